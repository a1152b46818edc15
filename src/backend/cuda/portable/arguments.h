// What the portable engine's forward kernels are handed, resolved from the problem and the tensors
// of one call.
#pragma once

#include <vector_types.h>

#include "backend/cuda/common/problem.h"

namespace fovea::cuda {

struct ForwardArguments {
  Problem p;
  Rows q, k, v, out;
  RowScalars lse;  // data may be null
  bool vector_qk;  // rows of q and k begin on 16 bytes and dim_qk is a multiple of 8
  bool vector_v;   // the same of v
  bool vector_out;
  bool whole_rows;  // of k and v: vectors bring them, and their dims are the kernel's
  int batch;
  bool longest_first;   // tiles of rows in the order of their work over all heads, not head by head
  bool tiles_of_heads;  // no tile holds rows of two heads
  // Of batch * head_kv, head_kv, tiles of rows of a KV head, group.
  Divider of_heads, of_head_kv, of_tiles, of_group;

  // Keys cut into parts, each with its own unnormalised sums.
  int parts;
  int part_keys;          // of a part, a multiple of the kernel's tile
  float* partial;         // [part][batch * head_kv][group * q_len][dim_v]
  float2* partial_stats;  // [part][batch * head_kv][group * q_len]: reference max (log2), sum

  // Of the launch.
  int shared_bytes;  // of a block
  bool comes_early;  // blocks come while the kernel before ends, and wait for that themselves
};

}  // namespace fovea::cuda
