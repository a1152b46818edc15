// A case and its text are the same thing, both ways; a wrong word is named.
#include <gtest/gtest.h>

#include "harness/case.h"

namespace fovea::harness {
namespace {

TEST(CaseText, DefaultsFollowTheOtherSizes) {
  const auto c = parse_case("hq=4 q=7 d=64");
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->problem.batch, 1);
  EXPECT_EQ(c->problem.head_kv, 4);
  EXPECT_EQ(c->problem.kv_len, 7);
  EXPECT_EQ(c->problem.dim_v, 64);
  EXPECT_EQ(c->problem.dtype, DType::kF32);
  EXPECT_TRUE(c->forward);
  EXPECT_FALSE(c->backward);
}

TEST(CaseText, RoundTrip) {
  for (const char* text : {
           "b=2 hq=32 hkv=8 q=4096 kv=4096 d=128 dv=128 dtype=bf16 mask=causal pass=fwd,bwd",
           "q=0 kv=3 d=8 dtype=f64 mask=window:3:inf prefix=2 pass=bwd",
           "b=3 hq=2 q=5 d=16 bias=bq bias_dtype=f32 dbias boolmask=h alibi=batch sink dlse",
           "b=2 q=9 kv=4 d=24 dv=40 softcap=30.5 dropout=0.1 scale=0.3333333333333333 keylens",
           "b=3 q=9 kv=4 d=24 varlen q_lens=9,0,3 kv_lens=4,4,0 order=bshd pad=5",
           "b=4 q=100 d=8 varlen seed=77 data=outlier_channels deterministic tf32 logit_bound=12",
           "b=2 q=1 kv=8 d=8 keylens=3,8 mask=window:inf:2 bias",
       }) {
    const auto first = parse_case(text);
    ASSERT_TRUE(first.ok()) << text << ": " << first.status().message();
    const auto second = parse_case(format_case(*first));
    ASSERT_TRUE(second.ok()) << format_case(*first) << ": " << second.status().message();
    EXPECT_EQ(*first, *second) << text << "\n" << format_case(*first);
    EXPECT_EQ(format_case(*first), format_case(*second));
  }
}

TEST(CaseText, MaskWords) {
  EXPECT_EQ(parse_case("q=1 d=8 mask=causal")->problem.mask, Mask::causal());
  EXPECT_EQ(parse_case("q=1 d=8 mask=window:4:0")->problem.mask, Mask::window(4, 0));
  EXPECT_EQ(parse_case("q=1 d=8 prefix=3 mask=causal")->problem.mask,
            Mask::causal().with_prefix(3));
}

TEST(CaseText, WrongWordsAreNamed) {
  for (const auto& [text, named] : std::initializer_list<std::pair<const char*, const char*>>{
           {"q=1 d=8 heads=3", "heads"},
           {"q=1 d=8 dtype=bf17", "dtype is bf17"},
           {"q=-1 d=8", "q is -1"},
           {"q=1x d=8", "q is 1x"},
           {"q=1 d=", "d is empty"},
           {"q=1 d=8 mask=window:3", "mask is window:3"},
           {"q=1 d=8 mask=window:3:-2", "mask is window:3:-2"},
           {"q=1 d=8 pass=up", "pass is up"},
           {"q=1 d=8 dropout=lots", "dropout is lots"},
           {"q=1 d=8 bias=bx", "bias is bx"},
           {"b=2 q=4 d=8 varlen q_lens=1", "q_lens has 1"},
           {"b=2 q=4 d=8 varlen q_lens=1,5", "q_lens holds 5"},
           {"d=8", "q is missing"},
           {"q=8", "d is missing"},
           {"q=8 d=8 sink=2", "sink is 2"},
       }) {
    const auto c = parse_case(text);
    ASSERT_FALSE(c.ok()) << text;
    EXPECT_EQ(c.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(c.status().message().find(named), std::string::npos) << c.status().message();
  }
}

TEST(CaseText, DrawnLengthsAddUpAndReachTheLongest) {
  for (int seed = 0; seed < 50; ++seed) {
    const auto c = parse_case("b=5 q=17 kv=29 d=8 varlen seed=" + std::to_string(seed));
    ASSERT_TRUE(c.ok());
    const CaseLengths lengths = lengths_of(*c);
    int64_t total = 0;
    int32_t longest = 0;
    for (const int32_t n : lengths.kv) {
      total += n;
      longest = std::max(longest, n);
    }
    EXPECT_EQ(total, c->problem.total_kv);
    EXPECT_EQ(longest, 29);
  }
}

}  // namespace
}  // namespace fovea::harness
