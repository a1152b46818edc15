// Builds without code for compute capability 9.0: products over taps are all mma.sync's, those of
// few rows a library's, attention and its output's projection two steps.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "layers/cuda/attended_output.h"
#include "layers/cuda/dense_product.h"
#include "layers/cuda/few_rows.h"

namespace fovea::layers::cuda {

template <typename T>
bool takes_dense(const TapProduct&) {
  return false;
}
template <typename T>
cudaError_t launch_dense(const TapProduct&, cudaStream_t) {
  return cudaErrorNotSupported;
}

template bool takes_dense<__nv_bfloat16>(const TapProduct&);
template bool takes_dense<__half>(const TapProduct&);
template cudaError_t launch_dense<__nv_bfloat16>(const TapProduct&, cudaStream_t);
template cudaError_t launch_dense<__half>(const TapProduct&, cudaStream_t);

bool takes_few_rows(const FewRows&) { return false; }
cudaError_t launch_few_rows(const FewRows&, cudaStream_t) { return cudaErrorNotSupported; }

bool takes_attended_output(const AttendedOutput&, const GpuInfo&) { return false; }
cudaError_t launch_attended_output(const AttendedOutput&, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace fovea::layers::cuda
