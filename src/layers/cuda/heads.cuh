// A head of one token after the convolutions: its norm, temperature and rotation, and the way back.
// A power of two of lanes holds a head, each lane some of its pairs of channels.
#pragma once

#include "layers/cuda/coupling.cuh"
#include "layers/cuda/rotation.cuh"

namespace fovea::layers::cuda {

struct HeadNorm {
  bool norm = true;
  float length = 1;
  KeyTemperature kind = KeyTemperature::kShared;
  const void* temperature = nullptr;
};

constexpr float kShortest = 1e-12f;  // a head is divided by its length, or by this if it is shorter

// The lanes of a warp that share a head.
struct HeadLanes {
  int count, first, lane;  // lanes of a head; the head of this lane among the warp's; its own place

  __device__ explicit HeadLanes(int dim) {
    count = min(32, 1 << (32 - __clz(dim / 2 - 1)));  // the power of two from dim / 2 on
    first = static_cast<int>(threadIdx.x) % 32 / count;
    lane = static_cast<int>(threadIdx.x) % count;
  }
  __device__ int heads_of_warp() const { return 32 / count; }
  __device__ float sum(float x) const {
    for (int step = count / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }
};

// What a head's length becomes.
template <typename T>
__device__ __forceinline__ float length_of(const HeadNorm& n, int head, int heads) {
  if (head < heads) return n.length;
  const T* const t = static_cast<const T*>(n.temperature);
  const float given = ptx::to_float(t[n.kind == KeyTemperature::kShared ? 0 : head - heads]);
  return n.length * (n.kind == KeyTemperature::kPerHeadExp ? expf(given) : given);
}

__device__ __forceinline__ float longest(float squares) { return fmaxf(sqrtf(squares), kShortest); }

// The rest of the forward pass from sums of the second convolution in shared memory, or from what
// stands in for them: mixed = sums + bias + coupling, qk = RoPE(norm(mixed)).
struct Finish {
  Coupling coupling;
  HeadNorm norm;
  Rotation rotation;
  const float* angles = nullptr;  // [tokens, 2, turning / 2]
  int tokens = 0, q_len = 0;      // of all members of the batch, and of one
  Rows mixed, qk;

  // Rows of whole heads from token `row` and channel `channel` on, which the bias begins at; they
  // are written over.
  template <typename T>
  __device__ void heads(float* s_tile, int pitch, int row, int rows, int channel, int cols,
                        const T* bias) const {
    const int dim = coupling.dim, per_row = cols / dim;
    const HeadLanes lanes(dim);
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int items = min(rows, tokens - row) * per_row, at_once = lanes.heads_of_warp();
    for (int begin = warp * at_once; begin < items; begin += warps * at_once) {
      // A warp's last heads may not exist: their lanes come along, with no channels.
      const int item = min(begin + lanes.first, items - 1), r = item / per_row;
      const int i = item % per_row * dim;
      one_head<T>(s_tile + r * pitch + i, lanes, begin + lanes.first < items ? dim : 0, row + r,
                  channel + i, bias != nullptr ? bias + i : nullptr);
    }
  }

 private:
  template <typename T>
  __device__ void one_head(float* s_head, const HeadLanes& lanes, int dim, int token, int channel,
                           const T* bias) const {
    const RowAt at(token, q_len);
    T* const to_mixed = mixed.at<T>(at.b, at.r) + channel;
    float squares = 0;
    for (int i = 2 * lanes.lane; i < dim; i += 2 * lanes.count) {
      float2 x = *reinterpret_cast<float2*>(s_head + i) + coupling.pair<T>(token, at, channel + i);
      if (bias != nullptr) x = x + float2{ptx::to_float(bias[i]), ptx::to_float(bias[i + 1])};
      x = round_pair<T>(x);
      store_pair(to_mixed + i, x);
      squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
      *reinterpret_cast<float2*>(s_head + i) = x;
    }
    squares = lanes.sum(squares);
    __syncwarp();
    const int head = channel / coupling.dim;
    const float factor =
        norm.norm ? length_of<T>(norm, head, coupling.heads) / longest(squares) : 1;
    const float* const row_angles = angles + int64_t{token} * rotation.turning;
    T* const to_qk = qk.at<T>(at.b, at.r) + channel;
    const auto value = [&](int i) { return s_head[i]; };
    for (int i = 2 * lanes.lane; i < dim; i += 2 * lanes.count) {
      const float2 x{rotation.turned(i, row_angles, 1, value),
                     rotation.turned(i + 1, row_angles, 1, value)};
      store_pair(to_qk + i, factor * x);
    }
  }
};

}  // namespace fovea::layers::cuda
