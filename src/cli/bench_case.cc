// Contenders of one case, their accuracy, their times.
#include "cli/bench_case.h"

#include <algorithm>
#include <cmath>

#include "backend/cpu/isa.h"
#include "cli/cost.h"
#include "cli/cuda/contender.h"
#include "cli/peak.h"
#include "cli/table.h"
#include "harness/comparison.h"

namespace fovea::cli {
namespace {

using harness::Accuracy;

// The verdict of one pass: of all its outputs the one with the largest error for its bound.
struct Verdict {
  std::optional<double> max_err;
  std::optional<double> err_bound;
  std::optional<bool> ok;
};

Verdict verdict_of(const std::vector<Accuracy>& outputs, bool lse) {
  Verdict verdict;
  double worst = -1;
  bool ok = true;
  for (const Accuracy& a : outputs) {
    if (a.tensor == "lse" && !lse) continue;
    ok = ok && a.ok;
    double share = a.bound > 0 ? a.max_err / a.bound : a.max_err > 0 ? HUGE_VAL : 0;
    if (std::isnan(share)) share = HUGE_VAL;
    if (share > worst) {
      worst = share;
      verdict.max_err = a.max_err;
      verdict.err_bound = a.bound;
    }
  }
  if (worst >= 0) verdict.ok = ok;
  return verdict;
}

// Everything about one case that outlives a pass.
struct Arena {
  const BenchCase& what;
  BenchSetup& setup;
  harness::CaseTensors tensors;
  harness::Comparison comparison;  // the oracle is asked once for all contenders
  std::vector<std::unique_ptr<Contender>> contenders;  // the subject first
  double pairs = 0;

