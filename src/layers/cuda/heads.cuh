// Heads after the convolutions: coupling, norm, temperature and rotation.
#pragma once

#include "layers/cuda/coupling.cuh"
#include "layers/cuda/rotation.cuh"

namespace fovea::layers::cuda {

struct HeadNorm {
  bool norm = true;
  float length = 1, query_length = 1;
  KeyTemperature kind = KeyTemperature::kShared;
  const void* temperature = nullptr;
};

constexpr float kShortest = 1e-12f;  // a head is divided by its length, or by this if it is shorter

// What a head's length becomes.
template <typename T>
__device__ __forceinline__ float length_of(const HeadNorm& n, int head, int heads) {
  if (head < heads) return n.query_length;
  const T* const t = static_cast<const T*>(n.temperature);
  const float given = ptx::to_float(t[n.kind == KeyTemperature::kShared ? 0 : head - heads]);
  return n.length * (n.kind == KeyTemperature::kPerHeadExp ? expf(given) : given);
}

__device__ __forceinline__ float longest(float squares) { return fmaxf(sqrtf(squares), kShortest); }

// The rest of the forward pass from sums of the second convolution in shared memory, or from what
// stands in for them: mixed = sums + bias + coupling, qk = RoPE(norm(mixed)). For backward mixed is
// kept of the keys. The heads of q have a length that is never 0, so that qk itself is theirs but
// for what they were divided by.
struct Finish {
  Coupling coupling;
  HeadNorm norm;
  Rotation rotation;
  HeadLanes lanes;
  int lanes_of_row = 32;          // a power of two that holds a tile's row of heads
  const float* angles = nullptr;  // [tokens, 2, dim]: cos and sin of each channel
  Rows qk;
  Rows keys, inverses;  // of mixed; no data: there is no backward

  // Rows of whole heads, `cols` columns from channel `channel` on, which the bias begins at;
  // row_of(r) says which token row r is: its number, its place, and whether it is one. The first
  // `threads` of a block come here, with as many rows as they take in whole turns.
  template <typename T, typename RowOf>
  __device__ void heads(float* s_tile, int pitch, int rows, int channel, int cols, const T* bias,
                        const RowOf& row_of, int threads = static_cast<int>(blockDim.x)) const {
    const int dim = coupling.dim, place = threadIdx.x % lanes_of_row;
    const int i = place % lanes.lanes * 8, col = place / lanes.lanes * dim + i;
    const bool is = i < dim && col < cols;  // not every lane has channels
    const int head = (channel + (is ? col - i : 0)) / dim;
    const float length = norm.norm ? length_of<T>(norm, head, coupling.heads) : 1;
    const Eight own_bias = is && bias != nullptr ? load_eight_apart(bias + col) : Eight{};
    const int step = threads / lanes_of_row;
#pragma unroll 2
    for (int r = threadIdx.x / lanes_of_row; r < rows; r += step) {
      const auto row = row_of(r);
      const bool live = is && row.is;
      float* const s_head = s_tile + r * pitch + col - i;
      Eight x{};
      if (live) {
        x = load_eight(s_head + i);
        add(x, own_bias);
        add(x, coupling.share<T>(row.token, row.at, head, i));
        round<T>(x);
        if (keys.data != nullptr && head >= coupling.heads) {
          store_eight(keys.at<T>(row.at.b, row.at.r) + (head - coupling.heads) * dim + i, x);
        }
        if (rotation.half) store_eight(s_head + i, x);
      }
      const float squares = lanes.sum(dot(x, x));
      __syncwarp();  // what a head's lanes stored is there for its partners
      if (!live) continue;
      const Eight partners = rotation.partners(x, s_head, i);
      const float* const row_angles = angles + int64_t{row.token} * 2 * dim + i;
      const Eight cosines = load_eight(row_angles), sines = load_eight(row_angles + dim);
      Eight y{};
      add_product(y, x, cosines);
      add_product(y, partners, sines);
      const float inverse = 1 / longest(squares);
      if (inverses.data != nullptr && i == 0 && head < coupling.heads) {
        inverses.at<float>(row.at.b, row.at.r)[head] = inverse;
      }
      scale(y, norm.norm ? length * inverse : 1);
      store_eight(qk.at<T>(row.at.b, row.at.r) + channel + col, y);
    }
  }
};

// Of Finish::heads.
struct TokenAt {
  int token;
  RowAt at;
  bool is;
};

}  // namespace fovea::layers::cuda
