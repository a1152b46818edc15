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

void CpuEngine::sum_heads(Run& run, const TensorView& x, const TensorView& y) const {
  if (!run.status.ok()) return;
  const CopyRows sum{head_rows(x), head_rows(y)};
  over_rows(row_count(x), [&](int64_t begin, int64_t end, int) { k_.sum_heads(sum, begin, end); });
}

}  // namespace fovea::layers::cpu
