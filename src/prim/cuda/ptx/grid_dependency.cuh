// Kernels that may be launched before the ones they follow have ended (compute capability 9.0 and
// later; elsewhere a launch waits by itself).
#pragma once

namespace fovea::ptx {

// Until the kernels before this one have ended and what they wrote can be read. A kernel that is
// launched early calls it before it touches memory, in every block: that what follows it may count
// on its end being theirs too.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#else
  asm volatile("" ::: "memory");
#endif
}

// The same, once these addresses are known. Compilers would put their computation off until after
// the wait, which is where it costs time: that it might trap, as it never does, keeps it here.
__device__ __forceinline__ void wait_for_earlier_kernels_with(const void* a, const void* b,
                                                              const void* c) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred none; .reg .b64 any;\n"
      "  or.b64 any, %0, %1; or.b64 any, any, %2;\n"
      "  setp.eq.u64 none, any, 0; @none trap; }" ::"l"(a),
      "l"(b), "l"(c));
#endif
  wait_for_earlier_kernels();
}

// Lets blocks of the next kernel take the room that this one's leave, and wait there. They go where
// room is, not where the balance would be: only few blocks that end together should ask for it.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether every block has a multiprocessor for itself.
__device__ __forceinline__ bool blocks_are_few() {
  unsigned multiprocessors;
  asm("mov.u32 %0, %%nsmid;" : "=r"(multiprocessors));
  return gridDim.x * gridDim.y <= multiprocessors;
}

}  // namespace fovea::ptx
