// The peer torch: PyTorch in a Python process of its own, given the very bytes fovea gets.
// bench/peers/torch_worker.py is the other end.
//
//   Result<std::unique_ptr<TorchPeer>> torch = TorchPeer::start(Device::cuda(0), threads);
//   Status loaded = load_operator(**torch, c, tensors, TorchPeer::Inputs::kSame);
//   Result<std::unique_ptr<Contender>> flash = (*torch)->open("flash");
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "cli/contender.h"
#include "cli/process.h"

namespace fovea::cli {

struct PeerCase;

class TorchPeer {
 public:
  // Fails, with the reason, where there is no Python, no torch, no peer script, or where torch
  // cannot use the device.
  static Result<std::unique_ptr<TorchPeer>> start(Device device, int threads);
  ~TorchPeer();

  const std::string& version() const { return version_; }

  // kOwn: random inputs of the same sizes and distribution, made where they are used. For inputs so
  // large that sending them takes longer than the benchmark; the outputs then cannot be checked.
  enum class Inputs { kSame, kOwn };

  // One case at a time: its contenders live until the next load. The tensors must outlive them.
  Status load(PeerCase peer_case, Inputs inputs);

  // One of torch's engines (peer_choice.h) on the case that is loaded. Fails where that engine does
  // not take it.
  Result<std::unique_ptr<Contender>> open(const std::string& backend);

 private:
  friend class TorchContender;
  TorchPeer();

  std::filesystem::path folder_;  // of its own, for tensors on their way and the worker's messages
  std::unique_ptr<ChildProcess> process_;
  Device device_;
  std::string version_;
  std::unique_ptr<PeerCase> case_;
  Inputs inputs_ = Inputs::kSame;
};

}  // namespace fovea::cli
