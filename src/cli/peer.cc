// Drives the torch worker: JSON lines for requests, raw files for tensors.
#include "cli/peer.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

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

// Elements from the first to the last that a view reaches: its memory, gaps included.
int64_t span(const TensorView& t) {
  int64_t last = 0;
  for (size_t i = 0; i < static_cast<size_t>(t.rank); ++i) {
    if (t.sizes[i] == 0) return 0;
    last += (t.sizes[i] - 1) * t.strides[i];
  }
  return last + 1;
}

Result<Json> write_tensor(const TensorView& t, const fs::path& path) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(t.data), span(t) * dtype_bytes(t.dtype));
  file.close();
  if (!file) return failed("cannot write " + path.string());
  Json sizes = Json::array(), strides = Json::array();
  for (size_t i = 0; i < static_cast<size_t>(t.rank); ++i) {
    sizes.push_back(t.sizes[i]);
    strides.push_back(t.strides[i]);
  }
  return Json{{"file", path.string()},
              {"dtype", dtype_name(t.dtype)},
              {"sizes", sizes},
              {"strides", strides}};
}

// Fills a [batch, len, head, dim] view of any strides from dense bytes.
Status read_tensor(const fs::path& path, const TensorView& t) {
  const int64_t bytes = dtype_bytes(t.dtype);
  std::ifstream file(path, std::ios::binary);
  for (int64_t b = 0; b < t.sizes[0]; ++b) {
    for (int64_t i = 0; i < t.sizes[1]; ++i) {
      for (int64_t h = 0; h < t.sizes[2]; ++h) {
        const int64_t at = b * t.strides[0] + i * t.strides[1] + h * t.strides[2];
        file.read(static_cast<char*>(t.data) + at * bytes, t.sizes[3] * bytes);
      }
    }
  }
  if (!file) return failed("cannot read " + path.string());
  return {};
}

Json describe(const harness::Case& c) {
  const AttentionProblem& p = c.problem;
  Json scale = p.scale ? Json(*p.scale) : Json();
  return {{"b", p.batch},
          {"hq", p.head_q},
          {"hkv", p.head_kv},
          {"q", p.q_len},
          {"kv", p.kv_len},
          {"left", p.mask.left},
          {"right", p.mask.right},
          {"prefix", p.mask.prefix},
          {"scale", scale},
          {"alibi", has(p.features, Feature::kAlibi)},
          {"inexpressible",
           {{"softcap", p.softcap > 0},
            {"sink", has(p.features, Feature::kSink)},
            {"key lengths", has(p.features, Feature::kKeyLengths)},
            {"packed layout", p.layout == Layout::kPacked},
            {"dropout that fovea would draw alike", p.dropout > 0},
            {"gradient of lse", c.want_dlse},
            {"gradient of the bias asked for here", c.want_dbias}}}};
}

}  // namespace

class TorchContender : public Contender {
 public:
  TorchContender(TorchPeer& peer, std::string kernel, harness::CaseTensors& tensors)
      : peer_(peer), kernel_(std::move(kernel)), tensors_(tensors) {}

  std::string impl() const override { return "torch-cpu"; }
  std::string kernel() const override { return kernel_; }
  bool gives_lse() const override { return false; }

  Result<double> sample(Pass pass, int repeats, WarmRun warm) override {
    const Result<Json> answer = ask(*peer_.process_,
                                    {{"cmd", "sample"},
                                     {"pass", pass_name(pass)},
                                     {"repeats", repeats},
                                     {"warm", warm == WarmRun::kUncounted}},
                                    kAnswerSeconds);
    if (!answer.ok()) return answer.status();
    return answer->at("seconds").get<double>();
  }

  Status produce(Pass pass) override {
    const Result<Json> answer =
        ask(*peer_.process_,
            {{"cmd", "outputs"}, {"pass", pass_name(pass)}, {"dir", peer_.folder_.string()}},
            kAnswerSeconds);
    if (!answer.ok()) return answer.status();
    const BackwardTensors& t = tensors_.backward();
    if (pass == Pass::kForward) return take("out", tensors_.forward().out);
    for (const auto& [name, view] : {std::pair("dq", t.dq), {"dk", t.dk}, {"dv", t.dv}}) {
      if (Status done = take(name, view); !done.ok()) return done;
    }
    return {};
  }

  std::optional<int64_t> memory_bytes(Pass pass) override {
    const Result<Json> answer =
        ask(*peer_.process_, {{"cmd", "memory"}, {"pass", pass_name(pass)}}, kAnswerSeconds);
    if (!answer.ok() || !answer->at("bytes").is_number()) return std::nullopt;
    return answer->at("bytes").get<int64_t>();
  }

 private:
  Status take(const char* name, const TensorView& view) {
    const fs::path path = peer_.folder_ / (std::string(name) + ".bin");
    Status done = read_tensor(path, view);
    std::error_code ignored;
    fs::remove(path, ignored);
    return done;
  }

  TorchPeer& peer_;
  std::string kernel_;
  harness::CaseTensors& tensors_;
};

Result<std::unique_ptr<TorchPeer>> TorchPeer::start(int threads) {
  const Result<std::string> script = find_script();
  if (!script.ok()) return script.status();
  const Result<fs::path> folder = make_folder();
  if (!folder.ok()) return folder.status();
  std::unique_ptr<TorchPeer> peer(new TorchPeer);
  peer->folder_ = *folder;
  const std::string python = python_command();
  const fs::path messages = peer->folder_ / "messages.txt";
  const std::string count = std::to_string(threads);
  Result<ChildProcess> process = ChildProcess::start(
      {python, *script}, {"OMP_NUM_THREADS=" + count, "MKL_NUM_THREADS=" + count},
      messages.string());
  if (!process.ok()) return failed(process.status().message());
  peer->process_ = std::make_unique<ChildProcess>(std::move(*process));
  const Result<Json> hello =
      ask(*peer->process_, {{"cmd", "hello"}, {"threads", threads}}, kStartSeconds);
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

Result<std::unique_ptr<Contender>> TorchPeer::open(const harness::Case& c,
                                                   harness::CaseTensors& tensors) {
  const AttentionInputs& in = tensors.forward();
  Json files = Json::object();
  std::vector<std::pair<const char*, TensorView>> given = {
      {"q", in.q},       {"k", in.k},       {"v", in.v},
      {"bias", in.bias}, {"mask", in.mask}, {"alibi_slopes", in.alibi_slopes}};
  if (c.backward) given.emplace_back("dout", tensors.backward().dout);
  for (const auto& [name, view] : given) {
    if (!view.given()) continue;
    const Result<Json> file = write_tensor(view, folder_ / (std::string(name) + ".bin"));
    if (!file.ok()) return file.status();
    files[name] = *file;
  }
  const Result<Json> answer =
      ask(*process_, {{"cmd", "open"}, {"case", describe(c)}, {"tensors", files}}, kAnswerSeconds);
  for (const auto& item : files.items()) {
    std::error_code ignored;
    fs::remove(item.value().at("file").get<std::string>(), ignored);
  }
  if (!answer.ok()) return answer.status();
  return std::unique_ptr<Contender>(
      std::make_unique<TorchContender>(*this, answer->value("kernel", "sdpa"), tensors));
}

}  // namespace fovea::cli
