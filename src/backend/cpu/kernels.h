// What one instruction set offers: the tasks of each pass for each element type. The engine cuts a
// call into tasks and runs them on threads; a task touches only its own outputs and its worker's
// scratch.
#pragma once

#include <cstddef>

#include "backend/cpu/arguments.h"
#include "fovea/tensor.h"

namespace fovea::cpu {

// Rows [row_begin, row_end) of a KV head (its query heads of query 0, those of query 1, and so on),
// keys [key_begin, key_end).
struct ForwardTask {
  Head head;
  int64_t row_begin = 0, row_end = 0;
  int64_t key_begin = 0, key_end = 0;
  float* partial =
      nullptr;  // one of several over the keys: unnormalised sums, max and sum of weights
};

// Keys [key_begin, key_end) of a KV head against the queries of some of its query heads: of its
// group those from head_begin to before head_end.
struct BackwardTask {
  Head head;
  int64_t head_begin = 0, head_end = 0;
  int64_t key_begin = 0, key_end = 0;
  // One of several over the keys: [group * q_len][dim_qk] sums, unscaled, of tiles of queries that
  // see some of the keys. Delta is then known; otherwise the task writes it.
  float* dq_partial = nullptr;
  // One of several over the query heads: [kv_len][dim_qk + dim_v], sums of dk, unscaled, and dv.
  float* dkv_partial = nullptr;
};

// What several tasks over the keys of one KV head made of dq.
struct DqParts {
  const float* first = nullptr;
  int64_t stride = 0;  // from one part to the next, in floats
  int64_t keys = 0;    // of a part
};

// What several tasks over the query heads of one KV head made of dk and dv.
struct DkvParts {
  const float* first = nullptr;
  int64_t stride = 0;
  int64_t count = 0;
};

// One tile of the bias gradient.
struct BiasGradientTask {
  void* dbias = nullptr;  // [batch|1, head|1, q|1, kv]
  Broadcast strides;
  BiasType type = BiasType::kF32;
  int64_t b = 0, b_count = 1;  // batch members and query heads that are summed
  int64_t head = 0, head_count = 1;
  int64_t q_begin = 0, q_end = 0;
  int64_t key_begin = 0, key_end = 0;
  const Sequence* sequences = nullptr;  // of every batch member
};

struct KernelSizes {
  int rows_per_task = 0;  // forward: query rows that share one packing of K and V
  int tile_q = 0;         // rows of a tile
  int tile_kv = 0;        // keys of a block
  int stream_rows = 0;    // with at most this many rows a KV head's keys are read once, unpacked
  int backward_tile_q = 0;
  int backward_tile_kv = 0;
};

// A call over few rows is cut over the keys into at most this many parts.
inline constexpr int kMaxPartials = 64;

struct Kernels {
  const char* matrix = nullptr;  // type the products run in
  KernelSizes sizes;
  size_t (*forward_scratch)(const Arguments&, int64_t rows) = nullptr;  // bytes per worker
  void (*forward)(const Arguments&, const ForwardTask&, std::byte* scratch) = nullptr;
  int64_t (*partial_floats)(const Arguments&,
                            int64_t rows) = nullptr;  // size of ForwardTask::partial
  // Joins `count` partials, `stride` floats apart, of the task's rows into out and lse.
  void (*join_partials)(const Arguments&, const ForwardTask&, const float* partials, int64_t stride,
                        int count) = nullptr;
  size_t (*backward_scratch)(const Arguments&, int64_t q_len, int64_t keys,
                             int64_t heads) = nullptr;  // of a task
  void (*backward)(const Arguments&, const BackwardTask&, std::byte* scratch) = nullptr;
  size_t (*bias_gradient_scratch)(const Arguments&) = nullptr;
  void (*bias_gradient)(const Arguments&, const BiasGradientTask&, std::byte* scratch) = nullptr;
  // delta of rows [begin, end) of one (batch, head).
  void (*delta)(const Arguments&, const Head& head, int64_t head_q, int64_t begin,
                int64_t end) = nullptr;
  // dq of rows [begin, end) of one query head: the sum of its parts. begin is a multiple of
  // backward_tile_q.
  void (*join_dq)(const Arguments&, const Head& head, int64_t head_q, int64_t begin, int64_t end,
                  const DqParts& parts) = nullptr;
  // dk and dv of keys [begin, end) of one KV head.
  void (*join_dkv)(const Arguments&, const Head& head, int64_t begin, int64_t end,
                   const DkvParts& parts) = nullptr;
  double (*peak_flops_of_a_thread)() = nullptr;
};

}  // namespace fovea::cpu
