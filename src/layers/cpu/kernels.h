// What one instruction set offers the layers on the CPU for one element type: work on ranges of
// rows, cut and put on threads by the engine. Plain values only, so that code compiled for a newer
// instruction set shares no function with the rest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/tensor.h"
#include "layers/cpu/gemm.h"

namespace fovea::layers::cpu {

// [batch, rows, heads, dim], dim contiguous; rows are numbered through the batch.
struct HeadRows {
  void* data = nullptr;
  int64_t rows = 0;  // of a batch member
  int64_t heads = 0, dim = 0;
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0;

  [[gnu::always_inline]] int64_t at(int64_t row) const {
    return row / rows * batch_stride + row % rows * row_stride;
  }
};

enum class Pairing { kHalf, kInterleaved };

// How rows turn. `table` holds cos and sin of `turning / 2` pairs for each tabulated position.
struct Rotation {
  int64_t turning = 0;  // channels
  Pairing pairing = Pairing::kHalf;
  double base = 0;
  const void* table = nullptr;  // [positions, 2, turning / 2] in the accumulation type
  int64_t positions = 0;
  double sign = 1;  // -1: back
  const int32_t* ids = nullptr;
  int64_t ids_batch = 0, ids_row = 0;  // strides
  int64_t first = 0;                   // of the batch's rows, without ids
};

struct RotateRows {
  HeadRows x;
  Rotation rotation;
};

enum class NormKind { kRms, kLayer };

struct NormRows {
  NormKind kind = NormKind::kRms;
  double eps = 0;
  HeadRows x, y;                 // forward; backward reads x
  const void* weight = nullptr;  // [dim]
  const void* bias = nullptr;    // [dim]
  HeadRows dy, dx;               // backward
};

struct CopyRows {
  HeadRows from, to;
};

struct DepthwiseRows {
  HeadRows x, y;  // one head of `dim` channels; a row of y reads x from its own row on
  int64_t taps = 1;
  int64_t step = 0;              // elements from one tap's row of x to the next
  const void* weight = nullptr;  // [dim, taps]
  const void* bias = nullptr;    // [dim]
  bool add = false;
};

enum class Coupling { kNone, kAllHeads, kGroup };
enum class Temperature { kShared, kPerHead, kPerHeadExp };

// Rows of heads + heads_kv heads of q and k side by side.
struct CoupleRows {
  int64_t heads = 0, heads_kv = 0, dim = 0;
  Coupling coupling = Coupling::kNone;
  bool convolve = true;  // backward: `before` has another way to the result than the coupling
  bool norm = true;
  double length = 1, query_length = 1;
  Temperature kind = Temperature::kShared;
  const void* temperature = nullptr;
  Rotation rotation;
  HeadRows before, convolved, mixed, qk;
  HeadRows dqk, dmixed, dbefore;  // backward
};

struct Kernels {
  size_t shared_scratch = 0;  // bytes that products take, besides those of each worker
  size_t worker_scratch = 0;

  // Products, one after another, each on all threads.
  void (*gemm)(const Gemm* gemms, int64_t count, int threads, const GemmScratch& scratch) = nullptr;

  void (*rotate)(const RotateRows&, int64_t begin, int64_t end, std::byte* worker) = nullptr;
  void (*normalise)(const NormRows&, int64_t begin, int64_t end) = nullptr;
  // sums: [2, dim] of dweight and dbias over these rows.
  void (*normalise_backward)(const NormRows&, int64_t begin, int64_t end, double* sums) = nullptr;
  // sums [dim] of the columns of one head.
  void (*column_sums)(const HeadRows&, int64_t begin, int64_t end, double* sums) = nullptr;
  void (*store_sums)(const double* sums, int64_t count, void* to, int64_t stride) = nullptr;
  void (*copy)(const CopyRows&, int64_t begin, int64_t end) = nullptr;
  void (*sum_heads)(const CopyRows&, int64_t begin, int64_t end) = nullptr;  // into one head
  void (*depthwise)(const DepthwiseRows&, int64_t begin, int64_t end, std::byte* worker) = nullptr;
  void (*depthwise_sums)(const DepthwiseRows&, int64_t begin, int64_t end, double* sums) = nullptr;
  void (*couple)(const CoupleRows&, int64_t begin, int64_t end, std::byte* worker) = nullptr;
  void (*couple_backward)(const CoupleRows&, int64_t begin, int64_t end, std::byte* worker,
                          double* sums) = nullptr;
  void (*fill_rotation)(const Rotation&, void* table) = nullptr;  // all of its positions
};

}  // namespace fovea::layers::cpu
