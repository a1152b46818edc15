// torch.ops.fovea: the schemas, and the one kernel of each op that serves the CPU and GPUs alike.
// What torch needs to know beyond that (shapes, gradients, autocast) is in python/fovea/ops.py.
#include "ops.h"

#include <string>

namespace {

// Shapes as in fovea/attention.h. q_len and kv_len are read in the packed layout only (cu_seqlens
// given), where they are the longest sequence's. heads_first: q, k, v, out and their gradients are
// [batch, head, seq, dim]. Read in this order by take_request in attention.cc.
const std::string kRequest =
    "Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? mask=None, Tensor? key_lengths=None, "
    "Tensor? alibi_slopes=None, Tensor? sink=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_kv=None, Tensor? dropout_seed=None, SymInt q_len=0, SymInt kv_len=0, "
    "SymInt left=-1, SymInt right=-1, SymInt prefix=0, float? scale=None, float softcap=0.0, "
    "float dropout=0.0, bool deterministic=False, bool tf32=False, str? backend=None, "
    "bool heads_first=False";

// Shapes as in fovea/layer_plan.h; options as in layer_settings.h, weights as in layer_plans.h.
// Read in this order by take_layer in layers.cc.
const std::string kLayer =
    "Tensor query, Tensor? key, Tensor? value, Tensor? mask, Tensor? position_ids, "
    "Tensor? key_position_ids, Tensor[] weights, Tensor? dropout_seed, str options";

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("attention", fovea::torch_ops::attention);
  m.impl("attention_no_grad", fovea::torch_ops::attention_no_grad);
  m.impl("attention_backward", fovea::torch_ops::attention_backward);
  m.impl("layer", fovea::torch_ops::layer);
  m.impl("layer_backward", fovea::torch_ops::layer_backward);
  m.impl("layer_cached", fovea::torch_ops::layer_cached);
  m.impl("merge", fovea::torch_ops::merge);
}

}  // namespace

STABLE_TORCH_LIBRARY(fovea, m) {
  m.def(("attention(" + kRequest + ") -> (Tensor out, Tensor lse)").c_str());
  // out alone, which no gradient reaches (ops.py tells torch's autograd to let calls pass): for
  // callers who know that none is wanted.
  m.def(("attention_no_grad(" + kRequest + ") -> Tensor").c_str());
  m.def(("attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool want_dbias, "
         "bool want_dsink, " +
         kRequest + ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)")
            .c_str());
  m.def("merge(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)");
  // saved is what a backward pass needs, and 0 bytes where none will follow; layer_saved_bytes says
  // how many (device: -1 is the CPU; kv_len: -1 is q_len). A gradient that is not wanted has no
  // elements. A backward pass that spends writes over saved: only where nobody will read it again,
  // not even torch's graphs, which is why no schema says so.
  m.def(("layer(" + kLayer + ", SymInt saved_bytes) -> (Tensor out, Tensor saved)").c_str());
  m.def(("layer_backward(Tensor dout, Tensor saved, " + kLayer +
         ", bool[] wanted, bool spends=False) -> Tensor[]")
            .c_str());
  m.def(("layer_cached(" + kLayer + ", Tensor(a!)[] cache, SymInt length) -> Tensor").c_str());
  m.def("layer_saved_bytes(str options, int device, int batch, int q_len, int kv_len) -> int");
  m.def("version() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fovea, CompositeExplicitAutograd, m) {
  m.impl("layer_saved_bytes", fovea::torch_ops::layer_saved_bytes);
  m.impl("version", fovea::torch_ops::version);
}
STABLE_TORCH_LIBRARY_IMPL(fovea, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(fovea, CUDA, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", fovea::torch_ops::overrideable);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward",
         fovea::torch_ops::overrideable_backward);
}
STABLE_TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_scaled_dot_product_flash_attention_for_cpu", fovea::torch_ops::flash_for_cpu);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward",
         fovea::torch_ops::flash_for_cpu_backward);
}
