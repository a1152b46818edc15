// What the backward kernels are handed.
#pragma once

#include "backend/cuda/portable/arguments.h"

namespace fovea::cuda {

// Parts that are about as long as each other: a tile of keys that more rows see has more of them.
// Blocks are numbered by tiles of keys, then by parts, then by heads.
struct EvenParts {
  static constexpr int kMostTiles = 16;
  int tiles;                        // of keys; 0: every tile has row_parts
  int first_block[kMostTiles + 1];  // of each, and the end
};

struct BackwardArguments {
  Problem p;
  Rows q, k, v, out, dout, dq, dk, dv;
  RowScalars lse, dlse;  // dlse.data may be null
  bool vector_q, vector_k, vector_v, vector_out, vector_dout;
  bool vector_dq, vector_dk, vector_dv;

  // Of every query row, in the workspace: [batch|1][head_q][stat_rows].
  float* delta;  // sum_d dout * out - dlse
  float* lse2;   // lse in log2 units; +inf for a row that sees nothing, so that its weights are 0
  // delta is NaN too where a row sees nothing but q or dout is not finite there; 0 otherwise.
  bool marks_hidden_rows;
  int64_t stat_rows;  // q_len, or all rows when packed
  int batch, sm_count;
  bool one_launch;  // of backward/short.cuh, which takes whole vectors and no dlse

  // Sums of gradients in the workspace, for blocks to add to (backward/sums.cuh): dq_sum when one
  // pass does all, the others when besides the rows that a tile of keys meets are cut into parts.
  float *dq_sum, *dk_sum, *dv_sum;
  int64_t sum_floats;  // of all three together and the turns, from dq_sum on
  int row_parts;
  EvenParts even;
  bool long_tiles;        // of rows, which a kernel of small heads has
  bool keys_begin_early;  // while deltas are worked out, and wait for them by themselves
  // Of row_parts, batch * head_kv, head_kv, q_len, head_q, group.
  Divider of_parts, of_heads, of_head_kv, of_q_len, of_head_q, of_group;
  bool first_keys_first;  // tiles of keys in their order over all heads, not head by head

  // Gradients of broadcast inputs; null when not asked for.
  void* dbias;
  int64_t dbias_batch, dbias_head, dbias_q;    // strides; 0 where broadcast
  int dbias_batches, dbias_heads, dbias_rows;  // sizes
  bool dbias_is_f32;
  // dbias is a whole tensor that lies as the bias does, dbias_shift bytes on, and rows see every
  // key: what one pass works out for it is stored at once.
  bool dbias_in_pass;
  int64_t dbias_shift;
  float* dsink;
  int64_t dsink_head;

  int* turns;  // at dq_sum (backward/turns.cuh); null: blocks add in any order
};

}  // namespace fovea::cuda
