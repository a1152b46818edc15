// bench on whole layers: rows, suites, peers.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/json.h"
#include "program.h"

namespace fovea::test::bench_layer {
namespace {

using cli::Json;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(BenchLayer, HasARowForEachPassWithNumbersThatAgree) {
  const ScratchFolder folder;
  const std::string path = folder.path("result.json");
  const Ran ran = fovea("bench --device cpu --quick --min-time 0.01 --peers none --json " + path +
                        " --case 'layer=gqa e=24 hq=4 hkv=2 d=8 b=2 q=9 pass=fwd,fwd+bwd'");
  ASSERT_EQ(ran.code, 0) << ran.out << ran.errors;
  const Json rows = Json::parse(read_file(path)).at("rows");
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].at("pass"), "fwd");
  EXPECT_EQ(rows[1].at("pass"), "fwd+bwd");
  // Weights of 64 x 24 and 24 x 32 meet 18 tokens; 9 * 10 / 2 pairs meet in each of 2 x 4 heads.
  const double projections = 2.0 * 18 * (64 * 24 + 24 * 32);
  const double attention = 2.0 * 8 * 45 * (8 + 8);
  // x and out, the weights; with the backward also dout, dx and the weights' gradients.
  const double bytes = 4.0 * (2 * 18 * 24 + 64 * 24 + 24 * 32);
  for (const Json& row : rows) {
    const bool forward = row.at("pass") == "fwd";
    EXPECT_EQ(row.at("layer"), "gqa");
    EXPECT_EQ(row.at("e"), 24);
    EXPECT_EQ(row.at("hq"), 4);
    EXPECT_EQ(row.at("hkv"), 2);
    EXPECT_EQ(row.at("d"), 8);
    EXPECT_EQ(row.at("mask"), "causal");
    EXPECT_EQ(row.at("ok"), true) << row;
    EXPECT_LE(row.at("max_err").get<double>(), row.at("err_bound").get<double>());
    const double flops = forward ? projections + attention : 3 * projections + 3.5 * attention;
    const double ms = row.at("ms");
    EXPECT_NEAR(row.at("tflops").get<double>() * ms * 1e9, flops, 1e-6 * flops);
    EXPECT_NEAR(row.at("gbps").get<double>() * ms * 1e6, forward ? bytes : 2 * bytes, 1e-6 * bytes);
  }
  EXPECT_GT(rows[1].at("mem_bytes").get<int64_t>(), rows[0].at("mem_bytes").get<int64_t>())
      << "what the backward reads is kept";
}

// The rows of the bar: none lost, none twice.
TEST(BenchLayer, SuitesHoldTheLayersOfTheBar) {
  const Ran ran = fovea("bench --list --suite ccgqa --suite models --suite cpu-layers");
  ASSERT_EQ(ran.code, 0) << ran.errors;
  for (const char* part :
       {"ccgqa: 14 cases", "models: 12 cases", "cpu-layers: 12 cases",
        "layer=ccgqa e=512 b=4 hq=8 hkv=2 q=16384 d=16 dtype=bf16 pass=fwd,fwd+bwd",
        "layer=ccgqa e=2048 b=4 hq=16 hkv=4 q=2048 d=32 dtype=bf16",
        "layer=ccgqa e=4096 b=1 hq=32 hkv=8 q=4096 d=32 dtype=bf16",
        "layer=mha e=7168 b=2 hq=128 hkv=128 q=2048 d=56 dtype=f16",
        "layer=gqa e=8192 b=1 hq=64 hkv=8 q=4096 d=128 dtype=f16",
        "layer=latent e=16384 b=1 hq=128 hkv=128 q=2048 d=128 dtype=f16"}) {
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  }
}

TEST(BenchLayer, ThatIsWrongInItselfIsRefusedBeforeAnythingIsMeasured) {
  const Ran ran = fovea("bench --device cpu --peers none --case 'layer=gqa e=24 hq=4 hkv=3 q=9'");
  EXPECT_EQ(ran.code, 2) << ran.out;
  EXPECT_TRUE(contains(ran.errors, "num_heads is 4, must be a multiple of num_kv_heads = 3"))
      << ran.errors;
}

// Speaks the protocol, and tells who was opened. Only gqa-cpu is another layer: only it can do
// without outputs to check.
constexpr const char* kWorker = R"(#!/bin/sh
while read -r line; do
  echo "$line" >> "$(dirname "$0")/asked"
  case "$line" in
    *'"hello"'*) echo '{"ok": true, "version": "9.9"}' ;;
    *'"load"'*) echo '{"ok": true}' ;;
    *'"open"'*'gqa-cpu'*) echo '{"ok": true, "kernel": "gqa", "same": false}' ;;
    *'"open"'*) echo '{"ok": true, "kernel": "slow", "same": true}' ;;
    *'"sample"'*) echo '{"ok": true, "seconds": 0.25}' ;;
    *'"memory"'*) echo '{"ok": true, "bytes": 4096}' ;;
    *) echo '{"ok": false, "why": "no outputs here"}' ;;
  esac
done
)";

TEST(BenchLayer, OfAnotherKindStandsBesideCcgqaUnchecked) {
  const ScratchFolder folder;
  const std::string worker = folder.write("worker", kWorker), path = folder.path("result.json");
  std::filesystem::permissions(worker, std::filesystem::perms::owner_all);
  const Ran ran = fovea("bench --device cpu --quick --min-time 0.01 --peers torch --json " + path +
                            " --case 'layer=ccgqa e=64 hq=4 hkv=2 q=9 pass=fwd+bwd'"
                            " --case 'layer=gqa e=64 hq=4 hkv=2 q=9'",
                        "FOVEA_PYTHON=" + worker);
  ASSERT_EQ(ran.code, 0) << ran.errors;
  const Json result = Json::parse(read_file(path));
  ASSERT_EQ(result.at("rows").size(), 3u) << result.at("rows");
  const Json other = result.at("rows")[1];
  EXPECT_EQ(other.at("impl"), "torch-gqa-cpu");
  EXPECT_EQ(other.at("layer"), "ccgqa") << "the case it stands beside";
  EXPECT_TRUE(other.at("ok").is_null()) << other;
  EXPECT_EQ(other.at("mem_bytes"), 4096);
  EXPECT_EQ(result.at("skipped").size(), 2u) << "torch-cpu, whose outputs cannot be had";
  // The peer gets the very tensors, by the names of the layer's weights.
  const std::string asked = read_file(folder.path("asked"));
  for (const char* name : {"w.qkv", "w.q_conv2", "w.temperature", "sampled_dout"}) {
    EXPECT_TRUE(contains(asked, std::string("\"") + name + "\"")) << name << "\n" << asked;
  }
}

}  // namespace
}  // namespace fovea::test::bench_layer
