// f32, bf16 and f16 layers against the same layer in float64 on the same, already rounded, values;
// on every instruction set of this machine, at sizes that cross the tiles of the products.
#include "backend/cpu/isa.h"
#include "layers/layer_trial.h"
#include "support/variable_scope.h"

namespace fovea::test {
namespace {

struct Precision {
  DType dtype;
  double tolerance;  // of the largest element
};
constexpr Precision kPrecisions[] = {
    {DType::kF32, 2e-5}, {DType::kF16, 1e-2}, {DType::kBf16, 6e-2}};

// Gradients that cancel (a bias of k has none at all) are held to the scale of the others.
void expect_close(const std::string& name, const TensorView& got, const TensorView& want,
                  double tolerance, double scale) {
  EXPECT_LE(largest_difference(got, want), tolerance * std::max(largest(want), scale)) << name;
}

// `weights(store)` makes them in the store's dtype; `set` gives the options a dtype.
template <typename Weights, typename Options>
void compare(Options options, const LayerShape& shape,
             const std::function<Weights(TensorStore&)>& weights) {
  for (const Precision& precision : kPrecisions) {
    SCOPED_TRACE(dtype_name(precision.dtype));
    TensorStore narrow(precision.dtype), exact;
    const auto copy = [&](const TensorView& from, const TensorView& to) {
      for (int64_t i = 0; i < from.elements(); ++i) set_element(to, i, element(from, i));
    };
    LayerInputs in, in_exact;
    in.query = narrow.normal({shape.batch, shape.q_len, options.embed_dim}, 1);
    in_exact.query = exact.like(in.query);
    copy(in.query, in_exact.query);
    Weights w = weights(narrow), w_exact = w;
    visit(w_exact, [&](const char*, TensorView& t) {
      if (!t.given()) return;
      const TensorView rounded = t;
      t = exact.like(rounded);
      copy(rounded, t);
    });
    const auto plan_of = [&](DType dtype) {
      options.dtype = dtype;
      return make_layer(options, shape, Device::cpu());
    };
    auto reference = plan_of(DType::kF64);
    ASSERT_TRUE(reference.ok()) << reference.status().message();
    Trial<Weights> want(*reference, exact, in_exact, w_exact);
    for (int64_t i = 0; i < want.back.dout.elements(); ++i) {
      set_element(want.back.dout, i, static_cast<double>(i % 5) - 1.5);  // exact in every type
    }
    want.run();
    for (const std::string& isa : cpu_isas()) {
      SCOPED_TRACE(isa);
      const VariableScope scope("FOVEA_ISA", isa);
      auto plan = plan_of(precision.dtype);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      Trial<Weights> got(*plan, narrow, in, w);
      copy(want.back.dout, got.back.dout);
      got.run();
      expect_close("out", got.call.out, want.call.out, precision.tolerance, 0);
      expect_close("dquery", got.back.dquery, want.back.dquery, precision.tolerance, 0);
      std::vector<TensorView> exact_gradients;
      double scale = 0;
      visit(want.back.dweights, [&](const char*, TensorView& t) {
        exact_gradients.push_back(t);
        if (t.given()) scale = std::max(scale, 0.1 * largest(t));
      });
      size_t at = 0;
      visit(got.back.dweights, [&](const char* name, TensorView& t) {
        const TensorView& other = exact_gradients[at++];
        if (t.given()) expect_close(name, t, other, precision.tolerance, scale);
      });
    }
  }
}

TEST(LayerPrecision, GroupedQuery) {
  GroupedQueryOptions o;
  o.embed_dim = 72;
  o.num_heads = 6;
  o.num_kv_heads = 2;
  o.head_dim = 18;
  o.causal = true;
  o.position = Position::kRope;
  o.qk_norm = QkNorm::kRms;
  compare<FusedWeights>(o, {.batch = 3, .q_len = 61, .use = LayerUse::kTraining},
                        [&](TensorStore& store) {
                          FusedWeights w;
                          w.qkv = store.normal({10 * 18, 72}, .12);
                          w.out = store.normal({72, 6 * 18}, .1);
                          w.qkv_bias = store.normal({10 * 18}, .1);
                          w.out_bias = store.normal({72}, .1);
                          return w;
                        });
}

// Widths of one and of few: rows of an input then lie as its columns do.
TEST(LayerPrecision, NarrowLayers) {
  for (const auto& [embed, dim] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 4}, {2, 1}, {4, 1}, {3, 5}}) {
    SCOPED_TRACE(std::to_string(embed) + " wide, heads of " + std::to_string(dim));
    MultiHeadOptions o;
    o.embed_dim = embed;
    o.num_heads = 1;
    o.head_dim = dim;
    o.kdim = o.vdim = embed;
    const int64_t width = dim;
    compare<MultiHeadWeights>(o, {.batch = 2, .q_len = 37, .use = LayerUse::kTraining},
                              [&](TensorStore& store) {
                                MultiHeadWeights w;
                                for (TensorView* t : {&w.q, &w.k, &w.v}) {
                                  *t = store.normal({width, o.embed_dim}, .5);
                                }
                                for (TensorView* t : {&w.q_bias, &w.k_bias, &w.v_bias}) {
                                  *t = store.normal({width}, .1);
                                }
                                w.out = store.normal({o.embed_dim, width}, .5);
                                w.out_bias = store.normal({o.embed_dim}, .1);
                                return w;
                              });
  }
}

