// A stream beside a call's, and the events by which they wait for each other.
#include "layers/cuda/side_stream.h"

namespace fovea::layers::cuda {
namespace {

struct Capture {
  cudaError_t error = cudaSuccess;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;

  explicit Capture(cudaStream_t stream) {
    error = cudaStreamGetCaptureInfo(stream, &status, &id);
    if (error != cudaSuccess) (void)cudaGetLastError();  // nobody is to take it for theirs
  }
  bool active() const { return status == cudaStreamCaptureStatusActive; }
};

}  // namespace

SideStream::~SideStream() {
  if (before_ != nullptr) (void)cudaEventDestroy(before_);
  if (after_ != nullptr) (void)cudaEventDestroy(after_);
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

cudaError_t SideStream::make() {
  cudaError_t error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  for (cudaEvent_t* const event : {&before_, &after_}) {
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  }
  return error;
}

std::unique_lock<std::mutex> SideStream::lend(cudaStream_t stream) const {
  std::unique_lock lock(mutex_, std::defer_lock);
  if (stream_ == nullptr || !lock.try_lock()) return {};
  const Capture own(stream_), theirs(stream);
  const bool free = own.error == cudaSuccess && theirs.error == cudaSuccess &&
                    (own.status == cudaStreamCaptureStatusNone ||
                     (own.active() && theirs.active() && own.id == theirs.id));
  if (!free) return {};
  return lock;
}

cudaError_t SideStream::follow(cudaStream_t stream) const {
  const cudaError_t error = cudaEventRecord(before_, stream);
  return error == cudaSuccess ? cudaStreamWaitEvent(stream_, before_, 0) : error;
}

cudaError_t SideStream::lead(cudaStream_t stream) const {
  const cudaError_t error = cudaEventRecord(after_, stream_);
  return error == cudaSuccess ? cudaStreamWaitEvent(stream, after_, 0) : error;
}

}  // namespace fovea::layers::cuda
