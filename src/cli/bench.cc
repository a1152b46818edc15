// `fovea bench`: which device, which cases, which peers, then one after the other.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "backend/cuda/device.h"
#include "cli/bench_case.h"
#include "cli/commands.h"
#include "cli/cost.h"
#include "cli/cuda/contender.h"
#include "cli/device_name.h"
#include "cli/layer_contender.h"
#include "cli/progress.h"
#include "cli/suite.h"
#include "cli/summary.h"
#include "cli/table.h"
#include "harness/accuracy.h"
#include "harness/layer_weights.h"
#include "plan/device.h"

namespace fovea::cli {
namespace {

constexpr TimingSettings kFull{.min_seconds = 0.3, .min_rounds = 5, .max_rounds = 100};
constexpr TimingSettings kQuick{.min_seconds = 0.1, .min_rounds = 3, .max_rounds = 20};
// A GPU answers within tens of milliseconds to the power it draws: shorter samples would show the
// clock it starts with.
constexpr TimingSettings kGpuFull{.min_seconds = 0.2,
                                  .min_rounds = 5,
                                  .max_rounds = 100,
                                  .sample_seconds = 0.02,
                                  .pause_seconds = 0};
constexpr TimingSettings kGpuQuick{.min_seconds = 0.06,
                                   .min_rounds = 3,
                                   .max_rounds = 20,
                                   .sample_seconds = 0.02,
                                   .pause_seconds = 0};
constexpr double kCpuRate = 1e11;  // operations a second, very roughly
constexpr double kGpuRate = 1e14;
constexpr double kBusyLoad = 0.7;  // of the last minute; an idle machine stays under 0.2
constexpr double kQuickCheckCost = harness::kDefaultCost / 10;

bool is_gpu(Device device) { return device.type != DeviceType::kCpu; }

int usage_error(const std::string& message) {
  const bool named = message.rfind("bench: ", 0) == 0;
  std::fprintf(stderr, "%s%s\n", named ? "" : "bench: ", message.c_str());
  return kExitUsage;
}

// The device that was asked for or the best there is. Refused where it is not to be had.
Result<DeviceInfo> find_device(const BenchOptions& options) {
  const Result<Device> device =
      options.device.empty() ? best_device() : parse_device("bench", options.device);
  if (!device.ok()) return device.status();
  Result<DeviceInfo> found = discover(*device, {.backend = {}, .threads = options.threads});
  if (found.ok() || options.device.empty()) return found;
  return Status(found.status().code(),
                "--device is " + options.device + ": " + found.status().message());
}

std::string default_suite(const BenchOptions& options, Device device) {
  if (is_gpu(device)) return options.quick ? "gpu-quick" : "gpu-prefill";
  return options.quick ? "quick" : "cpu";
}

Result<std::vector<BenchCase>> cases_of_suites(const BenchOptions& options, Device device) {
  std::vector<std::string> names = options.suites;
  const Result<std::string> dir = find_cases_dir(options.cases_dir);
  if (!dir.ok()) return dir.status();
  if (names.empty() && options.list) {
    const Result<std::vector<std::string>> all = suite_names(*dir);
    if (!all.ok()) return all.status();
    names = *all;
  }
  if (names.empty()) names.push_back(default_suite(options, device));
  std::vector<BenchCase> cases;
  for (const std::string& name : names) {
    Result<Suite> suite = load_suite(*dir, name);
    if (!suite.ok()) return suite.status();
    if (options.list) {
      std::printf("%s: %zu cases, %s\n", name.c_str(), suite->cases.size(), suite->about.c_str());
    }
    for (harness::AnyCase& c : suite->cases) {
      cases.push_back({name, harness::format_case(c), std::move(c)});
    }
  }
  return cases;
}

Result<std::vector<BenchCase>> cases_of_options(const BenchOptions& options) {
  std::vector<BenchCase> cases;
  for (const std::string& text : options.cases) {
    Result<harness::AnyCase> c = harness::parse_any_case(text);
    if (!c.ok()) {
      return Status(c.status().code(), "--case \"" + text + "\": " + c.status().message());
    }
    cases.push_back({"", harness::format_case(*c), std::move(*c)});
  }
  return cases;
}

// What is wrong with a case, or with the wish for that backend or device; fine where it is planned.
Status plan_status(const harness::AnyCase& c, Device device, const PlanOptions& options) {
  if (const auto* layer = std::get_if<harness::LayerCase>(&c)) {
    return PlannedLayer::make(*layer, device, options).status();
  }
  return make_plan(std::get<harness::Case>(c).problem, device, options).status();
}

// Cases by --case and --suite, those that --filter keeps, every one a problem that is right in
// itself: a wrong one is better refused now than after an hour.
Result<std::vector<BenchCase>> select_cases(const BenchOptions& options, Device device) {
  Result<std::vector<BenchCase>> all = cases_of_options(options);
  if (all.ok() && (options.cases.empty() || !options.suites.empty())) {
    Result<std::vector<BenchCase>> more = cases_of_suites(options, device);
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
    const Status planned =
        plan_status(c.one_case, device, {.backend = options.backend, .threads = options.threads});
    if (planned.code() == StatusCode::kInvalidArgument) {
      return Status(StatusCode::kInvalidArgument, "case \"" + c.text + "\": " + planned.message());
    }
  }
  return kept;
}

double operator_flops(const AttentionProblem& p, Pass pass) {
  const double all_pairs = static_cast<double>(p.batch * p.head_q) * static_cast<double>(p.q_len) *
                           static_cast<double>(p.kv_len);
  const double pairs = p.mask.right == 0 && p.q_len == p.kv_len ? all_pairs / 2 : all_pairs;
  return flops(p, pairs, pass);
}

double layer_flops(const harness::LayerCase& c, BenchPass pass) {
  const double tokens = static_cast<double>(c.batch * c.q_len);
  const double attention = tokens * static_cast<double>(c.q_len * c.head_q * c.head_dim);
  return 2 * (tokens * weight_macs(c) + attention) * (pass == BenchPass::kForward ? 1 : 3);
}

// Seconds, very roughly: for the progress bar alone.
double expected_work(const harness::AnyCase& c, BenchPass pass, const BenchSetup& setup) {
  const auto* layer = std::get_if<harness::LayerCase>(&c);
  const double work = layer != nullptr
                          ? layer_flops(*layer, pass)
                          : operator_flops(std::get<harness::Case>(c).problem, operator_pass(pass));
  const double rate = is_gpu(setup.device.device) ? kGpuRate : kCpuRate;
  return 1.5 + setup.timing.min_rounds * work / rate;
}

double expected_work(const std::vector<BenchCase>& cases, const BenchSetup& setup) {
  double work = 0;
  for (const BenchCase& c : cases) {
    for (const BenchPass pass : passes_of(c.one_case)) {
      work += expected_work(c.one_case, pass, setup);
    }
  }
  return work;
}

bool write_json(const std::string& path, const Results& results) {
  std::ofstream file(path, std::ios::trunc);
  file << to_json(results).dump(1) << "\n";
  file.close();
  return !file.fail();
}

// Of rows before too: the peak may have risen.
void take_parts_of_peak(const BenchSetup& setup, std::vector<Row>& rows) {
  for (Row& row : rows) {
    const std::optional<double> peak = peak_of(setup, row.problem.dtype);
    if (peak) row.peak_fraction = 1e12 * row.tflops / *peak;
  }
}

// True when fovea did every case, and did it right. What there is so far is written after each
// case: a long run that is cut short leaves its rows.
bool run_cases(const std::vector<BenchCase>& cases, BenchSetup& setup, const std::string& json_path,
               Results& results) {
  Progress progress(expected_work(cases, setup));
  bool good = true;
  for (const BenchCase& c : cases) {
    const BenchObserver observer{
        [&](BenchPass pass) {
          progress.begin_step(std::string(pass_text(pass)) + " of " + c.text);
        },
        [&](BenchPass pass, const std::string& outcome) {
          progress.end_step(expected_work(c.one_case, pass, setup), outcome);
        }};
    const Status done = bench_case(c, setup, observer, results.rows, results.skipped);
    if (!done.ok()) {
      good = false;
      results.skipped.push_back({"fovea", done.message(), c.text});
      progress.note("skipped " + c.text + ": " + done.message());
    }
    take_parts_of_peak(setup, results.rows);
    if (setup.watch != nullptr) results.gpu_state = setup.watch->typical();
    if (!json_path.empty()) (void)write_json(json_path, results);
  }
  for (const Row& row : results.rows) {
    if (row.impl.rfind("fovea-", 0) == 0 && row.ok == false) good = false;
  }
  return good;
}

BenchSetup setup_of(const BenchOptions& options, const DeviceInfo& device, int threads) {
  BenchSetup setup;
  setup.device = device;
  if (options.running_max) setup.device.softmax = SoftmaxRule::kRunningMax;
  setup.backend = options.backend;
  setup.threads = threads;
  setup.check = options.check;
  setup.check_cost = options.quick ? kQuickCheckCost : harness::kDefaultCost;
  setup.timing = is_gpu(device.device) ? (options.quick ? kGpuQuick : kGpuFull)
                                       : (options.quick ? kQuick : kFull);
  if (options.min_time > 0) setup.timing.min_seconds = options.min_time;
  return setup;
}

// The engines of torch that were asked for and that some case has a use for.
std::set<std::string> needed_engines(const std::vector<BenchCase>& cases,
                                     const TorchEngines& engines) {
  std::set<std::string> needed;
  for (const BenchCase& c : cases) {
    const auto* layer = std::get_if<harness::LayerCase>(&c.one_case);
    for (const std::string& engine : layer ? engines.of(*layer) : engines.of_operator) {
      needed.insert(engine);
    }
  }
  return needed;
}

// Starts torch where a peer of it was asked for. Without it the benchmark goes on, and says so.
std::unique_ptr<TorchPeer> start_torch(const std::vector<BenchCase>& cases, BenchSetup& setup,
                                       Results& results) {
  const std::set<std::string> engines = needed_engines(cases, setup.torch_engines);
  if (engines.empty()) return nullptr;
  Result<std::unique_ptr<TorchPeer>> started = TorchPeer::start(setup.device.device, setup.threads);
  if (started.ok()) {
    setup.torch = started->get();
    results.torch_version = (*started)->version();
    return std::move(*started);
  }
  const std::string& why = started.status().message();
  for (const std::string& engine : engines) {
    results.skipped.push_back({"torch-" + engine, why, ""});
  }
  std::fprintf(stderr, "bench: torch is skipped: %s\n", why.c_str());
  return nullptr;
}

std::string headline(const Results& r) {
  std::string text = r.gpu.empty()
                         ? r.machine.cpu + ", " + std::to_string(r.threads) + " threads, " + r.isa
                         : r.gpu + ", CUDA " + r.cuda;
  const GpuState& gpu = r.gpu_state;
  if (!gpu.driver.empty()) text += ", driver " + gpu.driver;
  if (gpu.sm_mhz) text += format(", SM at %.0f MHz", *gpu.sm_mhz);
  if (gpu.power_w) text += format(", drawing %.0f W", *gpu.power_w);
  if (gpu.power_limit_w) text += format(", limit %.0f W", *gpu.power_limit_w);
  if (!r.torch_version.empty()) text += ", torch " + r.torch_version;
  return text;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  const Result<DeviceInfo> device = find_device(options);
  if (!device.ok()) return usage_error(device.status().message());
  const Result<DeviceInfo> host =
      discover(Device::cpu(), {.backend = {}, .threads = options.threads});
  if (!host.ok()) return usage_error(host.status().message());
  const Result<PeerChoice> peers = choose_peers(options.peers, device->device);
  if (!peers.ok()) return usage_error(peers.status().message());
  const Result<std::vector<BenchCase>> cases = select_cases(options, device->device);
  if (!cases.ok()) return usage_error(cases.status().message());
  if (options.list) {
    for (const BenchCase& c : *cases) std::printf("  %-12s %s\n", c.suite.c_str(), c.text.c_str());
    return kExitOk;
  }
  // Found out now, not when the work is done.
  if (!options.json_path.empty() && !std::ofstream(options.json_path, std::ios::app)) {
    return usage_error("--json is " + options.json_path + ", cannot write there");
  }

  Results results;
  results.machine = this_machine();
  results.threads = host->threads;
  results.isa = host->isa;
  results.commit = source_commit();
  results.date = date_now();
  BenchSetup setup = setup_of(options, *device, host->threads);
  setup.reference_peer = peers->reference;
  setup.torch_engines = peers->torch;

  GpuWatch watch(is_gpu(device->device) ? cuda_bus_id(device->device) : "");
  if (is_gpu(device->device)) {
    results.gpu = device->gpu.name;
    results.cuda = cuda_version();
    setup.watch = &watch;
  } else if (results.machine.load > kBusyLoad) {
    std::fprintf(stderr, "bench: the machine is busy (load %.1f): expect times that scatter\n",
                 results.machine.load);
  }

  std::unique_ptr<TorchPeer> torch = start_torch(*cases, setup, results);
  const bool good = run_cases(*cases, setup, options.json_path, results);
  torch.reset();

  std::printf("%s\n\n%s", headline(results).c_str(), summary(results).c_str());
  if (!options.json_path.empty()) {
    if (!write_json(options.json_path, results)) {
      return usage_error("--json is " + options.json_path + ", cannot write there");
    }
    std::printf("\nwrote %s\n", options.json_path.c_str());
  }
  return good ? kExitOk : kExitFailed;
}

}  // namespace fovea::cli
