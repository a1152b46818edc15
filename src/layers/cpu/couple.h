// What CCGQA does to each token's q and k after their convolutions: coupling, norm, RoPE; and back.
#pragma once

#include "layers/cpu/element.h"
#include "layers/cpu/kernels.h"
#include "layers/cpu/rotate.h"

namespace fovea::FOVEA_ISA {

using layers::cpu::CoupleRows;
using layers::cpu::Coupling;
using layers::cpu::HeadRows;
using layers::cpu::Temperature;

constexpr double kShortest = 1e-12;  // a head is divided by its length, or by this if it is shorter

template <typename T>
struct Couple {
  using R = Real<T>;

  // mixed = convolved + coupling(before); qk = RoPE(norm(mixed)). `worker`: the angles of a row,
  // then two means over heads.
  static void forward(const CoupleRows& a, int64_t begin, int64_t end, std::byte* worker) {
    auto* const own = reinterpret_cast<R*>(worker);
    R* const mean_q = own + a.rotation.turning;
    R* const mean_k = mean_q + a.dim;
    for (int64_t row = begin; row < end; ++row) {
      const T* const before = head(a.before, row, 0);
      const T* const convolved = head(a.convolved, row, 0);
      T* const mixed = head(a.mixed, row, 0);
      T* const qk = head(a.qk, row, 0);
      add_coupling(a, before, convolved, mixed, mean_q, mean_k);
      const R* const angles = a.rotation.turning > 0
                                  ? row_angles(a.rotation, row / a.qk.rows, row % a.qk.rows, own)
                                  : nullptr;
      for (int64_t h = 0; h < a.heads + a.heads_kv; ++h) {
        const T* const from = mixed + h * a.dim;
        T* const to = qk + h * a.dim;
        const R factor = a.norm ? length_of(a, h) / longest(from, a.dim) : R{1};
        for (int64_t i = 0; i < a.dim; ++i) put(to + i, factor * value_of(from[i]));
        if (angles != nullptr) turn_head(to, to, a.rotation, angles);
      }
    }
  }

  // From dqk, which is written over: dmixed, the part of dbefore that came by the coupling (and, in
  // a layer without convolutions, all of it), and sums [heads_kv] of the temperature's gradient.
  template <typename S>
  static void backward(const CoupleRows& a, int64_t begin, int64_t end, std::byte* worker,
                       double* sums) {
    auto* const own = reinterpret_cast<R*>(worker);
    R* const sum_q = own + a.rotation.turning;
    R* const sum_k = sum_q + a.dim;
    for (int64_t g = 0; g < a.heads_kv; ++g) sums[g] = 0;
    for (int64_t row = begin; row < end; ++row) {
      T* const dqk = head(a.dqk, row, 0);
      T* const dmixed = head(a.dmixed, row, 0);
      const T* const mixed = head(a.mixed, row, 0);
      const R* const angles = a.rotation.turning > 0
                                  ? row_angles(a.rotation, row / a.qk.rows, row % a.qk.rows, own)
                                  : nullptr;
      for (int64_t h = 0; h < a.heads + a.heads_kv; ++h) {
        T* const d = dqk + h * a.dim;
        if (angles != nullptr) turn_head(d, d, a.rotation, angles);
        const R slope = norm_backward(a, h, d, mixed + h * a.dim, dmixed + h * a.dim);
        if (h >= a.heads) add_in(sums + h - a.heads, static_cast<S>(slope));
      }
      coupling_backward(a, dmixed, head(a.dbefore, row, 0), sum_q, sum_k);
    }
  }

 private:
  FOVEA_INLINE static T* head(const HeadRows& x, int64_t row, int64_t h) {
    return static_cast<T*>(x.data) + x.at(row) + h * x.head_stride;
  }

  static void add_coupling(const CoupleRows& a, const T* before, const T* convolved, T* mixed,
                           R* mean_q, R* mean_k) {
    const int64_t dim = a.dim, heads = a.heads, group = a.heads / a.heads_kv;
    const T* const k = before + heads * dim;
    if (a.coupling == Coupling::kNone) {
      for (int64_t i = 0; i < (heads + a.heads_kv) * dim; ++i) mixed[i] = convolved[i];
      return;
    }
    if (a.coupling == Coupling::kAllHeads) {
      half_sum(before, heads, dim, heads, mean_q);
      half_sum(k, a.heads_kv, dim, a.heads_kv, mean_k);
      for (int64_t h = 0; h < heads + a.heads_kv; ++h) {
        const R* const other = h < heads ? mean_k : mean_q;
        add_to(convolved + h * dim, other, dim, mixed + h * dim);
      }
      return;
    }
    for (int64_t g = 0; g < a.heads_kv; ++g) {
      R* const sum = mean_k;  // over the group, of (q + k) / 2
      for (int64_t i = 0; i < dim; ++i) sum[i] = 0;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        for (int64_t i = 0; i < dim; ++i) {
          mean_q[i] = R(0.5) * (value_of(before[h * dim + i]) + value_of(k[g * dim + i]));
          sum[i] += mean_q[i];
        }
        add_to(convolved + h * dim, mean_q, dim, mixed + h * dim);
      }
      for (int64_t i = 0; i < dim; ++i) sum[i] /= static_cast<R>(group);
      add_to(convolved + (heads + g) * dim, sum, dim, mixed + (heads + g) * dim);
    }
  }

