// A stream for work that may run beside a call's own, made once and lent to one call at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

namespace fovea::layers::cuda {

class SideStream {
 public:
  SideStream() = default;
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream();

  cudaError_t make();  // on the current device
  cudaStream_t get() const { return stream_; }

  // The stream, if it is free for a call on `stream`: a capture keeps to itself what it has taken
  // until it ends.
  std::unique_lock<std::mutex> lend(cudaStream_t stream) const;
  // What is queued here from now on waits for what `stream` has by now; and the other way round.
  cudaError_t follow(cudaStream_t stream) const;
  cudaError_t lead(cudaStream_t stream) const;

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t before_ = nullptr, after_ = nullptr;
  mutable std::mutex mutex_;
};

}  // namespace fovea::layers::cuda
