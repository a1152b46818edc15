// The prologue's kernels for f32.
#include "layers/cuda/prologue_run.cuh"

namespace fovea::layers::cuda {

template cudaError_t run<float>(const ForwardPlan&, cudaStream_t);
template cudaError_t run<float>(const BackwardPlan&, cudaStream_t);

}  // namespace fovea::layers::cuda
