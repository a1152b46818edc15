// The forms that features come in, each on a GPU against the oracle: broadcasting of bias and mask,
// bounds that are true and false, and layouts. What they do one by one is in oracle/features_test.
#include "support/engines.h"

namespace fovea::test::forms {
namespace {

class Forms : public EngineTest {};

constexpr const char* kDTypes[] = {"bf16", "f16", "f32"};
constexpr const char* kBroadcast[] = {"full", "b", "h", "q", "bh", "bq", "hq", "bhq"};

void expect(const std::string& text) {
  expect_accurate(fast_engines(), text + " pass=fwd,bwd", 1e8);
}

TEST_F(Forms, BiasAndItsGradientInEveryBroadcast) {
  for (const char* form : kBroadcast) {
    for (const char* dtype : kDTypes) {
      for (const char* extra : {"", "bias_dtype=f32 mask=causal", "deterministic keylens"}) {
        expect("b=3 hq=4 hkv=2 q=70 kv=133 d=64 dbias bias=" + std::string(form) + " " + extra +
               " dtype=" + dtype);
      }
    }
  }
}

TEST_F(Forms, BooleanMaskInEveryBroadcast) {
  for (const char* form : kBroadcast) {
    for (const char* dtype : kDTypes) {
      for (const char* extra : {"", "mask=causal sink", "bias=bh dbias"}) {
        expect("b=3 hq=4 hkv=2 q=70 kv=133 d=64 boolmask=" + std::string(form) + " " + extra +
               " dtype=" + dtype);
      }
    }
  }
}

// One term alone, whose kernels read it in vectors where keys and rows fill their tiles.
TEST_F(Forms, OneTermInWholeTilesAndTheLast) {
  for (const char* dtype : kDTypes) {
    for (const char* dim : {"64", "96", "128"}) {
      for (const char* term :
           {"alibi", "alibi mask=causal", "softcap=30", "softcap=2 mask=causal", "boolmask=full",
            "boolmask=b mask=causal", "boolmask=hq mask=window:50:3", "bias=full dbias",
            "bias=full mask=causal dbias", "bias=b", "bias=full deterministic"}) {
        expect("b=2 hq=4 hkv=2 q=200 kv=264 d=" + std::string(dim) + " " + term +
               " dtype=" + dtype);
      }
    }
  }
}

// A bound is a hint: where it is false the result must be right all the same.
TEST_F(Forms, LogitBoundTrueAndFalse) {
  for (const char* dtype : kDTypes) {
    for (const char* data : {"normal", "spiky", "large_logits", "tiny"}) {
      for (const char* bound : {"0.5", "10", "100000"}) {
        for (const char* extra : {"", "mask=causal", "sink softcap=20"}) {
          expect("hq=2 q=65 kv=300 d=64 logit_bound=" + std::string(bound) + " data=" + data + " " +
                 extra + " dtype=" + dtype);
        }
      }
    }
  }
}

// Enough rows for every warp to have its own: weights then refer to 0, and with a scale of ln 2
// products are exponents as they are. Rows that see no key, and scores far from 0, are found out.
TEST_F(Forms, LogitBoundOfManyRows) {
  for (const char* dim : {"b=64 hq=8 hkv=2 d=16", "b=8 hq=16 hkv=4 d=16", "b=8 hq=16 hkv=4 d=32",
                          "b=8 hq=16 hkv=4 d=64"}) {
    for (const char* data : {"normal", "large_logits", "tiny"}) {
      for (const char* scale : {"0.6931471805599453", "0.25", "40"}) {
        for (const char* extra : {"q=520 mask=causal", "q=520 kv=391 mask=causal", "q=520"}) {
          expect(std::string(dim) + " logit_bound=20 dtype=bf16 scale=" + scale + " data=" + data +
                 " " + extra);
        }
      }
    }
  }
}

// Small heads, whose forward kernels walk through tiles that all rows see without a question: from
// the first on, from a later one, or not at all; whatever scores do on the way.
TEST_F(Forms, ManyTilesOfKeysOfSmallHeads) {
  const Engine wide = {"portable", "", Device::cuda(0)};
  const Engine crowded = {"portable", "", Device::cuda(0), "1"};
  for (const char* dim : {"d=16", "d=32"}) {
    for (const char* shape :
         {"hq=4 hkv=2 q=700 kv=1300", "hq=2 q=1100 kv=1024", "b=2 hq=3 hkv=1 q=130 kv=1030",
          "b=2 hq=4 hkv=2 q=600 kv=1100 keylens=1100,513", "b=3 hq=2 q=900 kv=900 varlen pad=8"}) {
      for (const char* extra : {"", "mask=causal", "mask=window:300:40", "mask=causal prefix=270",
                                "mask=window:2000:200", "mask=causal data=spiky",
                                "mask=causal data=large_logits logit_bound=20",
                                "mask=causal logit_bound=20 scale=0.6931471805599453",
                                "data=large_logits logit_bound=20 scale=0.6931471805599453"}) {
        for (const Engine& engine : {wide, crowded}) {
          expect_accurate({engine}, std::string(shape) + " dtype=bf16 " + dim + " " + extra, 1e7);
        }
      }
    }
  }
}

// So many rows that on a GPU as small as that backward takes them in larger tiles; and a few less.
TEST_F(Forms, ManyRowsOfSmallHeads) {
  const Engine small = {"portable", "", Device::cuda(0), "1"};
  for (const char* dtype : {"bf16", "f16"}) {
    for (const char* shape :
         {"hq=4 hkv=2 q=8200 kv=300", "hq=2 q=4096 kv=520", "b=2 hq=3 hkv=1 q=8256 kv=257",
          "b=2 hq=4 hkv=2 q=8300 kv=400 varlen", "b=2 hq=3 hkv=1 q=4095 kv=257"}) {
      for (const char* extra : {"", "mask=causal", "mask=window:200:9", "pad=1 dlse",
                                "mask=causal logit_bound=20 scale=0.6931471805599453"}) {
        expect_accurate(
            {small}, std::string(shape) + " d=16 pass=fwd,bwd " + extra + " dtype=" + dtype, 1e7);
      }
    }
  }
}

TEST_F(Forms, StridesAndPadding) {
  for (const char* dtype : kDTypes) {
    for (const char* layout : {"order=bshd", "order=bhsd pad=8", "order=bshd pad=1",
                               "order=bhsd pad=3", "order=bshd pad=16 varlen", "pad=5 varlen"}) {
      for (const char* dims : {"d=64", "d=72 dv=40", "d=33 dv=65", "d=1", "d=7"}) {
        expect("b=2 hq=4 hkv=2 q=67 kv=90 mask=causal " + std::string(layout) + " " + dims +
               " dtype=" + dtype);
      }
    }
  }
}

// A decode step over ragged caches, and packs whose sequences differ by far.
TEST_F(Forms, RaggedLengths) {
  for (const char* dtype : kDTypes) {
    for (const char* lengths :
         {"b=4 q=1 kv=900 keylens=900,1,0,333", "b=4 q=5 kv=900 keylens=900,2,5,640 mask=causal",
          "b=5 q=300 kv=300 varlen q_lens=1,300,0,64,129 "
          "kv_lens=300,1,17,64,129 mask=causal",
          "b=5 q=300 kv=300 varlen q_lens=300,0,0,2,1 "
          "kv_lens=0,300,0,200,1 sink dlse"}) {
      for (const char* heads : {"hq=8 hkv=1", "hq=4 hkv=4"}) {
        expect(std::string(lengths) + " d=128 " + heads + " dtype=" + dtype);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test::forms
