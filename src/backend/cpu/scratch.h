// Scratch memory of one worker: the same list of buffers is counted once and carved later.
#pragma once

#include <cstddef>
#include <cstdint>

#include "prim/cpu/simd_math.h"

namespace fovea::FOVEA_ISA {

constexpr int64_t kScratchAlign = 64;

class ScratchCounter {
 public:
  template <typename T>
  T* take(int64_t count) {
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kScratchAlign - 1) / kScratchAlign *
              kScratchAlign;
    return nullptr;
  }
  size_t bytes() const { return static_cast<size_t>(bytes_); }

 private:
  int64_t bytes_ = 0;
};

class ScratchCarver {
 public:
  explicit ScratchCarver(std::byte* at) : at_(at) {}
  template <typename T>
  T* take(int64_t count) {
    T* const p = reinterpret_cast<T*>(at_);
    at_ += (count * static_cast<int64_t>(sizeof(T)) + kScratchAlign - 1) / kScratchAlign *
           kScratchAlign;
    return p;
  }

 private:
  std::byte* at_;
};

// Weights of zero must not meet NaN or Inf in a product, so blocks that hold any are packed again,
// from a copy without them.
template <typename T>
void copy_finite(T* dst, const T* src, int64_t stride, int rows, int cols) {
  for (int r = 0; r < rows; ++r) {
    for (int d = 0; d < cols; ++d) {
      const float x = to_float(src[r * stride + d]);
      dst[int64_t{r} * cols + d] = x - x == 0 ? src[r * stride + d] : T{};
    }
  }
}

// 2^x of one float.
FOVEA_INLINE float exp2_scalar(float x) { return exp2<Exp2::kF32>(broadcast(x))[0]; }

}  // namespace fovea::FOVEA_ISA
