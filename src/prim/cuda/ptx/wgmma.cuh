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
#define FOVEA_16(d, i) FOVEA_8(d, i), FOVEA_8(d, i + 8)
#define FOVEA_32(d, i) FOVEA_8(d, i), FOVEA_8(d, i + 8), FOVEA_8(d, i + 16), FOVEA_8(d, i + 24)
#define FOVEA_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FOVEA_R32                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define FOVEA_R48 FOVEA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FOVEA_R64 FOVEA_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define FOVEA_R96                                                                             \
  FOVEA_R64                                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FOVEA_R128                                                                          \
  FOVEA_R96                                                                                 \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113," \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define FOVEA_WGMMA(type, n, registers, a, b, rest, predicate, inputs, ...)                  \
  asm volatile("{\n.reg .pred p;\nsetp." predicate                                           \
               ";\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" registers \
               "}, " a ", " b ", p, 1, 1, " rest ";\n}\n"                                    \
               : __VA_ARGS__                                                                 \
               : inputs)
#define FOVEA_LIST(...) __VA_ARGS__

// d [64, N] = a [64, 16] b [N, 16]^T, both in shared memory, by their descriptors; added to what d
// was unless kFresh. Operands a, b, kFresh of asm follow those of d.
#define FOVEA_WGMMA_SS(n, registers, a, b, fresh, ...)                                     \
  if constexpr (std::is_same_v<T, __half>) {                                               \
    FOVEA_WGMMA("f16", n, registers, a, b, "0, 0", "eq.b32 p, " fresh ", 0",               \
                FOVEA_LIST("l"(da), "l"(db), "n"(static_cast<int>(kFresh))), __VA_ARGS__); \
  } else {                                                                                 \
    FOVEA_WGMMA("bf16", n, registers, a, b, "0, 0", "eq.b32 p, " fresh ", 0",              \
                FOVEA_LIST("l"(da), "l"(db), "n"(static_cast<int>(kFresh))), __VA_ARGS__); \
  }
template <typename T, bool kFresh, int kCount>
__device__ __forceinline__ void wgmma_ss(float (&d)[kCount], uint64_t da, uint64_t db) {
  static_assert(kCount == 32 || kCount == 64, "no such product yet");
  if constexpr (kCount == 32) {
    FOVEA_WGMMA_SS("64", FOVEA_R32, "%32", "%33", "%34", FOVEA_32(d, 0));
  } else {
    FOVEA_WGMMA_SS("128", FOVEA_R64, "%64", "%65", "%66", FOVEA_32(d, 0), FOVEA_32(d, 32));
  }
}

// d [64, 32] = a [16, 64]^T b [16, 32], both in shared memory with rows contiguous; added to what d
// was unless kFresh, and then d needs no registers before.
#define FOVEA_FRESH_8(d, i)                                                                   \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
      "=f"(d[i + 6]), "=f"(d[i + 7])
#define FOVEA_WGMMA_32(type, a, b, added, rest, inputs, ...)                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {" FOVEA_R16 "}, " a \
               ", " b ", " added ", 1, 1, " rest ";"                                              \
               : __VA_ARGS__                                                                      \
               : inputs)
#define FOVEA_WGMMA_FRESH_OR_NOT(type, a, b, rest, inputs)                                   \
  if constexpr (kFresh) {                                                                    \
    FOVEA_WGMMA_32(type, a, b, "0", rest, FOVEA_LIST(inputs), FOVEA_FRESH_8(d, 0),           \
                   FOVEA_FRESH_8(d, 8));                                                     \
  } else {                                                                                   \
    FOVEA_WGMMA_32(type, a, b, "1", rest, FOVEA_LIST(inputs), FOVEA_8(d, 0), FOVEA_8(d, 8)); \
  }
template <typename T, bool kFresh>
__device__ __forceinline__ void wgmma_ss_columns(float (&d)[16], uint64_t da, uint64_t db) {
  if constexpr (std::is_same_v<T, __half>) {
    FOVEA_WGMMA_FRESH_OR_NOT("f16", "%16", "%17", "1, 1", FOVEA_LIST("l"(da), "l"(db)));
  } else {
    FOVEA_WGMMA_FRESH_OR_NOT("bf16", "%16", "%17", "1, 1", FOVEA_LIST("l"(da), "l"(db)));
  }
}

