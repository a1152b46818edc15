// The program fovea: its command line, and nothing else.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <functional>

#include "cli/commands.h"
#include "fovea/version.h"

namespace fovea::cli {
namespace {

constexpr const char* kCaseHelp = R"(
A case is one line of key=value words, all optional but q and d:
  b hq hkv q kv d dv       batch, query heads, KV heads, lengths, head dims
                           (b=1 hq=1 hkv=hq kv=q dv=d when left out)
  dtype=f32|f16|bf16       pass=fwd|bwd|fwd,bwd
  mask=none|causal|window:LEFT:RIGHT    prefix=N
  bias  boolmask  alibi  sink  softcap=C  dropout=P  scale=S  keylens  varlen
  data=normal|spiky|large_logits|constant|tiny|outlier_channels    seed=N
)";

constexpr const char* kLayerHelp = R"(
With layer it is a whole layer, causal; q and e must be given:
  layer=mha|self|gqa|mqa|latent|ccgqa       preset=hydra|zaya (ccgqa)
  b hq hkv q d e           as above, and the model's width
                           (hkv=hq d=e/hq when left out, ccgqa: d=e/(4*hq))
  dtype=f32|f16|bf16       pass=fwd|fwd+bwd|fwd,fwd+bwd
  position=rope|none       seed=N
)";

using Command = std::function<int()>;

constexpr const char* kRunningMaxHelp =
    "Keep the classic softmax with a running maximum on the hopper engine, which otherwise does "
    "without one where it can; the other engines have one way";

void add_info(CLI::App& app, InfoOptions& options, Command& chosen) {
  CLI::App* command =
      app.add_subcommand("info", "Show this machine, the engines that can run on it, and versions");
  command->add_flag("--json", options.json, "Write it as JSON");
  command->add_flag("--support", options.support,
                    "Print which engine takes which feature, as a markdown table");
  command->footer("Examples:\n  fovea info\n  fovea info --support");
  command->callback([&] { chosen = [&] { return run_info(options); }; });
}

void add_case_options(CLI::App& command, CaseOptions& options) {
  command.add_option("--case", options.text, "The attention problem, as key=value words")
      ->required();
  command.add_option("--backend", options.backend,
                     "Use this engine (one that `fovea info` lists); otherwise the best that takes "
                     "the case");
  command.add_option("--device", options.device,
                     "Where to run: cpu (the default), cuda (the first GPU) or cuda:N");
  command.add_flag("--running-max", options.running_max, kRunningMaxHelp);
  command
      .add_option("--threads", options.threads,
                  "CPU threads; otherwise FOVEA_NUM_THREADS, or all cores")
      ->check(CLI::Range(1, 1024));
}

void add_explain(CLI::App& app, CaseOptions& options, Command& chosen) {
  CLI::App* command = app.add_subcommand(
      "explain", "Show how a problem would be computed, and why not by the other engines");
  add_case_options(*command, options);
  command->footer(std::string("Example:\n  fovea explain --case \"b=2 hq=32 hkv=8 q=4096 d=128 ") +
                  "dtype=bf16 mask=causal\"\n" + kCaseHelp);
  command->callback([&] { chosen = [&] { return run_explain(options); }; });
}

void add_check(CLI::App& app, CaseOptions& options, Command& chosen) {
  CLI::App* command = app.add_subcommand(
      "check", "Run one problem and hold every output against the float64 oracle");
  add_case_options(*command, options);
  command->footer(
      std::string(
          "Each output may err at most twice as much as the plain unfused formula does in the\n"
          "same dtype. Large cases are checked on a sample. Exit code 1 when an output is wrong.\n"
          "\nExample:\n  fovea check --case \"b=1 hq=4 hkv=2 q=300 d=64 dtype=bf16 mask=causal ") +
      "pass=fwd,bwd\"\n  fovea check --device cuda --case \"hq=8 q=512 d=128 dtype=bf16\"\n" +
      kCaseHelp);
  command->callback([&] { chosen = [&] { return run_check(options); }; });
}

