// RoPE in place, of several tensors in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include "layers/cuda/fixed_angles.h"
#include "layers/cuda/head_rows.h"

namespace fovea::layers::cuda {

struct RotateRows {
  HeadRows x;
  const int32_t* ids = nullptr;  // positions; null: counted on from `first`
  int64_t ids_batch = 0, ids_row = 0;
  int64_t first = 0;
};

struct RotateArguments {
  static constexpr int kMost = 2;
  RotateRows rows[kMost];
  int count = 0;
  float sign = 1;     // -1: back
  bool wide = false;  // 16 bytes at once
  FixedAngles angles;
};

cudaError_t launch_rotate(const RotateArguments& a, DType dtype, cudaStream_t stream);

}  // namespace fovea::layers::cuda
