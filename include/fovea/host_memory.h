// Memory of the host that suits workspaces of the CPU, and what layers keep between their passes.
//
//   auto memory = fovea::HostMemory::allocate(plan->workspace_bytes(fovea::Pass::kForward));
//   if (!memory.ok()) return memory.status();
//   fovea::Status done = plan->forward(tensors, memory->workspace());
//
// Any memory aligned to kWorkspaceAlignment will do. This lies on large pages where the system has
// them to give (on Linux: where transparent huge pages are set to `madvise` or `always`): a pass
// goes through megabytes of it again and again, and on pages of 4 KiB it waits for their addresses.
// docs/cpu-engine.md has what that gains.
#pragma once

#include <cstdlib>
#include <memory>
#include <utility>

#include "fovea/plan.h"

namespace fovea {

class HostMemory {
 public:
  HostMemory() = default;  // no bytes
  HostMemory(HostMemory&& other) noexcept { *this = std::move(other); }
  HostMemory& operator=(HostMemory&& other) noexcept {
    data_ = std::move(other.data_);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  static Result<HostMemory> allocate(size_t bytes);

  void* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  Workspace workspace() const { return {data(), bytes_}; }
  void* release();  // to the caller, whose std::free ends it

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace fovea
