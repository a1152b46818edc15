// mma.sync: a warp multiplies a 16 x 16 (or 16 x 8) by a 16 x 8 (8 x 8) fragment, accumulating in
// float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fovea::ptx {

// The accumulator: lane l holds rows l / 4 (c[0], c[1]) and l / 4 + 8 (c[2], c[3]), columns
// 2 (l % 4) and the next.
using Fragment = float[4];

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(Fragment& c, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(Fragment& c, const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(Fragment& c, const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a b + c, for sums that begin at what others begin at too.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(Fragment& d, const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1, const Fragment& c);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(Fragment& d, const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1,
                                                            const Fragment& c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(Fragment& d, const uint32_t (&a)[4],
                                                     uint32_t b0, uint32_t b1, const Fragment& c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// Of half the depth: a holds columns 2 (l % 4) and the next of rows l / 4 and l / 4 + 8, b rows
// 2 (l % 4) and the next of column l / 4.
template <typename T>
__device__ __forceinline__ void mma_m16n8k8(Fragment& c, uint32_t a0, uint32_t a1, uint32_t b);

template <>
__device__ __forceinline__ void mma_m16n8k8<__nv_bfloat16>(Fragment& c, uint32_t a0, uint32_t a1,
                                                           uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

template <>
__device__ __forceinline__ void mma_m16n8k8<__half>(Fragment& c, uint32_t a0, uint32_t a1,
                                                    uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Of tf32 values: a holds columns l % 4 (a[0], a[1]) and l % 4 + 4 (a[2], a[3]) of rows l / 4 and
// l / 4 + 8, b rows l % 4 and l % 4 + 4 of column l / 4.
__device__ __forceinline__ void mma_m16n8k8_tf32(Fragment& c, const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fovea::ptx
