// wgmma: a warpgroup multiplies a 64 x 16 by a 16 x N tile, asynchronously, accumulating in float.
// Lane l of warp w holds rows 16 w + l / 4 (d[4 j], d[4 j + 1]) and 8 below (d[4 j + 2],
// d[4 j + 3]), columns 8 j + 2 (l % 4) and the next.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fovea::ptx {

// Before the first product of a batch: what registers and shared memory hold is what it reads.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending committed batches are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Operands by the dozen, for asm wants each one named.
#define FOVEA_8(d, i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FOVEA_32(d, i) FOVEA_8(d, i), FOVEA_8(d, i + 8), FOVEA_8(d, i + 16), FOVEA_8(d, i + 24)
#define FOVEA_R32                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define FOVEA_R48 FOVEA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FOVEA_R64 FOVEA_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// Both operands in shared memory, a [64, 16] and b [N, 16], by their descriptors; d is overwritten
// where kFresh, otherwise added to. Operands of asm follow those of d: a, b.
#define FOVEA_WGMMA_SS(type, n, registers, a, b, fresh, ...)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, " fresh                                     \
               ", 0;\n"                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers \
               "}, " a ", " b ", p, 1, 1, 0, 0;\n}\n"                                        \
               : __VA_ARGS__                                                                 \
               : "l"(da), "l"(db), "n"(static_cast<int>(kFresh)))
// a [64, 16] in registers, b [16, N] in shared memory with N contiguous.
#define FOVEA_WGMMA_RS(type, n, registers, a, b, ...)                               \
  asm volatile(                                                                     \
      "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                    \
      "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers \
      "}, "                                                                         \
      "{" a "}, " b ", p, 1, 1, 1;\n}\n"                                            \
      : __VA_ARGS__                                                                 \
      : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "l"(db))

template <typename T, bool kFresh, int kCount>
__device__ __forceinline__ void wgmma_ss(float (&d)[kCount], uint64_t da, uint64_t db) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kCount == 32 || kCount == 64, "no such product yet");
  if constexpr (kCount == 32 && kHalf) {
    FOVEA_WGMMA_SS("f16", "64", FOVEA_R32, "%32", "%33", "%34", FOVEA_32(d, 0));
  } else if constexpr (kCount == 32) {
    FOVEA_WGMMA_SS("bf16", "64", FOVEA_R32, "%32", "%33", "%34", FOVEA_32(d, 0));
  } else if constexpr (kHalf) {
    FOVEA_WGMMA_SS("f16", "128", FOVEA_R64, "%64", "%65", "%66", FOVEA_32(d, 0), FOVEA_32(d, 32));
  } else {
    FOVEA_WGMMA_SS("bf16", "128", FOVEA_R64, "%64", "%65", "%66", FOVEA_32(d, 0), FOVEA_32(d, 32));
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void wgmma_rs(float (&d)[kCount], const uint32_t* ra, uint64_t db) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kCount == 32 || kCount == 64, "no such product yet");
  if constexpr (kCount == 32 && kHalf) {
    FOVEA_WGMMA_RS("f16", "64", FOVEA_R32, "%32,%33,%34,%35", "%36", FOVEA_32(d, 0));
  } else if constexpr (kCount == 32) {
    FOVEA_WGMMA_RS("bf16", "64", FOVEA_R32, "%32,%33,%34,%35", "%36", FOVEA_32(d, 0));
  } else if constexpr (kHalf) {
    FOVEA_WGMMA_RS("f16", "128", FOVEA_R64, "%64,%65,%66,%67", "%68", FOVEA_32(d, 0),
                   FOVEA_32(d, 32));
  } else {
    FOVEA_WGMMA_RS("bf16", "128", FOVEA_R64, "%64,%65,%66,%67", "%68", FOVEA_32(d, 0),
                   FOVEA_32(d, 32));
  }
}

#undef FOVEA_WGMMA_RS
#undef FOVEA_WGMMA_SS
#undef FOVEA_R64
#undef FOVEA_R48
#undef FOVEA_R32
#undef FOVEA_32
#undef FOVEA_8

}  // namespace fovea::ptx
