// The two passes of a problem that the portable engine has bound.
#include "backend/cuda/portable/kernel.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "backend/cuda/common/alignment.h"
#include "backend/cuda/common/call.h"
#include "backend/cuda/common/error.h"

namespace fovea::cuda {
namespace {

// Whether what lies in tensors is fewer than 2^31 values from their first.
bool places_are_ints(std::initializer_list<const TensorView*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const TensorView* t) {
    int64_t last = 0;
    for (size_t d = 0; d < static_cast<size_t>(t->rank); ++d) {
      last += (t->sizes[d] - 1) * std::abs(t->strides[d]);
    }
    return last < kDividable;
  });
}

}  // namespace

PortableKernel::PortableKernel(const AttentionProblem& problem, const DeviceInfo& device)
    : PortableKernel(problem, device, find_backward(problem, device.gpu)->one_pass) {}

PortableKernel::PortableKernel(const AttentionProblem& problem, const DeviceInfo& device,
                               const BackwardConfig& one_pass)
    : p_(problem),
      device_(device.device.index),
      forward_(*find_forward(problem, device.gpu)),
      backward_(*find_backward(problem, device.gpu)),
      one_pass_(one_pass),
      cut_(cut_forward(problem, forward_.config, device.gpu)),
      backward_cut_(cut_backward(problem, one_pass, device.gpu)),
      planned_forward_(plan_forward(problem, forward_.config, cut_, device.gpu)),
      planned_backward_(plan_backward(problem, backward_cut_, device.gpu)) {}

std::string PortableKernel::name() const {
  const ForwardConfig& c = forward_.config;
  const char* const numbers = c.products == Products::kTf32 ? "tf32" : dtype_name(p_.dtype);
  return std::string("portable/") + numbers + "/d" + std::to_string(c.dim_qk) +
         (c.dim_v == c.dim_qk ? "" : "v" + std::to_string(c.dim_v)) +
         (c.terms == Terms::kAny        ? "/terms"
          : c.terms == Terms::kComputed ? "/computed-terms"
          : c.terms == Terms::kBias     ? "/bias"
          : c.terms == Terms::kMask     ? "/mask"
          : c.width == Width::kPairs    ? "/pairs"
          : c.width == Width::kQuads    ? "/quads"
          : c.width == Width::kCrowded  ? "/crowded"
                                        : "");
}

std::string PortableKernel::describe() const {
  const ForwardConfig& c = forward_.config;
  const auto text = [](int64_t n) { return std::to_string(n); };
  const std::string products = c.products == Products::kHalf   ? "mma.sync"
                               : c.products == Products::kTf32 ? "mma.sync, f32 rounded to tf32"
                                                               : "exact multiply-adds";
  return products + "; forward: tiles " + text(c.tile_q()) + " x " + text(c.tile_kv) + ", " +
         text(cut_.tiles) + " tiles of rows a KV head, keys in " + text(cut_.parts) +
         (cut_.parts == 1 ? " part" : " parts") + "; backward: " +
         (backward_cut_.one_launch ? "one launch of blocks of keys and blocks of rows"
          : backward_cut_.one_pass
              ? "one pass over tiles of " + text(one_pass_.key_tile()) + " keys, their rows in " +
                    (backward_cut_.even.tiles > 0 ? "up to " : "") + text(backward_cut_.row_parts) +
                    (backward_cut_.row_parts == 1 ? " part" : " parts") +
                    (backward_cut_.long_tiles ? ", " + text(one_pass_.long_tile_q) + " at a time"
                                              : "")
              : "dk, dv by tiles of " + text(backward_.config.key_tile()) +
                    " keys, dq by tiles of " + text(backward_.config.row_tile()) + " rows");
}

size_t PortableKernel::workspace_bytes(Pass pass) const {
  if (pass == Pass::kBackward) {
    return static_cast<size_t>((padded_stats() + sum_floats()) * int64_t{sizeof(float)});
  }
  if (cut_.parts == 1) return 0;
  return static_cast<size_t>(Parts::bytes(cut_.parts, partial_rows(), p_.dim_v));
}

Status PortableKernel::forward(const ForwardTensors& t, Workspace workspace, Stream stream) const {
  const int64_t blocks = cut_.tiles * p_.batch * p_.head_kv;
  if (blocks == 0) return {};
  ForwardArguments a = planned_forward_;
  a.p = problem_of(p_, t);
  a.q = rows_of(t.q);
  a.k = rows_of(t.k);
  a.v = rows_of(t.v);
  a.out = rows_of(t.out);
  a.lse = scalars_of(t.lse);
  a.vector_qk = takes_vectors(t.q) && takes_vectors(t.k);
  a.vector_v = takes_vectors(t.v);
  a.vector_out = takes_vectors(t.out);
  a.whole_rows = a.vector_qk && a.vector_v && p_.dim_qk == forward_.config.dim_qk &&
                 p_.dim_v == forward_.config.dim_v;
  if (cut_.parts > 1) {
    a.parts = Parts::in(workspace.data, cut_.parts, partial_rows());
  }
  const CurrentDevice current(device_);
  if (Status s = to_status(current.error(), "forward: choosing the device"); !s.ok()) return s;
  const auto queue = static_cast<cudaStream_t>(stream.handle);
  if (Status s = to_status(forward_.launch(a, blocks, queue), "forward: launching the kernel");
      !s.ok() || cut_.parts == 1) {
    return s;
  }
  return to_status(forward_.merge({a.p, a.batch, a.parts, a.out, a.lse}, queue),
                   "forward: launching the merge");
}

