// Capture and replay.
#include "cli/cuda/replay.h"

#include "backend/cuda/common/error.h"

namespace fovea::cli {

using fovea::cuda::to_status;

Result<std::unique_ptr<Replay>> Replay::capture(int device, int calls, const Launch& launch) {
  std::unique_ptr<Replay> replay(new Replay);
  if (Status s = replay->open(device); !s.ok()) return s;
  // Once outside the capture: a kernel's code is loaded at its first launch.
  if (Status s = launch({replay->stream_.get()}); !s.ok()) return s;
  if (Status s = replay->wait(); !s.ok()) return s;
  if (Status s = replay->record(calls, launch); !s.ok()) return s;
  if (Status s = replay->wait(); !s.ok()) return s;
  return replay;
}

Status Replay::open(int device) {
  device_ = device;
  if (Status s = to_status(cudaSetDevice(device), "cudaSetDevice"); !s.ok()) return s;
  cudaStream_t stream = nullptr;
  const cudaError_t made = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (Status s = to_status(made, "cudaStreamCreateWithFlags"); !s.ok()) return s;
  stream_.reset(stream);
  for (auto* owner : {&begin_, &end_}) {
    cudaEvent_t event = nullptr;
    if (Status s = to_status(cudaEventCreate(&event), "cudaEventCreate"); !s.ok()) return s;
    owner->reset(event);
  }
  return {};
}

Status Replay::wait() {
  return to_status(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
}

Status Replay::record(int calls, const Launch& launch) {
  cudaStream_t stream = stream_.get();
  const cudaError_t begun = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (Status s = to_status(begun, "cudaStreamBeginCapture"); !s.ok()) return s;
  Status launched;
  for (int i = 0; i < calls && launched.ok(); ++i) launched = launch({stream});
  // Whatever the calls said, the capture must be ended.
  cudaGraph_t captured = nullptr;
  Status ended = to_status(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  const Owned<cudaGraph_t, cudaGraphDestroy> graph(captured);
  if (!launched.ok()) return launched;
  if (!ended.ok()) return ended;
  cudaGraphExec_t executable = nullptr;
  const cudaError_t built = cudaGraphInstantiateWithFlags(&executable, captured, 0);
  if (Status s = to_status(built, "cudaGraphInstantiateWithFlags"); !s.ok()) return s;
  graph_.reset(executable);
  return to_status(cudaGraphUpload(executable, stream), "cudaGraphUpload");
}

Status Replay::launch(int replays) {
  Status launched;
  for (int i = 0; i < replays && launched.ok(); ++i) {
    launched = to_status(cudaGraphLaunch(graph_.get(), stream_.get()), "cudaGraphLaunch");
  }
  return launched;
}

Result<double> Replay::seconds(int replays, int uncounted) {
  const auto mark = [this](cudaEvent_t event) {
    return to_status(cudaEventRecord(event, stream_.get()), "cudaEventRecord");
  };
  if (Status s = to_status(cudaSetDevice(device_), "cudaSetDevice"); !s.ok()) return s;
  if (Status s = launch(uncounted); !s.ok()) return s;
  if (Status s = mark(begin_.get()); !s.ok()) return s;
  if (Status s = launch(replays); !s.ok()) return s;
  if (Status s = mark(end_.get()); !s.ok()) return s;
  if (Status s = wait(); !s.ok()) return s;
  float ms = 0;
  const cudaError_t read = cudaEventElapsedTime(&ms, begin_.get(), end_.get());
  if (Status s = to_status(read, "cudaEventElapsedTime"); !s.ok()) return s;
  return 1e-3 * static_cast<double>(ms);
}

}  // namespace fovea::cli
