// Rotations, norms and small steps of the layers on a GPU, and how their engine is made.
#include "layers/cuda/engine.h"

#include "backend/cuda/common/alignment.h"
#include "base/ceil_div.h"
#include "base/refusal.h"
#include "layers/cuda/attended_output.h"
#include "layers/cuda/copy.h"
#include "layers/cuda/make_engine.h"
#include "layers/cuda/norm.h"
#include "layers/cuda/rotate.h"
#include "layers/cuda/sums.h"

namespace fovea::layers::cuda {
namespace {

// Products and sums over rows take turns.
size_t scratch_for(const EngineNeeds& needs) {
  return std::max(Products::kScratchBytes, static_cast<size_t>(needs.sums) * sizeof(float));
}

// Whether heads, and runs of `elements` in them, begin on 16 bytes.
bool is_wide(const TensorView& t, int64_t elements) {
  const int64_t wide = 16 / dtype_bytes(t.dtype);
  return elements % wide == 0 && fovea::cuda::rows_begin_on(t, wide);
}

// The widest word that a tensor's rows are made of, in bytes, and no wider than so far.
int word_bytes(const TensorView& t, int so_far) {
  const int64_t size = dtype_bytes(t.dtype);
  for (; so_far > size; so_far /= 2) {
    if (fovea::cuda::rows_are_whole(t, so_far / size)) break;
  }
  return so_far;
}

HeadRows in_words(const TensorView& t, int word) {
  HeadRows rows = head_rows(t);
  const int64_t elements = word / dtype_bytes(t.dtype);
  rows.dim /= elements;
  rows.batch_stride /= elements;
  rows.row_stride /= elements;
  rows.head_stride /= elements;
  return rows;
}

NormArguments norm_arguments(const Norm& norm, const TensorView& x) {
  const int64_t dim = x.sizes[3];
  const bool weights_are_wide = (!norm.weight.given() || is_wide(norm.weight, dim)) &&
                                (!norm.bias.given() || is_wide(norm.bias, dim));
  return {.kind = norm.kind,
          .eps = static_cast<float>(norm.eps),
          .wide = is_wide(x, dim) && weights_are_wide,
          .x = head_rows(x),
          .y = {},
          .weight = norm.weight.data,
          .bias = norm.bias.data};
}

}  // namespace

CudaEngine::CudaEngine(const DeviceInfo& device, DType dtype, const EngineNeeds& needs,
                       cublasLtHandle_t handle)
    : device_(device.device.index),
      gpu_(device.gpu),
      dtype_(dtype),
      scratch_bytes_(scratch_for(needs)),
      products_(handle, dtype, needs.tf32, device.gpu.sm_count),
      angles_(FixedAngles::make(needs.rope, needs.turning)),
      rope_{needs.turning, needs.rope.style, needs.rope.base, nullptr, 0} {}

Status CudaEngine::make_side() {
  return fovea::cuda::to_status(side_.make(), "make_layer: making a stream");
}

Aside CudaEngine::fork(Run& run) const {
  Aside aside{run, {}};
  const auto stream = static_cast<cudaStream_t>(run.stream.handle);
  aside.hold = side_.lend(stream);
  if (!aside.hold) return aside;
  aside.run.stream.handle = side_.get();
  const fovea::cuda::CurrentDevice current(device_);
  run.note(fovea::cuda::to_status(side_.follow(stream), "layer: forking"));
  return aside;
}

void CudaEngine::wait(Run& run, Aside& aside) const {
  if (!aside.hold) return;
  const fovea::cuda::CurrentDevice current(device_);
  const auto stream = static_cast<cudaStream_t>(run.stream.handle);
  run.note(fovea::cuda::to_status(side_.lead(stream), "layer: joining"));
}

void CudaEngine::join(Run& run, Aside& aside) const {
  run.note(aside.run.status);
  wait(run, aside);
  if (aside.hold) aside.hold.unlock();
}

int CudaEngine::sum_parts(const Run& run, int64_t rows, int64_t count) const {
  const int64_t room =
      static_cast<int64_t>(run.scratch.bytes) / (count * static_cast<int64_t>(sizeof(float)));
  return static_cast<int>(std::clamp<int64_t>(std::min(rows, room), 1, 2 * gpu_.sm_count));
}

void CudaEngine::rotate(Run& run, std::initializer_list<Turn> turns, Direction direction) const {
  if (angles_.turning == 0) return;
  queue(run, [&](cudaStream_t stream) {
    RotateArguments a;
    a.angles = angles_;
    a.sign = direction == Direction::kForward ? 1 : -1;
    a.wide = true;
    for (const auto& [x, positions] : turns) {
      RotateRows& rows = a.rows[a.count++];
      rows.x = head_rows(x);
      rows.first = positions.first;
      if (const TensorView& ids = positions.ids; ids.given()) {
        rows.ids = static_cast<const int32_t*>(ids.data);
        rows.ids_batch = ids.sizes[0] == 1 ? 0 : ids.strides[0];
        rows.ids_row = ids.strides[1];
      }
      a.wide = a.wide && is_wide(x, angles_.turning / 2);
    }
    return launch_rotate(a, dtype_, stream);
  });
}

void CudaEngine::normalise(Run& run, const TensorView& x, const Norm& norm,
                           const TensorView& y) const {
  queue(run, [&](cudaStream_t stream) {
    NormArguments a = norm_arguments(norm, x);
    a.y = head_rows(y);
    a.wide = a.wide && is_wide(y, a.y.dim);
    return launch_norm(a, dtype_, stream);
  });
}

void CudaEngine::normalise_backward(Run& run, const TensorView& dy, const TensorView& x,
                                    const Norm& norm, const TensorView& dx,
                                    const TensorView& dweight, const TensorView& dbias) const {
  queue(run, [&](cudaStream_t stream) -> Status {
    NormBackwardArguments a;
    a.of = norm_arguments(norm, x);
    a.dy = head_rows(dy);
    a.dx = head_rows(dx);
    const int64_t dim = a.dy.dim;
    a.of.wide = a.of.wide && is_wide(dy, dim) && is_wide(dx, dim);
    a.parts = sum_parts(run, a.dy.batch * a.dy.rows * a.dy.heads, 2 * dim);
    const bool summed = dweight.given() || dbias.given();
    if (summed && dim > kMostNormChannels) {
      return unsupported("backward", "the gradient of a norm's weight",
                         {{"cuda",
                           {"the norm is over " + show(dim) + " channels, takes up to " +
                            show(kMostNormChannels)}}});
    }
    if (summed) a.sums = reinterpret_cast<float*>(run.scratch.data);
    Status s = status_of(launch_norm_backward(a, dtype_, stream));
    if (!s.ok() || !summed) return s;
    return status_of(
        launch_sum_parts(a.sums, a.parts, {dweight.data, dim}, {dbias.data, dim}, dtype_, stream));
  });
}

void CudaEngine::copy(Run& run, std::initializer_list<Copy> copies) const {
  int word = 16;
  for (const auto& [from, to] : copies) {
    if (!to.given() || to.elements() == 0) continue;
    word = word_bytes(to, word);
    if (from.given()) word = word_bytes(from, word);
  }
  CopyArguments a;
  a.word_bytes = word;
  for (const auto& [from, to] : copies) {
    if (!to.given() || to.elements() == 0) continue;
    a.copies[a.count++] = {from.given() ? in_words(from, word) : HeadRows{}, in_words(to, word)};
  }
  if (a.count == 0) return;
  queue(run, [&](cudaStream_t stream) { return launch_copy(a, stream); });
}

// Of any rank.
void CudaEngine::zero(Run& run, const TensorView& to) const {
  if (!to.given()) return;
  const auto missing = static_cast<size_t>(3 - to.rank);
  TensorView view = to;
  view.rank = 3;
  for (size_t d = 0; d < 3; ++d) {
    view.sizes[d] = d < missing ? 1 : to.sizes[d - missing];
    view.strides[d] = d < missing ? 0 : to.strides[d - missing];
  }
  copy(run, {{{}, view}});
}

// Taps are the batch of a product: each begins a row of x further on.
class CudaEngine::ByProducts final : public DenseGradients {
 public:
  ByProducts(const CudaEngine& engine, Run& run) : engine_(engine), run_(run) {}

