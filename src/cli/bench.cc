// `fovea bench`: which cases, which peers, then one after the other.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "cli/bench_case.h"
#include "cli/commands.h"
#include "cli/cost.h"
#include "cli/progress.h"
#include "cli/suite.h"
#include "cli/summary.h"
#include "harness/accuracy.h"
#include "plan/device.h"

namespace fovea::cli {
namespace {

constexpr TimingSettings kFull{.min_seconds = 0.3, .min_rounds = 5, .max_rounds = 100};
constexpr TimingSettings kQuick{.min_seconds = 0.1, .min_rounds = 3, .max_rounds = 20};
constexpr double kBusyLoad = 0.7;  // of the last minute; an idle machine stays under 0.2
constexpr double kQuickCheckCost = harness::kDefaultCost / 10;

int usage_error(const std::string& message) {
  std::fprintf(stderr, "bench: %s\n", message.c_str());
  return kExitUsage;
}

Result<std::vector<BenchCase>> cases_of_suites(const BenchOptions& options) {
  std::vector<std::string> names = options.suites;
  const Result<std::string> dir = find_cases_dir(options.cases_dir);
  if (!dir.ok()) return dir.status();
  if (names.empty() && options.list) {
    const Result<std::vector<std::string>> all = suite_names(*dir);
    if (!all.ok()) return all.status();
    names = *all;
  }
  if (names.empty()) names.emplace_back(options.quick ? "quick" : "cpu");
  std::vector<BenchCase> cases;
  for (const std::string& name : names) {
    Result<Suite> suite = load_suite(*dir, name);
    if (!suite.ok()) return suite.status();
    if (options.list) {
      std::printf("%s: %zu cases, %s\n", name.c_str(), suite->cases.size(), suite->about.c_str());
    }
    for (harness::Case& c : suite->cases) cases.push_back({name, format_case(c), std::move(c)});
  }
  return cases;
}

Result<std::vector<BenchCase>> cases_of_options(const BenchOptions& options) {
  std::vector<BenchCase> cases;
  for (const std::string& text : options.cases) {
    Result<harness::Case> c = harness::parse_case(text);
    if (!c.ok()) {
      return Status(c.status().code(), "--case \"" + text + "\": " + c.status().message());
    }
    cases.push_back({"", format_case(*c), std::move(*c)});
  }
  return cases;
}

// Cases by --case and --suite, those that --filter keeps, every one a problem that is right in
// itself: a wrong one is better refused now than after an hour.
Result<std::vector<BenchCase>> select_cases(const BenchOptions& options) {
  Result<std::vector<BenchCase>> all = cases_of_options(options);
  if (all.ok() && (options.cases.empty() || !options.suites.empty())) {
    Result<std::vector<BenchCase>> more = cases_of_suites(options);
    if (!more.ok()) return more.status();
    std::move(more->begin(), more->end(), std::back_inserter(*all));
  }
  if (!all.ok()) return all;
  std::vector<BenchCase> kept;
  try {
    const std::regex filter(options.filter);
    std::copy_if(all->begin(), all->end(), std::back_inserter(kept), [&](const BenchCase& c) {
      return std::regex_search(c.suite + " " + c.text, filter);
    });
  } catch (const std::regex_error& error) {
    return Status(
        StatusCode::kInvalidArgument,
        "--filter is \"" + options.filter + "\", must be a regular expression: " + error.what());
  }
  if (kept.empty()) {
    return Status(StatusCode::kInvalidArgument, "--filter is \"" + options.filter +
                                                    "\" and keeps none of " +
                                                    std::to_string(all->size()) + " cases");
  }
  for (const BenchCase& c : kept) {
    const Result<Plan> plan = make_plan(c.one_case.problem, Device::cpu(),
                                        {.backend = options.backend, .threads = options.threads});
    if (!plan.ok() && plan.status().code() == StatusCode::kInvalidArgument) {
      return Status(StatusCode::kInvalidArgument,
                    "case \"" + c.text + "\": " + plan.status().message());
    }
  }
  return kept;
}

// Seconds, very roughly: for the progress bar alone.
double expected_work(const harness::Case& c, Pass pass, const TimingSettings& timing) {
  const AttentionProblem& p = c.problem;
  const double all_pairs = static_cast<double>(p.batch * p.head_q) * static_cast<double>(p.q_len) *
                           static_cast<double>(p.kv_len);
  const double pairs = p.mask.right == 0 && p.q_len == p.kv_len ? all_pairs / 2 : all_pairs;
  return 1.5 + timing.min_rounds * flops(p, pairs, pass) / 1e11;
}

double expected_work(const std::vector<BenchCase>& cases, const TimingSettings& timing) {
  double work = 0;
  for (const BenchCase& c : cases) {
    if (c.one_case.forward) work += expected_work(c.one_case, Pass::kForward, timing);
    if (c.one_case.backward) work += expected_work(c.one_case, Pass::kBackward, timing);
  }
  return work;
}

// The first peer that is none of ours, or nothing.
std::string unknown_peer(const std::vector<std::string>& peers) {
  for (const std::string& peer : peers) {
    if (peer != "torch" && peer != "reference" && peer != "none") return peer;
  }
  return {};
}

bool asked_for(const std::vector<std::string>& peers, const char* peer) {
  return std::find(peers.begin(), peers.end(), peer) != peers.end();
}

// True when fovea did every case, and did it right.
bool run_cases(const std::vector<BenchCase>& cases, BenchSetup& setup, Results& results) {
  Progress progress(expected_work(cases, setup.timing));
  bool good = true;
  for (const BenchCase& c : cases) {
    const BenchObserver observer{
        [&](Pass pass) { progress.begin_step(std::string(pass_text(pass)) + " of " + c.text); },
        [&](Pass pass, const std::string& outcome) {
          progress.end_step(expected_work(c.one_case, pass, setup.timing), outcome);
        }};
    const Status done = bench_case(c, setup, observer, results.rows, results.skipped);
    if (!done.ok()) {
      good = false;
      results.skipped.push_back({"fovea", c.text + ": " + done.message()});
      progress.note("skipped " + c.text + ": " + done.message());
    }
  }
  for (const Row& row : results.rows) {
    if (row.impl.rfind("fovea-", 0) == 0 && row.ok == false) good = false;
  }
  return good;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  if (const std::string peer = unknown_peer(options.peers); !peer.empty()) {
    return usage_error("--peers is " + peer + ", must be torch, reference or none");
  }
  const Result<DeviceInfo> device =
      discover(Device::cpu(), {.backend = {}, .threads = options.threads});
  if (!device.ok()) return usage_error(device.status().message());
  const Result<std::vector<BenchCase>> cases = select_cases(options);
  if (!cases.ok()) return usage_error(cases.status().message());
  if (options.list) {
    for (const BenchCase& c : *cases) std::printf("  %-6s %s\n", c.suite.c_str(), c.text.c_str());
    return kExitOk;
  }
  std::ofstream json_file;
  if (!options.json_path.empty()) {  // now, not when the work is done
    json_file.open(options.json_path, std::ios::app);
    if (!json_file) return usage_error("--json is " + options.json_path + ", cannot write there");
    json_file.close();
  }

  Results results;
  results.machine = this_machine();
  results.threads = device->threads;
  results.isa = device->isa;
  results.commit = source_commit();
  results.date = date_now();
  BenchSetup setup;
  setup.backend = options.backend;
  setup.threads = device->threads;
  setup.check = options.check;
  setup.check_cost = options.quick ? kQuickCheckCost : harness::kDefaultCost;
  setup.reference_peer = asked_for(options.peers, "reference");
  setup.timing = options.quick ? kQuick : kFull;
  if (options.min_time > 0) setup.timing.min_seconds = options.min_time;

  if (results.machine.load > kBusyLoad) {
    std::fprintf(stderr, "bench: the machine is busy (load %.1f): expect times that scatter\n",
                 results.machine.load);
  }

  std::unique_ptr<TorchPeer> torch;
  if (asked_for(options.peers, "torch")) {
    Result<std::unique_ptr<TorchPeer>> started = TorchPeer::start(device->threads);
    if (started.ok()) {
      torch = std::move(*started);
      setup.torch = torch.get();
      results.torch_version = torch->version();
    } else {
      results.skipped.push_back({"torch-cpu", started.status().message()});
      std::fprintf(stderr, "bench: torch is skipped: %s\n", started.status().message().c_str());
    }
  }
  const bool good = run_cases(*cases, setup, results);
  torch.reset();

  std::printf("%s, %d threads, %s%s\n\n%s", results.machine.cpu.c_str(), results.threads,
              results.isa.c_str(),
              results.torch_version.empty() ? "" : (", torch " + results.torch_version).c_str(),
              summary(results).c_str());
  if (!options.json_path.empty()) {
    json_file.open(options.json_path, std::ios::trunc);
    json_file << to_json(results).dump(1) << "\n";
    json_file.close();
    if (!json_file) return usage_error("--json is " + options.json_path + ", cannot write there");
    std::printf("\nwrote %s\n", options.json_path.c_str());
  }
  return good ? kExitOk : kExitFailed;
}

}  // namespace fovea::cli
