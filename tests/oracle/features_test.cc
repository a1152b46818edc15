// Every engine against the oracle over features and data families, forward and backward.
#include "support/engines.h"

namespace fovea::test {
namespace {

class Features : public EngineTest {};

constexpr const char* kFeatures[] = {
    "mask=causal",
    "mask=window:30:0",
    "mask=window:0:40",
    "mask=window:25:25 prefix=40",
    "mask=causal prefix=33",
    "bias=full dbias",
    "bias=b dbias",
    "bias=bh dbias mask=causal",
    "bias=bhq dbias",
    "bias=hq bias_dtype=f32 dbias",
    "bias=q bias_dtype=f32",
    "boolmask=full",
    "boolmask=bh mask=causal",
    "boolmask=hq",
    "keylens",
    "keylens mask=causal",
    "keylens mask=window:20:5 alibi",
    "varlen",
    "varlen mask=causal",
    "varlen mask=window:9:9 prefix=3 sink",
    "varlen alibi dropout=0.2 dlse",
    "varlen bias=full dbias boolmask=h",
    "alibi",
    "alibi=batch mask=causal",
    "softcap=2",
    "softcap=30 mask=causal bias=h dbias",
    "sink",
    "sink dlse mask=causal",
    "sink dlse boolmask=b keylens",
    "dropout=0.1",
    "dropout=0.5 mask=causal sink dlse",
    "dropout=0.3 bias=q dbias softcap=5",
    "dlse",
    "scale=0.02",
    "scale=-0.3 mask=causal",
    "scale=0",
    "logit_bound=1",
    "logit_bound=40 mask=causal",
    "deterministic mask=causal bias=bhq dbias",
    "order=bshd mask=causal",
    "order=bshd pad=3 keylens",
    "order=bshd pad=8 varlen mask=causal",
    "bias=h dbias boolmask=b alibi softcap=8 sink dropout=0.15 dlse mask=window:70:3 keylens",
};

TEST_F(Features, OneByOneAndTogether) {
  const char* dtypes[] = {"f32", "bf16", "f16"};
  const char* shapes[] = {"b=2 hq=4 hkv=2 q=75 kv=101 d=64", "b=3 hq=2 q=130 kv=67 d=32 dv=48",
                          "b=2 hq=4 hkv=1 q=3 kv=260 d=40"};
  size_t turn = 0;
  for (const char* feature : kFeatures) {
    for (const char* dtype : dtypes) {
      const std::string shape = shapes[turn++ % 3];
      expect_accurate(every_engine(), shape + " " + feature + " pass=fwd,bwd dtype=" + dtype +
                                          " seed=" + std::to_string(turn));
    }
    ++turn;  // so that a feature's dtypes meet other shapes than the last one's
  }
}

TEST_F(Features, DataFamilies) {
  const char* families[] = {"normal",   "spiky", "large_logits",
                            "constant", "tiny",  "outlier_channels"};
  const char* shapes[] = {"hq=2 q=150 kv=333 d=64 mask=causal", "hq=4 hkv=2 q=65 kv=65 d=128",
                          "hq=1 q=1 kv=1000 d=32", "hq=2 q=40 kv=90 d=64 sink softcap=20 dlse"};
  for (const char* family : families) {
    for (const char* dtype : {"f32", "bf16", "f16"}) {
      for (const char* shape : shapes) {
        expect_accurate(every_engine(),
                        std::string(shape) + " pass=fwd,bwd data=" + family + " dtype=" + dtype);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::test