Status PortableKernel::backward(const BackwardTensors& t, Workspace workspace,
                                Stream stream) const {
  BackwardArguments a = planned_backward_;
  a.p = problem_of(p_, t);
  a.q = rows_of(t.q);
  a.k = rows_of(t.k);
  a.v = rows_of(t.v);
  a.out = rows_of(t.out);
  a.dout = rows_of(t.dout);
  a.dq = rows_of(t.dq);
  a.dk = rows_of(t.dk);
  a.dv = rows_of(t.dv);
  a.lse = scalars_of(t.lse);
  a.dlse = scalars_of(t.dlse);
  a.vector_q = takes_vectors(t.q);
  a.vector_k = takes_vectors(t.k);
  a.vector_v = takes_vectors(t.v);
  a.vector_out = takes_vectors(t.out);
  a.vector_dout = takes_vectors(t.dout);
  a.vector_dq = takes_vectors(t.dq);
  a.vector_dk = takes_vectors(t.dk);
  a.vector_dv = takes_vectors(t.dv);
  a.delta = static_cast<float*>(workspace.data);
  a.lse2 = a.delta + stat_rows();
  a.marks_hidden_rows = backward_.config.terms == Terms::kMask;
  a.one_launch &= !t.dlse.given() && places_are_ints({&t.q, &t.k, &t.v, &t.out, &t.dout, &t.lse}) &&
                  a.vector_q && a.vector_k && a.vector_v && a.vector_out && a.vector_dout &&
                  a.vector_dq && a.vector_dk && a.vector_dv;
  if (backward_cut_.one_pass) {
    a.dq_sum = a.delta + padded_stats();
    a.dk_sum = a.dq_sum + backward_cut_.query_sum_rows * backward_.config.dim_qk;
    a.dv_sum = a.dk_sum + backward_cut_.key_sum_rows * backward_.config.dim_qk;
    a.sum_floats = sum_floats();
    if (backward_cut_.turns > 0) {
      a.turns = reinterpret_cast<int*>(a.dq_sum + a.sum_floats - backward_cut_.turns);
    }
  }
  if (t.dbias.given()) {
    const Broadcast strides = broadcast_of(t.dbias);
    a.dbias = t.dbias.data;
    a.dbias_batch = strides.batch;
    a.dbias_head = strides.head;
    a.dbias_q = strides.q;
    a.dbias_batches = static_cast<int>(t.dbias.sizes[0]);
    a.dbias_heads = static_cast<int>(t.dbias.sizes[1]);
    a.dbias_rows = static_cast<int>(t.dbias.sizes[2]);
    a.dbias_is_f32 = t.dbias.dtype == DType::kF32;
    a.dbias_in_pass = stores_dbias(a.p, t);
    a.dbias_shift = static_cast<const char*>(t.dbias.data) - static_cast<const char*>(t.bias.data);
  }
  if (t.dsink.given()) {
    a.dsink = static_cast<float*>(t.dsink.data);
    a.dsink_head = t.dsink.strides[0];
  }
  const CurrentDevice current(device_);
  if (Status s = to_status(current.error(), "backward: choosing the device"); !s.ok()) return s;
  return to_status(launch_backward(a, t, static_cast<cudaStream_t>(stream.handle)),
                   "backward: launching the kernels");
}

bool PortableKernel::stores_dbias(const Problem& p, const BackwardTensors& t) const {
  const Broadcast from = p.bias, to = broadcast_of(t.dbias);
  const bool whole =
      t.dbias.sizes[0] == p_.batch && t.dbias.sizes[1] == p_.head_q && t.dbias.sizes[2] == p_.q_len;
  return backward_.config.terms == Terms::kBias && p.term_runs && t.dbias.dtype == p_.dtype &&
         rows_begin_on(t.dbias, 8) && whole && from.batch == to.batch && from.head == to.head &&
         from.q == to.q && p.left < 0 && p.right < 0 && !p.lengths_are_read();
}

cudaError_t PortableKernel::launch_backward(const BackwardArguments& a, const BackwardTensors&,
                                            cudaStream_t stream) const {
  return backward_.launch(a, stream);
}

}  // namespace fovea::cuda
