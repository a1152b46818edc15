// What the kernel of attention and its output's projection is handed, and has in shared memory.
#pragma once

#include "layers/cuda/rows.cuh"
#include "prim/cuda/tile/shared_tile.cuh"

namespace fovea::layers::cuda {

struct OutputShape {
  static constexpr int kHeads = 8, kDim = 16, kWidth = kHeads * kDim;
  static constexpr int kMostKvHeads = 2, kMostKeys = 512, kMostColumns = 512;
  static constexpr int kSoonKeys = kMostKeys / 4;  // that are worked on while others come
  static constexpr int kTokens = 8;                // of a tile; a block has two
  static constexpr int kBlocks = 2;                // of a cluster
  static constexpr int kThreads = 512, kWarps = kThreads / 32;
  static constexpr int kShares = 4;                       // warps that share the keys of two heads
  static constexpr int kColumns = kMostColumns / kWarps;  // of out, of a warp
  static constexpr int kPitch = kWidth + 32;              // of heads: read without conflicts
};

struct OutputArguments {
  Rows q, k, v;          // heads side by side
  Rows heads;            // attention's output, and
  float* lse = nullptr;  // its lse; neither: not kept
  int64_t lse_batch = 0, lse_head = 0;
  const void* weight = nullptr;  // [columns, kWidth], dense
  Rows out;
  int columns = 0;  // of out
  float scale = 1;
  bool settled = false;  // the weight was written before what was queued last
  int batch = 0, q_len = 0, tiles = 0;
  int kv_shift = 0;  // log2 of the heads that share a KV head
  int kv_heads = 0;
  Divider pairs;  // of tiles of a member of the batch: blocks
};

template <typename T>
struct OutputShared {
  using Keys = tile::SharedTile<T, OutputShape::kMostKeys, OutputShape::kDim>;

  struct Parts {
    float4 out[OutputShape::kWarps][4][32];  // attention's, by fragment
    float sums[OutputShape::kWarps][2][16];  // of weights, by tile and row
  };

  alignas(128) T weight[OutputShape::kMostColumns * OutputShape::kWidth];
  union {
    unsigned char keys[2][OutputShape::kMostKvHeads][Keys::kBytes];  // and values
    Parts parts;
  };
  alignas(16) T heads[2 * OutputShape::kTokens * OutputShape::kPitch];
  uint64_t weight_is_there;
};

// The tiles of a block: the n-th from the beginning, and the n-th from the end unless they are one.
class TwoTiles {
 public:
  __device__ __forceinline__ TwoTiles(const OutputArguments& a, int n)
      : low_(n * OutputShape::kTokens),
        high_((a.tiles - 1 - n) * OutputShape::kTokens),
        end_(a.q_len) {}
  // Its first token, and whether it is there.
  __device__ __forceinline__ int first(int tile) const { return tile == 0 ? low_ : high_; }
  __device__ __forceinline__ bool has(int tile) const { return tile == 1 || low_ < high_; }
  __device__ __forceinline__ bool has(int tile, int token) const {
    return has(tile) && first(tile) + token < end_;
  }

 private:
  int low_, high_, end_;
};

}  // namespace fovea::layers::cuda
