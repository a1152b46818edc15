// Sequences of a problem, and which keys their queries see.
#pragma once

#include "backend/cuda/common/problem.h"

namespace fovea::cuda {

constexpr float kLog2e = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

struct Sequence {
  int q_len, kv_len;
  int64_t q_row, kv_row;  // packed: first rows
  int batch_at;           // index for the batch stride: 0 when packed
};

__device__ __forceinline__ int clamp_to(int x, int low, int high) {
  return x < low ? low : x > high ? high : x;
}

// Whether lengths are read from memory.
__device__ __forceinline__ bool varies(const Problem& p) {
  return p.cu_q != nullptr || p.key_lengths != nullptr;
}

// Values that no host has checked are held within the tensors.
__device__ __forceinline__ Sequence sequence_at(const Problem& p, int b) {
  Sequence s{p.q_len, p.kv_len, 0, 0, b};
  if (p.cu_q != nullptr) {
    const int q_row = clamp_to(p.cu_q[b], 0, p.total_q);
    const int kv_row = clamp_to(p.cu_kv[b], 0, p.total_kv);
    s.q_row = q_row;
    s.kv_row = kv_row;
    s.q_len = clamp_to(p.cu_q[b + 1] - q_row, 0, min(p.q_len, p.total_q - q_row));
    s.kv_len = clamp_to(p.cu_kv[b + 1] - kv_row, 0, min(p.kv_len, p.total_kv - kv_row));
    s.batch_at = 0;
  } else if (p.key_lengths != nullptr) {
    s.kv_len = clamp_to(p.key_lengths[b * p.key_length_stride], 0, p.kv_len);
  }
  return s;
}

// The keys that one query sees: [begin, end), and those below prefix.
struct Sight {
  int begin, end, prefix;

  __device__ __forceinline__ bool sees(int key) const {
    return static_cast<uint32_t>(key - begin) < static_cast<uint32_t>(end - begin) || key < prefix;
  }
};

// Whether every query sees every key of its sequence.
__device__ __forceinline__ bool sees_all(const Problem& p) { return p.left < 0 && p.right < 0; }

__device__ __forceinline__ Sight sight_of(const Problem& p, const Sequence& s, int i) {
  const int position = i + s.kv_len - s.q_len;
  Sight sight;
  sight.begin = p.left < 0 ? 0 : clamp_to(position - p.left, 0, s.kv_len);
  sight.end = p.right < 0 ? s.kv_len : clamp_to(position + p.right + 1, 0, s.kv_len);
  if (sight.end < sight.begin) sight.end = sight.begin;
  sight.prefix = p.prefix < s.kv_len ? p.prefix : s.kv_len;
  return sight;
}

}  // namespace fovea::cuda
