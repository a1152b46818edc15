// What the plans of both passes are made of: sizes, scratch, weights.
#pragma once

#include <algorithm>
#include <bit>

#include "backend/cuda/common/device_attribute.h"
#include "base/ceil_div.h"
#include "layers/cuda/prologue_plan.h"

namespace fovea::layers::cuda {

// What the prologue's own memory is for. Weights' gradients are of q and of k.
enum class Work {
  kSums,    // the coupling's, over heads
  kAngles,  // forward
  kSlopes,  // backward, of the temperature, by tokens
  kTemperature,
  kPackedOfQ,  // weights of the second convolution
  kPackedOfK,
  kPackedFirst,  // of the first
  kPackedAgain,  // of the first, to make u again
  kSecondOfQ,    // parts of gradients of the second's weights
  kSecondOfK,
  kFirstOfQ,  // the same of the first's
  kFirstOfK,
  kColumns,   // sums of single channels
  kProducts,  // what cuBLASLt takes for gradients
  kCount
};
static_assert(static_cast<size_t>(Work::kCount) <= kMostWork);

// Hands out the prologue's memory; without any it only counts.
class Cut {
 public:
  explicit Cut(const PrologueWork* work) : work_(work) {}

  bool plans() const { return work_ == nullptr; }
  void* bytes(Work from, int64_t count) {
    constexpr size_t kAlignment = 256;
    const auto n = static_cast<size_t>(from);
    std::byte* const at =
        plans() || (*work_)[n].data == nullptr ? nullptr : (*work_)[n].data + used_[n];
    used_[n] += (static_cast<size_t>(count) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  float* floats(Work from, int64_t count) { return static_cast<float*>(bytes(from, 4 * count)); }
  // What is there to be handed out.
  int64_t room(Work from) const {
    return plans() ? INT64_MAX : static_cast<int64_t>((*work_)[static_cast<size_t>(from)].bytes);
  }
  size_t used(Work from) const { return used_[static_cast<size_t>(from)]; }

 private:
  const PrologueWork* work_;
  std::array<size_t, kMostWork> used_{};
};

inline int as_int(int64_t x) { return static_cast<int>(x); }

// What the parts of a plan are made from.
struct Sizes {
  int batch, q_len, tokens, dim, qk, v;
  int margin = 0, reach = 0;  // rows before a token that the second, and that both, reach back to
  int u_rows = 0, lead = 0;
  bool depthwise = false;

  explicit Sizes(const Prologue& p)
      : batch(as_int(p.qk.sizes[0])),
        q_len(as_int(p.qk.sizes[1])),
        tokens(batch * q_len),
        dim(as_int(p.mix.dim)),
        qk(as_int(p.mix.qk_width())),
        v(as_int(p.mix.v_width())),
        lead(as_int(p.lead)) {
    if (!p.convolve) return;
    margin = as_int(p.second.taps) - 1;
    reach = as_int(p.first.taps) - 1 + margin;
    u_rows = margin + q_len;
    depthwise = p.first.block[0].group == 1;
  }
};

inline Coupling coupling_of(const HeadMix& mix, bool forward) {
  // With one query head to a KV head both couplings are the same.
  const bool all = mix.coupling == CcgqaCoupling::kAllHeads && mix.heads != mix.heads_kv;
  const Coupled kind = !mix.couple ? Coupled::kNone : all ? Coupled::kAllHeads : Coupled::kGroup;
  return Coupling::of(kind, as_int(mix.heads), as_int(mix.heads_kv), as_int(mix.dim), forward);
}

inline HeadNorm norm_of(const HeadMix& mix) {
  return {mix.norm, static_cast<float>(mix.length), static_cast<float>(mix.query_length), mix.kind,
          mix.temperature.data};
}

// One of q's and one of k's, or of one block the first.
using WorkOfBlocks = std::array<Work, 2>;

// The weights of a convolution, packed for a product; `packs` gets the work.
inline void set_blocks(const Conv& conv, DType dtype, bool backward, Cut& cut,
                       const WorkOfBlocks& work, Packs& packs, TapProduct& product) {
  product.taps = as_int(conv.taps);
  product.blocks = conv.blocks;
  for (int n = 0; n < conv.blocks; ++n) {
    const ConvBlock& from = conv.block[static_cast<size_t>(n)];
    const int channels = as_int(from.channels), group = as_int(from.group);
    void* const packed = cut.bytes(work[static_cast<size_t>(n)],
                                   from.channels * from.group * conv.taps * dtype_bytes(dtype));
    packs.add(from.weight.data, packed, product.taps, channels, group, backward);
    product.block[n] = {as_int(from.first), channels, group, packed,
                        backward ? nullptr : from.bias.data};
  }
}

inline bool weights_begin_on_16_bytes(const Conv& conv) {
  bool begin = true;
  for (const ConvBlock& b : conv.block) {
    begin = begin && reinterpret_cast<uintptr_t>(b.weight.data) % 16 == 0;
  }
  return begin;
}

// Moves a product of small heads to the kernel that is made for them, which takes weights as they
// are: they are not packed.
inline bool move_to_heads(const Conv& conv, DType dtype, TapProduct& product, HeadConv& heads) {
  const int taps = as_int(conv.taps), group = as_int(conv.block[0].group);
  if (dtype == DType::kF32 || !HeadConvShape<__half>::takes(group, taps)) return false;
  if (!weights_begin_on_16_bytes(conv)) return false;
  for (int n = 0; n < conv.blocks; ++n) {
    product.block[n].weight = conv.block[static_cast<size_t>(n)].weight.data;
  }
  heads.product = product;
  heads.product.tile_cols = HeadConvShape<__half>::kCols / group * group;
  heads.pieces = Divider(group * taps / 8);
  product.blocks = 0;
  return true;
}

constexpr int kTileCols = 128;  // of products

// Columns of a tile of whole heads.
inline int whole_heads(int dim) { return std::max(1, kTileCols / dim) * dim; }

// The first convolution, of heads, from z to u.
inline void set_first(const Prologue& p, const Sizes& s, Cut& cut, Work work, Packs& packs,
                      TapProduct& first, HeadConv& heads) {
  Packs with = packs;
  set_blocks(p.first, p.z.dtype, false, cut, {work, work}, with, first);
  first.from = rows_of(p.z, s.lead - s.reach);
  first.to = rows_of(p.u);
  first.from_rows = s.reach + s.q_len;
  first.set_rows(s.batch, s.u_rows);
  first.tile_cols = kTileCols;
  if (!move_to_heads(p.first, p.z.dtype, first, heads)) packs = with;
}

// A convolution for blocks that hold its weights whole, from `bytes` of shared memory on.
inline WholeConv whole_conv(const Conv& from, int& bytes) {
  WholeConv conv;
  conv.taps = as_int(from.taps);
  conv.blocks = from.blocks;
  for (int n = 0; n < from.blocks; ++n) {
    const ConvBlock& b = from.block[static_cast<size_t>(n)];
    const int channels = as_int(b.channels), group = as_int(b.group);
    conv.block[n] = {as_int(b.first), channels, group,
                     b.weight.data,   bytes,    Divider(group * conv.taps / 8)};
    bytes += channels * (group * conv.taps + kRowPadding) * 2;
  }
  return conv;
}

// Whether kernels whose blocks hold all weights take the convolutions, if these fit.
inline bool may_be_whole(const Prologue& p, const Sizes& s) {
  constexpr int kMostWidth = 1024;   // far more than fits
  constexpr int kMostTokens = 4096;  // of blocks that all run at once: each reads all weights
  if (s.tokens > kMostTokens) return false;
  if (p.z.dtype == DType::kF32 || !p.convolve || s.depthwise || s.qk > kMostWidth) return false;
  if (std::max(p.first.taps, p.second.taps) > kMostTaps) return false;
  if (p.first.block[0].bias.given() || p.second.block[0].bias.given()) return false;
  return weights_begin_on_16_bytes(p.first) && weights_begin_on_16_bytes(p.second);
}

// Whether blocks of threads can hold the weights of both convolutions; sets where they lie, and
// what else a block has.
inline bool set_whole(const Prologue& p, const Sizes& s, WholeConv& first, WholeConv& second,
                      WholeRoom& room) {
  if (!may_be_whole(p, s)) return false;
  int bytes = 0;
  first = whole_conv(p.first, bytes);
  second = whole_conv(p.second, bytes);
  room = WholeRoom::of(bytes, s.qk, s.dim, bytes);
  return bytes <= kWholeSharedBytes &&
         fovea::cuda::device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >=
             kWholeSharedBytes;
}

}  // namespace fovea::layers::cuda