// d [64, 32] = a [64, 16] b [32, 16]^T, both in shared memory with columns contiguous.
template <typename T, bool kFresh>
__device__ __forceinline__ void wgmma_ss_rows(float (&d)[16], uint64_t da, uint64_t db) {
  if constexpr (std::is_same_v<T, __half>) {
    FOVEA_WGMMA_FRESH_OR_NOT("f16", "%16", "%17", "0, 0", FOVEA_LIST("l"(da), "l"(db)));
  } else {
    FOVEA_WGMMA_FRESH_OR_NOT("bf16", "%16", "%17", "0, 0", FOVEA_LIST("l"(da), "l"(db)));
  }
}

// The same, a in registers.
#define FOVEA_OPERANDS FOVEA_LIST("r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "l"(db))
template <typename T, bool kFresh>
__device__ __forceinline__ void wgmma_rs_rows(float (&d)[16], const uint32_t* ra, uint64_t db) {
  if constexpr (std::is_same_v<T, __half>) {
    FOVEA_WGMMA_FRESH_OR_NOT("f16", "{%16,%17,%18,%19}", "%20", "0", FOVEA_OPERANDS);
  } else {
    FOVEA_WGMMA_FRESH_OR_NOT("bf16", "{%16,%17,%18,%19}", "%20", "0", FOVEA_OPERANDS);
  }
}

// d [64, N] += a [64, 16] b [16, N], a in registers, b in shared memory with N contiguous.
#define FOVEA_WGMMA_RS(n, registers, a, b, ...)                                                    \
  if constexpr (std::is_same_v<T, __half>) {                                                       \
    FOVEA_WGMMA("f16", n, registers, "{" a "}", b, "1", "eq.b32 p, 0, 0",                          \
                FOVEA_LIST("r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "l"(db)), __VA_ARGS__); \
  } else {                                                                                         \
    FOVEA_WGMMA("bf16", n, registers, "{" a "}", b, "1", "eq.b32 p, 0, 0",                         \
                FOVEA_LIST("r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "l"(db)), __VA_ARGS__); \
  }
template <typename T, int kCount>
__device__ __forceinline__ void wgmma_rs(float (&d)[kCount], const uint32_t* ra, uint64_t db) {
  if constexpr (kCount == 16) {
    FOVEA_WGMMA_RS("32", FOVEA_R16, "%16,%17,%18,%19", "%20", FOVEA_16(d, 0));
  } else if constexpr (kCount == 32) {
    FOVEA_WGMMA_RS("64", FOVEA_R32, "%32,%33,%34,%35", "%36", FOVEA_32(d, 0));
  } else if constexpr (kCount == 48) {
    FOVEA_WGMMA_RS("96", FOVEA_R48, "%48,%49,%50,%51", "%52", FOVEA_32(d, 0), FOVEA_8(d, 32),
                   FOVEA_8(d, 40));
  } else if constexpr (kCount == 64) {
    FOVEA_WGMMA_RS("128", FOVEA_R64, "%64,%65,%66,%67", "%68", FOVEA_32(d, 0), FOVEA_32(d, 32));
  } else if constexpr (kCount == 96) {
    FOVEA_WGMMA_RS("192", FOVEA_R96, "%96,%97,%98,%99", "%100", FOVEA_32(d, 0), FOVEA_32(d, 32),
                   FOVEA_32(d, 64));
  } else {
    static_assert(kCount == 128, "no such product yet");
    FOVEA_WGMMA_RS("256", FOVEA_R128, "%128,%129,%130,%131", "%132", FOVEA_32(d, 0),
                   FOVEA_32(d, 32), FOVEA_32(d, 64), FOVEA_32(d, 96));
  }
}

#undef FOVEA_WGMMA_RS
#undef FOVEA_OPERANDS
#undef FOVEA_WGMMA_FRESH_OR_NOT
#undef FOVEA_WGMMA_32
#undef FOVEA_FRESH_8
#undef FOVEA_WGMMA_SS
#undef FOVEA_LIST
#undef FOVEA_WGMMA
#undef FOVEA_R128
#undef FOVEA_R96
#undef FOVEA_R64
#undef FOVEA_R48
#undef FOVEA_R32
#undef FOVEA_R16
#undef FOVEA_32
#undef FOVEA_16
#undef FOVEA_8

}  // namespace fovea::ptx
