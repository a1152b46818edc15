// A prologue's tensors, and the two places that it runs in.
#include "gpu/prologue_call.h"

#include <cstring>
#include <random>
#include <string_view>

#include "gpu/stream.h"
#include "layers/cuda/prologue.h"
#include "layers/engine.h"
#include "layers/layer_trial.h"
#include "plan/device.h"

namespace fovea::test {
namespace {

constexpr int kNan = 0xff;  // in every byte

int64_t bytes_of(const TensorView& t) { return t.elements() * dtype_bytes(t.dtype); }

// Sizes of everything, with no memory yet.
PrologueCall make_call(const PrologueSpec& s, DType dtype) {
  const auto tensor = [&](std::initializer_list<int64_t> sizes) {
    return TensorView::contiguous(nullptr, dtype, sizes);
  };
  const int64_t q = s.heads * s.dim, kv = s.heads_kv * s.dim, qk = q + kv;
  PrologueCall c;
  layers::Prologue& p = c.p;
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

layers::EngineNeeds needs_of(const PrologueSpec& s) {
  layers::EngineNeeds needs;
  needs.head_dim = s.dim;
  needs.sums = (s.heads + s.heads_kv) * s.dim * std::max(s.taps[0], s.taps[1]);
  if (!s.rope) return needs;
  needs.rope = {10000, s.style, s.fraction};
  needs.turning = static_cast<int64_t>(s.fraction * static_cast<double>(s.dim)) / 2 * 2;
  needs.positions = s.q_len;
  return needs;
}

std::vector<int32_t> ids_of(const PrologueSpec& s) {
  std::vector<int32_t> ids(static_cast<size_t>(s.batch * s.q_len));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7 % 90001);
  return ids;
}

void set_ids(const PrologueSpec& s, void* ids, PrologueCall& call) {
  if (s.ids) {
    call.p.mix.positions.ids = TensorView::contiguous(ids, DType::kI32, {s.batch, s.q_len});
  }
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

}  // namespace

HostPrologue::HostPrologue(const PrologueSpec& s, DType dtype, HostPrologue* like)
    : call(make_call(s, dtype)) {
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  std::vector<TensorView> inputs;
  if (like != nullptr) {
    like->call.visit([&](const char*, TensorView& t, TensorRole, double) { inputs.push_back(t); });
  }
  size_t n = 0;
  call.visit([&](const char*, TensorView& t, TensorRole role, double scale) {
    const size_t at = n++;
    if (!t.given()) return;
    memory_.emplace_back(static_cast<size_t>(bytes_of(t)), static_cast<unsigned char>(kNan));
    t.data = memory_.back().data();
    for (int64_t i = 0; role == TensorRole::kInput && i < t.elements(); ++i) {
      set_element(t, i, like != nullptr ? element(inputs[at], i) : scale * normal(random));
    }
  });
}

void run_on_host(const PrologueSpec& s, DType dtype, PrologueCall& call) {
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

void run_on_device(const PrologueSpec& s, PrologueCall& call) {
  DeviceMemory memory;
  PrologueCall there = call;
  there.p.mixed =
      TensorView::contiguous(nullptr, call.p.z.dtype, {s.batch, s.q_len, s.heads_kv * s.dim});
  there.p.inverses = TensorView::contiguous(nullptr, DType::kF32, {s.batch, s.q_len, s.heads});
  there.p.inverses.data = memory.make(static_cast<size_t>(bytes_of(there.p.inverses)));
  there.visit([&](const char* name, TensorView& t, TensorRole, double) {
    const std::string_view of(name);
    const bool odd = s.odd && (of == "weight" || of == "dfirst" || of == "dsecond");
    if (!t.given()) return;
    t.data = memory.make(static_cast<size_t>(bytes_of(t)), t.data, odd ? dtype_bytes(t.dtype) : 0);
  });
  std::vector<int32_t> ids = ids_of(s);
  set_ids(s, memory.make(ids.size() * 4, ids.data()), there);
  const layers::cuda::RopeTable rope = rope_of(needs_of(s), memory);
  PrologueCall sizes = make_call(s, call.p.z.dtype);
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
  there.visit([&](const char*, TensorView& t, TensorRole, double) { from.push_back(t); });
  size_t n = 0;
  call.visit([&](const char*, TensorView& t, TensorRole role, double) {
    const TensorView& made = from[n++];
    if (!t.given() || role == TensorRole::kOwn) return;
    ASSERT_CUDA(
        cudaMemcpy(t.data, made.data, static_cast<size_t>(bytes_of(t)), cudaMemcpyDeviceToHost));
  });
}

}  // namespace fovea::test
