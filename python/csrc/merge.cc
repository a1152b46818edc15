// The op fovea::merge.
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"
#include "torch_tensor.h"

namespace fovea::torch_ops {
namespace {

std::vector<Viewed> views(const char* name, std::vector<Tensor> tensors) {
  std::vector<Viewed> list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    list[i].tensor = std::move(tensors[i]);
    make_view(name, list[i]);
  }
  return list;
}

}  // namespace

void merge(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  auto out_tensors = arguments.take<std::vector<Tensor>>();
  auto lse_tensors = arguments.take<std::vector<Tensor>>();
  const std::vector<Viewed> outs = views("outs", std::move(out_tensors));
  const std::vector<Viewed> lses = views("lses", std::move(lse_tensors));
  if (outs.empty() || outs.size() != lses.size()) {
    throw std::runtime_error("fovea: merge: there are " + std::to_string(outs.size()) +
                             " outs and " + std::to_string(lses.size()) +
                             " lses, must be as many of each, and at least one");
  }
  std::vector<PartialResult> parts;
  for (size_t i = 0; i < outs.size(); ++i) parts.push_back({outs[i].view, lses[i].view});
  const Viewed out = empty_like(outs[0].view), lse = empty_like(lses[0].view);
  raise_unless_ok(fovea::merge(parts.data(), static_cast<int64_t>(parts.size()), out.view, lse.view,
                               current_stream(out.view.device)));
  give_back(stack, *out.tensor, *lse.tensor);
}

}  // namespace fovea::torch_ops
