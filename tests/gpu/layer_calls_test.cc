// How layers are called on a GPU: over a cache, from a graph, with tensors of any strides.
#include "layer_samples.h"

namespace fovea::test {
namespace {

// Every cut of the sequence against the whole one in float64, under the 2x rule.
template <typename Weights, typename Options>
void expect_decode_accurate(LayerSample<Weights, Options> sample,
                            const std::vector<std::vector<int64_t>>& cuts) {
  sample.shape.use = LayerUse::kInference;
  for (const DType dtype : kLayerTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    TensorStore store(dtype);
    const LayerValues<Weights> values(sample, store);
    const LayerYardstick yardstick = yardstick_of(sample, dtype);
    sample.options.dtype = dtype;
    const auto make = [&](int64_t count) {
      return make_layer(sample.options,
                        {.batch = sample.shape.batch, .q_len = count, .use = LayerUse::kCached},
                        Device::cuda(0));
    };
    for (const std::vector<int64_t>& chunks : cuts) {
      SCOPED_TRACE(std::to_string(chunks.size()) + " chunks");
      DeviceCopies copies;
      LayerForward<Weights> call;
      call.query = copies.there(values.in.query);
      call.weights = copies.there(values.weights);
      const TensorView out = store.like(values.in.query);
      call.out = copies.there(out);
      copies.upload();
      decode_with<PoisonedMemory>(make, call, chunks);
      copies.download();
      yardstick.expect_within_twice({{"out", out}});
    }
  }
}

std::vector<std::vector<int64_t>> cuts_of(int64_t len) {
  return {{len},
          std::vector<int64_t>(static_cast<size_t>(len), 1),
          {len / 2, len - len / 2},
          {2, 1, len - 3}};
}

TEST_F(DeviceLayers, DecodeOfGroupedQuery) {
  using O = GroupedQueryOptions;
  GroupedSizes odd = kOdd, even = kEven;
  odd.len = even.len = 19;
  expect_decode_accurate(grouped(odd, [](O& o) { o.causal = true, o.position = Position::kRope; }),
                         cuts_of(19));
  expect_decode_accurate(grouped(even,
                                 [](O& o) {
                                   o.causal = true, o.position = Position::kRope;
                                   o.qk_norm = QkNorm::kRms, o.sliding_window = 7;
                                 }),
                         cuts_of(19));
  expect_decode_accurate(
      grouped(even, [](O& o) { o.causal = true, o.position = Position::kAlibi; }), cuts_of(19));
}

TEST_F(DeviceLayers, DecodeOfLatents) {
  for (const LatentDims& dims : {kSimple, kDeepSeek, kOddDeepSeek}) {
    for (const LatentDecode way : {LatentDecode::kExpanded, LatentDecode::kAbsorbed}) {
      SCOPED_TRACE(way == LatentDecode::kAbsorbed ? "absorbed" : "expanded");
      LatentSample sample = latent(dims, [&](LatentOptions& o) { o.decode = way; });
      sample.shape.q_len = 17;
      expect_decode_accurate(sample, cuts_of(17));
    }
  }
}

// Heads as wide as a large latent are more than the GPU's engines take: keys are expanded then.
TEST_F(DeviceLayers, ALatentThatNoEngineTakesIsExpanded) {
  LatentOptions o;
  o.embed_dim = 256;
  o.num_heads = 4;
  o.form = LatentForm::kDeepSeek;
  o.position = Position::kRope;
  o.q_latent = 64, o.kv_latent = 512, o.nope_dim = 64, o.rope_dim = 32, o.v_dim = 64;
  o.dtype = DType::kBf16;
  o.max_seq_len = 128;
  const LayerShape one{.batch = 1, .q_len = 1, .use = LayerUse::kCached};
  const auto plan = make_layer(o, one, Device::cuda(0));
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->attention().problem().dim_qk, 96);
  o.decode = LatentDecode::kAbsorbed;
  EXPECT_EQ(make_layer(o, one, Device::cuda(0)).status().code(), StatusCode::kUnsupported);
}

TEST_F(DeviceLayers, DecodeOfCcgqa) {
  for (const CcgqaOptions& options :
       {CcgqaOptions::hydra(64, 4, 2, 1), CcgqaOptions::zaya(48, 4, 2, 16)}) {
    expect_decode_accurate(ccgqa(options, 2, 17), cuts_of(17));
  }
}

// A call as a graph.
class Captured {
 public:
  template <typename Call>
  explicit Captured(const Call& call) {
    capture(call);
  }
  ~Captured() {
    (void)cudaGraphExecDestroy(replay_);
    (void)cudaGraphDestroy(graph_);
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  void launch() { ASSERT_CUDA(cudaGraphLaunch(replay_, stream_.get())); }
  size_t launches() const {
    size_t nodes = 0;
    EXPECT_EQ(cudaGraphGetNodes(graph_, nullptr, &nodes), cudaSuccess);
    return nodes;
  }

 private:
  template <typename Call>
  void capture(const Call& call) {
    ASSERT_CUDA(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeGlobal));
    call(stream_.get());
    ASSERT_CUDA(cudaStreamEndCapture(stream_.get(), &graph_));
    ASSERT_CUDA(cudaGraphInstantiateWithFlags(&replay_, graph_, 0));
  }

