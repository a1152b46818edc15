// CCGQA's prologue on the GPU against the CPU's in float64: every output and gradient has at most
// twice the error of the plain formula in the same type, all of whose sums are one running sum.
#include "layers/cuda/prologue.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <string_view>
#include <vector>

#include "base/half.h"
#include "gpu/stream.h"
#include "layers/engine.h"
#include "plan/device.h"

namespace fovea::test {
namespace {

using layers::Conv;
using layers::Prologue;
using layers::PrologueGradients;

struct Spec {
  const char* name = "";
  int64_t heads = 4, heads_kv = 2, dim = 16, batch = 2, q_len = 37;
  CcgqaConv conv = CcgqaConv::kHeadsThenAll;
  int64_t taps[2] = {3, 3};
  bool convs = true, bias = false, couple = true, norm = true, shift = true, rope = true;
  CcgqaCoupling coupling = CcgqaCoupling::kAllHeads;
  KeyTemperature temperature = KeyTemperature::kShared;
  RopeStyle style = RopeStyle::kInterleaved;
  double fraction = 1;
  int64_t first = 0;
  bool ids = false;
  bool again = false;  // u is not there for backward
  bool odd = false;    // weights and their gradients begin on odd addresses
};

Spec zaya(Spec s) {
  s.conv = CcgqaConv::kChannelsThenHeads;
  s.taps[0] = s.taps[1] = 2;
  s.bias = true;
  s.coupling = CcgqaCoupling::kGroup;
  s.temperature = KeyTemperature::kPerHeadExp;
  s.style = RopeStyle::kHalf;
  s.fraction = 0.5;
  return s;
}

void PrintTo(const Spec& s, std::ostream* out) { *out << s.name; }

enum class Role { kInput, kOutput, kOwn };  // kOwn: each engine has its own form of it

struct Call {
  Prologue p;
  PrologueGradients g;

