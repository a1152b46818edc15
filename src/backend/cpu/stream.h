// Products for a few query rows (decode): K and V are read once, unpacked, at the speed of memory.
#pragma once

#include "backend/cpu/scores.h"

namespace fovea::FOVEA_ISA {

constexpr int kStreamKeys = 128;  // keys whose scores are in flight between the two products

// Asks for the rows that come kAheadKeys later: a head's rows lie apart in memory, in runs too
// short for the hardware to foresee the next. Past the last key it asks for memory that nobody
// reads.
constexpr int kAheadKeys = kLanes == 4 ? 64 : 32;
template <typename T>
FOVEA_INLINE void prefetch_ahead(const T* rows, int64_t stride, int count, int dim) {
  constexpr int kLine = 64 / sizeof(T);
  for (int r = 0; r < count; ++r) {
    const T* const row = rows + (r + kAheadKeys) * stride;
    for (int d = 0; d < dim; d += kLine) __builtin_prefetch(row + d, 0, 3);
  }
}

// Lays a query row out for stream_scores: float, in the order load_two gives, zeros past dim.
template <typename T>
FOVEA_INLINE void stream_query(float* dst, const T* q, int dim) {
  for (int d = 0; d < dim; d += 2 * kLanes) {
    Vec a = load_up_to(q + d, dim - d), b = zero();
    if (dim - d > kLanes) b = load_up_to(q + d + kLanes, dim - d - kLanes);
    to_loaded_order(q, a, b);
    store(dst + d, a);
    store(dst + d + kLanes, b);
  }
}

// Scores of kRows rows and kLanes / kRows keys: one accumulator each, summed over lanes at the end.
template <int kRows, typename T>
FOVEA_INLINE void stream_score_tile(float* scores, int64_t score_stride, const float* q,
                                    int q_stride, const T* k, int64_t k_stride, int dim) {
  constexpr int kKeys = kLanes / kRows;
  Vec acc[kLanes];
  for (int x = 0; x < kLanes; ++x) acc[x] = zero();
  int d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    for (int key = 0; key < kKeys; ++key) {
      Vec a, b;
      load_two(k + key * k_stride + d, a, b);
      for (int r = 0; r < kRows; ++r) {
        Vec& sum = acc[r * kKeys + key];
        sum = fma(a, load(q + r * q_stride + d), sum);
        sum = fma(b, load(q + r * q_stride + d + kLanes), sum);
      }
    }
  }
  if (d < dim) {
    for (int key = 0; key < kKeys; ++key) {
      const T* const row = k + key * k_stride + d;
      Vec a = load_up_to(row, dim - d), b = zero();
      if (dim - d > kLanes) b = load_up_to(row + kLanes, dim - d - kLanes);
      to_loaded_order(row, a, b);
      for (int r = 0; r < kRows; ++r) {
        Vec& sum = acc[r * kKeys + key];
        sum = fma(a, load(q + r * q_stride + d), sum);
        sum = fma(b, load(q + r * q_stride + d + kLanes), sum);
      }
    }
  }
  const Vec sums = lane_sums(acc);
  for (int r = 0; r < kRows; ++r) {
    for (int key = 0; key < kKeys; ++key) scores[r * score_stride + key] = sums[r * kKeys + key];
  }
}

// scores[r][j] = q_r . k_j for the keys of one block; q comes from stream_query.
template <int kRows, typename T>
FOVEA_INLINE void stream_score_rows(float* scores, int64_t score_stride, const float* q,
                                    int q_stride, const T* k, int64_t k_stride, int keys, int dim) {
  constexpr int kKeys = kLanes / kRows;
  int j = 0;
  for (; j + kKeys <= keys; j += kKeys) {
    prefetch_ahead(k + j * k_stride, k_stride, kKeys, dim);
    stream_score_tile<kRows>(scores + j, score_stride, q, q_stride, k + j * k_stride, k_stride,
                             dim);
  }
  for (; j < keys; ++j) {
    for (int r = 0; r < kRows; ++r) {
      Vec sum2 = zero();
      for (int d = 0; d < dim; d += 2 * kLanes) {
        const T* const row = k + j * k_stride + d;
        Vec a = load_up_to(row, dim - d), b = zero();
        if (dim - d > kLanes) b = load_up_to(row + kLanes, dim - d - kLanes);
        to_loaded_order(row, a, b);
        sum2 = fma(a, load(q + r * q_stride + d), sum2);
        sum2 = fma(b, load(q + r * q_stride + d + kLanes), sum2);
      }
      scores[r * score_stride + j] = sum(sum2);
    }
  }
}

