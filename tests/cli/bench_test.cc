// bench: its JSON, its arithmetic, its suites, and its manners towards a peer.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/json.h"
#include "program.h"

namespace fovea::test::bench {
namespace {

using cli::Json;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::set<std::string> keys_of(const Json& object) {
  std::set<std::string> keys;
  for (const auto& item : object.items()) keys.insert(item.key());
  return keys;
}

const std::set<std::string> kRowKeys = {
    "suite", "case",    "impl",      "kernel",    "pass",   "dtype",        "b",
    "hq",    "hkv",     "q",         "kv",        "d",      "dv",           "mask",
    "layer", "e",       "timing",    "ms",        "ms_p10", "ms_p90",       "tflops",
    "gbps",  "max_err", "err_bound", "mem_bytes", "ok",     "peak_fraction"};

TEST(BenchJson, HasEveryKeyAndNumbersThatAgree) {
  const ScratchFolder folder;
  const std::string path = folder.path("result.json");
  const Ran ran =
      fovea("bench --device cpu --quick --min-time 0.01 --peers none --json " + path +
            " --case 'b=2 hq=4 hkv=2 q=5 kv=7 d=16 dv=24 mask=causal pass=fwd,bwd dtype=f32'");
  ASSERT_EQ(ran.code, 0) << ran.out << ran.errors;
  const Json result = Json::parse(read_file(path));
  EXPECT_EQ(keys_of(result),
            (std::set<std::string>{"machine", "commit", "date", "rows", "skipped"}));
  for (const char* key :
       {"cpu", "cores", "threads", "isa", "mhz", "memory_bytes", "os", "compiler", "torch"}) {
    EXPECT_TRUE(result.at("machine").contains(key)) << key;
  }
  for (const char* key : {"gpu", "driver", "cuda", "gpu_sm_mhz", "gpu_memory_mhz",
                          "gpu_power_limit_w", "gpu_power_w"}) {
    EXPECT_TRUE(result.at("machine").at(key).is_null()) << key << ": the CPU was measured";
  }
  EXPECT_TRUE(result.at("skipped").empty()) << result.at("skipped");
  ASSERT_EQ(result.at("rows").size(), 2u);
  // Query i of 5 sees keys 0 .. i + 2: 3 + 4 + 5 + 6 + 7 pairs for each of 2 x 4 heads.
  const double forward_flops = 2.0 * 8 * 25 * (16 + 24);
  for (const Json& row : result.at("rows")) {
    EXPECT_EQ(keys_of(row), kRowKeys);
    const bool forward = row.at("pass") == "fwd";
    EXPECT_EQ(row.at("impl").get<std::string>().rfind("fovea-", 0), 0u) << row;
    EXPECT_EQ(row.at("mask"), "causal");
    EXPECT_TRUE(row.at("layer").is_null() && row.at("e").is_null()) << "the operator alone";
    EXPECT_EQ(row.at("timing"), "host");
    EXPECT_EQ(row.at("hkv"), 2);
    EXPECT_EQ(row.at("dv"), 24);
    const double ms = row.at("ms");
    EXPECT_GT(ms, 0);
    EXPECT_LE(row.at("ms_p10").get<double>(), ms);
    EXPECT_GE(row.at("ms_p90").get<double>(), ms);
    EXPECT_NEAR(row.at("tflops").get<double>() * ms * 1e9,
                forward ? forward_flops : 2.5 * forward_flops, 1e-6 * forward_flops);
    EXPECT_EQ(row.at("ok"), true) << row;
    EXPECT_LE(row.at("max_err").get<double>(), row.at("err_bound").get<double>());
    EXPECT_GE(row.at("mem_bytes").get<int64_t>(), 0);
    // q, k, v, out and lse; the backward reads those and dout, and writes dq, dk, dv.
    const double q = 2 * 5 * 4 * 16 * 4, k = 2 * 7 * 2 * 16 * 4, v = 2 * 7 * 2 * 24 * 4;
    const double out = 2 * 5 * 4 * 24 * 4, lse = 2 * 4 * 5 * 4;
    const double bytes = q + k + v + out + lse + (forward ? 0 : out + q + k + v);
    EXPECT_NEAR(row.at("gbps").get<double>() * ms * 1e6, bytes, 1e-6 * bytes);
  }
}

// The best that was seen in the whole run: not what a core could do just before a pass.
TEST(BenchJson, RowsOfATypeArePartsOfOnePeak) {
  const ScratchFolder folder;
  const std::string path = folder.path("result.json");
  const Ran ran =
      fovea("bench --device cpu --quick --min-time 0.01 --no-check --peers none --json " + path +
            " --case 'q=64 d=64 pass=fwd,bwd dtype=f32' --case 'q=32 d=32 dtype=f32'");
  ASSERT_EQ(ran.code, 0) << ran.errors;
  const Json rows = Json::parse(read_file(path)).at("rows");
  ASSERT_EQ(rows.size(), 3u);
  const auto peak = [](const Json& row) {
    return row.at("tflops").get<double>() / row.at("peak_fraction").get<double>();
  };
  for (const Json& row : rows) {
    EXPECT_GT(row.at("peak_fraction").get<double>(), 0) << row;
    EXPECT_NEAR(peak(row), peak(rows[0]), 1e-9 * peak(rows[0])) << row;
  }
}

TEST(BenchJson, SaysNothingOfAccuracyItDidNotMeasure) {
  const ScratchFolder folder;
  const std::string path = folder.path("result.json");
  const Ran ran =
      fovea("bench --device cpu --quick --min-time 0.01 --no-check --peers none --json " + path +
            " --case 'q=5 d=16'");
  ASSERT_EQ(ran.code, 0) << ran.errors;
  const Json row = Json::parse(read_file(path)).at("rows").at(0);
  for (const char* key : {"max_err", "err_bound", "ok"}) EXPECT_TRUE(row.at(key).is_null()) << key;
}

// The suite the project's speed is judged by: products unrolled, none lost.
TEST(BenchSuite, CpuHoldsTheCasesOfTheBar) {
  const Ran ran = fovea("bench --list --suite cpu");
  ASSERT_EQ(ran.code, 0) << ran.errors;
  EXPECT_TRUE(contains(ran.out, "cpu: 72 cases")) << ran.out;
  std::set<std::string> lines;
  std::stringstream text(ran.out);
  for (std::string line; std::getline(text, line);) lines.insert(line);
  EXPECT_EQ(lines.size(), 73u) << "every case once, and the suite's own line";
  const Ran decode = fovea("bench --list --suite cpu --filter 'kv=8192'");
  EXPECT_EQ(std::count(decode.out.begin(), decode.out.end(), '\n'), 1 + 8) << decode.out;
}

// Listing reads every suite, and a suite that cannot be read is refused: so all of them parse.
TEST(BenchSuite, ListNamesThemAllWithoutMeasuring) {
  const Ran ran = fovea("bench --list");
  ASSERT_EQ(ran.code, 0) << ran.errors;
  for (const char* line :
       {"\nquick: ", "\ngpu-quick: ", "\ngpu-prefill: 24 cases", "\ngpu-small: 24 cases",
        "\ngpu-features: 14 cases", "\ngpu-f32: 16 cases"}) {
    EXPECT_TRUE(contains("\n" + ran.out, line)) << line << "\n" << ran.out;
  }
}

// 16k tokens, 2048 wide, whatever the sequence length.
TEST(BenchSuite, GpuPrefillKeepsItsSize) {
  const Ran ran = fovea("bench --list --suite gpu-prefill");
  ASSERT_EQ(ran.code, 0) << ran.errors;
  std::stringstream text(ran.out);
  std::string line;
  std::getline(text, line);  // the suite's own
  while (std::getline(text, line)) {
    std::map<std::string, long> sizes;
    std::stringstream words(line);
    for (std::string word; words >> word;) {
      const size_t equals = word.find('=');
      if (equals != std::string::npos) {
        sizes[word.substr(0, equals)] = std::atol(word.c_str() + equals + 1);
      }
    }
    EXPECT_EQ(sizes["b"] * sizes["q"], 16384) << line;
    EXPECT_EQ(sizes["hq"] * sizes["d"], 2048) << line;
    EXPECT_TRUE(contains(line, "pass=fwd,bwd") && contains(line, "dtype=bf16")) << line;
  }
}

TEST(BenchSuite, UnrollsProductsInTheOrderOfTheFile) {
  const ScratchFolder folder;
  folder.write("mine.json",
               R"({"name": "mine", "cases": [{"hq,hkv": [[4, 4], [4, 1]], "q": [8, 9], "d": 8,
                   "sink": true, "alibi": false}]})");
  const Ran ran = fovea("bench --list --suite mine --cases-dir " + folder.path(""));
  ASSERT_EQ(ran.code, 0) << ran.errors;
  std::vector<std::string> cases;
  std::stringstream text(ran.out);
  for (std::string line; std::getline(text, line);) cases.push_back(line);
  ASSERT_EQ(cases.size(), 5u) << ran.out;
  EXPECT_TRUE(contains(cases[1], "hkv=4 q=8")) << cases[1];
  EXPECT_TRUE(contains(cases[2], "hkv=4 q=9")) << cases[2];
  EXPECT_TRUE(contains(cases[3], "hkv=1 q=8")) << cases[3];
  EXPECT_TRUE(contains(cases[4], "hkv=1 q=9")) << cases[4];
  for (size_t i = 1; i < cases.size(); ++i) {
    EXPECT_TRUE(contains(cases[i], "sink") && !contains(cases[i], "alibi")) << cases[i];
  }
}

