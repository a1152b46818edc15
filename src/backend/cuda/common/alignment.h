// Which tensors may be read and written several elements at a time.
#pragma once

#include <cstdint>

#include "fovea/tensor.h"

namespace fovea::cuda {

// Whether every row (the last dimension) begins on a multiple of `elements` elements in memory.
inline bool rows_begin_on(const TensorView& t, int64_t elements) {
  bool begin = reinterpret_cast<uintptr_t>(t.data) %
                   static_cast<uintptr_t>(elements * dtype_bytes(t.dtype)) ==
               0;
  for (size_t d = 0; d + 1 < static_cast<size_t>(t.rank); ++d) {
    begin = begin && (t.sizes[d] <= 1 || t.strides[d] % elements == 0);
  }
  return begin;
}

// Whether rows are whole multiples of `elements` long besides.
inline bool rows_are_whole(const TensorView& t, int64_t elements) {
  return rows_begin_on(t, elements) && t.sizes[static_cast<size_t>(t.rank - 1)] % elements == 0;
}

}  // namespace fovea::cuda
