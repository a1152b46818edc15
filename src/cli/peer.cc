// Drives the torch worker: JSON lines for requests, raw files for tensors.
#include "cli/peer.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/refusal.h"
#include "cli/peer_tensors.h"
#include "cli/timing.h"

namespace fovea::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kStartSeconds = 180;    // importing torch from a cold disk
constexpr int kAnswerSeconds = 1800;  // one sample of the largest case

Status failed(const std::string& why) { return {StatusCode::kUnsupported, why}; }

std::string python_command() {
  if (const char* given = std::getenv("FOVEA_PYTHON"); given != nullptr) return given;
  for (const fs::path& root : {fs::path(FOVEA_SOURCE_DIR), fs::current_path()}) {
    const fs::path python = root / ".venv/bin/python";
    if (fs::exists(python)) return python.string();
  }
  return "python3";
}

Result<std::string> find_script() {
  std::vector<fs::path> places;
  if (const char* given = std::getenv("FOVEA_BENCH_DIR"); given != nullptr) {
    places.emplace_back(fs::path(given) / "peers");
  }
  places.emplace_back(fs::path(FOVEA_SOURCE_DIR) / "bench/peers");
  places.emplace_back("bench/peers");
  for (const fs::path& place : places) {
    const fs::path script = place / "torch_sdpa.py";
    if (fs::exists(script)) return script.string();
  }
  return failed("bench/peers/torch_sdpa.py is not in the source tree, FOVEA_BENCH_DIR or here");
}

Result<fs::path> make_folder() {
  std::string name = (fs::temp_directory_path() / "fovea-bench-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) return failed("cannot make a folder " + name);
  return fs::path(name);
}

std::string last_line(const fs::path& path) {
  std::ifstream file(path);
  std::string last;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty()) last = line;
  }
  return last;
}

Result<Json> ask(ChildProcess& process, const Json& request, int seconds) {
  if (Status sent = process.write_line(request.dump()); !sent.ok()) return sent;
  const Result<std::string> line = process.read_line(seconds);
  if (!line.ok()) return line.status();
  Json answer = Json::parse(*line, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object() || !answer.contains("ok")) return failed("it answered: " + *line);
  if (!answer["ok"].get<bool>()) return failed(answer.value("why", "no reason given"));
  return answer;
}

const char* pass_name(Pass pass) { return pass == Pass::kForward ? "fwd" : "bwd"; }

// What scaled_dot_product_attention has no argument for; empty where it can say the case.
std::string inexpressible(const harness::Case& c) {
  const AttentionProblem& p = c.problem;
  if (p.softcap > 0) return "softcap";
  if (has(p.features, Feature::kSink)) return "sink";
  if (has(p.features, Feature::kKeyLengths)) return "key lengths";
  if (p.layout == Layout::kPacked) return "packed layout";
  if (p.dropout > 0) return "dropout that fovea would draw alike";
  if (c.want_dlse) return "gradient of lse";
  if (c.want_dbias) return "gradient of the bias asked for here";
  return {};
}

Json describe(const harness::Case& c) {
  const AttentionProblem& p = c.problem;
  return {{"b", p.batch},
          {"hq", p.head_q},
          {"hkv", p.head_kv},
          {"q", p.q_len},
          {"kv", p.kv_len},
          {"left", p.mask.left},
          {"right", p.mask.right},
          {"prefix", p.mask.prefix},
          {"scale", p.scale ? Json(*p.scale) : Json()},
          {"alibi", has(p.features, Feature::kAlibi)},
          {"tf32", p.tf32 == Tf32::kAllowed},
          {"seed", c.seed}};
}

}  // namespace

class TorchContender : public Contender {
 public:
  TorchContender(TorchPeer& peer, std::string backend, std::string kernel)
      : peer_(peer), backend_(std::move(backend)), kernel_(std::move(kernel)) {}

  std::string impl() const override { return "torch-" + backend_; }
  std::string kernel() const override { return kernel_; }
  bool gives_lse() const override { return false; }
  bool comparable() const override { return peer_.inputs_ == TorchPeer::Inputs::kSame; }
  const char* timing(Pass pass) const override {
    if (peer_.device_.type == DeviceType::kCpu) return "host";
    return eager_[index_of(pass)] ? "eager" : "graph";
  }

  Result<double> sample(Pass pass, int repeats, WarmRun warm) override {
    Json asked = request("sample", pass);
    double share = 1;
    if (peer_.device_.type == DeviceType::kCpu) {
      asked["repeats"] = repeats;
      asked["warm"] = warm == WarmRun::kUncounted;
    } else {
      const ReplayCounts counts = replay_counts(repeats, warm);
      asked["calls"] = counts.calls;
      asked["replays"] = counts.replays;
      asked["uncounted"] = counts.uncounted;
      share = static_cast<double>(repeats) / counts.runs();
    }
    const Result<Json> answer = ask(*peer_.process_, asked, kAnswerSeconds);
    if (!answer.ok()) return answer.status();
    eager_[index_of(pass)] = answer->value("eager", false);
    return answer->at("seconds").get<double>() * share;
  }