// acc_r += sum_j p[r][j] v_j over kRows rows and 2 * kPairs vectors of v. A weight below
// zero says that the row does not see the key: it adds nothing, whatever its value holds.
template <int kRows, int kPairs, typename T>
FOVEA_INLINE void stream_value_tile(float* acc, int64_t acc_stride, const float* p,
                                    int64_t p_stride, const T* v, int64_t v_stride, int keys) {
  Vec total[kRows][2 * kPairs];
  for (int r = 0; r < kRows; ++r) {
    for (int x = 0; x < 2 * kPairs; x += 2) {
      total[r][x] = load(acc + r * acc_stride + x * kLanes);
      total[r][x + 1] = load(acc + r * acc_stride + (x + 1) * kLanes);
      to_loaded_order(v, total[r][x], total[r][x + 1]);
    }
  }
  for (int j = 0; j < keys; ++j) {
    const T* const row = v + j * v_stride;
    prefetch_ahead(row, v_stride, 1, 2 * kPairs * kLanes);
    float weight[kRows];
    bool all = true;
    for (int r = 0; r < kRows; ++r) {
      weight[r] = p[r * p_stride + j];
      all = all && !(weight[r] < 0);
    }
    if (all) {
      for (int x = 0; x < 2 * kPairs; x += 2) {
        Vec a, b;
        load_two(row + x * kLanes, a, b);
        for (int r = 0; r < kRows; ++r) {
          total[r][x] = fma(a, broadcast(weight[r]), total[r][x]);
          total[r][x + 1] = fma(b, broadcast(weight[r]), total[r][x + 1]);
        }
      }
      continue;
    }
    for (int r = 0; r < kRows; ++r) {
      if (weight[r] < 0) continue;
      for (int x = 0; x < 2 * kPairs; x += 2) {
        Vec a, b;
        load_two(row + x * kLanes, a, b);
        total[r][x] = fma(a, broadcast(weight[r]), total[r][x]);
        total[r][x + 1] = fma(b, broadcast(weight[r]), total[r][x + 1]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int x = 0; x < 2 * kPairs; x += 2) {
      from_loaded_order(v, total[r][x], total[r][x + 1]);
      store(acc + r * acc_stride + x * kLanes, total[r][x]);
      store(acc + r * acc_stride + (x + 1) * kLanes, total[r][x + 1]);
    }
  }
}

template <int kRows, typename T>
FOVEA_INLINE void stream_value_rows(float* acc, int64_t acc_stride, const float* p,
                                    int64_t p_stride, const T* v, int64_t v_stride, int keys,
                                    int dim) {
  // Accumulators for half the registers, and of at most 128 columns: the more of a row is read at
  // once, the better for memory.
  constexpr int kMost = 64 / kLanes, kRoom = kVectorRegisters / 4 / kRows;
  constexpr int kPairs = kVectorRegisters == 16 ? 2 : kRoom < kMost ? kRoom : kMost;
  int d = 0;
  for (; d + 2 * kPairs * kLanes <= dim; d += 2 * kPairs * kLanes) {
    stream_value_tile<kRows, kPairs>(acc + d, acc_stride, p, p_stride, v + d, v_stride, keys);
  }
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    stream_value_tile<kRows, 1>(acc + d, acc_stride, p, p_stride, v + d, v_stride, keys);
  }
  for (; d < dim; d += kLanes) {
    for (int r = 0; r < kRows; ++r) {
      Vec total = load(acc + r * acc_stride + d);
      for (int j = 0; j < keys; ++j) {
        const float weight = p[r * p_stride + j];
        if (!(weight < 0))
          total = fma(load_up_to(v + j * v_stride + d, dim - d), broadcast(weight), total);
      }
      store(acc + r * acc_stride + d, total);
    }
  }
}

// Calls body.template operator()<n>(first) for groups of 4, 2 and 1 rows.
template <typename Body>
FOVEA_INLINE void in_row_groups(int rows, Body body) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) body.template operator()<4>(r);
  for (; r + 2 <= rows; r += 2) body.template operator()<2>(r);
  for (; r < rows; ++r) body.template operator()<1>(r);
}

}  // namespace fovea::FOVEA_ISA
