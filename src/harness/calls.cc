// Calls of a plan, on the host or on a GPU.
#include "harness/calls.h"

#include <string>
#include <utility>

#ifdef FOVEA_WITH_CUDA
#include "harness/device_tensors.h"
#endif

namespace fovea::harness {
namespace {

const char* name_of(Pass pass) { return pass == Pass::kForward ? "forward" : "backward"; }

Status wrote_past_workspace(Pass pass) {
  return {StatusCode::kInternal, std::string(name_of(pass)) + " wrote past its workspace"};
}

}  // namespace

Calls::Calls(Plan plan, CaseTensors& tensors, Device device, Scratch scratch)
    : plan_(std::move(plan)), tensors_(tensors), device_(device), scratch_(scratch) {}

Status Calls::forward() { return run(Pass::kForward); }
Status Calls::backward() { return run(Pass::kBackward); }

Status Calls::run(Pass pass) {
  return device_.type == DeviceType::kCpu ? run_here(pass) : run_there(pass);
}

Status Calls::run_here(Pass pass) {
  OwnedWorkspace workspace(plan_.workspace_bytes(pass) + scratch_.extra);
  workspace.fill(scratch_.byte);
  Status s = pass == Pass::kForward ? plan_.forward(tensors_.forward(), workspace.view())
                                    : plan_.backward(tensors_.backward(), workspace.view());
  if (s.ok() && !workspace.canaries_intact()) return wrote_past_workspace(pass);
  return s;
}

#ifdef FOVEA_WITH_CUDA

Status Calls::run_there(Pass pass) {
  const auto named = [&](const Status& s) {
    return Status(s.code(), std::string(name_of(pass)) + ": " + s.message());
  };
  if (there_ == nullptr) there_ = std::make_shared<DeviceTensors>(tensors_, device_.index);
  if (Status s = there_->upload(); !s.ok()) return named(s);
  DeviceWorkspace workspace(plan_.workspace_bytes(pass) + scratch_.extra, device_.index);
  if (Status s = workspace.fill(scratch_.byte); !s.ok()) return named(s);
  Status called = pass == Pass::kForward ? plan_.forward(there_->forward(), workspace.view())
                                         : plan_.backward(there_->backward(), workspace.view());
  if (!called.ok()) return called;
  if (Status s = there_->download(); !s.ok()) return named(s);
  const Result<bool> intact = workspace.canaries_intact();
  if (!intact.ok()) return named(intact.status());
  return *intact ? Status() : wrote_past_workspace(pass);
}

#else

Status Calls::run_there(Pass pass) {
  return {StatusCode::kUnsupported, std::string(name_of(pass)) + ": this build has no CUDA"};
}

#endif

}  // namespace fovea::harness
