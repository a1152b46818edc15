// Products for a few query rows (decode): K and V are read once, unpacked, at the speed of memory.
#pragma once

#include "backend/cpu/scores.h"

namespace fovea::FOVEA_ISA {

constexpr int kStreamKeys = 128;  // keys whose scores are in flight between the two products

// scores[r][j] = q_r . k_j for keys of one block; q is float, padded with zeros to whole vectors.
template <typename T>
void stream_scores(float* scores, int64_t score_stride, const float* q, int q_stride, int rows,
                   const T* k, int64_t k_stride, int keys, int dim) {
  for (int j = 0; j < keys; j += kLanes) {
    const int n = keys - j < kLanes ? keys - j : kLanes;
    for (int r = 0; r < rows; ++r) {
      Vec acc[kLanes];
      for (int x = 0; x < kLanes; ++x) acc[x] = zero();
      for (int d = 0; d < dim; d += kLanes) {
        const Vec qv = load(q + r * q_stride + d);
        if (n == kLanes && d + kLanes <= dim) {
          for (int x = 0; x < kLanes; ++x)
            acc[x] = fma(load(k + (j + x) * k_stride + d), qv, acc[x]);
        } else {
          for (int x = 0; x < n; ++x) {
            acc[x] = fma(load_up_to(k + (j + x) * k_stride + d, dim - d), qv, acc[x]);
          }
        }
      }
      store(scores + r * score_stride + j, lane_sums(acc));
    }
  }
}

// acc_r += sum_j p[r][j] v_j. A weight of zero adds nothing, whatever its value holds.
template <typename T>
void stream_values(float* acc, int64_t acc_stride, const float* p, int64_t p_stride, int rows,
                   const T* v, int64_t v_stride, int keys, int dim) {
  constexpr int kAtOnce = 8;  // vectors of one row
  for (int r = 0; r < rows; ++r) {
    for (int d0 = 0; d0 < dim; d0 += kAtOnce * kLanes) {
      float* const out = acc + r * acc_stride + d0;
      const int vectors = (dim - d0 + kLanes - 1) / kLanes;
      if (dim - d0 >= kAtOnce * kLanes) {
        Vec sum[kAtOnce];
        for (int x = 0; x < kAtOnce; ++x) sum[x] = load(out + x * kLanes);
        for (int j = 0; j < keys; ++j) {
          const float weight = p[r * p_stride + j];
          if (weight == 0) continue;
          const T* row = v + j * v_stride + d0;
          for (int x = 0; x < kAtOnce; ++x)
            sum[x] = fma(load(row + x * kLanes), broadcast(weight), sum[x]);
        }
        for (int x = 0; x < kAtOnce; ++x) store(out + x * kLanes, sum[x]);
      } else {
        for (int x = 0; x < vectors; ++x) {
          Vec sum = load(out + x * kLanes);
          const int left = dim - d0 - x * kLanes;
          for (int j = 0; j < keys; ++j) {
            const float weight = p[r * p_stride + j];
            if (weight == 0) continue;
            sum = fma(load_up_to(v + j * v_stride + d0 + x * kLanes, left), broadcast(weight), sum);
          }
          store(out + x * kLanes, sum);
        }
      }
    }
  }
}

}  // namespace fovea::FOVEA_ISA
