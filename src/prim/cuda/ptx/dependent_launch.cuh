// griddepcontrol: a kernel whose blocks come to the GPU while the kernel before it in the stream
// ends. GPUs before compute capability 9.0 know no such launches, and code for them says nothing.
#pragma once

namespace fovea::ptx {

// Lets blocks of the next kernel come, if it was launched so, once every block has said this or
// has ended.
__device__ __forceinline__ void let_next_kernel_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before has ended and what it wrote can be read. Every block has to: the
// end of this kernel then is the end of all before it.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fovea::ptx
