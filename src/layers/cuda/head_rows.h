// Tensors as the layers' kernels on a GPU are handed them.
#pragma once

#include <cstdint>

#include "fovea/tensor.h"

namespace fovea::layers::cuda {

// [batch, rows, heads, dim], dim contiguous; strides in elements.
struct HeadRows {
  void* data = nullptr;
  int64_t batch = 0, rows = 0, heads = 0, dim = 0;
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0;
};

// [batch, rows, dim] is one head.
inline HeadRows head_rows(const TensorView& t) {
  const bool plain = t.rank == 3;
  return {.data = t.data,
          .batch = t.sizes[0],
          .rows = t.sizes[1],
          .heads = plain ? 1 : t.sizes[2],
          .dim = plain ? t.sizes[2] : t.sizes[3],
          .batch_stride = t.strides[0],
          .row_stride = t.strides[1],
          .head_stride = plain ? 0 : t.strides[2]};
}

}  // namespace fovea::layers::cuda
