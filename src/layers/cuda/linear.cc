// Projections and their gradients as products of matrices.
#include <optional>

#include "backend/cuda/common/alignment.h"
#include "base/refusal.h"
#include "layers/cuda/engine.h"
#include "layers/cuda/few_rows.h"
#include "layers/cuda/head_rows.h"
#include "layers/cuda/sums.h"

namespace fovea::layers::cuda {
namespace {

// The first two dimensions of tensors that are walked together: one of all rows where every
// tensor's batch follows on its rows, otherwise a batch of rows.
struct Walk {
  int64_t batch = 0, rows = 0;
  bool joined = false;
};

bool joins(const TensorView& t) {
  return t.sizes[0] <= 1 || t.sizes[1] == 1 || t.strides[0] == t.sizes[1] * t.strides[1];
}

Walk walk(const TensorView& a, const TensorView& b) {
  const int64_t batch = a.sizes[0], rows = a.sizes[1];
  if (joins(a) && joins(b)) return {1, batch * rows, true};
  return {batch, rows, false};
}

// [batch, rows, width], or one head of [batch, rows, heads, width], as the matrices of a walk.
Matrix matrix_of(const TensorView& t, const Walk& along) {
  const int64_t width = t.sizes[static_cast<size_t>(t.rank - 1)];
  if (along.rows <= 1) return {t.data, width, 0, false};  // a stride that is never stepped
  const int64_t step = along.joined && t.sizes[1] == 1 ? t.strides[0] : t.strides[1];
  return {t.data, step, along.joined ? 0 : t.strides[0], false};
}

Matrix weight_of(const TensorView& w, int64_t first_row = 0) {
  const int64_t ld = w.sizes[0] > 1 ? w.strides[0] : w.sizes[1];
  return {static_cast<const std::byte*>(w.data) + first_row * w.strides[0] * dtype_bytes(w.dtype),
          ld, 0, false};
}

Matrix transposed(Matrix m) {
  m.transposed = true;
  return m;
}

// to = from times b, row by row.
Product rows_times(const TensorView& from, const Matrix& b, const TensorView& to) {
  const Walk along = walk(from, to);
  Product m;
  m.batch = along.batch;
  m.rows = along.rows;
  m.cols = to.sizes[2];
  m.depth = from.sizes[2];
  m.a = matrix_of(from, along);
  m.b = b;
  m.c = matrix_of(to, along);
  return m;
}

// The n-th member of a matrix's batch by itself.
Matrix member(Matrix m, int64_t n, DType dtype) {
  m.data = static_cast<const std::byte*>(m.data) + n * m.batch_stride * dtype_bytes(dtype);
  m.batch_stride = 0;
  return m;
}

Product linear_of(const TensorView& x, const Projection& p, const TensorView& y) {
  Product m = rows_times(x, transposed(weight_of(p.weight)), y);
  m.bias = p.bias.data;
  m.scale = p.scale;
  m.share = p.share;
  return m;
}

Product dx_of(const TensorView& dy, const Projection& p, const TensorView& dx) {
  Product m = rows_times(dy, weight_of(p.weight), dx);
  m.scale = p.scale;
  m.share = p.share;
  return m;
}

// Of all rows, or of those of each member of the batch.
Product dw_of(const TensorView& dy, const TensorView& x, const Projection& dp) {
  const Walk along = walk(dy, x);
  Product m;
  m.rows = dp.weight.sizes[0];
  m.cols = dp.weight.sizes[1];
  m.depth = along.rows;
  m.a = transposed(matrix_of(dy, along));
  m.b = matrix_of(x, along);
  m.c = weight_of(dp.weight);
  m.scale = dp.scale;
  m.share = dp.share;
  return m;
}

// All rows as those of one member, as matrix_of.
TensorView joined(const TensorView& t) {
  TensorView view = t;
  view.sizes[0] = 1;
  view.sizes[1] = t.sizes[0] * t.sizes[1];
  if (t.sizes[1] == 1) view.strides[1] = t.strides[0];
  return view;
}

// A product of a chain that a kernel of this library takes. After a projection comes a kernel that
// has weights to load; after a gradient attention, whose blocks are to be dealt out evenly.
std::optional<FewRows> in_chain(const TensorView& from, const Projection& p, const TensorView& to,
                                bool gradient) {
  if (p.chain == Chain::kNone || p.bias.given()) return std::nullopt;
  const bool joins_all = walk(from, to).joined;
  FewRows few;
  few.from = joins_all ? joined(from) : from;
  few.weight = p.weight;
  few.to = joins_all ? joined(to) : to;
  few.gradient = gradient;
  few.scale = static_cast<float>(p.scale);
  few.share = p.share;
  few.settled = p.chain == Chain::kGoesOn;
  few.leaves_early = p.chain == Chain::kBegins && !gradient;
  return takes_few_rows(few) ? std::optional(few) : std::nullopt;
}

}  // namespace

Status CudaEngine::multiply(const Run& run, const Product& p, cudaStream_t stream) const {
  if (p.batch == 0 || p.rows == 0 || p.cols == 0) return {};
  struct One {
    const Matrix& matrix;
    int64_t rows, cols;
  };
  for (const One& one :
       {One{p.a, p.rows, p.depth}, One{p.b, p.depth, p.cols}, One{p.c, p.rows, p.cols}}) {
    const int64_t width = one.matrix.transposed ? one.rows : one.cols;
    if (one.matrix.ld >= width) continue;
    return unsupported("layer", "rows of a tensor overlap",
                       {{"cuda",
                         {"rows lie " + show(one.matrix.ld) + " elements apart, takes " +
                          show(width) + " or more"}}});
  }
  return products_.run(p, run.scratch, stream);
}

// Where it cannot be asked for, the calls will say why.
size_t CudaEngine::product_bytes(const Product& p) const {
  const fovea::cuda::CurrentDevice current(device_);
  if (current.error() != cudaSuccess || p.batch == 0 || p.rows == 0 || p.cols == 0) return 0;
  const Result<size_t> bytes = products_.scratch_bytes(p);
  return bytes.ok() ? *bytes : Products::kScratchBytes;
}

size_t CudaEngine::linear_bytes(const TensorView& x, const Projection& p,
                                const TensorView& y) const {
  return product_bytes(linear_of(x, p, y));
}

size_t CudaEngine::linear_dx_bytes(const TensorView& dy, const Projection& p,
                                   const TensorView& dx) const {
  return product_bytes(dx_of(dy, p, dx));
}

size_t CudaEngine::linear_dw_bytes(const TensorView& dy, const TensorView& x,
                                   const Projection& dp) const {
  return product_bytes(dw_of(dy, x, dp));
}

void CudaEngine::linear(Run& run, const TensorView& x, const Projection& p,
                        const TensorView& y) const {
  queue(run, [&](cudaStream_t stream) -> Status {
    if (const auto few = in_chain(x, p, y, false)) return status_of(launch_few_rows(*few, stream));
    return multiply(run, linear_of(x, p, y), stream);
  });
}

void CudaEngine::linear_dx(Run& run, const TensorView& dy, const Projection& p,
                           const TensorView& dx, Write write) const {
  queue(run, [&](cudaStream_t stream) -> Status {
    if (write == Write::kSet) {
      if (const auto few = in_chain(dy, p, dx, true)) {
        return status_of(launch_few_rows(*few, stream));
      }
    }
    Product m = dx_of(dy, p, dx);
    m.write = write;
    return multiply(run, m, stream);
  });
}

// A batch that does not join is added up member by member, rounded each time.
void CudaEngine::linear_dw(Run& run, const TensorView& dy, const TensorView& x,
                           const Projection& dp) const {
  if (dy.sizes[0] * dy.sizes[1] == 0) {  // sums of nothing
    zero(run, dp.weight);
    zero(run, dp.bias);
    return;
  }
  queue(run, [&](cudaStream_t stream) -> Status {
    TensorView bias = dp.bias;
    if (dp.weight.given()) {
      const Walk along = walk(dy, x);
      Product m = dw_of(dy, x, dp);
      const Matrix a = m.a, b = m.b;
      for (int64_t n = 0; n < along.batch; ++n) {
        m.a = member(a, n, dtype_);
        m.b = member(b, n, dtype_);
        m.write = n == 0 ? Write::kSet : Write::kAdd;
        if (bias.given() && along.joined && dp.scale == 1) {
          m.row_sums = bias.data;
          const Result<bool> both = products_.takes(m);
          if (!both.ok()) return both.status();
          if (*both) {
            bias = {};
          } else {
            m.row_sums = nullptr;
          }
        }
        if (Status s = multiply(run, m, stream); !s.ok()) return s;
      }
    }
    return bias.given() ? column_sums(run, dy, bias, stream) : Status();
  });
}

Status CudaEngine::column_sums(const Run& run, const TensorView& x, const TensorView& to,
                               cudaStream_t stream) const {
  const HeadRows rows = head_rows(x);
  const int parts = sum_parts(run, rows.batch * rows.rows, rows.dim);
  auto* const sums = reinterpret_cast<float*>(run.scratch.data);
  if (Status s = status_of(launch_column_sums(rows, dtype_, sums, parts, stream)); !s.ok()) {
    return s;
  }
  return status_of(launch_sum_parts(sums, parts, {to.data, rows.dim}, {}, dtype_, stream));
}

// The batch of a product are the heads; a batch of sequences that does not join takes turns.
void CudaEngine::head_linear(Run& run, const TensorView& x, const TensorView& weight, Block block,
                             const TensorView& y) const {
  queue(run, [&](cudaStream_t stream) -> Status {
    const Walk along = walk(x, y);
    const int64_t heads = y.sizes[2], rows = weight.sizes[0] / heads;
    const bool flipped = block == Block::kTransposed;
    Product m;
    m.batch = heads;
    m.rows = along.rows;
    m.cols = flipped ? rows : weight.sizes[1];
    m.depth = flipped ? weight.sizes[1] : rows;
    const Matrix a = matrix_of(x, along), c = matrix_of(y, along);
    m.b = weight_of(weight);
    m.b.transposed = flipped;
    m.b.batch_stride = rows * weight.strides[0];
    for (int64_t n = 0; n < along.batch; ++n) {
      m.a = member(a, n, dtype_);
      m.a.batch_stride = x.rank == 4 ? x.strides[2] : 0;
      m.c = member(c, n, dtype_);
      m.c.batch_stride = y.strides[2];
      if (Status s = multiply(run, m, stream); !s.ok()) return s;
    }
    return {};
  });
}

void CudaEngine::sum_heads(Run& run, const TensorView& x, const TensorView& y) const {
  queue(run, [&](cudaStream_t stream) {
    const int64_t wide = 16 / dtype_bytes(dtype_);
    return launch_sum_heads(
        head_rows(x), head_rows(y),
        fovea::cuda::rows_are_whole(x, wide) && fovea::cuda::rows_are_whole(y, wide), dtype_,
        stream);
  });
}

}  // namespace fovea::layers::cuda
