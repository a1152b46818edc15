// One layer bound to the sizes of its calls: immutable, cheap to copy, safe to use from many
// threads. Calls allocate nothing; workspace, saved memory and cache are the caller's.
//
//   auto layer = fovea::make_layer(options, {.batch = 1, .q_len = 1, .use = LayerUse::kCached},
//   cpu); fovea::LayerCache cache = layer->cache_in(memory);   // cache_bytes() of it, empty
//   call.cache = &cache;                                 // each forward adds its q_len tokens
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "fovea/plan.h"

namespace fovea {

enum class LayerUse {
  kInference,  // forward alone
  kTraining,   // forward leaves in `saved` what backward needs
  kCached,     // forward alone, over a cache that it adds its tokens to
};

// Sizes that every call of a plan has.
struct LayerShape {
  static constexpr int64_t kAsQuery = -1;

  int64_t batch = 0;
  int64_t q_len = 0;
  int64_t kv_len = kAsQuery;  // MultiHeadAttention: tokens of key and value; kAsQuery: q_len
  LayerUse use = LayerUse::kInference;
  bool masked = false;  // calls bring a mask
  // Results lend their memory: until it is written, a result may hold what would lie in the
  // workspace, which is smaller for it. Then all of a call's results, gradients too, must be given,
  // contiguous, aligned like a workspace, and overlap no other tensor. `saved` is the same either
  // way.
  bool lends = false;
  // Backward spends what forward left for it: it may write over `saved`, and needs a smaller
  // workspace for it. Another backward pass then needs another forward pass, or a copy of `saved`,
  // which forward writes the same either way.
  bool spends = false;
};

// Keys and values of the tokens so far. What each layer keeps is its own affair (docs/layers.md);
// cache_in makes the views. A plan of any q_len may go on with a cache that another plan of the
// same layer, batch and max_seq_len began.
struct LayerCache {
  TensorView k;        // [batch, max_seq_len, head_kv, dim]
  TensorView v;        // [batch, max_seq_len, head_kv, dim]; latent layers: not given
  TensorView conv;     // CCGQA: the last rows that its convolutions reach back to
  TensorView shift;    // CCGQA: the last row of shifted values
  int64_t length = 0;  // tokens in it; set it to 0 to begin again
};

struct LayerInputs {
  TensorView query;         // [batch, q_len, embed_dim], last stride 1, as all rank-3 tensors here
  TensorView key;           // MultiHeadAttention: [batch, kv_len, kdim]; not given: query
  TensorView value;         // MultiHeadAttention: [batch, kv_len, vdim]; not given: key
                            // The other layers take key and value only where they are query itself.
  TensorView mask;          // bool, true = takes part: [batch, keys] (padding) or
                            // [batch|1, head|1, q_len|1, keys]; keys is kv_len, cached: max_seq_len
  TensorView position_ids;  // [batch|1, q_len] i32; not given: aligned at the last key
  TensorView key_position_ids;  // [batch|1, kv_len] i32; not given: position_ids where kv_len is
                                // q_len, otherwise counted on from the cache's length
  DropoutSeed dropout;
};

template <typename Weights>
struct LayerForward : LayerInputs {
  Weights weights;
  TensorView out;               // [batch, q_len, embed_dim]
  LayerCache* cache = nullptr;  // LayerUse::kCached
};

// Gradients that are not given are not computed. dquery holds all that reached query: also what
// came by key and value where those were not given.
template <typename Weights>
struct LayerBackward : LayerInputs {
  Weights weights;
  TensorView dout;    // like out
  TensorView dquery;  // like query
  TensorView dkey;    // like key
  TensorView dvalue;  // like value
  Weights dweights;   // like weights
};

// What forward leaves for backward (LayerUse::kTraining), aligned like a workspace. One forward and
// its backward at a time may use it.
struct Saved {
  void* data = nullptr;
  size_t bytes = 0;
};

template <typename Weights>
class LayerPlan {
 public:
  class Impl;
  explicit LayerPlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  const LayerShape& shape() const;
  const Plan& attention() const;  // the operator inside
  size_t workspace_bytes(Pass pass) const;
  size_t saved_bytes() const;               // 0 unless LayerUse::kTraining
  size_t cache_bytes() const;               // 0 unless LayerUse::kCached
  LayerCache cache_in(void* memory) const;  // an empty cache over cache_bytes() of memory

  Status forward(const LayerForward<Weights>& call, Workspace workspace, Saved saved = {},
                 Stream stream = {}) const;
  Status backward(const LayerBackward<Weights>& call, Workspace workspace, Saved saved,
                  Stream stream = {}) const;

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace fovea