TEST(BenchSuite, RefusesAFileThatIsWrongAndNamesIt) {
  for (const char* text :
       {"", "[]", R"({"name": "mine", "cases": [{"q": 8}]})", R"({"name": "other", "cases": []})",
        R"({"name": "mine", "cases": [{"q,kv": [8], "d": 8}]})",
        R"({"name": "mine", "cases": [{"q": 8, "d": {"x": 1}}]})"}) {
    const ScratchFolder folder;
    folder.write("mine.json", text);
    const Ran ran = fovea("bench --list --suite mine --cases-dir " + folder.path(""));
    EXPECT_EQ(ran.code, 2) << text;
    EXPECT_TRUE(contains(ran.errors, "mine.json")) << text << "\n" << ran.errors;
  }
}

TEST(BenchPeer, ThatIsMissingIsReportedAsSkipped) {
  const ScratchFolder folder;
  const std::string path = folder.path("result.json");
  const Ran ran = fovea("bench --device cpu --quick --min-time 0.01 --peers torch --json " + path +
                            " --case 'q=5 d=16'",
                        "FOVEA_PYTHON=/nonexistent/python");
  ASSERT_EQ(ran.code, 0) << ran.errors;
  const Json result = Json::parse(read_file(path));
  ASSERT_EQ(result.at("skipped").size(), 1u);
  EXPECT_EQ(result.at("skipped")[0].at("impl"), "torch-cpu");
  EXPECT_TRUE(contains(result.at("skipped")[0].at("why"), "/nonexistent/python"));
  EXPECT_TRUE(contains(ran.out, "torch-cpu: ")) << ran.out;
  EXPECT_EQ(result.at("rows").size(), 1u);
}

