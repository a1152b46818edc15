// From raw products q . k to logits: scale, softcap, bias, ALiBi, masks; and which weights dropout
// keeps. One row of a block at a time; keys are contiguous in a row.
#pragma once

#include "backend/cpu/arguments.h"
#include "prim/cpu/simd_math.h"

namespace fovea::FOVEA_ISA {

using cpu::Arguments;
using cpu::Head;

constexpr float kLog2e = 1.44269504f;
constexpr float kLn2 = 0.693147181f;
constexpr float kMinusInf = -__builtin_inff();
constexpr float kLeastFloat = -0x1.fffffep127f;

FOVEA_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FOVEA_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// One query row of a KV head: rows are numbered through the heads of the group, head-major.
struct Row {
  int64_t head = 0;      // query head
  int64_t i = 0;         // query in its sequence
  int64_t position = 0;  // key position it stands at
  int64_t begin = 0;     // window: keys [begin, end), and keys below prefix
  int64_t end = 0;
  int64_t prefix = 0;

  FOVEA_INLINE int64_t first_key() const { return prefix > 0 ? 0 : begin; }
  FOVEA_INLINE int64_t last_key() const { return larger(end, prefix); }  // one past it
  FOVEA_INLINE bool sees_all(int64_t from, int64_t to) const {
    return (from >= begin && to <= end) || to <= prefix || (begin <= prefix && to <= end);
  }
};

// Query i of the h-th query head of the group.
FOVEA_INLINE Row row_at(const Arguments& a, const Head& head, int64_t h, int64_t i) {
  const Sequence& s = head.sequence;
  Row row;
  row.head = head.kv * a.group + h;
  row.i = i;
  row.position = row.i + s.kv_len - s.q_len;
  row.begin = 0;
  row.end = s.kv_len;
  if (a.mask.left != Mask::kUnbounded) row.begin = larger(0, row.position - a.mask.left);
  if (a.mask.right != Mask::kUnbounded)
    row.end = smaller(s.kv_len, row.position + a.mask.right + 1);
  if (row.begin > s.kv_len) row.begin = s.kv_len;
  if (row.end < row.begin) row.end = row.begin;
  row.prefix = smaller(a.mask.prefix, s.kv_len);
  return row;
}

// Calls put(k, row) for rows first + k, k < count, of a KV head: query after query, for each its
// heads. Neighbours see nearly the same keys then, and lie near each other. One division, not one a
// row.
template <typename Put>
FOVEA_INLINE void for_rows(const Arguments& a, const Head& head, int64_t first, int64_t count,
                           Put put) {
  int64_t h = first % a.group, i = first / a.group;
  for (int64_t k = 0; k < count; ++k) {
    put(k, row_at(a, head, h, i));
    if (++h == a.group) {
      h = 0;
      ++i;
    }
  }
}

// Columns [from, to) of a block whose column 0 is key `first`.
struct Columns {
  int64_t first = 0;
  int from = 0;
  int to = 0;
};

// -inf where the row's window hides the key.
FOVEA_INLINE void hide_unseen(const Row& row, Columns columns, float* s) {
  const auto hide = [&](int64_t from, int64_t to) {
    const auto begin = static_cast<int>(larger(from - columns.first, columns.from));
    const auto end = static_cast<int>(smaller(to - columns.first, columns.to));
    for (int j = begin; j < end; ++j) s[j] = kMinusInf;
  };
  const int64_t begin = larger(row.begin, row.prefix);
  hide(row.prefix, begin);
  hide(larger(row.end, row.prefix), columns.first + columns.to);
}

// Logits of one row in place, in natural-log units, window not yet applied. Where slopes is given
// it gets d softcap(x) / dx of each.
template <typename T>
FOVEA_INLINE void apply_score_terms(const Arguments& a, const Head& head, const Row& row,
                                    Columns columns, float* s, float* slopes) {
  const Vec scale = broadcast(a.scale);
  const float alibi =
      a.alibi == nullptr ? 0 : a.alibi[head.b * a.alibi_batch + row.head * a.alibi_head];
  const int64_t bias_row = head.b * a.bias.batch + row.head * a.bias.head + row.i * a.bias.q;
  const auto* mask = static_cast<const uint8_t*>(a.bool_mask.data);
  if (mask != nullptr) {
    mask += head.b * a.bool_mask.batch + row.head * a.bool_mask.head + row.i * a.bool_mask.q;
    mask += columns.first;
  }
  for (int j = columns.from; j < columns.to; j += kLanes) {
    const int n = columns.to - j;
    const int64_t key = columns.first + j;
    Vec x = load(s + j) * scale;
    if (a.softcap > 0) {
      const Vec t = tanh(x * broadcast(1.0f / a.softcap));
      x = t * broadcast(a.softcap);
      if (slopes != nullptr) store(slopes + j, broadcast(1.0f) - t * t);
    }
    if (a.bias.data != nullptr) {
      x = x + (a.bias_type == cpu::BiasType::kF32
                   ? load_up_to(static_cast<const float*>(a.bias.data) + bias_row + key, n)
                   : load_up_to(static_cast<const T*>(a.bias.data) + bias_row + key, n));
    }
    if (a.alibi != nullptr) {
      const Vec distance = broadcast(static_cast<float>(row.position - key)) - iota();
      x = x - broadcast(alibi) * abs(distance);
    }
    store(s + j, x);
    if (mask != nullptr) {
      for (int lane = 0; lane < kLanes && lane < n; ++lane) {
        if (mask[j + lane] == 0) s[j + lane] = kMinusInf;
      }
    }
  }
}

// Whether the row sees the key: what neither its window hides nor a term makes -inf.
template <typename T>
bool sees(const Arguments& a, const Head& head, const Row& row, int64_t key) {
  if (!row.sees_all(key, key + 1)) return false;
  float score[kLanes] = {};
  if (a.has_score_terms()) apply_score_terms<T>(a, head, row, {key, 0, 1}, score, nullptr);
  return score[0] != kMinusInf;
}

// keep[j] = 1 / (1 - p) for weights that dropout keeps, 0 for those it drops. columns.from is a
// multiple of 4 from key 0, as block and panel sizes are.
FOVEA_INLINE void kept_weights(const Arguments& a, const Head& head, const Row& row,
                               Columns columns, float* keep) {
  const auto batch_head = static_cast<uint32_t>(head.b * a.head_q + row.head);
  for (int j = columns.from; j < columns.to; j += 4) {
    uint32_t c0 = static_cast<uint32_t>((columns.first + j) / 4), c1 = static_cast<uint32_t>(row.i);
    uint32_t c2 = batch_head, c3 = a.drop_offset;
    uint32_t k0 = a.drop_key.k0, k1 = a.drop_key.k1;
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
      const uint32_t high0 = static_cast<uint32_t>(p0 >> 32),
                     high1 = static_cast<uint32_t>(p1 >> 32);
      c0 = high1 ^ c1 ^ k0;
      c1 = static_cast<uint32_t>(p1);
      c2 = high0 ^ c3 ^ k1;
      c3 = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const uint32_t words[4] = {c0, c1, c2, c3};
    for (int w = 0; w < 4; ++w) keep[j + w] = words[w] >= a.drop_threshold ? a.keep_scale : 0.0f;
  }
}

}  // namespace fovea::FOVEA_ISA
