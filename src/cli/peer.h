// The peer torch: PyTorch's scaled_dot_product_attention in a Python process of its own, given the
// very bytes fovea gets. bench/peers/torch_sdpa.py is the other end.
//
//   Result<std::unique_ptr<TorchPeer>> torch = TorchPeer::start(Device::cuda(0), threads);
//   Status loaded = (*torch)->load(c, tensors, TorchPeer::Inputs::kSame);
//   Result<std::unique_ptr<Contender>> flash = (*torch)->open("flash");
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "cli/contender.h"
#include "cli/process.h"
#include "harness/case.h"

namespace fovea::cli {

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

  // One case at a time: its contenders live until the next load. Fails where torch has no such
  // call. The tensors must outlive the contenders.
  Status load(const harness::Case& c, harness::CaseTensors& tensors, Inputs inputs);

  // One of torch's engines on the case that is loaded: "cpu", or "flash", "cudnn", "efficient" on a
  // GPU. Fails where that engine does not take it.
  Result<std::unique_ptr<Contender>> open(const std::string& backend);

 private:
  friend class TorchContender;
  TorchPeer() = default;

  std::filesystem::path folder_;  // of its own, for tensors on their way and the worker's messages
  std::unique_ptr<ChildProcess> process_;
  Device device_;
  std::string version_;
  harness::CaseTensors* tensors_ = nullptr;
  Inputs inputs_ = Inputs::kSame;
};

}  // namespace fovea::cli
