// The prologue's kernels for f16.
#include "layers/cuda/prologue_run.cuh"

namespace fovea::layers::cuda {

template bool has_clusters<__half>();
template cudaError_t run<__half>(const ForwardPlan&, cudaStream_t);
template cudaError_t run<__half>(const BackwardPlan&, cudaStream_t);

}  // namespace fovea::layers::cuda
