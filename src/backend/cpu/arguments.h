// What the CPU engine's per-ISA code is handed: plain values and pointers, resolved from the
// problem and the tensors of one call.
#pragma once

#include <cstdint>

#include "backend/sequence.h"
#include "base/philox.h"

namespace fovea::cpu {

// A [batch, row, head, dim] tensor, dim contiguous.
struct Rows {
  void* data = nullptr;
  RowStrides strides;
};

// A float per (batch, head, row): lse and its kin.
struct RowScalars {
  float* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;

  float& at(int64_t b, int64_t h, int64_t i) const { return data[b * batch + h * head + i * row]; }
};

// [batch|1, head|1, q|1, kv]: a stride of 0 where broadcast.
struct Broadcast {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, q = 0;
};

enum class BiasType { kF32, kLikeProblem };

struct Arguments {
  int64_t head_q = 0, head_kv = 0, group = 0;  // group = head_q / head_kv
  int dim_qk = 0, dim_v = 0;
  Mask mask;
  float scale = 1, softcap = 0;
  float keep_scale = 1;         // 1 / (1 - dropout)
  uint32_t drop_threshold = 0;  // 0: no dropout
  PhiloxKey drop_key;
  uint32_t drop_offset = 0;

  Rows q, k, v, out;
  RowScalars lse;  // data may be null in the forward pass
  Broadcast bias, bool_mask;
  BiasType bias_type = BiasType::kF32;
  const float* alibi = nullptr;  // at b * alibi_batch + h * alibi_head
  int64_t alibi_batch = 0, alibi_head = 0;
  const float* sink = nullptr;
  int64_t sink_head = 0;

  // backward
  Rows dout, dq, dk, dv;
  RowScalars dlse;   // data may be null
  RowScalars delta;  // sum_d dout * out - dlse

  // Whether scores need more than scale and a range of visible keys.
  bool has_score_terms() const {
    return softcap > 0 || bias.data != nullptr || bool_mask.data != nullptr || alibi != nullptr ||
           scale <= 0;
  }
};

// One batch member and KV head.
struct Head {
  Sequence sequence;
  int64_t b = 0;
  int64_t kv = 0;
};

}  // namespace fovea::cpu
