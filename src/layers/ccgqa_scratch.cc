// Scratch of CCGQA's steps.
#include "layers/ccgqa_scratch.h"

namespace fovea::layers {

namespace forth = ccgqa_forward;
namespace back = ccgqa_backward;

int output_weight_until(const LayerEngine& engine, const Prologue& sizes) {
  if (!engine.forks()) return back::kAttend;
  return engine.goes_back_at_once(sizes) ? back::kFirst : back::kTokens;
}

Status CcgqaScratch::make(LayerParts& layer, const TensorView& x, const TensorView& heads,
                          const TensorView& z, const TensorView& dz, const Prologue& sizes) {
  const LayerEngine& engine = *layer.engine;
  MemoryPlan& memory = layer.memory;
  const auto weight = [&](const TensorView& from, const TensorView& to,
                          double share = 1) -> Projection {
    return {
        TensorView::contiguous(nullptr, layer.dtype, {to.sizes[2], from.sizes[2]}), {}, 1, share};
  };
  const Projection to_z = weight(x, z), to_out = weight(heads, x);
  const auto forward = [&](size_t bytes, int step) {
    return memory.forward_bytes({bytes, {step, step}});
  };
  const auto backward = [&](size_t bytes, int first, int last) {
    return memory.backward_bytes({bytes, {first, last}});
  };
  project = forward(engine.linear_bytes(x, to_z, z), forth::kProject);
  prologue[0] = forward(engine.prologue_bytes(), forth::kPrologue);
  output = forward(engine.linear_bytes(heads, to_out, x), forth::kOutput);
  if (Status s = make_work(layer, sizes, Pass::kForward); !s.ok() || !layer.training()) return s;
  share_aside = engine.share_aside(sizes);
  dheads = backward(engine.linear_dx_bytes(x, weight(heads, x, share_beside()), heads),
                    back::kOutput, back::kOutput);
  dout_weight =
      backward(engine.linear_dw_bytes(x, heads, weight(heads, x, share_aside)),
               share_aside < 1 ? back::kOutput : back::kAttend, output_weight_until(engine, sizes));
  // Beside the gradients of the convolutions' weights, or after them.
  dproject_weight =
      backward(engine.linear_dw_bytes(dz, x, weight(x, z, share_last())),
               engine.goes_back_at_once(sizes) ? back::kFirst : back::kProject, back::kProject);
  prologue[1] = backward(engine.prologue_bytes(), back::kTokens, back::kFirst);
  dquery = backward(engine.linear_dx_bytes(dz, to_z, x), back::kProject, back::kProject);
  return make_work(layer, sizes, Pass::kBackward);
}

Status CcgqaScratch::make_work(LayerParts& layer, const Prologue& sizes, Pass pass) {
  const Result<PrologueNeeds> needs = layer.engine->prologue_needs(sizes, pass);
  if (!needs.ok()) return needs.status();
  for (size_t n = 0; n < kMostWork; ++n) {
    const Need& need = (*needs)[n];
    work_[static_cast<size_t>(pass)][n] = pass == Pass::kForward
                                              ? layer.memory.forward_bytes(need)
                                              : layer.memory.backward_bytes(need);
  }
  return {};
}

PrologueWork CcgqaScratch::work_at(const Memory& at, Pass pass) const {
  PrologueWork work;
  for (size_t n = 0; n < kMostWork; ++n) {
    work[n] = at.scratch_at(work_[static_cast<size_t>(pass)][n]);
  }
  return work;
}

}  // namespace fovea::layers