  template <typename Use>
  void visit(const Use& use) {
    use("z", p.z, Role::kInput, 1.0);
    use("dqk", g.dqk, Role::kInput, 1.0);
    use("dv", g.dv, Role::kInput, 1.0);
    use("temperature", p.mix.temperature, Role::kInput, 0.5);
    for (Conv* conv : {&p.first, &p.second}) {
      for (auto& block : conv->block) {
        const double fan_in = static_cast<double>(conv->taps * block.group);
        use("weight", block.weight, Role::kInput, 1 / std::sqrt(fan_in));
        use("bias", block.bias, Role::kInput, 0.3);
      }
    }
    use("u", p.u, Role::kOutput, 0.0);
    use("mixed", p.mixed, Role::kOwn, 0.0);
    use("qk", p.qk, Role::kOutput, 0.0);
    use("v", p.v, Role::kOutput, 0.0);
    use("dmixed", g.dmixed, Role::kOutput, 0.0);
    use("du", g.du, Role::kOutput, 0.0);
    use("dz", g.dz, Role::kOutput, 0.0);
    use("dtemperature", g.dtemperature, Role::kOutput, 0.0);
    const char* names[2][2] = {{"dfirst", "dfirst bias"}, {"dsecond", "dsecond bias"}};
    for (int n = 0; n < 2; ++n) {
      for (auto& block : (n == 0 ? g.first : g.second).block) {
        use(names[n][0], block.weight, Role::kOutput, 0.0);
        use(names[n][1], block.bias, Role::kOutput, 0.0);
      }
    }
  }
};

double element(const TensorView& t, int64_t i) {
  switch (t.dtype) {
    case DType::kF64: return static_cast<const double*>(t.data)[i];
    case DType::kF32: return static_cast<const float*>(t.data)[i];
    case DType::kBf16: return to_float(static_cast<const Bf16*>(t.data)[i]);
    default: return to_float(static_cast<const F16*>(t.data)[i]);
  }
}
void set_element(const TensorView& t, int64_t i, double x) {
  const auto f = static_cast<float>(x);
  switch (t.dtype) {
    case DType::kF64: static_cast<double*>(t.data)[i] = x; break;
    case DType::kF32: static_cast<float*>(t.data)[i] = f; break;
    case DType::kBf16: static_cast<Bf16*>(t.data)[i] = to_bf16(f); break;
    default: static_cast<F16*>(t.data)[i] = to_f16(f); break;
  }
}
int64_t bytes_of(const TensorView& t) { return t.elements() * dtype_bytes(t.dtype); }

// Sizes of everything, with no memory yet.
Call make_call(const Spec& s, DType dtype) {
  const auto tensor = [&](std::initializer_list<int64_t> sizes) {
    return TensorView::contiguous(nullptr, dtype, sizes);
  };
  const int64_t q = s.heads * s.dim, kv = s.heads_kv * s.dim, qk = q + kv;
  Call c;
  Prologue& p = c.p;
  p.mix = {.heads = s.heads,
           .heads_kv = s.heads_kv,
           .dim = s.dim,
           .couple = s.couple,
           .coupling = s.coupling,
           .norm = s.norm,
           .length = s.conv == CcgqaConv::kHeadsThenAll ? 1 : std::sqrt(static_cast<double>(s.dim)),
           .query_length = 0.7,
           .kind = s.temperature,
           .temperature = {},
           .positions = {{}, s.first},
           .value_shift = s.shift};
  if (s.norm) {
    p.mix.temperature = tensor({s.temperature == KeyTemperature::kShared ? 1 : s.heads_kv});
  }
  p.convolve = s.convs;
  int64_t margin = 0, reach = 0;
  if (s.convs) {
    margin = s.taps[1] - 1;
    reach = s.taps[0] - 1 + margin;
    p.first.taps = s.taps[0];
    p.second.taps = s.taps[1];
    if (s.conv == CcgqaConv::kHeadsThenAll) {
      p.first.blocks = p.second.blocks = 2;
      p.first.block = {{{0, q, s.dim, tensor({q, s.dim, s.taps[0]}), {}},
                        {q, kv, s.dim, tensor({kv, s.dim, s.taps[0]}), {}}}};
      p.second.block = {
          {{0, q, q, tensor({q, q, s.taps[1]}), {}}, {q, kv, kv, tensor({kv, kv, s.taps[1]}), {}}}};
    } else {
      p.first.blocks = p.second.blocks = 1;
      p.first.block[0] = {0, qk, 1, tensor({qk, 1, s.taps[0]}), {}};
      p.second.block[0] = {0, qk, s.dim, tensor({qk, s.dim, s.taps[1]}), {}};
      if (s.bias) p.first.block[0].bias = p.second.block[0].bias = tensor({qk});
    }
    p.u = tensor({s.batch, margin + s.q_len, qk});
    c.g.du = tensor({s.batch, margin + s.q_len + s.taps[0] - 1, qk});
  }
  p.lead = std::max<int64_t>(reach, s.shift ? 1 : 0);
  p.z = tensor({s.batch, p.lead + s.q_len, qk + kv});
  p.mixed = p.qk = c.g.dqk = tensor({s.batch, s.q_len, qk});
  p.v = c.g.dv = tensor({s.batch, s.q_len, kv});
  c.g.dmixed = tensor({s.batch, s.q_len + 2 * margin, qk});
  c.g.dz = tensor({s.batch, s.q_len, qk + kv});
  c.g.dtemperature = p.mix.temperature;
  c.g.first = p.first;
  c.g.second = p.second;
  return c;
}

constexpr int kNan = 0xff;  // in every byte

// A call with memory on the host. Inputs are `like`'s, or random and of this type's precision.
class HostCall {
 public:
  HostCall(const Spec& s, DType dtype, HostCall* like) : call(make_call(s, dtype)) {
    std::mt19937_64 random(5);
    std::normal_distribution<double> normal;
    std::vector<TensorView> inputs;
    if (like != nullptr) {
      like->call.visit([&](const char*, TensorView& t, Role, double) { inputs.push_back(t); });
    }
    size_t n = 0;
    call.visit([&](const char*, TensorView& t, Role role, double scale) {
      const size_t at = n++;
      if (!t.given()) return;
      memory_.emplace_back(static_cast<size_t>(bytes_of(t)), static_cast<unsigned char>(kNan));
      t.data = memory_.back().data();
      for (int64_t i = 0; role == Role::kInput && i < t.elements(); ++i) {
        set_element(t, i, like != nullptr ? element(inputs[at], i) : scale * normal(random));
      }
    });
  }
  HostCall(const HostCall&) = delete;
  Call call;

