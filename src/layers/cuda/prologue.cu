// CCGQA's prologue on the GPU, by type.
#include "backend/cuda/common/alignment.h"
#include "layers/cuda/prologue.h"
#include "layers/cuda/prologue_plan.h"
#include "layers/cuda/tile_plan.h"

namespace fovea::layers::cuda {
namespace {

bool takes(const Prologue& p) {
  const auto begins = [](const TensorView& t) { return fovea::cuda::rows_begin_on(t, 8); };
  return p.mix.dim % 8 == 0 && p.mix.dim <= kMostDim && begins(p.z) && begins(p.u) &&
         (!p.mixed.given() || begins(p.mixed)) && begins(p.qk) && begins(p.v);
}

// As if every gradient were asked for.
PrologueGradients all_gradients(const Prologue& p) {
  const auto asked = [](Conv conv) {
    for (ConvBlock& block : conv.block) block.weight.rank = block.bias.rank = 1;
    return conv;
  };
  PrologueGradients g;
  g.dqk = p.qk;
  g.dv = p.v;
  g.dmixed = p.convolve ? p.u : p.qk;
  g.du = p.u;
  g.dz = p.z;
  g.dtemperature.rank = p.mix.norm ? 1 : 0;
  g.first = asked(p.first);
  g.second = asked(p.second);
  return g;
}

constexpr Life kInForward{ccgqa_forward::kPrologue, ccgqa_forward::kPrologue};

// In backward.
Life life_of(Work work) {
  using namespace ccgqa_backward;
  switch (work) {
    case Work::kSlopes: return {kTokens, kTokens};
    case Work::kPackedOfQ:
    case Work::kPackedOfK: return {kTokens, kSecond};
    case Work::kSecondOfQ:
    case Work::kSecondOfK:
    case Work::kProducts: return {kSecondWeights, kFirst};
    case Work::kFirstOfQ:
    case Work::kFirstOfK:
    case Work::kColumns: return {kFirst, kFirst};
    default: return {kTokens, kFirst};
  }
}

}  // namespace

PrologueNeeds prologue_needs(const Prologue& p, const RopeTable& rope, Pass pass,
                             const DenseGradients* dense) {
  Cut cut(nullptr);
  if (pass == Pass::kForward) {
    plan_forward(p, rope, cut);
  } else {
    plan_backward(p, all_gradients(p), rope, cut, dense);
  }
  PrologueNeeds needs;
  for (size_t n = 0; n < static_cast<size_t>(Work::kCount); ++n) {
    const auto work = static_cast<Work>(n);
    needs[n] = {cut.used(work), pass == Pass::kForward ? kInForward : life_of(work)};
  }
  return needs;
}

Scratch scratch_of_dense(const PrologueWork& work) {
  return work[static_cast<size_t>(Work::kProducts)];
}

bool prologue_goes_by_tiles(const Prologue& p, const RopeTable& rope, Pass pass) {
  Tiled tiles;
  return takes(p) && weights_begin_on_16_bytes(p) &&
         cut_tiles(p, Sizes(p), Rotation::of(rope, p.mix.positions), pass == Pass::kBackward,
                   tiles);
}

cudaError_t prologue(const Prologue& p, const RopeTable& rope, cudaStream_t stream) {
  if (!takes(p)) return cudaErrorInvalidValue;
  Cut cut(&p.work);
  const ForwardPlan plan = plan_forward(p, rope, cut);
  switch (p.z.dtype) {
    case DType::kBf16: return run<__nv_bfloat16>(plan, stream);
    case DType::kF16: return run<__half>(plan, stream);
    case DType::kF32: return run<float>(plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t prologue_backward(const Prologue& p, const PrologueGradients& g, const RopeTable& rope,
                              cudaStream_t stream, const DenseGradients* dense,
                              const SideStream* side) {
  if (!takes(p)) return cudaErrorInvalidValue;
  Cut cut(&p.work);
  BackwardPlan plan = plan_backward(p, g, rope, cut, dense);
  plan.side = side;
  switch (p.z.dtype) {
    case DType::kBf16: return run<__nv_bfloat16>(plan, stream);
    case DType::kF16: return run<__half>(plan, stream);
    case DType::kF32: return run<float>(plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fovea::layers::cuda
