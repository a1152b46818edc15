// The values of a case's inputs, by data family.
#include "harness/fill.h"

#include <array>
#include <cmath>

#include "base/half.h"
#include "harness/chunks.h"
#include "harness/random.h"

namespace fovea::harness {
namespace {

void store(float* p, double x) { *p = static_cast<float>(x); }
void store(double* p, double x) { *p = x; }
void store(Bf16* p, double x) { *p = to_bf16(static_cast<float>(x)); }
void store(F16* p, double x) { *p = to_f16(static_cast<float>(x)); }
void store(bool* p, double x) { *p = x != 0; }

// Element [a][b][c][d] becomes value(b, c, d, flat), flat being its contiguous index. Ranks below
// four are padded in front.
template <typename T, typename Value>
void fill_typed(const TensorView& t, const Value& value) {
  std::array<int64_t, 4> sizes{1, 1, 1, 1}, strides{};
  for (int i = 0; i < t.rank; ++i) {
    sizes[static_cast<size_t>(4 - t.rank + i)] = t.sizes[static_cast<size_t>(i)];
    strides[static_cast<size_t>(4 - t.rank + i)] = t.strides[static_cast<size_t>(i)];
  }
  for_chunks(sizes[0] * sizes[1] * sizes[2], sizes[3], [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      const int64_t c = line % sizes[2], b = line / sizes[2] % sizes[1];
      const int64_t a = line / (sizes[2] * sizes[1]);
      T* at = static_cast<T*>(t.data) + a * strides[0] + b * strides[1] + c * strides[2];
      auto flat = static_cast<uint64_t>(line * sizes[3]);
      for (int64_t d = 0; d < sizes[3]; ++d) store(at + d * strides[3], value(b, c, d, flat++));
    }
  });
}

template <typename Value>
void fill(const TensorView& t, const Value& value) {
  switch (t.dtype) {
    case DType::kF32: fill_typed<float>(t, value); break;
    case DType::kF64: fill_typed<double>(t, value); break;
    case DType::kBf16: fill_typed<Bf16>(t, value); break;
    case DType::kF16: fill_typed<F16>(t, value); break;
    case DType::kBool: fill_typed<bool>(t, value); break;
    case DType::kI32: break;  // lengths are not drawn here
  }
}

constexpr double kLargeFactor = 20;     // of q and of k: scores of deviation 400
constexpr double kTinyFactor = 0x1p-9;  // normal numbers even in f16
constexpr double kOutlierFactor = 8;    // on one channel of 16
constexpr double kSpikeFactor = 3;      // along the direction that all queries share
constexpr int64_t kSpikeEvery = 61;     // keys from one spike to the next
constexpr int64_t kOutlierEvery = 16;

double direction(int64_t d) { return (hash64(static_cast<uint64_t>(d)) & 1) != 0 ? 1 : -1; }

// Rows of q, k, v, dout: (row, head, channel) of one batch member, or of the packed whole.
void fill_rows(const TensorView& t, InputName name, DataFamily data, uint64_t key) {
  const bool scores = name == InputName::kQ || name == InputName::kK;
  const double constant = 2 * uniform(hash64(key)) - 1;
  const auto noise = [key](uint64_t flat) { return normal(hash64(key + flat)); };
  switch (data) {
    case DataFamily::kNormal:
      return fill(t, [&](auto, auto, auto, uint64_t flat) { return noise(flat); });
    case DataFamily::kConstant:
      return fill(t, [&](auto, auto, auto, uint64_t) { return constant; });
    case DataFamily::kTiny:
      return fill(t, [&](auto, auto, auto, uint64_t flat) { return kTinyFactor * noise(flat); });
    case DataFamily::kLargeLogits: {
      const double factor = scores ? kLargeFactor : 1;
      return fill(t, [&](auto, auto, auto, uint64_t flat) { return factor * noise(flat); });
    }
    case DataFamily::kOutlierChannels:
      return fill(t, [&](auto, auto, int64_t d, uint64_t flat) {
        return noise(flat) * (name != InputName::kQ && d % kOutlierEvery == 3 ? kOutlierFactor : 1);
      });
    case DataFamily::kSpiky:
      return fill(t, [&](int64_t row, auto, int64_t d, uint64_t flat) {
        if (name == InputName::kQ) return noise(flat) + direction(d);
        if (name == InputName::kK && row % kSpikeEvery == 0) {
          return noise(flat) + kSpikeFactor * direction(d);
        }
        return noise(flat);
      });
  }
}

}  // namespace

void fill_input(const TensorView& view, InputName name, const Case& c) {
  const uint64_t key = hash64(hash64(c.seed) + static_cast<uint64_t>(name));
  switch (name) {
    case InputName::kQ:
    case InputName::kK:
    case InputName::kV:
    case InputName::kDout: return fill_rows(view, name, c.data, key);
    case InputName::kBias:
    case InputName::kSink:
    case InputName::kDlse:
      return fill(view,
                  [key](auto, auto, auto, uint64_t flat) { return normal(hash64(key + flat)); });
    case InputName::kMask: {
      // Three keys of four take part; one row in 16 sees nothing.
      const uint64_t row_length = static_cast<uint64_t>(view.sizes[3]);
      const bool rows_differ = view.sizes[2] > 1;
      return fill(view, [=](auto, auto, auto, uint64_t flat) {
        if (rows_differ && hash64(key ^ ~(flat / row_length)) % 16 == 0) return 0.0;
        return hash64(key + flat) % 4 == 0 ? 0.0 : 1.0;
      });
    }
    case InputName::kAlibi:
      return fill(view, [](auto, auto, auto, uint64_t flat) {
        return std::exp2(-static_cast<double>(flat % 8) - 1);
      });
  }
}

}  // namespace fovea::harness