void add_bench(CLI::App& app, BenchOptions& options, bool& no_check, Command& chosen) {
  CLI::App* command =
      app.add_subcommand("bench", "Measure speed, checked against the oracle, beside other peers");
  command->add_option("--case", options.cases, "Measure this problem; may be given several times");
  command->add_option("--suite", options.suites,
                      "Measure this suite of cases; otherwise cpu or gpu-prefill, by the device, "
                      "and with --quick quick or gpu-quick");
  command->add_flag("--list", options.list, "List the suites and their cases, measure nothing");
  command->add_option("--filter", options.filter,
                      "Keep the cases whose \"suite case\" text matches this regular expression");
  command
      ->add_option(
          "--peers", options.peers,
          "Measure these too, separated by commas: torch (the default), which is "
          "torch-flash,torch-cudnn,torch-efficient on a GPU and torch-cpu on the CPU; "
          "reference, on the CPU; or none. Of layers torch is "
          "torch-flash,torch-cudnn,torch-eager,torch-compile on a GPU; on the CPU "
          "torch-cpu, and torch-compile only by its name; beside ccgqa also the gqa layer: "
          "torch-gqa-flash,torch-gqa-cudnn or torch-gqa-cpu")
      ->delimiter(',');
  command->add_option("--device", options.device,
                      "Where to measure: cpu, cuda (the first GPU) or cuda:N; otherwise the first "
                      "GPU if there is one, else the CPU");
  command->add_option("--json", options.json_path, "Write the results to this file");
  command->add_flag("--quick", options.quick, "Fewer samples, and by default fewer cases");
  command
      ->add_option("--threads", options.threads,
                   "CPU threads of fovea and of every peer; otherwise FOVEA_NUM_THREADS, or all")
      ->check(CLI::Range(1, 1024));
  command->add_option("--backend", options.backend,
                      "Measure this engine, one that `fovea info` lists for the device");
  command
      ->add_option("--min-time", options.min_time,
                   "Seconds that the samples of one case, pass and peer last together, at least")
      ->check(CLI::Range(0.001, 3600.0));
  command->add_flag("--running-max", options.running_max, kRunningMaxHelp);
  command->add_flag("--no-check", no_check, "Do not compare the outputs with the oracle");
  command->add_option("--cases-dir", options.cases_dir, "Where the suites are: a folder of .json");
  command->footer(
      std::string(
          "Everybody gets the same inputs, bytes for bytes, and the same number of threads. After\n"
          "a warm-up, samples are taken in rounds that go through all peers and back; the table\n"
          "shows the median, the 10th and 90th percentile, and how much longer each peer took.\n"
          "Caches are not flushed between runs. On a GPU every contender runs as replays of a "
          "CUDA\n"
          "graph, timed by the GPU's clock; with --no-check, and where the tensors of a case are\n"
          "larger than 2 GiB, peers there draw their own inputs and are not checked. Torch runs\n"
          "in the Python of FOVEA_PYTHON, else of .venv, else python3. Exit code 1 when a result\n"
          "of fovea is wrong.\n"
          "\nExamples:\n"
          "  fovea bench --quick\n"
          "  fovea bench --device cpu --suite cpu --json cpu.json\n"
          "  fovea bench --suite gpu-small --peers torch-flash,torch-cudnn\n"
          "  fovea bench --suite ccgqa\n"
          "  fovea bench --case \"b=2 hq=16 hkv=4 q=2048 d=128 dtype=bf16 mask=causal ") +
      "pass=fwd,bwd\"\n" + kCaseHelp + kLayerHelp);
  command->callback([&] {
    options.check = !no_check;
    if (options.peers.empty()) options.peers = {"torch"};
    chosen = [&] { return run_bench(options); };
  });
}

void add_compare(CLI::App& app, CompareOptions& options, Command& chosen) {
  CLI::App* command =
      app.add_subcommand("compare", "Compare two results of `fovea bench --json`, row by row");
  command->add_option("before", options.before, "The older result")->required();
  command->add_option("after", options.after, "The newer result")->required();
  command
      ->add_option("--fail-under", options.fail_under,
                   "Exit with 1 when any row's ratio, time before over time after, is below this")
      ->check(CLI::Range(0.001, 1000.0));
  command->footer(
      "Example:\n"
      "  fovea compare main.json branch.json --fail-under 0.95   # fails when a row is 5 % slower");
  command->callback([&] { chosen = [&] { return run_compare(options); }; });
}

int run(int argc, char** argv) {
  CLI::App app{"fovea: attention for CPUs and GPUs, planned, checked and measured.", "fovea"};
  InfoOptions info;
  CaseOptions explain, check;
  BenchOptions bench;
  bool no_check = false;
  CompareOptions compare;
  Command chosen;
  bool show_version = false;
  app.add_flag("--version", show_version, "Print the version");
  add_info(app, info, chosen);
  add_explain(app, explain, chosen);
  add_check(app, check, chosen);
  add_bench(app, bench, no_check, chosen);
  add_compare(app, compare, chosen);
  app.footer(
      "Start with `fovea info`, then `fovea bench --quick`. `fovea COMMAND --help` tells more.\n"
      "Exit codes: 0 done, 1 a result is wrong or too slow, 2 the request is.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  if (show_version) {
    std::printf("fovea %s\n", version());
    return kExitOk;
  }
  if (!chosen) {
    std::fprintf(stderr, "A command is required: info, explain, check, bench or compare\n\n%s",
                 app.help().c_str());
    return kExitUsage;
  }
  return chosen();
}

}  // namespace
}  // namespace fovea::cli

int main(int argc, char** argv) {
  try {
    return fovea::cli::run(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs("fovea: not enough memory for this case\n", stderr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fovea: %s\n", error.what());
  }
  return fovea::cli::kExitFailed;
}
