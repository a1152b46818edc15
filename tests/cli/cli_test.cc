// info, explain, check, compare, and how the program refuses.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/json.h"
#include "program.h"

namespace fovea::test {
namespace {

using cli::Json;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Help, NamesEveryCommandAndEachGivesAnExample) {
  const Ran help = fovea("--help");
  EXPECT_EQ(help.code, 0);
  for (const std::string command : {"info", "explain", "check", "bench", "compare"}) {
    EXPECT_TRUE(contains(help.out, command)) << help.out;
    const Ran own = fovea(command + " --help");
    EXPECT_EQ(own.code, 0);
    EXPECT_TRUE(contains(own.out, "fovea " + command)) << own.out;
  }
}

TEST(Info, SaysWhatPlansWillUse) {
  const Ran text = fovea("info", "FOVEA_NUM_THREADS=3");
  EXPECT_EQ(text.code, 0) << text.errors;
  EXPECT_TRUE(contains(text.out, "plans use 3")) << text.out;
  const Ran json = fovea("info --json", "FOVEA_NUM_THREADS=3");
  EXPECT_EQ(json.code, 0) << json.errors;
  const Json info = Json::parse(json.out);
  EXPECT_EQ(info.at("threads"), 3);
  EXPECT_FALSE(info.at("cpu").get<std::string>().empty());
  EXPECT_GT(info.at("memory_bytes").get<int64_t>(), 0);
  const auto backends = info.at("backends").get<std::vector<std::string>>();
  EXPECT_EQ(std::count(backends.begin(), backends.end(), "reference"), 1);
  EXPECT_TRUE(info.at("gpus").is_array());
  EXPECT_TRUE(contains(text.out, "\ngpus ")) << text.out;
}

// The README shows these tables, so each line must be one of markdown's.
TEST(Info, SupportIsATableForEnginesAndOneForLayers) {
  const Ran ran = fovea("info --support");
  ASSERT_EQ(ran.code, 0) << ran.errors;
  std::stringstream lines(ran.out);
  std::string header;
  std::getline(lines, header);
  EXPECT_TRUE(contains(header, "reference"));
  auto columns = std::count(header.begin(), header.end(), '|');
  int rows = 0;
  for (std::string line; std::getline(lines, line); ++rows) {
    if (line.empty()) {  // between the tables
      ASSERT_TRUE(std::getline(lines, line));
      columns = std::count(line.begin(), line.end(), '|');
    }
    EXPECT_EQ(std::count(line.begin(), line.end(), '|'), columns) << line;
  }
  EXPECT_GE(rows, 25);
  EXPECT_TRUE(contains(ran.out, "| causal mask |"));
  EXPECT_TRUE(contains(ran.out, "| CCGQAttention, zaya | yes |"));
}

TEST(Explain, NamesTheBackendAskedFor) {
  const Ran ran = fovea("explain --backend reference --case 'q=16 d=8 mask=causal'");
  EXPECT_EQ(ran.code, 0) << ran.errors;
  EXPECT_TRUE(contains(ran.out, "mask=causal")) << ran.out;
  EXPECT_TRUE(contains(ran.out, "reference")) << ran.out;
}

TEST(Check, JudgesEveryOutputOfBothPasses) {
  const Ran ran =
      fovea("check --case 'b=2 hq=4 hkv=2 q=19 kv=23 d=16 mask=causal sink pass=fwd,bwd'");
  EXPECT_EQ(ran.code, 0) << ran.out << ran.errors;
  for (const char* output : {"out", "lse", "dq", "dk", "dv", "dsink"}) {
    EXPECT_TRUE(contains(ran.out, std::string("\n") + output + " ")) << output << "\n" << ran.out;
  }
  EXPECT_TRUE(contains(ran.out, "\nok\n")) << ran.out;
  EXPECT_FALSE(contains(ran.out, "WRONG")) << ran.out;
}

struct BadRequest {
  std::string arguments;
  std::string named;  // what the message must speak of
};

TEST(Refusal, ExitsWithTwoAndNamesWhatIsWrong) {
  const std::vector<BadRequest> requests = {
      {"", "command"},
      {"frobnicate", "frobnicate"},
      {"info --frobnicate", "--frobnicate"},
      {"explain", "--case"},
      {"check", "--case"},
      {"check --case 'q=8 d=8 dtype=bf17'", "bf17"},
      {"check --case 'q=8 d=8 frob=1'", "frob"},
      {"check --case 'q=8 d=8 hq=30 hkv=8'", "head_q is 30"},
      {"check --case 'q=8 d=8' --threads 0", "--threads"},
      {"check --case 'q=8 d=8' --backend nope", "nope"},
      {"check --case 'q=8 d=8' --device gpu", "--device is \"gpu\", must be cpu, cuda or cuda:N"},
      {"explain --case 'q=8 d=8' --device cuda:x", "--device is \"cuda:x\""},
      {"check --case 'q=8 d=8' --device cuda:-1", "--device is \"cuda:-1\""},
      {"explain --case 'q=8 d=8' --device cuda:999", "999"},
      {"explain --case 'q=8 d=-3'", "d is -3"},
      {"bench --case 'q=8 d=8 hq=30 hkv=8'", "head_q is 30"},
      {"bench --case 'q=8'", "d"},
      {"bench --suite nope", "--suite is nope"},
      {"bench --peers nope", "--peers is nope"},
      {"bench --device cpu --peers torch,torch-flash",
       "--peers is torch-flash, must be torch, torch-cpu, torch-compile, torch-gqa-cpu, reference "
       "or none on cpu"},
      {"bench --device gpu", "--device is \"gpu\", must be cpu, cuda or cuda:N"},
      {"bench --device cuda:999 --list", "--device is cuda:999"},
      {"bench --filter '['", "--filter is \"[\""},
      {"bench --filter nothing-like-this", "keeps none"},
      {"bench --device cpu --quick --json /nonexistent/folder/x.json", "--json is /nonexistent"},
      {"bench --quick --min-time -1", "--min-time"},
      {"bench --cases-dir /nonexistent", "--cases-dir is /nonexistent"},
      {"compare", "before"},
      {"compare /nonexistent/a.json /nonexistent/b.json", "/nonexistent/a.json"},
  };
  for (const BadRequest& request : requests) {
    const Ran ran = fovea(request.arguments);
    EXPECT_EQ(ran.code, 2) << request.arguments << "\n" << ran.out << ran.errors;
    EXPECT_TRUE(contains(ran.errors, request.named)) << request.arguments << "\n" << ran.errors;
  }
}

// A result file of two rows whose times the test chooses.
std::string result_text(double forward_ms, double backward_ms, bool ok = true) {
  Json rows = Json::array();
  for (const char* pass : {"fwd", "bwd"}) {
    rows.push_back({{"case", "q=8 d=8"},
                    {"impl", "fovea-cpu"},
                    {"pass", pass},
                    {"dtype", "f32"},
                    {"ms", pass[0] == 'f' ? forward_ms : backward_ms},
                    {"ok", ok}});
  }
  return Json{{"rows", rows}}.dump();
}

TEST(Compare, GivesRatiosAndFailsOnlyWhenAsked) {
  const ScratchFolder folder;
  const std::string before = folder.write("a.json", result_text(2.0, 4.0));
  const std::string after = folder.write("b.json", result_text(1.0, 5.0));
  const Ran plain = fovea("compare " + before + " " + after);
  EXPECT_EQ(plain.code, 0) << plain.errors;
  EXPECT_TRUE(contains(plain.out, "2.000") && contains(plain.out, "0.800")) << plain.out;
  EXPECT_LT(plain.out.find("0.800"), plain.out.find("2.000")) << "the worst comes first";
  EXPECT_EQ(fovea("compare " + before + " " + after + " --fail-under 0.95").code, 1);
  EXPECT_EQ(fovea("compare " + before + " " + after + " --fail-under 0.75").code, 0);
  EXPECT_EQ(fovea("compare " + after + " " + after + " --fail-under 0.95").code, 0);
}

TEST(Compare, FailsWhenAResultTurnedWrong) {
  const ScratchFolder folder;
  const std::string before = folder.write("a.json", result_text(1, 1));
  const std::string after = folder.write("b.json", result_text(1, 1, /*ok=*/false));
  EXPECT_EQ(fovea("compare " + before + " " + after).code, 1);
}

TEST(Compare, RefusesFilesThatAreNoResults) {
  const ScratchFolder folder;
  const std::string good = folder.write("good.json", result_text(1, 1));
  for (const char* text : {"", "{", "[]", "{\"rows\": 1}", "{\"rows\": [{}]}", "{\"rows\": []}"}) {
    const std::string bad = folder.write("bad.json", text);
    EXPECT_EQ(fovea("compare " + good + " " + bad).code, 2) << text;
  }
}

}  // namespace
}  // namespace fovea::test
