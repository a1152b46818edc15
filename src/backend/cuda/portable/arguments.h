// What the portable engine's forward kernels are handed, resolved from the problem and the tensors
// of one call.
#pragma once

#include "backend/cuda/common/parts.h"

namespace fovea::cuda {

struct ForwardArguments {
  Problem p;
  Rows q, k, v, out;
  RowScalars lse;  // data may be null
  bool vector_qk;  // rows of q and k begin on 16 bytes and dim_qk is a multiple of 8
  bool vector_v;   // the same of v
  bool vector_out;
  bool whole_rows;  // of q, k and v: vectors bring them, and their dims are the kernel's
  int batch;
  bool longest_first;   // tiles of rows in the order of their work over all heads, not head by head
  bool tiles_of_heads;  // no tile holds rows of two heads
  // Logits are believed to be near 0 (logit_bound), which is what weights then refer to; and q
  // comes so scaled that products are logits in log2 units already.
  bool bounded, products_are_exponents;
  // Of batch * head_kv, head_kv, tiles of rows of a KV head, group, blocks of a round.
  Divider of_heads, of_head_kv, of_tiles, of_group, of_round;

  // Keys cut into parts, each with its own unnormalised sums.
  Parts parts;
  int part_keys;  // of a part, a multiple of the kernel's tile

  int shared_bytes;  // that a block is launched with
};

}  // namespace fovea::cuda