  size_t scratch_bytes(const DenseGradient& g) const override {
    return engine_.product_bytes(product_of(g));
  }

  cudaError_t add(const DenseGradient& g, cudaStream_t stream) const override {
    run_.note(engine_.multiply(run_, product_of(g), stream));
    return run_.status.ok() ? cudaSuccess : cudaErrorUnknown;
  }

 private:
  static Product product_of(const DenseGradient& g) {
    Product m;
    m.batch = g.taps;
    m.rows = m.cols = g.channels;
    m.depth = g.rows;
    m.a = {g.dy, g.row, 0, true};
    m.b = {g.x, g.row, g.row, false};
    m.c = {g.to, g.channels, int64_t{g.channels} * g.channels, false};
    m.floats = true;
    return m;
  }

  const CudaEngine& engine_;
  Run& run_;
};

Result<PrologueNeeds> CudaEngine::prologue_needs(const Prologue& p, Pass pass) const {
  if (p.mix.dim % 8 != 0) {
    return unsupported("make_layer", "CCGQA does not run on " + show(Device::cuda(device_)),
                       {{"cuda", {"head_dim is " + show(p.mix.dim) + ", takes multiples of 8"}}});
  }
  Run none;
  const ByProducts dense(*this, none);
  const fovea::cuda::CurrentDevice current(device_);
  if (Status s = fovea::cuda::to_status(current.error(), "make_layer: choosing the device");
      !s.ok()) {
    return s;
  }
  return cuda::prologue_needs(p, rope_, pass, &dense);
}

// To make u again costs a hundredth of the time where there are many tokens, and a launch where
// there are few, which is more of the time of tiles: they keep it for more tokens. Channels by
// themselves are no such product. However wide, few tokens keep it: so what they save grows with
// them alike, as who measures it (fovea/layer_ops.py) for sizes yet unknown needs it to.
bool CudaEngine::makes_u_again(const Prologue& p) const {
  constexpr int64_t kFewTokens = 256;
  constexpr int64_t kManyBytes = int64_t{4} << 20, kManyBytesOfTiles = int64_t{32} << 20;
  return p.convolve && p.first.block[0].group > 1 && p.qk.sizes[0] * p.qk.sizes[1] >= kFewTokens &&
         p.u.elements() * dtype_bytes(p.u.dtype) >=
             (goes_by_tiles(p, Pass::kBackward) ? kManyBytesOfTiles : kManyBytes);
}

bool CudaEngine::goes_back_at_once(const Prologue& p) const {
  return goes_by_tiles(p, Pass::kBackward);
}

// Few tokens have products that end before they have filled the device, and an attention whose
// blocks all run at once, so that the last of them is the one that had to wait for a product.
double CudaEngine::share_aside(const Prologue& p) const {
  constexpr int64_t kFewTokens = 4096;
  const bool few = p.qk.sizes[0] * p.qk.sizes[1] <= kFewTokens;
  return few && forks() && goes_back_at_once(p) ? 1.0 / 3 : 1;
}

bool CudaEngine::makes_lead(const Prologue& p) const { return goes_by_tiles(p, Pass::kForward); }

bool CudaEngine::goes_by_tiles(const Prologue& p, Pass pass) const {
  const fovea::cuda::CurrentDevice current(device_);
  return current.error() == cudaSuccess && cuda::prologue_goes_by_tiles(p, rope_, pass);
}

void CudaEngine::prologue(Run& run, const Prologue& p) const {
  if (p.qk.elements() == 0) return;
  queue(run, [&](cudaStream_t stream) { return cuda::prologue(p, rope_, stream); });
}

void CudaEngine::prologue_backward(Run& run, Aside& aside, const Prologue& p,
                                   const PrologueGradients& g) const {
  if (p.qk.elements() == 0) {  // sums of nothing
    zero(run, g.dtemperature);
    for (const Conv& conv : {g.first, g.second}) {
      for (const ConvBlock& block : conv.block) {
        zero(run, block.weight);
        zero(run, block.bias);
      }
    }
    return;
  }
  aside.run.scratch = scratch_of_dense(p.work);
  const ByProducts dense(*this, aside.run);
  queue(run, [&](cudaStream_t stream) {
    return cuda::prologue_backward(p, g, rope_, stream, &dense, aside.hold ? &side_ : nullptr);
  });
}

bool CudaEngine::takes(const AttendedOutput& p) const { return takes_attended_output(p, gpu_); }

void CudaEngine::attended_output(Run& run, const AttendedOutput& p) const {
  queue(run, [&](cudaStream_t stream) { return launch_attended_output(p, stream); });
}

void CudaEngine::fill_lengths(Run& run, int64_t length, const TensorView& to) const {
  queue(run, [&](cudaStream_t stream) {
    return launch_fill_lengths(static_cast<int32_t*>(to.data), to.sizes[0],
                               static_cast<int32_t>(length), stream);
  });
}

void CudaEngine::fill_alibi_slopes(Run& run, const TensorView& to) const {
  queue(run, [&](cudaStream_t stream) {
    return launch_fill_alibi_slopes(static_cast<float*>(to.data), to.sizes[0], stream);
  });
}

Result<std::unique_ptr<const LayerEngine>> make_engine(const DeviceInfo& device, DType dtype,
                                                       const EngineNeeds& needs) {
  const auto refused = [&](const std::string& why) {
    return unsupported("make_layer", "layers do not run on " + show(device.device),
                       {{"cuda", {why}}});
  };
  if (dtype == DType::kF64) return refused("dtype is f64, takes f32, bf16 and f16");
  if (needs.turning > 2 * FixedAngles::kMostPairs) {
    return refused("RoPE turns " + show(needs.turning) + " channels of a head, takes up to " +
                   show(int64_t{2 * FixedAngles::kMostPairs}));
  }
  if (const std::string& why = loaded_blas().absence; !why.empty()) return refused(why);
  const fovea::cuda::CurrentDevice current(device.device.index);
  if (Status s = fovea::cuda::to_status(current.error(), "make_layer: choosing the device");
      !s.ok()) {
    return s;
  }
  const Result<cublasLtHandle_t> handle = blas_handle(device.device.index);
  if (!handle.ok()) return handle.status();
  auto engine = std::make_unique<CudaEngine>(device, dtype, needs, *handle);
  if (needs.forks) {
    if (Status s = engine->make_side(); !s.ok()) return s;
  }
  return std::unique_ptr<const LayerEngine>(std::move(engine));
}

}  // namespace fovea::layers::cuda
