// The prologue's kernels for bf16.
#include "layers/cuda/prologue_run.cuh"

namespace fovea::layers::cuda {

template bool has_clusters<__nv_bfloat16>();
template cudaError_t run<__nv_bfloat16>(const ForwardPlan&, cudaStream_t);
template cudaError_t run<__nv_bfloat16>(const BackwardPlan&, cudaStream_t);

}  // namespace fovea::layers::cuda