  Arena(const BenchCase& one, BenchSetup& with)
      : what(one),
        setup(with),
        tensors(one.one_case),
        comparison(one.one_case, tensors, with.check_cost),
        pairs(visible_pairs(one.one_case.problem, tensors.forward())) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
};

// From poisoned outputs, so that none can pass by what an earlier run left there.
Result<Verdict> check(Arena& arena, Contender& contender, Pass pass) {
  const bool forward = pass == Pass::kForward;
  if (forward) {
    arena.tensors.poison_outputs();
  } else {
    arena.tensors.poison_gradients();
  }
  if (Status done = contender.produce(pass); !done.ok()) return done;
  return verdict_of(forward ? arena.comparison.forward() : arena.comparison.backward(),
                    contender.gives_lse());
}

bool on_gpu(const BenchSetup& setup) { return setup.device.device.type != DeviceType::kCpu; }

// Tensors of a case beyond this many bytes are not sent to a peer on a GPU: it draws its own.
constexpr size_t kMostSentBytes = size_t{2} << 30;

TorchPeer::Inputs inputs_for(const Arena& arena) {
  // Only normal data can be drawn there. On the CPU everybody always gets the same bytes.
  if (!on_gpu(arena.setup) || arena.what.one_case.data != harness::DataFamily::kNormal) {
    return TorchPeer::Inputs::kSame;
  }
  const bool worth_sending = arena.setup.check && arena.tensors.bytes() <= kMostSentBytes;
  return worth_sending ? TorchPeer::Inputs::kSame : TorchPeer::Inputs::kOwn;
}

void admit_torch(Arena& arena, std::vector<Skipped>& skipped) {
  if (arena.setup.torch == nullptr) return;
  TorchPeer& torch = *arena.setup.torch;
  const Status loaded = torch.load(arena.what.one_case, arena.tensors, inputs_for(arena));
  for (const std::string& backend : arena.setup.torch_backends) {
    Result<std::unique_ptr<Contender>> contender = loaded;
    if (loaded.ok()) contender = torch.open(backend);
    if (contender.ok()) {
      arena.contenders.push_back(std::move(*contender));
    } else {
      skipped.push_back({"torch-" + backend, contender.status().message(), arena.what.text});
    }
  }
}

Status admit_subject(Arena& arena, const Plan& plan) {
  const bool backward = arena.what.one_case.backward;
  if (!on_gpu(arena.setup)) {
    arena.contenders.push_back(std::make_unique<FoveaContender>(plan, arena.tensors, backward));
    return {};
  }
  Result<std::unique_ptr<Contender>> there =
      open_cuda_contender(plan, arena.tensors, arena.setup.device.device, backward);
  if (!there.ok()) return there.status();
  arena.contenders.push_back(std::move(*there));
  return {};
}

Status admit_contenders(Arena& arena, std::vector<Skipped>& skipped) {
  const harness::Case& c = arena.what.one_case;
  const BenchSetup& setup = arena.setup;
  const Result<Plan> plan = make_plan(
      c.problem, setup.device.device,
      {.backend = setup.backend, .threads = setup.threads, .softmax = setup.device.softmax});
  if (!plan.ok()) return plan.status();
  if (Status done = admit_subject(arena, *plan); !done.ok()) return done;
  if (setup.reference_peer && plan->backend() != "reference") {
    Result<Plan> reference =
        make_plan(c.problem, Device::cpu(), {.backend = "reference", .threads = setup.threads});
    if (reference.ok()) {
      arena.contenders.push_back(
          std::make_unique<FoveaContender>(*reference, arena.tensors, c.backward));
    } else {
      skipped.push_back({"fovea-reference", reference.status().message(), arena.what.text});
    }
  }
  admit_torch(arena, skipped);
  return {};
}

std::optional<double> peak_of(BenchSetup& setup, DType dtype) {
  if (on_gpu(setup)) return gpu_peak_flops(setup.device.gpu, dtype);
  const auto [at, fresh] = setup.peaks.try_emplace(dtype);
  if (fresh) {
    const double measured = cpu_peak_flops(dtype, setup.threads);
    if (measured > 0) at->second = measured;  // the engine knows no peak for f64
  }
  return at->second;
}

Row row_of(Arena& arena, Contender& contender, Pass pass, const Timing& timing,
           const Verdict& verdict) {
  const harness::Case& c = arena.what.one_case;
  const double bytes = pass == Pass::kForward ? minimal_bytes(arena.tensors.forward())
                                              : minimal_bytes(arena.tensors.backward());
  const double work = flops(c.problem, arena.pairs, pass);
  const double seconds = std::max(timing.ms, 1e-6) * 1e-3;
  Row row;
  row.suite = arena.what.suite;
  row.case_text = arena.what.text;
  row.one_case = c;
  row.pass = pass;
  row.impl = contender.impl();
  row.kernel = contender.kernel();
  row.timing = contender.timing(pass);
  row.ms = timing.ms;
  row.ms_p10 = timing.ms_p10;
  row.ms_p90 = timing.ms_p90;
  row.tflops = work / seconds * 1e-12;
  row.gbps = bytes / seconds * 1e-9;
  if (const auto peak = peak_of(arena.setup, c.problem.dtype)) {
    row.peak_fraction = work / seconds / *peak;
  }
  row.max_err = verdict.max_err;
  row.err_bound = verdict.err_bound;
  row.ok = verdict.ok;
  row.mem_bytes = contender.memory_bytes(pass);
  return row;
}

Status bench_pass(Arena& arena, Pass pass, std::vector<Row>& rows, std::vector<Skipped>& skipped) {
  const std::string of_pass = std::string(pass_text(pass)) + ": ";
  std::vector<Contender*> running;
  std::vector<Verdict> verdicts;
  for (const auto& contender : arena.contenders) {
    Verdict verdict;
    if (arena.setup.check && contender->comparable()) {
      const Result<Verdict> checked = check(arena, *contender, pass);
      if (!checked.ok()) {
        if (running.empty()) return checked.status();
        skipped.push_back(
            {contender->impl(), of_pass + checked.status().message(), arena.what.text});
        continue;
      }
      verdict = *checked;
    }
    running.push_back(contender.get());
    verdicts.push_back(verdict);
  }
  // The checks may have left a peer's results, and NaN for lse: backward is timed on fovea's own.
  if (Status done = arena.contenders.front()->produce(Pass::kForward); !done.ok()) return done;
  if (arena.setup.watch != nullptr) arena.setup.watch->look();
  const std::vector<Timing> timings = measure(running, pass, arena.setup.timing);
  for (size_t i = 0; i < running.size(); ++i) {
    if (timings[i].failure.empty()) {
      rows.push_back(row_of(arena, *running[i], pass, timings[i], verdicts[i]));
    } else {
      if (i == 0) return {StatusCode::kInternal, timings[i].failure};
      skipped.push_back({running[i]->impl(), of_pass + timings[i].failure, arena.what.text});
    }
  }
  return {};
}

std::string outcome_of(const std::vector<Row>& rows, size_t first) {
  std::string text;
  for (size_t i = first; i < rows.size(); ++i) {
    if (i > first) text += ", ";
    text += rows[i].impl + " " + format_ms(rows[i].ms) + " ms";
    if (rows[i].ok == false) text += " WRONG";
  }
  return text;
}

}  // namespace

Status bench_case(const BenchCase& what, BenchSetup& setup, const BenchObserver& observer,
                  std::vector<Row>& rows, std::vector<Skipped>& skipped) {
  const harness::Case& c = what.one_case;
  Arena arena(what, setup);
  if (Status done = admit_contenders(arena, skipped); !done.ok()) return done;
  // The backward pass starts from fovea's forward, whether or not that is measured too.
  if (Status done = arena.contenders.front()->produce(Pass::kForward); !done.ok()) return done;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    if (!(pass == Pass::kForward ? c.forward : c.backward)) continue;
    observer.begin(pass);
    const size_t first = rows.size();
    if (Status done = bench_pass(arena, pass, rows, skipped); !done.ok()) return done;
    observer.end(pass, outcome_of(rows, first));
  }
  return {};
}

}  // namespace fovea::cli
