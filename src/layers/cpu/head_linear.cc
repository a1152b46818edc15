// Products head by head, for layers whose keys and values come from a latent.
#include "layers/cpu/engine.h"

namespace fovea::layers::cpu {

void CpuEngine::head_linear(Run& run, const TensorView& x, const TensorView& weight, Block block,
                            const TensorView& y) const {
  if (!run.status.ok()) return;
  const int64_t heads = y.sizes[2], rows = weight.sizes[0] / heads;
  const bool transposed = block == Block::kTransposed;
  multiply_all(run, heads, [&](int64_t h) {
    Gemm m;
    m.batch = y.sizes[0];
    m.rows = y.sizes[1];
    m.cols = transposed ? rows : weight.sizes[1];
    m.depth = transposed ? weight.sizes[1] : rows;
    m.a = {x.rank == 4 ? element_at(x, h * x.strides[2]) : x.data, x.strides[0], x.strides[1], 0,
           1};
    m.b = {element_at(weight, h * rows * weight.strides[0]), 0, transposed ? 1 : weight.strides[0],
           transposed ? weight.strides[0] : 1};
    m.c = element_at(y, h * y.strides[2]);
    m.c_batch = y.strides[0];
    m.c_row = y.strides[1];
    return m;
  });
}

// One product: the contraction runs over heads and their channels.
void CpuEngine::head_linear_dx(Run& run, const TensorView& dy, const TensorView& weight,
                               const TensorView& dx, Write write) const {
  if (!run.status.ok()) return;
  const int64_t heads = dy.sizes[2], rows = weight.sizes[0] / heads;
  Gemm m;
  m.batch = dy.sizes[0];
  m.rows = dy.sizes[1];
  m.cols = weight.sizes[1];
  m.blocks = heads;
  m.depth = rows;
  m.a = {dy.data, dy.strides[0], dy.strides[1], dy.strides[2], 1};
  m.b = {weight.data, rows * weight.strides[0], weight.strides[0], 1};
  m.c = dx.data;
  m.c_batch = dx.strides[0];
  m.c_row = dx.strides[1];
  m.add = write == Write::kAdd;
  multiply(run, &m, 1);
}

void CpuEngine::head_linear_dw(Run& run, const TensorView& dy, const TensorView& x,
                               const TensorView& dweight) const {
  if (!run.status.ok()) return;
  const int64_t heads = dy.sizes[2], rows = dweight.sizes[0] / heads;
  multiply_all(run, heads, [&](int64_t h) {
    Gemm m;
    m.rows = rows;
    m.cols = dweight.sizes[1];
    m.blocks = dy.sizes[0];
    m.depth = dy.sizes[1];
    m.a = {element_at(dy, h * dy.strides[2]), 0, 1, dy.strides[0], dy.strides[1]};
    m.b = {x.data, x.strides[0], x.strides[1], 1};
    m.c = element_at(dweight, h * rows * dweight.strides[0]);
    m.c_row = dweight.strides[0];
    return m;
  });
}

void CpuEngine::sum_heads(Run& run, const TensorView& x, const TensorView& y) const {
  if (!run.status.ok()) return;
  const CopyRows sum{head_rows(x), head_rows(y)};
  over_rows(row_count(x), [&](int64_t begin, int64_t end, int) { k_.sum_heads(sum, begin, end); });
}

}  // namespace fovea::layers::cpu