  Status produce(Pass pass) override {
    Json asked = request("outputs", pass);
    asked["dir"] = peer_.folder_.string();
    const Result<Json> answer = ask(*peer_.process_, asked, kAnswerSeconds);
    if (!answer.ok()) return answer.status();
    const BackwardTensors& t = peer_.tensors_->backward();
    if (pass == Pass::kForward) return take("out", peer_.tensors_->forward().out);
    for (const auto& [name, view] : {std::pair("dq", t.dq), {"dk", t.dk}, {"dv", t.dv}}) {
      if (Status done = take(name, view); !done.ok()) return done;
    }
    return {};
  }

  std::optional<int64_t> memory_bytes(Pass pass) override {
    const Result<Json> answer = ask(*peer_.process_, request("memory", pass), kAnswerSeconds);
    if (!answer.ok() || !answer->at("bytes").is_number()) return std::nullopt;
    return answer->at("bytes").get<int64_t>();
  }

 private:
  static size_t index_of(Pass pass) { return pass == Pass::kForward ? 0 : 1; }

  Json request(const char* command, Pass pass) const {
    return {{"cmd", command}, {"backend", backend_}, {"pass", pass_name(pass)}};
  }

  Status take(const char* name, const TensorView& view) {
    const fs::path path = peer_.folder_ / (std::string(name) + ".bin");
    Status done = read_tensor(path, view);
    std::error_code ignored;
    fs::remove(path, ignored);
    return done;
  }

  TorchPeer& peer_;
  std::string backend_;
  std::string kernel_;
  std::array<bool, 2> eager_{};  // by pass: the last sample was not of a graph
};

Result<std::unique_ptr<TorchPeer>> TorchPeer::start(Device device, int threads) {
  const Result<std::string> script = find_script();
  if (!script.ok()) return script.status();
  const Result<fs::path> folder = make_folder();
  if (!folder.ok()) return folder.status();
  std::unique_ptr<TorchPeer> peer(new TorchPeer);
  peer->folder_ = *folder;
  peer->device_ = device;
  const std::string python = python_command();
  const fs::path messages = peer->folder_ / "messages.txt";
  const std::string count = std::to_string(threads);
  Result<ChildProcess> process = ChildProcess::start(
      {python, *script}, {"OMP_NUM_THREADS=" + count, "MKL_NUM_THREADS=" + count},
      messages.string());
  if (!process.ok()) return failed(process.status().message());
  peer->process_ = std::make_unique<ChildProcess>(std::move(*process));
  const Result<Json> hello =
      ask(*peer->process_, {{"cmd", "hello"}, {"threads", threads}, {"device", show(device)}},
          kStartSeconds);
  if (!hello.ok()) {
    const std::string said = last_line(messages);
    return failed(hello.status().message() + " (" + python + (said.empty() ? "" : ": " + said) +
                  ")");
  }
  peer->version_ = hello->value("version", "unknown");
  return peer;
}

TorchPeer::~TorchPeer() {
  process_.reset();
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

Status TorchPeer::load(const harness::Case& c, harness::CaseTensors& tensors, Inputs inputs) {
  if (const std::string feature = inexpressible(c); !feature.empty()) {
    return failed("scaled_dot_product_attention has no " + feature);
  }
  tensors_ = &tensors;
  inputs_ = inputs;
  const AttentionInputs& in = tensors.forward();
  // Those that may be drawn there, by their distribution, and one that is computed and small.
  std::vector<std::tuple<const char*, TensorView, const char*>> given = {
      {"q", in.q, "normal"},     {"k", in.k, "normal"},
      {"v", in.v, "normal"},     {"bias", in.bias, "normal"},
      {"mask", in.mask, "mask"}, {"alibi_slopes", in.alibi_slopes, nullptr}};
  if (c.backward) given.emplace_back("dout", tensors.backward().dout, "normal");
  Json sent = Json::object();
  for (const auto& [name, view, distribution] : given) {
    if (!view.given()) continue;
    if (inputs == Inputs::kOwn && distribution != nullptr) {
      sent[name] = describe_tensor(view);
      sent[name]["draw"] = distribution;
      continue;
    }
    Result<Json> file = write_tensor(view, folder_ / (std::string(name) + ".bin"));
    if (!file.ok()) return file.status();
    sent[name] = std::move(*file);
  }
  const Result<Json> answer =
      ask(*process_, {{"cmd", "load"}, {"case", describe(c)}, {"tensors", sent}}, kAnswerSeconds);
  for (const auto& item : sent.items()) {
    std::error_code ignored;
    if (item.value().contains("file")) {
      fs::remove(item.value().at("file").get<std::string>(), ignored);
    }
  }
  return answer.status();
}

Result<std::unique_ptr<Contender>> TorchPeer::open(const std::string& backend) {
  const Result<Json> answer =
      ask(*process_, {{"cmd", "open"}, {"backend", backend}}, kAnswerSeconds);
  if (!answer.ok()) return answer.status();
  return std::unique_ptr<Contender>(
      std::make_unique<TorchContender>(*this, backend, answer->value("kernel", "sdpa")));
}

}  // namespace fovea::cli
