// The benchmark's own reasoning: who the peers are, how long a sample is, what the summary says.
#include <gtest/gtest.h>

#include "cli/gpu_state.h"
#include "cli/peak.h"
#include "cli/peer_choice.h"
#include "cli/summary.h"
#include "cli/timing.h"

namespace fovea::test::bench_parts {
namespace {

using namespace fovea::cli;
using Names = std::vector<std::string>;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(BenchPeers, TorchStandsForAllThatItHasOnTheDevice) {
  const Result<PeerChoice> cpu = choose_peers({"torch", "reference"}, Device::cpu());
  ASSERT_TRUE(cpu.ok()) << cpu.status().message();
  EXPECT_EQ(cpu->torch.of_operator, Names{"cpu"});
  EXPECT_EQ(cpu->torch.of_layer, (Names{"cpu", "gqa-cpu"}))
      << "compile takes too long to come unasked";
  EXPECT_TRUE(cpu->reference);
  const Result<PeerChoice> gpu = choose_peers({"torch"}, Device::cuda(0));
  ASSERT_TRUE(gpu.ok()) << gpu.status().message();
  EXPECT_EQ(gpu->torch.of_operator, (Names{"flash", "cudnn", "efficient"}));
  EXPECT_EQ(gpu->torch.of_layer,
            (Names{"flash", "cudnn", "eager", "compile", "gqa-flash", "gqa-cudnn"}));
  EXPECT_FALSE(gpu->reference);
  const Result<PeerChoice> some = choose_peers({"torch-cudnn", "torch-flash"}, Device::cuda(1));
  ASSERT_TRUE(some.ok()) << some.status().message();
  EXPECT_EQ(some->torch.of_operator, (Names{"flash", "cudnn"}))
      << "in the order of the table, each once";
  EXPECT_EQ(some->torch.all(), (Names{"flash", "cudnn"}));
  const Result<PeerChoice> none = choose_peers({"none"}, Device::cuda(0));
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE(none->torch.all().empty());
}

// The layer that CCGQA stands in for is measured beside it, and beside no other.
TEST(BenchPeers, OfLayersDependOnTheLayer) {
  const Result<PeerChoice> asked = choose_peers({"torch-compile", "torch-gqa-cpu"}, Device::cpu());
  ASSERT_TRUE(asked.ok()) << asked.status().message();
  EXPECT_TRUE(asked->torch.of_operator.empty());
  harness::LayerCase c;
  c.kind = harness::LayerKind::kGrouped;
  EXPECT_EQ(asked->torch.of(c), Names{"compile"});
  c.kind = harness::LayerKind::kCcgqa;
  EXPECT_EQ(asked->torch.of(c), (Names{"compile", "gqa-cpu"}));
}

TEST(BenchPeers, OfAnotherDeviceAreRefused) {
  for (const auto& [name, device] : {std::pair<std::string, Device>{"torch-cpu", Device::cuda(0)},
                                     {"reference", Device::cuda(0)},
                                     {"torch-flash", Device::cpu()},
                                     {"flash", Device::cuda(0)}}) {
    const Result<PeerChoice> choice = choose_peers({"torch", name}, device);
    ASSERT_FALSE(choice.ok()) << name;
    EXPECT_EQ(choice.status().code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(contains(choice.status().message(), "--peers is " + name + ", must be torch, "))
        << choice.status().message();
  }
}

TEST(BenchTiming, ASampleLastsAsLongAsItShould) {
  EXPECT_EQ(repeats_for(0.5, 0.02), 1);
  EXPECT_EQ(repeats_for(0.02, 0.02), 1);
  EXPECT_EQ(repeats_for(0.009, 0.02), 3);
  EXPECT_EQ(repeats_for(5e-6, 0.02), 4000);
  EXPECT_EQ(repeats_for(0, 0.02), 1000000) << "a clock too coarse for one run";
}

// Short runs share a graph, long ones have it alone, and no run that was asked for is left out.
TEST(BenchTiming, AGraphHoldsManyShortRunsAndOneLong) {
  using Warm = Contender::WarmRun;
  EXPECT_EQ(replay_counts(1, Warm::kNone).calls, 1);
  EXPECT_EQ(replay_counts(1, Warm::kNone).uncounted, 0);
  EXPECT_EQ(replay_counts(1, Warm::kUncounted).uncounted, 1);
  EXPECT_EQ(replay_counts(200, Warm::kNone).calls, 20) << "a run of 100 us in a sample of 20 ms";
  for (const int repeats : {1, 2, 9, 10, 11, 19, 20, 199, 201, 4000, 1000000}) {
    const ReplayCounts counts = replay_counts(repeats, Warm::kUncounted);
    EXPECT_GE(counts.runs(), repeats);
    EXPECT_LT(counts.runs(), repeats + counts.calls);
    EXPECT_LE(counts.calls, 20);
    EXPECT_TRUE(counts.calls == 1 || counts.replays >= 10) << repeats;
    EXPECT_GE(4 * counts.uncounted, counts.replays);
  }
}

TEST(BenchGpuState, IsReadFromALineOfNvidiaSmi) {
  const GpuState state = parse_gpu_state("580.159.04, 1755, 3201, 700.00, 688.31");
  EXPECT_EQ(state.driver, "580.159.04");
  EXPECT_EQ(state.sm_mhz, 1755);
  EXPECT_EQ(state.memory_mhz, 3201);
  EXPECT_EQ(state.power_limit_w, 700);
  EXPECT_EQ(state.power_w, 688.31);
  const GpuState partly = parse_gpu_state("580.159.04, 1755, 3201, [N/A], [N/A]");
  EXPECT_EQ(partly.sm_mhz, 1755);
  EXPECT_FALSE(partly.power_limit_w.has_value());
  for (const char* line : {"", "No devices were found", "1, 2"}) {
    EXPECT_TRUE(parse_gpu_state(line).driver.empty()) << line;
  }
}

TEST(BenchGpuState, TypicalIsTheMedianOfWhatWasSeen) {
  const GpuState typical = typical_state(
      {parse_gpu_state("1.2, 1980, 3201, 700, 200"), parse_gpu_state(""),
       parse_gpu_state("1.2, 1400, 3201, 700, 690"), parse_gpu_state("1.2, 1500, 3201, 700, 699")});
  EXPECT_EQ(typical.driver, "1.2");
  EXPECT_EQ(typical.sm_mhz, 1500);
  EXPECT_EQ(typical.power_w, 690);
  EXPECT_FALSE(typical_state({}).sm_mhz.has_value());
  EXPECT_TRUE(typical_state({}).driver.empty());
}

TEST(BenchPeak, IsKnownForSomeGpusInHalfPrecision) {
  GpuInfo gpu;
  gpu.sm = 90;
  EXPECT_EQ(gpu_peak_flops(gpu, DType::kBf16), 989e12);
  EXPECT_FALSE(gpu_peak_flops(gpu, DType::kF32).has_value());
  gpu.sm = 75;
  EXPECT_FALSE(gpu_peak_flops(gpu, DType::kBf16).has_value());
}

Row row_of(const std::string& text, BenchPass pass, const std::string& impl, double ms) {
  Row row;
  const Result<harness::Case> parsed = harness::parse_case(text);
  if (parsed.ok()) row.problem = parsed->problem;
  row.suite = "gpu-small";
  row.case_text = text;
  row.pass = pass;
  row.impl = impl;
  row.kernel = "portable/bf16";
  row.timing = impl == "torch-efficient" ? "eager" : "graph";
  row.ms = ms;
  row.tflops = 123.4;
  return row;
}

// The words of the line of a table that begins so.
Names line_of(const std::string& table, const std::string& begin) {
  const size_t at = ("\n" + table).find("\n" + begin);
  Names words;
  if (at == std::string::npos) return words;
  std::stringstream line(table.substr(at, table.find('\n', at) - at));
  for (std::string word; line >> word;) words.push_back(word);
  return words;
}

TEST(BenchSummary, OfAGpuGivesEachPeersRatioTheBestPeersAndTheWorstCase) {
  const std::string one = "q=128 d=64 dtype=bf16", two = "q=512 d=64 dtype=bf16";
  Results results;
  results.gpu = "Some GPU";
  results.rows = {row_of(one, BenchPass::kForward, "fovea-portable", 1.0),
                  row_of(one, BenchPass::kForward, "torch-flash", 2.0),
                  row_of(one, BenchPass::kForward, "torch-cudnn", 1.0),
                  row_of(two, BenchPass::kForward, "fovea-portable", 2.0),
                  row_of(two, BenchPass::kForward, "torch-flash", 1.0),
                  row_of(two, BenchPass::kForward, "torch-cudnn", 8.0),
                  row_of(two, BenchPass::kForward, "torch-efficient", 4.0)};
  const std::string text = summary(results);
  EXPECT_TRUE(contains(text, "TFLOP/s") && contains(text, "123.4")) << text;
  EXPECT_TRUE(contains(text, "4.000 eager")) << text;
  // peer, dtype, pass, cases, geometric mean, worst, worst case
  const Names flash = line_of(text, "torch-flash  ");
  ASSERT_GE(flash.size(), 7u) << text;
  EXPECT_EQ(Names(flash.begin(), flash.begin() + 7),
            (Names{"torch-flash", "bf16", "fwd", "2", "1.00", "0.50", "q=512"}));
  const Names cudnn = line_of(text, "torch-cudnn  ");
  ASSERT_GE(cudnn.size(), 7u) << text;
  EXPECT_EQ(Names(cudnn.begin(), cudnn.begin() + 7),
            (Names{"torch-cudnn", "bf16", "fwd", "2", "2.00", "1.00", "q=128"}));
  // The better of each line: 1.0 over 1.0, 1.0 over 2.0.
  const Names best = line_of(text, "best peer  ");
  ASSERT_GE(best.size(), 8u) << text;
  EXPECT_EQ(Names(best.begin(), best.begin() + 8),
            (Names{"best", "peer", "bf16", "fwd", "2", "0.71", "0.50", "q=512"}));
}

TEST(BenchSummary, SaysOnceWhatManyCasesWereSkippedFor) {
  Results results;
  results.skipped = {{"torch-flash", "no mask", "q=1 d=8"},
                     {"torch-flash", "no mask", "q=2 d=8"},
                     {"torch-cudnn", "no mask", "q=1 d=8"},
                     {"torch-efficient", "not installed", ""}};
  EXPECT_EQ(summary(results),
            "\nSkipped\n"
            "  torch-flash: 2 cases, first q=1 d=8: no mask\n"
            "  torch-cudnn: q=1 d=8: no mask\n"
            "  torch-efficient: not installed\n");
}

}  // namespace
}  // namespace fovea::test::bench_parts
