// CCGQA's prologue on the GPU against the CPU's in float64: every output and gradient has at most
// twice the error of the plain formula in the same type, all of whose sums are one running sum.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "gpu/prologue_call.h"
#include "layers/layer_trial.h"

namespace fovea::test {
namespace {

PrologueSpec zaya(PrologueSpec s) {
  s.conv = CcgqaConv::kChannelsThenHeads;
  s.taps[0] = s.taps[1] = 2;
  s.bias = true;
  s.coupling = CcgqaCoupling::kGroup;
  s.temperature = KeyTemperature::kPerHeadExp;
  s.style = RopeStyle::kHalf;
  s.fraction = 0.5;
  return s;
}

double epsilon_of(DType dtype) {
  return dtype == DType::kBf16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-24;
}

double norm_of(const TensorView& t) {
  double squares = 0;
  for (int64_t i = 0; i < t.elements(); ++i) squares += element(t, i) * element(t, i);
  return std::sqrt(squares);
}

void expect_close(const PrologueSpec& s, DType dtype) {
  HostPrologue given(s, dtype, nullptr), plain(s, dtype, &given), exact(s, DType::kF64, &given);
  run_on_device(s, given.call);
  run_on_host(s, dtype, plain.call);
  run_on_host(s, DType::kF64, exact.call);
  std::vector<TensorView> plains, exacts;
  plain.call.visit([&](const char*, TensorView& t, TensorRole, double) { plains.push_back(t); });
  exact.call.visit([&](const char*, TensorView& t, TensorRole, double) { exacts.push_back(t); });
  size_t n = 0;
  given.call.visit([&](const char* name, TensorView& t, TensorRole role, double) {
    const TensorView &own = plains[n], &truth = exacts[n];
    ++n;
    if (role != TensorRole::kOutput || !t.given()) return;
    // Rows beyond the tokens of dmixed and du are the engine's own business.
    const int64_t margin = s.convs ? s.taps[1] - 1 : 0;
    const bool is_dmixed = std::strcmp(name, "dmixed") == 0, is_du = std::strcmp(name, "du") == 0;
    double worst = 0, plain_worst = 0, largest = 0, squares = 0, plain_squares = 0;
    int64_t at = -1, count = 0;
    for (int64_t i = 0; i < t.elements(); ++i) {
      if (is_dmixed || is_du) {
        const int64_t row = i / t.sizes[2] % t.sizes[1];
        const int64_t first = is_dmixed ? margin : 0;
        if (row < first || row >= first + s.q_len + (is_du ? margin : 0)) continue;
      }
      const double want = element(truth, i);
      const double error = std::abs(element(t, i) - want);
      if (!(error <= worst)) worst = error, at = i;
      plain_worst = std::max(plain_worst, std::abs(element(own, i) - want));
      largest = std::max(largest, std::abs(want));
      squares += error * error;
      plain_squares += std::pow(element(own, i) - want, 2);
      ++count;
    }
    // A temperature's gradient is one sum over everything, whose terms cancel.
    const bool is_sum = std::strcmp(name, "dtemperature") == 0;
    const double ulp = epsilon_of(dtype) * (is_sum ? norm_of(given.call.g.dqk) : largest);
    EXPECT_LE(worst, 2 * plain_worst + ulp)
        << name << " of " << s.name << " in " << dtype_name(dtype) << " at " << at << ": "
        << element(t, std::max<int64_t>(at, 0)) << " for "
        << element(truth, std::max<int64_t>(at, 0));
    if (is_sum) return;
    const double rms = std::sqrt(squares / static_cast<double>(count));
    const double plain_rms = std::sqrt(plain_squares / static_cast<double>(count));
    EXPECT_LE(rms, 1.5 * plain_rms + 0.1 * ulp) << name << " of " << s.name;
  });
}

class PrologueOnGpu : public testing::TestWithParam<PrologueSpec> {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_P(PrologueOnGpu, ErrsAtMostTwiceAsThePlainFormula) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    expect_close(GetParam(), dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Hydra, PrologueOnGpu,
    testing::Values(
        PrologueSpec{.name = "plain"}, PrologueSpec{.name = "one token", .q_len = 1},
        PrologueSpec{.name = "odd KV heads", .heads = 6, .heads_kv = 3, .q_len = 70},
        PrologueSpec{.name = "a KV head a query head", .heads = 3, .heads_kv = 3, .dim = 32},
        PrologueSpec{.name = "one KV head", .heads = 8, .heads_kv = 1, .q_len = 129},
        PrologueSpec{.name = "heads of 8", .dim = 8},
        PrologueSpec{.name = "heads of 24", .dim = 24, .q_len = 65},
        PrologueSpec{.name = "heads of 40", .heads = 8, .heads_kv = 4, .dim = 40},
        PrologueSpec{.name = "heads of 64", .dim = 64, .q_len = 131},
        PrologueSpec{.name = "heads of 96", .dim = 96},
        PrologueSpec{.name = "heads of 128", .dim = 128, .q_len = 34},
        PrologueSpec{.name = "heads of 192", .heads = 2, .heads_kv = 1, .dim = 192},
        PrologueSpec{.name = "other taps", .taps = {4, 2}},
        PrologueSpec{.name = "one tap", .taps = {1, 1}},
        PrologueSpec{.name = "twenty taps", .taps = {20, 17}},
        PrologueSpec{
            .name = "many small heads", .heads = 16, .heads_kv = 4, .dim = 32, .q_len = 70},
        PrologueSpec{
            .name = "many heads of 24", .heads = 15, .heads_kv = 5, .dim = 24, .q_len = 67},
        PrologueSpec{.name = "no convolutions", .convs = false},
        PrologueSpec{.name = "no coupling", .couple = false},
        PrologueSpec{.name = "no norm", .norm = false},
        PrologueSpec{.name = "no shift", .shift = false},
        PrologueSpec{.name = "no rope", .rope = false},
        PrologueSpec{.name = "u again", .q_len = 70, .again = true},
        PrologueSpec{
            .name = "u again in heads of 64", .heads = 8, .dim = 64, .q_len = 70, .again = true},
        PrologueSpec{.name = "by group", .coupling = CcgqaCoupling::kGroup},
        PrologueSpec{.name = "temperatures", .temperature = KeyTemperature::kPerHead},
        PrologueSpec{.name = "half rope", .style = RopeStyle::kHalf},
        PrologueSpec{.name = "later chunk", .first = 100000},
        PrologueSpec{.name = "ids", .ids = true},
        PrologueSpec{.name = "short", .batch = 70, .q_len = 5},
        PrologueSpec{
            .name = "the small layer", .heads = 8, .heads_kv = 2, .batch = 4, .q_len = 512},
        PrologueSpec{.name = "odd addresses", .heads = 8, .heads_kv = 2, .q_len = 200, .odd = true},
        PrologueSpec{.name = "many tiles",
                     .heads = 16,
                     .heads_kv = 4,
                     .dim = 32,
                     .batch = 2,
                     .q_len = 2100}));

INSTANTIATE_TEST_SUITE_P(
    Zaya, PrologueOnGpu,
    testing::Values(
        zaya({.name = "plain"}), zaya({.name = "one token", .q_len = 1}),
        zaya({.name = "odd KV heads", .heads = 6, .heads_kv = 3}),
        zaya({.name = "heads of 24", .dim = 24}),
        zaya({.name = "heads of 56", .dim = 56, .q_len = 130}),
        zaya({.name = "heads of 128", .dim = 128, .q_len = 99}),
        zaya({.name = "heads of 160", .dim = 160}), zaya({.name = "no coupling", .couple = false}),
        zaya({.name = "no norm", .norm = false}), zaya({.name = "later chunk", .first = 77}),
        zaya({.name = "many tokens", .heads = 8, .dim = 128, .batch = 3, .q_len = 1500})));

}  // namespace
}  // namespace fovea::test
