// Whether the tensors of a layer's call are what its plan was made for. The first fault stays.
//
//   CallCheck check("forward", device, dtype);
//   check.input("query", call.query, {{"batch", 2}, {"q_len", 128}, {"embed_dim", 512}});
//   check.output("out", call.out, {...});
//   return check.finish();
#pragma once

#include <array>
#include <initializer_list>
#include <string_view>

#include "api/check_tensor.h"
#include "fovea/layers.h"

namespace fovea::layers {

// The sizes of an input or output: [batch, tokens, width].
struct RowDims {
  int64_t batch = 0, tokens = 0, width = 0;
  const char* tokens_name = "q_len";
  const char* width_name = "embed_dim";
};

class CallCheck {
 public:
  CallCheck(const char* call, Device device, DType dtype)
      : call_(call), device_(device), dtype_(dtype) {}

  using Dims = std::initializer_list<Dim>;
  // Stands before the names that follow: "weights.".
  void prefix(const char* text) { prefix_ = text; }
  // Whether the outputs that follow lend their memory (LayerShape::lends).
  void lends(bool yes) { lends_ = yes; }

  void input(const char* name, const TensorView& t, Dims dims);
  void output(const char* name, const TensorView& t, Dims dims);
  void optional_output(const char* name, const TensorView& t, Dims dims) {
    if (t.given() || lends_) output(name, t, dims);
  }
  void input(const char* name, const TensorView& t, const RowDims& d) {
    input(name, t, {{"batch", d.batch}, {d.tokens_name, d.tokens}, {d.width_name, d.width}});
  }
  void output(const char* name, const TensorView& t, const RowDims& d) {
    output(name, t, {{"batch", d.batch}, {d.tokens_name, d.tokens}, {d.width_name, d.width}});
  }
  void optional_output(const char* name, const TensorView& t, const RowDims& d) {
    if (t.given() || lends_) output(name, t, d);
  }

  // A weight is read, its gradient written where it is given; one that the options have no use for
  // must not be given.
  enum class Weights { kRead, kGradients };
  void weight(Weights kind, const char* name, const TensorView& t, Dims dims);
  // Of rank 3, and contiguous.
  void dense_weight(Weights kind, const char* name, const TensorView& t, Dims dims);
  void bias(Weights kind, bool wanted, const char* name, const TensorView& t, Dim dim) {
    if (wanted) return weight(kind, name, t, {dim});
    absent(name, t, "options.bias is false");
  }
  // Scales and shifts of a norm may be left out.
  void qk_norm(Weights kind, QkNorm norm, int64_t head_dim, const QkNormWeights& w);
  void absent(const char* name, const TensorView& t, std::string_view why);

  void mask(const TensorView& t, bool wanted, const LayerShape& shape, int64_t heads, int64_t keys);
  void positions(const char* name, const TensorView& t, int64_t batch, int64_t count);
  void cache(const LayerCache* cache, const LayerShape& shape, int64_t max_seq_len);
  void memory(Workspace workspace, size_t needed);
  void saved(Saved saved, size_t needed);

  void note(Status s) {
    if (status_.ok() && !s.ok()) status_ = std::move(s);
  }
  bool ok() const { return status_.ok(); }
  // Also: no output starts where another tensor does, and none that is lent overlaps one.
  Status finish();

 private:
  struct Name {
    std::array<char, 48> text{};
  };
  static Name named(const char* name, const char* prefix = "");
  Name full(const char* name) const { return named(name, prefix_); }
  void remember(const Name& name, const TensorView& t, Access access);
  void check(const char* name, const TensorView& t, Dims dims, Access access);
  void check_lent(const char* name, const TensorView& t);

  const char* call_;
  Device device_;
  DType dtype_;
  const char* prefix_ = "";
  bool lends_ = false;
  Status status_;

  static constexpr size_t kMost = 64;  // tensors of a call
  struct Seen {
    Name name;
    TensorView view;
    bool written = false, lent = false;
  };
  std::array<Seen, kMost> seen_;
  size_t count_ = 0;
};

}  // namespace fovea::layers
