// Checks the contenders of one case, times them, writes their rows.
#include "cli/bench_case.h"

#include <algorithm>

#include "backend/cpu/isa.h"
#include "cli/arena.h"
#include "cli/peak.h"
#include "cli/table.h"

namespace fovea::cli {
namespace {

// Tensors of a case beyond this many bytes are not sent to a peer on a GPU: it draws its own.
constexpr size_t kMostSentBytes = size_t{2} << 30;

// Looks at the peak of the CPU once more, while nobody who is measured is at work.
void look_at_peak(BenchSetup& setup, DType dtype) {
  if (on_gpu(setup)) return;
  pause(setup.timing);
  double& peak = setup.peaks[dtype];
  peak = std::max(peak, cpu_peak_flops(dtype, setup.threads));
}

// One case on its way, and where its rows go.
struct Bench {
  const BenchCase& what;
  BenchSetup& setup;
  Arena& arena;
  std::vector<Row>& rows;
  std::vector<Skipped>& skipped;
};

Row row_of(Bench& bench, Contender& contender, BenchPass pass, const Timing& timing,
           const Verdict& verdict) {
  const Work work = bench.arena.work(pass);
  const double seconds = std::max(timing.ms, 1e-6) * 1e-3;
  Row row;
  row.suite = bench.what.suite;
  row.case_text = bench.what.text;
  row.problem = bench.arena.problem();
  if (const auto* layer = std::get_if<harness::LayerCase>(&bench.what.one_case)) {
    row.layer = layer_name(*layer);
    row.embed_dim = layer->embed_dim;
  }
  row.pass = pass;
  row.impl = contender.impl();
  row.kernel = contender.kernel();
  row.timing = contender.timing(pass);
  row.ms = timing.ms;
  row.ms_p10 = timing.ms_p10;
  row.ms_p90 = timing.ms_p90;
  row.tflops = work.flops / seconds * 1e-12;
  row.gbps = work.bytes / seconds * 1e-9;
  row.max_err = verdict.max_err;
  row.err_bound = verdict.err_bound;
  row.ok = verdict.ok;
  row.mem_bytes = contender.memory_bytes(pass);
  return row;
}

Status bench_pass(Bench& bench, BenchPass pass) {
  const auto skip = [&](const Contender& contender, const std::string& why) {
    bench.skipped.push_back(
        {contender.impl(), std::string(pass_text(pass)) + ": " + why, bench.what.text});
  };
  std::vector<Contender*> running;
  std::vector<Verdict> verdicts;
  for (const auto& contender : bench.arena.contenders()) {
    Verdict verdict;
    if (bench.setup.check && contender->comparable()) {
      const Result<Verdict> checked = bench.arena.check(*contender, pass);
      if (!checked.ok()) {
        if (running.empty()) return checked.status();
        skip(*contender, checked.status().message());
        continue;
      }
      verdict = *checked;
    }
    running.push_back(contender.get());
    verdicts.push_back(verdict);
  }
  if (Status done = bench.arena.prepare(); !done.ok()) return done;
  if (bench.setup.watch != nullptr) bench.setup.watch->look();
  look_at_peak(bench.setup, bench.arena.problem().dtype);
  const std::vector<Timing> timings = measure(running, pass, bench.setup.timing);
  for (size_t i = 0; i < running.size(); ++i) {
    if (timings[i].failure.empty()) {
      bench.rows.push_back(row_of(bench, *running[i], pass, timings[i], verdicts[i]));
    } else {
      if (i == 0) return {StatusCode::kInternal, timings[i].failure};
      skip(*running[i], timings[i].failure);
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

bool on_gpu(const BenchSetup& setup) { return setup.device.device.type != DeviceType::kCpu; }

TorchPeer::Inputs inputs_for(const BenchSetup& setup, size_t bytes) {
  const bool worth_sending = setup.check && bytes <= kMostSentBytes;
  return !on_gpu(setup) || worth_sending ? TorchPeer::Inputs::kSame : TorchPeer::Inputs::kOwn;
}

std::optional<double> peak_of(const BenchSetup& setup, DType dtype) {
  if (on_gpu(setup)) return gpu_peak_flops(setup.device.gpu, dtype);
  const auto at = setup.peaks.find(dtype);
  if (at == setup.peaks.end() || at->second == 0) return std::nullopt;
  return at->second;
}

std::vector<BenchPass> passes_of(const harness::AnyCase& c) {
  std::vector<BenchPass> passes;
  if (const auto* layer = std::get_if<harness::LayerCase>(&c)) {
    if (layer->forward) passes.push_back(BenchPass::kForward);
    if (layer->training) passes.push_back(BenchPass::kTraining);
  } else {
    const auto& problem = std::get<harness::Case>(c);
    if (problem.forward) passes.push_back(BenchPass::kForward);
    if (problem.backward) passes.push_back(BenchPass::kBackward);
  }
  return passes;
}

Status bench_case(const BenchCase& what, BenchSetup& setup, const BenchObserver& observer,
                  std::vector<Row>& rows, std::vector<Skipped>& skipped) {
  const std::unique_ptr<Arena> arena = std::holds_alternative<harness::LayerCase>(what.one_case)
                                           ? make_layer_arena(what, setup)
                                           : make_operator_arena(what, setup);
  if (Status done = arena->admit(skipped); !done.ok()) return done;
  Bench bench{what, setup, *arena, rows, skipped};
  for (const BenchPass pass : passes_of(what.one_case)) {
    observer.begin(pass);
    const size_t first = rows.size();
    if (Status done = bench_pass(bench, pass); !done.ok()) return done;
    observer.end(pass, outcome_of(rows, first));
  }
  return {};
}

}  // namespace fovea::cli
