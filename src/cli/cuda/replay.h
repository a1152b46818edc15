// Calls on a GPU as one CUDA graph, replayed and timed by the GPU's own clock: the host only keeps
// the queue full, so that what it takes to launch a call is not measured.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <type_traits>

#include "fovea/device.h"
#include "fovea/status.h"

namespace fovea::cli {

class Replay {
 public:
  // Queues one call on a stream.
  using Launch = std::function<Status(Stream)>;

  // A graph of `calls` calls in a row on a stream of its own. What the calls work on must outlive
  // it.
  static Result<std::unique_ptr<Replay>> capture(int device, int calls, const Launch& launch);

  // Seconds that `replays` replays took back to back. Those not counted come right before, so that
  // the GPU is at work, and the queue ahead of it, when the clock starts.
  Result<double> seconds(int replays, int uncounted);

 private:
  template <auto destroy>
  struct Destroy {
    template <typename T>
    void operator()(T* handle) const {
      (void)destroy(handle);
    }
  };
  template <typename Handle, auto destroy>
  using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<destroy>>;

  Replay() = default;
  Status open(int device);
  Status record(int calls, const Launch& launch);
  Status launch(int replays);
  Status wait();

  int device_ = 0;
  Owned<cudaStream_t, cudaStreamDestroy> stream_;
  Owned<cudaEvent_t, cudaEventDestroy> begin_, end_;
  Owned<cudaGraphExec_t, cudaGraphExecDestroy> graph_;
};

}  // namespace fovea::cli
