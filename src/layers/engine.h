// What a layer asks of a device besides the attention operator. A layer is a sequence of these
// steps over tensors; each kind of device answers them all in its own way (cpu/ and cuda/ here).
//
// Views are [batch, rows, cols] or [batch, rows, heads, dim] with the last stride 1, all of the
// engine's dtype, checked by the layer. A tensor that is not given is left out of the step.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "fovea/layers.h"
#include "layers/ccgqa_prologue.h"
#include "layers/projection.h"
#include "layers/row_positions.h"

namespace fovea::layers {

// One call on its way. The first failure stays, and steps after it do nothing.
struct Run {
  Scratch scratch;  // what the step says that it takes
  Stream stream;
  Status status;

  void note(Status s) {
    if (status.ok() && !s.ok()) status = std::move(s);
  }
};

// Steps that may run beside those of a call, from LayerEngine::fork on until they are joined.
struct Aside {
  Run run;
  std::unique_lock<std::mutex> hold;  // of a stream of its own; none: the call's
};

enum class Write { kSet, kAdd };
enum class Direction { kForward, kBackward };  // backward, a rotation is by the negative angle

// A norm over the last dimension, with scale and shift where they are given.
struct Norm {
  QkNorm kind = QkNorm::kRms;
  double eps = 0;
  TensorView weight;  // [dim]
  TensorView bias;    // [dim]
};

// A copy of rows; `from` is not given: zeros. Where `to` has no elements nothing is done.
struct Copy {
  TensorView from, to;
};

// Rows to turn, in place.
struct Turn {
  TensorView x;
  RowPositions positions;
};

class LayerEngine {
 public:
  virtual ~LayerEngine() = default;
  // Scratch that is enough for any step.
  virtual size_t scratch_bytes() const = 0;
  // What single steps take, of these sizes; products of dense tensors. With less they are slower.
  virtual size_t linear_bytes(const TensorView&, const Projection&, const TensorView&) const {
    return scratch_bytes();
  }
  virtual size_t linear_dx_bytes(const TensorView&, const Projection&, const TensorView&) const {
    return scratch_bytes();
  }
  virtual size_t linear_dw_bytes(const TensorView&, const TensorView&, const Projection&) const {
    return scratch_bytes();
  }
  virtual size_t prologue_bytes() const { return scratch_bytes(); }

  // What is queued aside waits for what `run` had queued by `fork`; what `run` queues after `wait`
  // waits for what is aside by then, and after `join` for all of it. `fork` and `join` are always
  // called, whatever has failed.
  virtual bool forks() const { return false; }  // or steps take turns
  virtual Aside fork(Run& run) const { return {run, {}}; }
  virtual void wait(Run&, Aside&) const {}
  virtual void join(Run& run, Aside& aside) const { run.note(aside.run.status); }

  // y = scale * x weight^T + bias. x [batch, rows, in], y [batch, rows, out].
  virtual void linear(Run& run, const TensorView& x, const Projection& p,
                      const TensorView& y) const = 0;
  // dx (+)= scale * dy weight.
  virtual void linear_dx(Run& run, const TensorView& dy, const Projection& p, const TensorView& dx,
                         Write write) const = 0;
  // dp.weight = scale * dy^T x, dp.bias = the sum of dy's rows; either may be absent.
  virtual void linear_dw(Run& run, const TensorView& dy, const TensorView& x,
                         const Projection& dp) const = 0;

  // The same by heads: head h is multiplied with the h-th of the equal blocks W_h [n, m] of rows of
  // the weight. y_h = x_h W_h^T, or y_h = x_h W_h. x is [batch, rows, heads, m or n], or a
  // [batch, rows, m or n] that all heads share.
  enum class Block { kTransposed, kAsIs };
  virtual void head_linear(Run& run, const TensorView& x, const TensorView& weight, Block block,
                           const TensorView& y) const = 0;
  // [batch, rows, heads, dim] summed over heads into [batch, rows, dim].
  virtual void sum_heads(Run& run, const TensorView& x, const TensorView& y) const = 0;

  // Turns the first channels of every head by the RoPE the engine was made for; of one or two
  // tensors.
  virtual void rotate(Run& run, std::initializer_list<Turn> turns, Direction direction) const = 0;

  // y = norm(x) over the last dimension of [batch, rows, heads, dim].
  virtual void normalise(Run& run, const TensorView& x, const Norm& norm,
                         const TensorView& y) const = 0;
  // dx from dy, which may be the same memory; dweight and dbias may be absent.
  virtual void normalise_backward(Run& run, const TensorView& dy, const TensorView& x,
                                  const Norm& norm, const TensorView& dx, const TensorView& dweight,
                                  const TensorView& dbias) const = 0;

  // What p.work must be in a pass, by p's sizes; refused where it cannot be had. Lives are in steps
  // of CCGQA's.
  virtual Result<PrologueNeeds> prologue_needs(const Prologue& p, Pass pass) const = 0;
  // Whether of `mixed` only the keys are kept for backward.
  virtual bool keeps_keys() const = 0;
  // What p.makes_u_again is to be, by p's sizes.
  virtual bool makes_u_again(const Prologue& p) const = 0;
  // Whether backward may read dqk and dv while it makes all other gradients, by p's sizes, and not
  // step by step.
  virtual bool goes_back_at_once(const Prologue&) const { return true; }
  // What share of the device gradients of weights are to count on aside, by p's sizes, while what
  // the call waits for has the rest; 1: it comes first, and they take what they find.
  virtual double share_aside(const Prologue&) const { return 1; }
  // Whether the rows of z before the first token are made zeros by the prologue itself, if
  // p.begins.
  virtual bool makes_lead(const Prologue&) const { return false; }
  // Everything between CCGQA's projection and its attention. Backward, gradients of weights may be
  // made aside; what is queued there next follows that of z.
  virtual void prologue(Run& run, const Prologue& p) const = 0;
  virtual void prologue_backward(Run& run, Aside& aside, const Prologue& p,
                                 const PrologueGradients& g) const = 0;

  // Whether it is one step for the device, by its tensors or, before there are any, by their sizes.
  virtual bool takes(const AttendedOutput&) const { return false; }
  virtual void attended_output(Run&, const AttendedOutput&) const {}

  // Up to four copies, in any order.
  virtual void copy(Run& run, std::initializer_list<Copy> copies) const = 0;
  virtual void fill_lengths(Run& run, int64_t length, const TensorView& to) const = 0;  // [n] i32
  // The usual geometric slopes of ALiBi: [head_q] f32, or f64 for an f64 engine.
  virtual void fill_alibi_slopes(Run& run, const TensorView& to) const = 0;
};

// What an engine is made for.
struct EngineNeeds {
  RopeOptions rope;
  int64_t turning = 0;    // channels of a head that RoPE turns
  int64_t positions = 0;  // that its table should hold; others are computed when they come
  int64_t head_dim = 0;
  int64_t sums = 0;  // the most columns whose sums over rows a step is asked for
  // CPU: every sum is one running sum in order, in the type that the dtype is computed in: the
  // plain formula, whose error is the yardstick of other engines.
  bool plain_sums = false;
  Tf32 tf32 = Tf32::kForbidden;
  bool forks = false;  // LayerEngine::fork is called
};

Result<std::unique_ptr<const LayerEngine>> make_engine(const DeviceInfo& device, DType dtype,
                                                       const EngineNeeds& needs);

}  // namespace fovea::layers
