// Whether the values of key_lengths and cu_seqlens stay inside their tensors; for memory that the
// host can read.
#pragma once

#include <cstdint>

#include "fovea/attention.h"

namespace fovea {

// `lengths` is a checked i32 tensor: each value must be in 0..kv_len.
Status check_key_lengths(const char* call, const TensorView& lengths, int64_t kv_len);

struct CuSeqlensRule {
  const char* call;
  const char* argument;  // "cu_seqlens_q"
  const char* longest_name;
  int64_t longest;  // of any sequence
  const char* total_name;
  int64_t total;  // rows of the packed tensor
};

// `bounds` is a checked dense i32 tensor: 0 first, never falling, the total last.
Status check_cu_seqlens(const CuSeqlensRule& rule, const TensorView& bounds);

}  // namespace fovea
