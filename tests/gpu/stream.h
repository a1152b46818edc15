// CUDA calls in tests: errors that fail the test, and a stream of one's own.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#define ASSERT_CUDA(call)                                                        \
  do {                                                                           \
    const cudaError_t error = (call);                                            \
    ASSERT_EQ(error, cudaSuccess) << #call << ": " << cudaGetErrorString(error); \
  } while (false)

namespace fovea::test {

// Does not wait for the default stream, nor that for it.
class OwnedStream {
 public:
  OwnedStream() { (void)cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~OwnedStream() { (void)cudaStreamDestroy(stream_); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace fovea::test