 private:
  std::deque<std::vector<unsigned char>> memory_;
};

layers::EngineNeeds needs_of(const Spec& s) {
  layers::EngineNeeds needs;
  needs.head_dim = s.dim;
  needs.sums = (s.heads + s.heads_kv) * s.dim * std::max(s.taps[0], s.taps[1]);
  if (!s.rope) return needs;
  needs.rope = {10000, s.style, s.fraction};
  needs.turning = static_cast<int64_t>(s.fraction * static_cast<double>(s.dim)) / 2 * 2;
  needs.positions = s.q_len;
  return needs;
}

std::vector<int32_t> ids_of(const Spec& s) {
  std::vector<int32_t> ids(static_cast<size_t>(s.batch * s.q_len));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7 % 90001);
  return ids;
}

void set_ids(const Spec& s, void* ids, Call& call) {
  if (s.ids) {
    call.p.mix.positions.ids = TensorView::contiguous(ids, DType::kI32, {s.batch, s.q_len});
  }
}

// By plain sums; in float64 that is the reference.
void run_on_host(const Spec& s, DType dtype, Call& call) {
  PlanOptions options;
  const auto device = discover(Device::cpu(), options);
  ASSERT_TRUE(device.ok());
  layers::EngineNeeds needs = needs_of(s);
  needs.plain_sums = true;
  auto engine = layers::make_engine(*device, dtype, needs);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  std::vector<std::byte> scratch((*engine)->scratch_bytes());
  std::vector<int32_t> ids = ids_of(s);
  set_ids(s, ids.data(), call);
  layers::Run run;
  run.scratch = {scratch.data(), scratch.size()};
  (*engine)->prologue(run, call.p);
  layers::Aside aside = (*engine)->fork(run);
  (*engine)->prologue_backward(run, aside, call.p, call.g);
  ASSERT_TRUE(run.status.ok()) << run.status.message();
}

// Memory on the device, freed at the end.
class DeviceMemory {
 public:
  ~DeviceMemory() {
    for (void* p : all_) (void)cudaFree(p);
  }
  // Of NaN, or of what `from` holds; beginning `after` bytes behind an even address.
  void* make(size_t bytes, const void* from = nullptr, int64_t after = 0) {
    void* memory = nullptr;
    const size_t all = bytes + static_cast<size_t>(after) + 1;
    EXPECT_EQ(cudaMalloc(&memory, all), cudaSuccess);
    auto* const p = static_cast<std::byte*>(memory);
    EXPECT_EQ(cudaMemset(p, kNan, all), cudaSuccess);
    if (from != nullptr) {
      EXPECT_EQ(cudaMemcpy(p + after, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
    // Streams of tests do not wait for this one.
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    all_.push_back(p);
    return p + after;
  }

 private:
  std::vector<void*> all_;
};

layers::cuda::RopeTable rope_of(const layers::EngineNeeds& needs, DeviceMemory& memory) {
  layers::cuda::RopeTable rope;
  rope.turning = needs.turning;
  rope.style = needs.rope.style;
  rope.base = needs.rope.base;
  rope.positions = needs.positions / 2;  // the rest is computed as it comes
  std::vector<float> angles(static_cast<size_t>(rope.positions * rope.turning) + 1);
  const int64_t pairs = rope.turning / 2;
  for (int64_t at = 0; at < rope.positions; ++at) {
    for (int64_t i = 0; i < pairs; ++i) {
      const double angle =
          static_cast<double>(at) *
          std::pow(rope.base, -2.0 * static_cast<double>(i) / static_cast<double>(rope.turning));
      angles[static_cast<size_t>(at * rope.turning + i)] = static_cast<float>(std::cos(angle));
      angles[static_cast<size_t>(at * rope.turning + pairs + i)] =
          static_cast<float>(std::sin(angle));
    }
  }
  rope.angles = static_cast<const float*>(memory.make(angles.size() * 4, angles.data()));
  return rope;
}

// Runs on the GPU with the inputs of `call`, and leaves the outputs in its memory.
void run_on_device(const Spec& s, Call& call) {
  DeviceMemory memory;
  Call there = call;
  there.p.mixed =
      TensorView::contiguous(nullptr, call.p.z.dtype, {s.batch, s.q_len, s.heads_kv * s.dim});
  there.p.inverses = TensorView::contiguous(nullptr, DType::kF32, {s.batch, s.q_len, s.heads});
  there.p.inverses.data = memory.make(static_cast<size_t>(bytes_of(there.p.inverses)));
  there.visit([&](const char* name, TensorView& t, Role, double) {
    const std::string_view of(name);
    const bool odd = s.odd && (of == "weight" || of == "dfirst" || of == "dsecond");
    if (!t.given()) return;
    t.data = memory.make(static_cast<size_t>(bytes_of(t)), t.data, odd ? dtype_bytes(t.dtype) : 0);
  });
  std::vector<int32_t> ids = ids_of(s);
  set_ids(s, memory.make(ids.size() * 4, ids.data()), there);
  const layers::cuda::RopeTable rope = rope_of(needs_of(s), memory);
  Call sizes = make_call(s, call.p.z.dtype);
  sizes.p.makes_u_again = s.again;
  there.p.keeps_u = !s.again;
  OwnedStream stream;
  const auto make_work = [&](Pass pass) {
    const layers::PrologueNeeds needs = layers::cuda::prologue_needs(sizes.p, rope, pass);
    for (size_t n = 0; n < needs.size(); ++n) {
      const size_t bytes = needs[n].bytes;
      there.p.work[n] = {static_cast<std::byte*>(memory.make(bytes)), bytes};
    }
  };
  make_work(Pass::kForward);
  ASSERT_CUDA(layers::cuda::prologue(there.p, rope, stream.get()));
  if (s.again) {
    there.p.makes_u_again = true;
    const auto bytes = static_cast<size_t>(bytes_of(there.p.u));
    ASSERT_CUDA(cudaMemsetAsync(there.p.u.data, kNan, bytes, stream.get()));
  }
  make_work(Pass::kBackward);
  ASSERT_CUDA(layers::cuda::prologue_backward(there.p, there.g, rope, stream.get()));
  ASSERT_CUDA(cudaStreamSynchronize(stream.get()));
  std::vector<TensorView> from;
  there.visit([&](const char*, TensorView& t, Role, double) { from.push_back(t); });
  size_t n = 0;
  call.visit([&](const char*, TensorView& t, Role role, double) {
    const TensorView& made = from[n++];
    if (!t.given() || role == Role::kOwn) return;
    ASSERT_CUDA(
        cudaMemcpy(t.data, made.data, static_cast<size_t>(bytes_of(t)), cudaMemcpyDeviceToHost));
  });
}

double epsilon_of(DType dtype) {
  return dtype == DType::kBf16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-24;
}

double norm_of(const TensorView& t) {
  double squares = 0;
  for (int64_t i = 0; i < t.elements(); ++i) squares += element(t, i) * element(t, i);
  return std::sqrt(squares);
}

void expect_close(const Spec& s, DType dtype) {
  HostCall given(s, dtype, nullptr), plain(s, dtype, &given), exact(s, DType::kF64, &given);
  run_on_device(s, given.call);
  run_on_host(s, dtype, plain.call);
  run_on_host(s, DType::kF64, exact.call);
  std::vector<TensorView> plains, exacts;
  plain.call.visit([&](const char*, TensorView& t, Role, double) { plains.push_back(t); });
  exact.call.visit([&](const char*, TensorView& t, Role, double) { exacts.push_back(t); });
  size_t n = 0;
  given.call.visit([&](const char* name, TensorView& t, Role role, double) {
    const TensorView &own = plains[n], &truth = exacts[n];
    ++n;
    if (role != Role::kOutput || !t.given()) return;
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

class PrologueOnGpu : public testing::TestWithParam<Spec> {
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
        Spec{.name = "plain"}, Spec{.name = "one token", .q_len = 1},
        Spec{.name = "odd KV heads", .heads = 6, .heads_kv = 3, .q_len = 70},
        Spec{.name = "a KV head a query head", .heads = 3, .heads_kv = 3, .dim = 32},
        Spec{.name = "one KV head", .heads = 8, .heads_kv = 1, .q_len = 129},
        Spec{.name = "heads of 8", .dim = 8}, Spec{.name = "heads of 24", .dim = 24, .q_len = 65},
        Spec{.name = "heads of 40", .heads = 8, .heads_kv = 4, .dim = 40},
        Spec{.name = "heads of 64", .dim = 64, .q_len = 131},
        Spec{.name = "heads of 96", .dim = 96},
        Spec{.name = "heads of 128", .dim = 128, .q_len = 34},
        Spec{.name = "heads of 192", .heads = 2, .heads_kv = 1, .dim = 192},
        Spec{.name = "other taps", .taps = {4, 2}}, Spec{.name = "one tap", .taps = {1, 1}},
        Spec{.name = "twenty taps", .taps = {20, 17}},
        Spec{.name = "many small heads", .heads = 16, .heads_kv = 4, .dim = 32, .q_len = 70},
        Spec{.name = "many heads of 24", .heads = 15, .heads_kv = 5, .dim = 24, .q_len = 67},
        Spec{.name = "no convolutions", .convs = false},
        Spec{.name = "no coupling", .couple = false}, Spec{.name = "no norm", .norm = false},
        Spec{.name = "no shift", .shift = false}, Spec{.name = "no rope", .rope = false},
        Spec{.name = "u again", .q_len = 70, .again = true},
        Spec{.name = "u again in heads of 64", .heads = 8, .dim = 64, .q_len = 70, .again = true},
        Spec{.name = "by group", .coupling = CcgqaCoupling::kGroup},
        Spec{.name = "temperatures", .temperature = KeyTemperature::kPerHead},
        Spec{.name = "half rope", .style = RopeStyle::kHalf},
        Spec{.name = "later chunk", .first = 100000}, Spec{.name = "ids", .ids = true},
        Spec{.name = "short", .batch = 70, .q_len = 5},
        Spec{.name = "the small layer", .heads = 8, .heads_kv = 2, .batch = 4, .q_len = 512},
        Spec{.name = "odd addresses", .heads = 8, .heads_kv = 2, .q_len = 200, .odd = true},
        Spec{.name = "many tiles",
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
