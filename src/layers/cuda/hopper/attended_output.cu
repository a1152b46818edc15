// Launching of attention and its output's projection in one.
#include "backend/cuda/common/alignment.h"
#include "backend/cuda/common/exponents.h"
#include "backend/cuda/common/launch.cuh"
#include "base/ceil_div.h"
#include "layers/cuda/attended_output.h"
#include "layers/cuda/hopper/attended_output.cuh"

namespace fovea::layers::cuda {
namespace {

using S = OutputShape;

// [batch, rows, heads, dim] whose heads lie side by side, and rows on multiples of `elements`.
bool takes_heads(const TensorView& t, int64_t elements) {
  return t.rank == 4 && t.sizes[3] == S::kDim && t.strides[3] == 1 &&
         (t.sizes[2] == 1 || t.strides[2] == S::kDim) && fovea::cuda::rows_begin_on(t, elements);
}

int64_t tiles_of(const AttendedOutput& p) { return ceil_div(p.q.sizes[1], S::kTokens); }
int64_t pairs_of(const AttendedOutput& p) { return ceil_div(tiles_of(p), 2); }
int64_t blocks_of(const AttendedOutput& p) {
  return ceil_div(p.q.sizes[0] * pairs_of(p), S::kBlocks) * S::kBlocks;
}

template <typename T>
cudaError_t launch_type(const OutputArguments& a, int64_t blocks, cudaStream_t stream) {
  return fovea::cuda::launch<attended_output_kernel<T>>(
      {dim3(static_cast<unsigned>(blocks)), S::kThreads, sizeof(OutputShared<T>), stream}, a);
}

}  // namespace

bool takes_attended_output(const AttendedOutput& p, const GpuInfo& gpu) {
  constexpr int kSm = 90;
  constexpr int64_t kEight = 8, kTwo = 2;
  if (dtype_bytes(p.q.dtype) != 2 || p.project.bias.given()) return false;
  if (p.logit_bound > fovea::cuda::kMostLogitBound) return false;
  if (!takes_heads(p.q, kTwo) || !takes_heads(p.k, kEight) || !takes_heads(p.v, kEight)) {
    return false;
  }
  const int64_t rows = p.q.sizes[1], kv_heads = p.k.sizes[2], columns = p.out.sizes[2];
  if (p.q.sizes[2] != S::kHeads || (kv_heads != 1 && kv_heads != 2)) return false;
  if (rows < 1 || rows > S::kMostKeys || p.k.sizes[1] != rows) return false;
  if (columns > S::kMostColumns || columns % kEight != 0) return false;
  const TensorView& weight = p.project.weight;
  if (weight.sizes[0] > 1 && weight.strides[0] != S::kWidth) return false;
  for (const TensorView& t : {weight, p.out}) {
    if (!fovea::cuda::rows_begin_on(t, kEight)) return false;
  }
  if (p.heads.given() && !takes_heads(p.heads, kEight)) return false;
  if (p.lse.given() && p.lse.strides[2] != 1) return false;
  return gpu.sm == kSm && blocks_of(p) > 0 && blocks_of(p) <= gpu.sm_count;
}

cudaError_t launch_attended_output(const AttendedOutput& p, cudaStream_t stream) {
  OutputArguments a;
  a.q = rows_of(p.q);
  a.k = rows_of(p.k);
  a.v = rows_of(p.v);
  if (p.heads.given()) a.heads = rows_of(p.heads);
  if (p.lse.given()) {
    a.lse = static_cast<float*>(p.lse.data);
    a.lse_batch = p.lse.strides[0];
    a.lse_head = p.lse.strides[1];
  }
  a.weight = p.project.weight.data;
  a.batch = static_cast<int>(p.q.sizes[0]);
  a.out = rows_of(p.out);
  a.columns = static_cast<int>(p.out.sizes[2]);
  a.scale = static_cast<float>(p.project.scale);
  a.settled = p.project.chain == Chain::kGoesOn;
  a.q_len = static_cast<int>(p.q.sizes[1]);
  a.tiles = static_cast<int>(tiles_of(p));
  a.kv_heads = static_cast<int>(p.k.sizes[2]);
  a.kv_shift = a.kv_heads == 1 ? 3 : 2;
  a.pairs = Divider(static_cast<int>(pairs_of(p)));
  return p.q.dtype == DType::kF16 ? launch_type<__half>(a, blocks_of(p), stream)
                                  : launch_type<__nv_bfloat16>(a, blocks_of(p), stream);
}

}  // namespace fovea::layers::cuda
