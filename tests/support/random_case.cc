// Random valid cases.
#include "support/random_case.h"

#include <initializer_list>

#include "harness/random.h"

namespace fovea::test {
namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(harness::hash64(seed)) {}

  int64_t up_to(int64_t most) {  // 0..most
    state_ = harness::hash64(state_);
    return static_cast<int64_t>(state_ % static_cast<uint64_t>(most + 1));
  }
  bool one_in(int64_t n) { return up_to(n - 1) == 0; }
  double unit() {
    state_ = harness::hash64(state_);
    return harness::uniform(state_);
  }
  template <typename T>
  T of(std::initializer_list<T> list) {
    return list.begin()[up_to(static_cast<int64_t>(list.size()) - 1)];
  }
  std::array<bool, 3> three() { return {one_in(2), one_in(2), one_in(2)}; }

 private:
  uint64_t state_;
};

// Mostly short, now and then past a tile, rarely none at all.
int64_t length(Dice& dice) {
  if (dice.one_in(40)) return 0;
  if (dice.one_in(3))
    return dice.of<int64_t>({1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129});
  return 1 + dice.up_to(dice.one_in(4) ? 160 : 40);
}

int64_t dim(Dice& dice) {
  if (dice.one_in(2)) return dice.of<int64_t>({8, 16, 24, 32, 40, 64, 80, 96, 128});
  return 1 + dice.up_to(70);
}

Mask mask(Dice& dice) {
  Mask m = dice.of({Mask::none(), Mask::causal(), Mask::window(0, 0)});
  if (m.left == 0) {
    m = Mask::window(dice.one_in(4) ? Mask::kUnbounded : dice.up_to(50),
                     dice.one_in(4) ? Mask::kUnbounded : dice.up_to(50));
  }
  if (dice.one_in(5)) m = m.with_prefix(dice.up_to(40));
  return m;
}

void add_features(Dice& dice, harness::Case& c) {
  AttentionProblem& p = c.problem;
  const auto add = [&p](Feature f) { p.features = p.features | f; };
  if (dice.one_in(4)) {
    add(Feature::kBias);
    c.bias_broadcast = dice.three();
    c.want_dbias = c.backward && dice.one_in(2);
    c.bias_f32 = p.dtype != DType::kF32 && dice.one_in(2);
  }
  if (dice.one_in(5)) {
    add(Feature::kBoolMask);
    c.mask_broadcast = dice.three();
  }
  if (dice.one_in(5)) {
    add(Feature::kAlibi);
    c.alibi_per_batch = dice.one_in(2);
  }
  if (dice.one_in(5)) add(Feature::kSink);
  if (dice.one_in(4)) {
    p.layout = Layout::kPacked;
  } else if (dice.one_in(4)) {
    add(Feature::kKeyLengths);
  }
}

}  // namespace

harness::Case random_case(uint64_t seed) {
  Dice dice(seed);
  harness::Case c;
  AttentionProblem& p = c.problem;
  c.seed = seed;
  p.batch = dice.one_in(40) ? 0 : 1 + dice.up_to(2);
  p.head_kv = 1 + dice.up_to(2);
  p.head_q = p.head_kv * (1 + dice.up_to(3));
  p.q_len = length(dice);
  p.kv_len = length(dice);
  p.dim_qk = dim(dice);
  p.dim_v = dice.one_in(3) ? dim(dice) : p.dim_qk;
  p.dtype = dice.of({DType::kF32, DType::kBf16, DType::kF16});
  p.mask = mask(dice);
  c.backward = dice.one_in(2);
  c.want_dlse = c.backward && dice.one_in(4);
  add_features(dice, c);
  if (dice.one_in(5)) p.softcap = 0.5 + 20 * dice.unit();
  if (dice.one_in(6)) p.dropout = 0.6 * dice.unit();
  if (dice.one_in(5)) p.scale = dice.unit() - 0.3;
  if (dice.one_in(6)) p.logit_bound = 10 * dice.unit();
  if (dice.one_in(4)) p.determinism = Determinism::kRequired;
  c.order = dice.of({harness::TensorOrder::kBshd, harness::TensorOrder::kBhsd});
  if (dice.one_in(3)) c.pad = 1 + dice.up_to(16);
  using harness::DataFamily;
  c.data = dice.one_in(2)
               ? DataFamily::kNormal
               : dice.of({DataFamily::kSpiky, DataFamily::kLargeLogits, DataFamily::kConstant,
                          DataFamily::kTiny, DataFamily::kOutlierChannels});
  set_totals(c);
  return c;
}

}  // namespace fovea::test