// A worker that speaks the protocol and claims that every run takes 250 ms.
constexpr const char* kSlowWorker = R"(#!/bin/sh
while read -r line; do
  case "$line" in
    *'"hello"'*) echo '{"ok": true, "version": "9.9"}' ;;
    *'"load"'*) echo '{"ok": true}' ;;
    *'"open"'*) echo '{"ok": true, "kernel": "slow"}' ;;
    *'"sample"'*) echo '{"ok": true, "seconds": 0.25}' ;;
    *'"memory"'*) echo '{"ok": true, "bytes": 4096}' ;;
    *) echo '{"ok": false, "why": "not in this worker"}' ;;
  esac
done
)";

std::string runnable(const ScratchFolder& folder, const char* text) {
  const std::string path = folder.write("worker", text);
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

TEST(BenchPeer, StandsBesideFoveaWithItsRatio) {
  const ScratchFolder folder;
  const std::string path = folder.path("result.json");
  const Ran ran = fovea(
      "bench --device cpu --quick --no-check --peers torch --json " + path + " --case 'q=5 d=16'",
      "FOVEA_PYTHON=" + runnable(folder, kSlowWorker));
  ASSERT_EQ(ran.code, 0) << ran.errors;
  const Json result = Json::parse(read_file(path));
  EXPECT_EQ(result.at("machine").at("torch"), "9.9");
  ASSERT_EQ(result.at("rows").size(), 2u);
  const Json ours = result.at("rows")[0], theirs = result.at("rows")[1];
  EXPECT_EQ(theirs.at("impl"), "torch-cpu");
  EXPECT_EQ(theirs.at("kernel"), "slow");
  EXPECT_EQ(theirs.at("mem_bytes"), 4096);
  EXPECT_NEAR(theirs.at("ms").get<double>(), 250, 1e-9);
  char ratio[32];
  std::snprintf(ratio, sizeof ratio, "%.2f", 250 / ours.at("ms").get<double>());
  EXPECT_TRUE(contains(ran.out, ratio)) << ratio << "\n" << ran.out;
}

// Its outputs cannot be had for the check: the row goes, and the reason stays.
TEST(BenchPeer, ThatCannotBeCheckedIsNotMeasured) {
  const ScratchFolder folder;
  const std::string path = folder.path("result.json");
  const Ran ran = fovea("bench --device cpu --quick --min-time 0.01 --peers torch --json " + path +
                            " --case 'q=5 d=16'",
                        "FOVEA_PYTHON=" + runnable(folder, kSlowWorker));
  EXPECT_EQ(ran.code, 0) << ran.errors;
  const Json result = Json::parse(read_file(path));
  EXPECT_EQ(result.at("rows").size(), 1u);
  ASSERT_EQ(result.at("skipped").size(), 1u);
  EXPECT_TRUE(contains(result.at("skipped")[0].at("why"), "not in this worker"));
}

TEST(BenchPeer, ThatDiesLeavesTheRestStanding) {
  const ScratchFolder folder;
  const std::string path = folder.path("result.json");
  const std::string worker = runnable(folder, R"(#!/bin/sh
read -r line; echo '{"ok": true, "version": "9.9"}'
read -r line; echo '{"ok": true}'
read -r line; echo '{"ok": true, "kernel": "slow"}'
exit 1
)");
  const Ran ran =
      fovea("bench --device cpu --quick --min-time 0.01 --no-check --peers torch --json " + path +
                " --case 'q=5 d=16' --case 'q=6 d=16'",
            "FOVEA_PYTHON=" + worker);
  EXPECT_EQ(ran.code, 0) << ran.errors;
  const Json result = Json::parse(read_file(path));
  EXPECT_EQ(result.at("rows").size(), 2u) << "fovea's own two";
  EXPECT_EQ(result.at("skipped").size(), 2u) << result.at("skipped");
}

}  // namespace
}  // namespace fovea::test::bench
