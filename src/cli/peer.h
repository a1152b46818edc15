// The peer torch: PyTorch's scaled_dot_product_attention in a Python process of its own, given the
// very bytes fovea gets. bench/peers/torch_sdpa.py is the other end.
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
  // Fails, with the reason, where there is no Python, no torch or no peer script.
  static Result<std::unique_ptr<TorchPeer>> start(int threads);
  ~TorchPeer();

  const std::string& version() const { return version_; }

  // One case at a time: a contender lives until the next open. Fails where torch has no such call.
  Result<std::unique_ptr<Contender>> open(const harness::Case& c, harness::CaseTensors& tensors);

 private:
  friend class TorchContender;
  TorchPeer() = default;

  std::filesystem::path folder_;  // of its own, for tensors on their way and the worker's messages
  std::unique_ptr<ChildProcess> process_;
  std::string version_;
};

}  // namespace fovea::cli