  OwnedStream stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

// A capture takes launches and nothing else: an allocation, a wait or another stream would break
// it. Gradients may be summed in another order.
template <typename Weights, typename Options>
void expect_replays_as_called(const LayerSample<Weights, Options>& sample) {
  for (const DType dtype : kLayerTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    TensorStore store(dtype);
    const LayerValues<Weights> values(sample, store);
    const LayerPlan<Weights> plan = plan_layer(sample, dtype, Device::cuda(0));
    auto direct = trial_of(plan, values, store), replayed = trial_of(plan, values, store);
    LayerOnDevice<Weights>(direct).run();
    const LayerYardstick yardstick = yardstick_of(sample, dtype);
    LayerOnDevice<Weights> call(replayed);
    call.reset();
    Captured graph([&](cudaStream_t stream) { call.launch(stream); });
    for (int time = 0; time < 3; ++time) {
      call.reset();
      graph.launch();
      call.fetch();
      expect_same_bits(replayed.call.out, direct.call.out, "out");
      yardstick.expect_within_twice(results_of(replayed));
      for (const NamedTensor& result : results_of(replayed)) {  // poison for the next time
        for (int64_t i = 0; i < result.view.elements(); ++i) {
          set_element(result.view, i, std::nan(""));
        }
      }
    }
  }
}

TEST_F(DeviceLayers, GraphReplayIsTheDirectCall) {
  expect_replays_as_called(grouped(kEven, [](GroupedQueryOptions& o) {
    o.causal = true, o.position = Position::kRope, o.qk_norm = QkNorm::kLayer;
  }));
  expect_replays_as_called(latent(kDeepSeek, [](LatentOptions&) {}));
  expect_replays_as_called(ccgqa(CcgqaOptions::hydra(64, 4, 2, 1), 2, 70));
}

template <typename Weights, typename Options>
void expect_same_bits_every_time(LayerSample<Weights, Options> sample) {
  constexpr int kTimes = 30;
  sample.options.determinism = Determinism::kRequired;
  for (const DType dtype : kLayerTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    TensorStore store(dtype);
    const LayerValues<Weights> values(sample, store);
    const LayerPlan<Weights> plan = plan_layer(sample, dtype, Device::cuda(0));
    EXPECT_EQ(plan.attention().problem().determinism, Determinism::kRequired);
    auto first = trial_of(plan, values, store), again = trial_of(plan, values, store);
    LayerOnDevice<Weights>(first).run();
    LayerOnDevice<Weights> call(again);
    for (int time = 1; time < kTimes; ++time) {
      call.run();
      const auto want = results_of(first), got = results_of(again);
      for (size_t n = 0; n < want.size(); ++n) {
        expect_same_bits(got[n].view, want[n].view, want[n].name);
      }
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST_F(DeviceLayers, DeterministicTrainingGivesTheSameBits) {
  expect_same_bits_every_time(grouped({2, 500, 128, 8, 2, 64}, [](GroupedQueryOptions& o) {
    o.causal = true, o.position = Position::kRope;
  }));
  expect_same_bits_every_time(latent(kDeepSeek, [](LatentOptions&) {}));
  expect_same_bits_every_time(ccgqa(CcgqaOptions::hydra(128, 8, 2, 1), 2, 500));
}

// Each launch is time in a small layer: how many there are is part of what CCGQA promises.
TEST_F(DeviceLayers, CcgqaTakesFewLaunches) {
  CcgqaSample sample = ccgqa(CcgqaOptions::hydra(512, 8, 2), 4, 512);
  TensorStore store(DType::kBf16);
  const LayerValues<CcgqaWeights> values(sample, store);
  const auto launches = [&](LayerUse use) {
    sample.shape.use = use;
    auto trial = trial_of(plan_layer(sample, DType::kBf16, Device::cuda(0)), values, store);
    LayerOnDevice<CcgqaWeights> call(trial);
    call.run();
    return Captured([&](cudaStream_t stream) { call.launch(stream); }).launches();
  };
  const size_t forward = launches(LayerUse::kInference), both = launches(LayerUse::kTraining);
  EXPECT_LE(forward, 8u);
  EXPECT_LE(both - forward, 16u);
}

// A view of a dense [batch, rows, cols] tensor's values elsewhere, at other strides.
TensorView placed(TensorStore& store, const TensorView& dense, int64_t batch_stride,
                  int64_t row_stride) {
  const int64_t room = dense.sizes[0] * dense.sizes[1] * (dense.sizes[2] + 8);
  const TensorView memory = store.blank({room});
  const TensorView view = TensorView::strided(memory.data, dense.dtype,
                                              {dense.sizes[0], dense.sizes[1], dense.sizes[2]},
                                              {batch_stride, row_stride, 1});
  for (int64_t i = 0; i < dense.elements(); ++i) {
    const int64_t b = i / dense.sizes[2] / dense.sizes[1], r = i / dense.sizes[2] % dense.sizes[1];
    set_element(memory, b * batch_stride + r * row_stride + i % dense.sizes[2], element(dense, i));
  }
  return view;
}

TensorView gathered(TensorStore& store, const TensorView& view) {
  const TensorView dense = store.like(view);
  const TensorView memory = TensorView::contiguous(view.data, view.dtype, {1});
  for (int64_t i = 0; i < dense.elements(); ++i) {
    const int64_t b = i / dense.sizes[2] / dense.sizes[1], r = i / dense.sizes[2] % dense.sizes[1];
    set_element(dense, i,
                element(memory, b * view.strides[0] + r * view.strides[1] + i % dense.sizes[2]));
  }
  return dense;
}

TEST_F(DeviceLayers, AnyStridesAreTaken) {
  const GroupedSizes s = kOdd;
  const GroupedSample sample = grouped(s, [](GroupedQueryOptions& o) { o.causal = true; });
  const LayerYardstick yardstick = yardstick_of(sample, DType::kF32);
  struct Strides {
    const char* name;
    int64_t batch, row;
  };
  for (const Strides& strides :
       {Strides{"sequence first", s.embed, s.batch * s.embed},
        Strides{"padded rows", s.len * (s.embed + 3), s.embed + 3},
        Strides{"a gap between batches", (s.len + 1) * (s.embed + 1), s.embed + 1}}) {
    SCOPED_TRACE(strides.name);
    TensorStore store(DType::kF32);
    LayerValues<FusedWeights> values(sample, store);
    auto trial = trial_of(plan_layer(sample, DType::kF32, Device::cuda(0)), values, store);
    const auto place = [&](TensorView& t) { t = placed(store, t, strides.batch, strides.row); };
    place(trial.call.query);
    trial.back.query = trial.call.query;
    for (TensorView* t : {&trial.call.out, &trial.back.dout, &trial.back.dquery}) place(*t);
    LayerOnDevice<FusedWeights>(trial).run();
    std::vector<NamedTensor> results = results_of(trial);
    for (size_t rows : {0, 1}) results[rows].view = gathered(store, results[rows].view);
    yardstick.expect_within_twice(results);
  }
}

TEST_F(DeviceLayers, OverlappingRowsAreRefused) {
  const GroupedSample sample = grouped(kOdd, [](GroupedQueryOptions&) {});
  TensorStore store(DType::kF32);
  LayerValues<FusedWeights> values(sample, store);
  auto trial = trial_of(plan_layer(sample, DType::kF32, Device::cuda(0)), values, store);
  DeviceCopies copies;
  LayerForward<FusedWeights> call;
  call.query = copies.there(values.in.query);
  call.query.strides[1] = 0;
  call.weights = copies.there(values.weights);
  call.out = copies.there(trial.call.out);
  copies.upload();
  const PoisonedMemory workspace(trial.plan.workspace_bytes(Pass::kForward));
  const PoisonedMemory saved(trial.plan.saved_bytes());
  EXPECT_EQ(trial.plan.forward(call, workspace, saved).message(),
            "layer: rows of a tensor overlap\n"
            "  cuda  rows lie 0 elements apart, takes 45 or more");
}

}  // namespace
}  // namespace fovea::test
