// layer(x, x, x) is layer(x); layer(x, y) is a mistake.
#include "layers/self_inputs.h"

#include "base/refusal.h"

namespace fovea::layers {
namespace {

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.rank == b.rank && a.sizes == b.sizes && a.strides == b.strides;
}

}  // namespace

void check_self_inputs(CallCheck& check, const LayerInputs& in, const RowDims& dims) {
  check.input("query", in.query, dims);
  struct One {
    const char* name;
    const TensorView& view;
  };
  for (const One& one : {One{"key", in.key}, One{"value", in.value}}) {
    if (!one.view.given() || same_view(one.view, in.query)) continue;
    check.absent(one.name, one.view, "is not query: this layer attends to query itself");
  }
}

void check_self_positions(CallCheck& check, const LayerInputs& in, const LayerShape& shape,
                          int64_t heads, int64_t keys) {
  check.mask(in.mask, shape.masked, shape, heads, keys);
  check.positions("position_ids", in.position_ids, shape.batch, shape.q_len);
  check.absent("key_position_ids", in.key_position_ids, "this layer attends to query itself");
}

void check_no_key_gradients(CallCheck& check, const TensorView& dkey, const TensorView& dvalue) {
  constexpr const char* kWhy = "this layer attends to query itself: all is in dquery";
  check.absent("dkey", dkey, kWhy);
  check.absent("dvalue", dvalue, kWhy);
}

}  // namespace fovea::layers