// More columns, rows and depth than one tile, one chunk and one packing of b hold.
TEST(LayerPrecision, ProductsOfManyTiles) {
  MultiHeadOptions o;
  o.embed_dim = 1100;
  o.num_heads = 2;
  o.head_dim = 40;
  o.kdim = 1100;
  compare<MultiHeadWeights>(o, {.batch = 1, .q_len = 150, .use = LayerUse::kTraining},
                            [&](TensorStore& store) {
                              MultiHeadWeights w;
                              w.q = store.normal({80, 1100}, .03);
                              w.k = store.normal({80, 1100}, .03);
                              w.v = store.normal({80, 1100}, .03);
                              w.out = store.normal({1100, 80}, .1);
                              w.q_bias = store.normal({80}, .1);
                              w.k_bias = store.normal({80}, .1);
                              w.v_bias = store.normal({80}, .1);
                              w.out_bias = store.normal({1100}, .1);
                              return w;
                            });
}

TEST(LayerPrecision, DeepSeekLatent) {
  LatentOptions o;
  o.embed_dim = 64;
  o.num_heads = 3;
  o.form = LatentForm::kDeepSeek;
  o.q_latent = 24, o.kv_latent = 40, o.nope_dim = 16, o.rope_dim = 8, o.v_dim = 12;
  o.position = Position::kRope;
  o.causal = true;
  compare<LatentWeights>(o, {.batch = 2, .q_len = 37, .use = LayerUse::kTraining},
                         [&](TensorStore& store) {
                           LatentWeights w;
                           w.q_down = store.normal({24, 64}, .12);
                           w.q_up = store.normal({3 * 24, 24}, .2);
                           w.kv_down = store.normal({48, 64}, .12);
                           w.k_up = store.normal({3 * 16, 40}, .16);
                           w.v_up = store.normal({3 * 12, 40}, .16);
                           w.out = store.normal({64, 36}, .16);
                           return w;
                         });
}

CcgqaWeights ccgqa_weights(TensorStore& store, const CcgqaOptions& o) {
  const int64_t q = o.num_heads * o.head_dim, kv = o.num_kv_heads * o.head_dim;
  CcgqaWeights w;
  w.qkv = store.normal({q + 2 * kv, o.embed_dim}, .12);
  w.out = store.normal({o.embed_dim, q}, .12);
  if (o.conv == CcgqaConv::kHeadsThenAll) {
    w.q_conv1 = store.normal({q, o.head_dim, 3}, .2);
    w.q_conv2 = store.normal({q, q, 3}, .1);
    w.k_conv1 = store.normal({kv, o.head_dim, 3}, .2);
    w.k_conv2 = store.normal({kv, kv, 3}, .1);
    w.temperature = store.wave({1}, 0, 1, 4);
  } else {
    w.channel_conv = store.normal({q + kv, 1, 2}, .5);
    w.head_conv = store.normal({q + kv, o.head_dim, 2}, .2);
    w.channel_conv_bias = store.normal({q + kv}, .1);
    w.head_conv_bias = store.normal({q + kv}, .1);
    w.temperature = store.normal({o.num_kv_heads}, .1);
  }
  return w;
}

TEST(LayerPrecision, Ccgqa) {
  for (const CcgqaOptions& o :
       {CcgqaOptions::hydra(64, 4, 2, 1), CcgqaOptions::zaya(48, 4, 2, 12)}) {
    SCOPED_TRACE(o.conv == CcgqaConv::kHeadsThenAll ? "hydra" : "zaya");
    compare<CcgqaWeights>(o, {.batch = 2, .q_len = 70, .use = LayerUse::kTraining},
                          [&](TensorStore& store) { return ccgqa_weights(store, o); });
  }
}

}  // namespace
}  // namespace fovea::test
