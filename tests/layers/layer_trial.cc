// Tensors of layer tests.
#include "layers/layer_trial.h"

#include <algorithm>
#include <cstring>

#include "base/half.h"

namespace fovea::test {

double element(const TensorView& t, int64_t i) {
  switch (t.dtype) {
    case DType::kF64: return static_cast<const double*>(t.data)[i];
    case DType::kF32: return static_cast<const float*>(t.data)[i];
    case DType::kBf16: return to_float(static_cast<const Bf16*>(t.data)[i]);
    case DType::kF16: return to_float(static_cast<const F16*>(t.data)[i]);
    default: return std::nan("");
  }
}

void set_element(const TensorView& t, int64_t i, double x) {
  const auto f = static_cast<float>(x);
  switch (t.dtype) {
    case DType::kF64: static_cast<double*>(t.data)[i] = x; break;
    case DType::kF32: static_cast<float*>(t.data)[i] = f; break;
    case DType::kBf16: static_cast<Bf16*>(t.data)[i] = to_bf16(f); break;
    case DType::kF16: static_cast<F16*>(t.data)[i] = to_f16(f); break;
    default: break;
  }
}

TensorView TensorStore::bytes(DType dtype, std::initializer_list<int64_t> sizes) {
  TensorView view = TensorView::contiguous(nullptr, dtype, sizes);
  const auto size = static_cast<size_t>(view.elements() * dtype_bytes(dtype));
  memory_.emplace_back(size / sizeof(Line) + 1);
  view.data = memory_.back().data();
  return view;
}

TensorView TensorStore::blank(std::initializer_list<int64_t> sizes) {
  const TensorView view = bytes(dtype_, sizes);
  for (int64_t i = 0; i < view.elements(); ++i) set_element(view, i, std::nan(""));
  return view;
}

TensorView TensorStore::like(const TensorView& t) {
  TensorView view = blank({t.elements()});
  const TensorView dense =
      t.rank == 1 ? TensorView::contiguous(view.data, dtype_, {t.sizes[0]})
      : t.rank == 2
          ? TensorView::contiguous(view.data, dtype_, {t.sizes[0], t.sizes[1]})
          : TensorView::contiguous(view.data, dtype_, {t.sizes[0], t.sizes[1], t.sizes[2]});
  return dense;
}

TensorView TensorStore::wave(std::initializer_list<int64_t> sizes, double a, double b, double s) {
  const TensorView view = blank(sizes);
  for (int64_t i = 0; i < view.elements(); ++i) {
    set_element(view, i, s * std::sin(a * static_cast<double>(i) + b));
  }
  return view;
}

TensorView TensorStore::normal(std::initializer_list<int64_t> sizes, double scale) {
  const TensorView view = blank(sizes);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < view.elements(); ++i) set_element(view, i, scale * normal(random_));
  return view;
}

Scratch::Scratch(size_t size) : memory(size + kWorkspaceAlignment), bytes(size) {
  std::memset(memory.data(), 0xff, memory.size());  // NaN in every float type
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t aligned = (at + kWorkspaceAlignment - 1) / kWorkspaceAlignment;
  data = reinterpret_cast<void*>(aligned * kWorkspaceAlignment);
}

namespace {

void visit_norm(QkNormWeights& w, const Visitor& visitor) {
  visitor("norm.q", w.q);
  visitor("norm.q_bias", w.q_bias);
  visitor("norm.k", w.k);
  visitor("norm.k_bias", w.k_bias);
}

}  // namespace

void visit(MultiHeadWeights& w, const Visitor& visitor) {
  visitor("q", w.q);
  visitor("k", w.k);
  visitor("v", w.v);
  visitor("out", w.out);
  visitor("q_bias", w.q_bias);
  visitor("k_bias", w.k_bias);
  visitor("v_bias", w.v_bias);
  visitor("out_bias", w.out_bias);
  visit_norm(w.norm, visitor);
}

void visit(FusedWeights& w, const Visitor& visitor) {
  visitor("qkv", w.qkv);
  visitor("out", w.out);
  visitor("qkv_bias", w.qkv_bias);
  visitor("out_bias", w.out_bias);
  visit_norm(w.norm, visitor);
}

void visit(LatentWeights& w, const Visitor& visitor) {
  visitor("q_down", w.q_down);
  visitor("q_up", w.q_up);
  visitor("kv_down", w.kv_down);
  visitor("k_up", w.k_up);
  visitor("v_up", w.v_up);
  visitor("out", w.out);
  visitor("q_latent_norm", w.q_latent_norm);
  visitor("kv_latent_norm", w.kv_latent_norm);
  visit_norm(w.norm, visitor);
}

void visit(CcgqaWeights& w, const Visitor& visitor) {
  visitor("qkv", w.qkv);
  visitor("out", w.out);
  visitor("q_conv1", w.q_conv1);
  visitor("q_conv2", w.q_conv2);
  visitor("k_conv1", w.k_conv1);
  visitor("k_conv2", w.k_conv2);
  visitor("channel_conv", w.channel_conv);
  visitor("head_conv", w.head_conv);
  visitor("channel_conv_bias", w.channel_conv_bias);
  visitor("head_conv_bias", w.head_conv_bias);
  visitor("temperature", w.temperature);
}

double sum(const TensorView& t) {
  double total = 0;
  for (int64_t i = 0; i < t.elements(); ++i) total += element(t, i);
  return total;
}

double sum_abs(const TensorView& t) {
  double total = 0;
  for (int64_t i = 0; i < t.elements(); ++i) total += std::abs(element(t, i));
  return total;
}

double largest(const TensorView& t) {
  double most = 0;
  for (int64_t i = 0; i < t.elements(); ++i) most = std::max(most, std::abs(element(t, i)));
  return most;
}

double dot(const TensorView& a, const TensorView& b) {
  double total = 0;
  for (int64_t i = 0; i < a.elements(); ++i) total += element(a, i) * element(b, i);
  return total;
}

double largest_difference(const TensorView& a, const TensorView& b) {
  double most = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    const double d = std::abs(element(a, i) - element(b, i));
    if (!(d <= most) && !std::isnan(most)) most = d;  // NaN stays
  }
  return most;
}

void expect_same_bits(const TensorView& a, const TensorView& b, const std::string& what) {
  ASSERT_EQ(a.elements(), b.elements()) << what;
  for (int64_t i = 0; i < a.elements(); ++i) {
    ASSERT_EQ(element(a, i), element(b, i)) << what << ", element " << i;
  }
}

}  // namespace fovea::test