  // `sum_q`, `sum_k`: room for a head each.
  static void coupling_backward(const CoupleRows& a, const T* dmixed, T* dbefore, R* sum_q,
                                R* sum_k) {
    const int64_t dim = a.dim, heads = a.heads, group = a.heads / a.heads_kv;
    // Without convolutions `before` is also what the coupling is added to.
    const R straight = a.convolve ? R{0} : R{1};
    const auto give = [&](int64_t h, const R* coupled) {
      for (int64_t i = 0; i < dim; ++i) {
        put(dbefore + h * dim + i, coupled[i] + straight * value_of(dmixed[h * dim + i]));
      }
    };
    if (a.coupling == Coupling::kNone) {
      for (int64_t i = 0; i < dim; ++i) sum_q[i] = 0;
      for (int64_t h = 0; h < heads + a.heads_kv; ++h) give(h, sum_q);
    } else if (a.coupling == Coupling::kAllHeads) {
      // A head of q reached each head of k by half the mean over q's heads, and so back.
      half_sum(dmixed, heads, dim, a.heads_kv, sum_q);
      half_sum(dmixed + heads * dim, a.heads_kv, dim, heads, sum_k);
      for (int64_t h = 0; h < heads + a.heads_kv; ++h) give(h, h < heads ? sum_k : sum_q);
    } else {
      for (int64_t g = 0; g < a.heads_kv; ++g) {
        const T* const dk = dmixed + (heads + g) * dim;
        R* const to_k = sum_k;
        for (int64_t i = 0; i < dim; ++i) to_k[i] = 0;
        for (int64_t h = g * group; h < (g + 1) * group; ++h) {
          for (int64_t i = 0; i < dim; ++i) {
            const R own = value_of(dmixed[h * dim + i]);
            sum_q[i] = R(0.5) * (own + value_of(dk[i]) / static_cast<R>(group));
            to_k[i] += sum_q[i];
          }
          give(h, sum_q);
        }
        give(heads + g, to_k);
      }
    }
  }

  // d/dx of factor * x / |x|; gives the derivative by the temperature for a key's head.
  static R norm_backward(const CoupleRows& a, int64_t h, const T* dy, const T* x, T* dx) {
    if (!a.norm) {
      for (int64_t i = 0; i < a.dim; ++i) dx[i] = dy[i];
      return 0;
    }
    const R length = longest(x, a.dim), factor = length_of(a, h);
    R along = 0;  // dy . x / |x|
    for (int64_t i = 0; i < a.dim; ++i) along += value_of(dy[i]) * value_of(x[i]);
    along /= length;
    // Below the shortest length the division is by a constant, which has no gradient.
    const R bent = length > static_cast<R>(kShortest) ? along / length : R{0};
    for (int64_t i = 0; i < a.dim; ++i) {
      put(dx + i, factor / length * (value_of(dy[i]) - bent * value_of(x[i])));
    }
    // factor = length * s, and s is the temperature, or its exponential.
    if (h < a.heads) return 0;
    return along * (a.kind == Temperature::kPerHeadExp ? factor : static_cast<R>(a.length));
  }

  static R longest(const T* x, int64_t dim) {
    R squares = 0;
    for (int64_t i = 0; i < dim; ++i) squares += value_of(x[i]) * value_of(x[i]);
    const R length = root(squares);
    return length > static_cast<R>(kShortest) ? length : static_cast<R>(kShortest);
  }

  // What a head's length becomes.
  static R length_of(const CoupleRows& a, int64_t h) {
    if (h < a.heads) return static_cast<R>(a.query_length);
    const R length = static_cast<R>(a.length);
    const T* const t = static_cast<const T*>(a.temperature);
    const R given = value_of(t[a.kind == Temperature::kShared ? 0 : h - a.heads]);
    if (a.kind != Temperature::kPerHeadExp) return length * given;
    return length * static_cast<R>(::exp(static_cast<double>(given)));
  }

  // Half the sum of heads, over `shares`.
  static void half_sum(const T* x, int64_t heads, int64_t dim, int64_t shares, R* sum) {
    for (int64_t i = 0; i < dim; ++i) sum[i] = 0;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < dim; ++i) sum[i] += value_of(x[h * dim + i]);
    }
    for (int64_t i = 0; i < dim; ++i) sum[i] *= R(0.5) / static_cast<R>(shares);
  }

  static void add_to(const T* x, const R* y, int64_t dim, T* sum) {
    for (int64_t i = 0; i < dim; ++i) put(sum + i, value_of(x[i]) + y[i]);
  }
};

}  // namespace fovea::FOVEA_ISA
