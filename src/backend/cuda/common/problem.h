// A problem and the tensors of a call as kernels are handed them: plain values and device pointers.
#pragma once

#include <cstdint>

namespace fovea::cuda {

// A [batch, row, head, dim] tensor, dim contiguous; strides in elements.
struct Rows {
  void* data;
  int64_t batch, row, head;
};

// A float per (batch, head, row).
struct RowScalars {
  float* data;
  int64_t batch, head, row;
};

// [batch|1, head|1, q|1, kv]: a stride of 0 where broadcast.
struct Broadcast {
  const void* data;
  int64_t batch, head, q;
};

struct Problem {
  int head_q, head_kv, group;  // group = head_q / head_kv
  int q_len, kv_len;           // packed: the longest
  int dim_qk, dim_v;
  int left, right;  // window reach, negative: unbounded
  int prefix;
  float scale, softcap;
  float inverse_scale, scale_of_cap;  // 1 / scale, scale / softcap

  // Lengths, where they vary.
  const int* cu_q;         // packed: [batch + 1]
  const int* cu_kv;        // packed: [batch + 1]
  int total_q, total_kv;   // packed: rows of all sequences
  const int* key_lengths;  // [batch]
  int64_t key_length_stride;
  constexpr bool lengths_are_read() const { return cu_q != nullptr || key_lengths != nullptr; }

  // Score terms.
  Broadcast bias, bool_mask;
  bool bias_is_f32;
  bool bias_pairs, mask_pairs;  // keys 2 n and 2 n + 1 of every row may be read at once
  // Keys 8 n .. 8 n + 7 may, and a bias is of the problem's dtype, which 1 / scale fits.
  bool term_runs;
  const float* alibi;
  int64_t alibi_batch, alibi_head;
  const float* sink;
  int64_t sink_head;

  // Dropout: a weight is dropped where its word is below the threshold; 0 is off.
  uint32_t drop_threshold;
  uint32_t drop_key0, drop_key1, drop_offset;
  float keep_scale;
};

// Division by what is known before the launch, of numbers below kDividable: a multiplication and a
// shift.
constexpr int64_t kDividable = int64_t{1} << 31;
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  static Divider by(int64_t divisor) {
    if (divisor <= 1) return {};  // nothing is divided where there is nothing
    uint32_t shift = 0;
    while (shift < 31 && (int64_t{1} << shift) < divisor) ++shift;
    const auto d = static_cast<uint64_t>(divisor);
    const uint64_t rest = (uint64_t{1} << shift) - d;
    return {static_cast<uint32_t>(d), static_cast<uint32_t>((rest << 32) / d + 1), shift};
  }
#ifdef __CUDACC__
  __device__ __forceinline__ int operator()(uint32_t n) const {
    return static_cast<int>((__umulhi(n, multiplier) + n) >> shift);
  }
#endif
};

}  // namespace fovea::cuda
