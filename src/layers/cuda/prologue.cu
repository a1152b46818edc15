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

}  // namespace

size_t prologue_scratch_bytes(const Prologue& p, const RopeTable& rope, Pass pass,
                              const DenseGradients* dense) {
  if (pass == Pass::kForward) return plan_forward(p, rope, nullptr).bytes;
  // As if every gradient were asked for.
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
  return plan_backward(p, g, rope, nullptr, dense).bytes;
}

bool prologue_goes_by_tiles(const Prologue& p, const RopeTable& rope, Pass pass) {
  Tiled tiles;
  return takes(p) && cut_tiles(p, Sizes(p), Rotation::of(rope, p.mix.positions),
                               pass == Pass::kBackward, tiles);
}

cudaError_t prologue(const Prologue& p, const RopeTable& rope, std::byte* scratch,
                     cudaStream_t stream) {
  if (!takes(p)) return cudaErrorInvalidValue;
  const ForwardPlan plan = plan_forward(p, rope, scratch);
  switch (p.z.dtype) {
    case DType::kBf16: return run<__nv_bfloat16>(plan, stream);
    case DType::kF16: return run<__half>(plan, stream);
    case DType::kF32: return run<float>(plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t prologue_backward(const Prologue& p, const PrologueGradients& g, const RopeTable& rope,
                              std::byte* scratch, cudaStream_t stream, const DenseGradients* dense,
                              const SideStream* side) {
  if (!takes(p)) return cudaErrorInvalidValue;
  BackwardPlan plan = plan_backward(p, g, rope, scratch, dense);
  plan.side = side;
  switch (p.z.dtype) {
    case DType::kBf16: return run<__nv_bfloat16>(plan, stream);
    case DType::kF16: return run<__half>(plan, stream);
    case DType::kF32: return run<float>(plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fovea::layers::cuda
