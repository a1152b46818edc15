// Drives the torch worker: JSON lines for requests, raw files for tensors.
#include "cli/peer.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/refusal.h"
#include "cli/json.h"
#include "cli/peer_case.h"
#include "cli/peer_tensors.h"
#include "cli/timing.h"

namespace fovea::cli {
namespace {

namespace fs = std::filesystem;

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
    const fs::path script = place / "torch_worker.py";
    if (fs::exists(script)) return script.string();
  }
  return failed("bench/peers/torch_worker.py is not in the source tree, FOVEA_BENCH_DIR or here");
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

}  // namespace

class TorchContender : public Contender {
 public:
  // `same`: it computes what fovea does, and not another layer in its place.
  TorchContender(TorchPeer& peer, std::string backend, std::string kernel, bool same)
      : peer_(peer), backend_(std::move(backend)), kernel_(std::move(kernel)), same_(same) {}

  std::string impl() const override { return "torch-" + backend_; }
  std::string kernel() const override { return kernel_; }
  bool gives_lse() const override { return false; }
  bool comparable() const override { return same_ && peer_.inputs_ == TorchPeer::Inputs::kSame; }
  const char* timing(BenchPass pass) const override {
    if (peer_.device_.type == DeviceType::kCpu) return "host";
    return eager_.at(pass) ? "eager" : "graph";
  }

  Result<double> sample(BenchPass pass, int repeats, WarmRun warm) override {
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
    eager_[pass] = answer->value("eager", false);
    return answer->at("seconds").get<double>() * share;
  }

  Status produce(BenchPass pass) override {
    Json asked = request("outputs", pass);
    asked["dir"] = peer_.folder_.string();
    const Result<Json> answer = ask(*peer_.process_, asked, kAnswerSeconds);
    if (!answer.ok()) return answer.status();
    for (const PeerTensor& output : peer_.case_->outputs(pass)) {
      if (Status done = take(output); !done.ok()) return done;
    }
    return {};
  }

  std::optional<int64_t> memory_bytes(BenchPass pass) override {
    const Result<Json> answer = ask(*peer_.process_, request("memory", pass), kAnswerSeconds);
    if (!answer.ok() || !answer->at("bytes").is_number()) return std::nullopt;
    return answer->at("bytes").get<int64_t>();
  }

 private:
  Json request(const char* command, BenchPass pass) const {
    return {{"cmd", command}, {"backend", backend_}, {"pass", pass_text(pass)}};
  }

  Status take(const PeerTensor& output) {
    const fs::path path = peer_.folder_ / (output.name + ".bin");
    Status done = read_tensor(path, output.view);
    std::error_code ignored;
    fs::remove(path, ignored);
    return done;
  }

  TorchPeer& peer_;
  std::string backend_;
  std::string kernel_;
  bool same_;
  std::map<BenchPass, bool> eager_;  // the last sample was not of a graph
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

TorchPeer::TorchPeer() = default;

TorchPeer::~TorchPeer() {
  process_.reset();
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

Status TorchPeer::load(PeerCase peer_case, Inputs inputs) {
  case_ = std::make_unique<PeerCase>(std::move(peer_case));
  inputs_ = inputs;
  Json sent = Json::object();
  for (const PeerInput& input : case_->inputs) {
    if (!input.view.given()) continue;
    if (inputs == Inputs::kOwn && !input.distribution.empty()) {
      sent[input.name] = describe_tensor(input.view);
      sent[input.name]["draw"] = input.distribution;
      sent[input.name]["deviation"] = input.deviation;
      continue;
    }
    Result<Json> file = write_tensor(input.view, folder_ / (input.name + ".bin"));
    if (!file.ok()) return file.status();
    sent[input.name] = std::move(*file);
  }
  const Result<Json> answer =
      ask(*process_, {{"cmd", "load"}, {"case", case_->description}, {"tensors", sent}},
          kAnswerSeconds);
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
  return std::unique_ptr<Contender>(std::make_unique<TorchContender>(
      *this, backend, answer->value("kernel", "torch"), answer->value("same", true)));
}

}  // namespace fovea::cli
