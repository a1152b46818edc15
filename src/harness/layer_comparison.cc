// The float64 layer on a part of a case.
#include "harness/layer_comparison.h"

#include <algorithm>
#include <cmath>

#include "harness/any_layer.h"
#include "harness/chunks.h"
#include "harness/layer_weights.h"

namespace fovea::harness {
namespace {

constexpr int64_t kFewestTokens = 8;  // fewer would not see the convolutions, nor much attention
constexpr int64_t kMostTokens = 512;  // the attention within a sample stays a small part of it

// How far an element may be off, of the largest of its tensor: what rounding at every step of a
// layer leaves, with room (tests/layers holds fovea's own to the same).
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF64: return 1e-12;
    case DType::kF32: return 2e-5;
    case DType::kF16: return 1e-2;
    default: return 6e-2;
  }
}
constexpr double kCancelled = 0.1;  // gradients that cancel are held to this part of the largest

// The first elements: `to` may be the beginning of `from`.
void copy_values(const TensorView& from, const TensorView& to) {
  const TensorView source = flat(from), target = flat(to);
  for_chunks(target.elements(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) write_element(target, read_element(source, i), i);
  });
}

// What some elements of a tensor come to: their errors, or the largest of them.
struct Sums {
  double largest = 0;  // NaN once an element was
  double squares = 0;
  double sum = 0;

  void take(double x) {
    const double size = std::abs(x);
    if (!(size <= largest) && !std::isnan(largest)) largest = size;
    squares += x * x;
    sum += x;
  }
  void take(const Sums& s) {
    if (!(s.largest <= largest) && !std::isnan(largest)) largest = s.largest;
    squares += s.squares;
    sum += s.sum;
  }
};

// Of value(0), value(1), ...: lines of them are shared among the cores and joined in their order.
template <typename Value>
Sums sums_of(int64_t elements, const Value& value) {
  constexpr int64_t kLine = 1 << 14;
  std::vector<Sums> lines(static_cast<size_t>((elements + kLine - 1) / kLine));
  for_chunks(static_cast<int64_t>(lines.size()), kLine, [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      Sums& sums = lines[static_cast<size_t>(line)];
      const int64_t last = std::min(elements, (line + 1) * kLine);
      for (int64_t i = line * kLine; i < last; ++i) sums.take(value(i));
    }
  });
  Sums all;
  for (const Sums& line : lines) all.take(line);
  return all;
}

double largest(const TensorView& t) {
  const TensorView row = flat(t);
  return sums_of(row.elements(), [&row](int64_t i) { return read_element(row, i); }).largest;
}

Accuracy compare(const std::string& name, const TensorView& got, const TensorView& want,
                 double relative, double scale) {
  const TensorView found = flat(got), exact = flat(want);
  Accuracy a;
  a.tensor = name;
  a.bound = relative * std::max(largest(want), scale);
  const Sums errors = sums_of(
      exact.elements(), [&](int64_t i) { return read_element(found, i) - read_element(exact, i); });
  const auto count = static_cast<double>(exact.elements());
  a.max_err = errors.largest;
  a.rms = std::sqrt(errors.squares / count);
  a.rms_bound = a.bound;
  a.mean_err = errors.sum / count;
  a.ok = a.max_err <= a.bound;
  return a;
}

}  // namespace

int64_t sample_tokens(const LayerCase& c, double cost_limit) {
  const auto affordable = static_cast<int64_t>(cost_limit / (3 * weight_macs(c)));
  const int64_t tokens = std::min({affordable, kMostTokens, c.q_len});
  return tokens >= std::min(kFewestTokens, c.q_len) ? tokens : 0;
}

LayerComparison::LayerComparison(const LayerCase& c, const LayerTensors& tensors, int64_t sample)
    : exact_case_(c), tensors_(tensors) {
  exact_case_.dtype = DType::kF64;
  exact_case_.batch = 1;
  exact_case_.q_len = sample;
}

Status LayerComparison::run_exact() {
  if (exact_ != nullptr) return {};
  const bool training = exact_case_.training;
  const auto layer = make_any_layer(
      exact_case_, training ? LayerUse::kTraining : LayerUse::kInference, Device::cpu());
  if (!layer.ok()) return layer.status();
  auto exact = std::make_unique<LayerTensors>(exact_case_, 0);
  const LayerViews &from = tensors_.views(), &to = exact->views();
  copy_values(from.x, to.x);
  if (training) copy_values(from.sampled_dout, to.dout);
  for (size_t i = 0; i < to.weights.size(); ++i) {
    copy_values(from.weights[i].view, to.weights[i].view);
  }
  const OwnedWorkspace saved((*layer)->saved_bytes());
  const Saved kept{saved.view().data, saved.view().bytes};
  const OwnedWorkspace forward((*layer)->workspace_bytes(Pass::kForward));
  if (Status s = (*layer)->forward(to, forward.view(), kept, {}); !s.ok()) return s;
  if (training) {
    const OwnedWorkspace backward((*layer)->workspace_bytes(Pass::kBackward));
    if (Status s = (*layer)->backward(to, backward.view(), kept, {}); !s.ok()) return s;
  }
  exact_ = std::move(exact);
  return {};
}

std::vector<Accuracy> LayerComparison::forward() {
  if (Status s = run_exact(); !s.ok()) return {failed(s)};
  const double relative = tolerance(tensors_.views().x.dtype);
  return {compare("out", tensors_.views().out, exact_->views().out, relative, 0)};
}

std::vector<Accuracy> LayerComparison::training() {
  std::vector<Accuracy> found = forward();
  if (exact_ == nullptr) return found;
  const LayerViews &got = tensors_.views(), &want = exact_->views();
  const double relative = tolerance(got.x.dtype);
  found.push_back(compare("dx", got.dx, want.dx, relative, 0));
  double scale = 0;
  for (const LayerWeight& weight : want.weights) {
    scale = std::max(scale, kCancelled * largest(weight.gradient));
  }
  for (size_t i = 0; i < want.weights.size(); ++i) {
    const std::string name = "d" + want.weights[i].name;
    found.push_back(
        compare(name, got.weights[i].gradient, want.weights[i].gradient, relative, scale));
  }
  return found;
}

}  // namespace fovea::harness
