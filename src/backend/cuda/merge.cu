// Launches of the merge: as many parts at a time as a kernel takes.
#include <algorithm>
#include <string>

#include "backend/cuda/common/alignment.h"
#include "backend/cuda/common/error.h"
#include "backend/cuda/common/launch.cuh"
#include "backend/cuda/merge.cuh"
#include "backend/cuda/merge.h"
#include "base/ceil_div.h"
#include "base/refusal.h"

namespace fovea {
namespace {

using cuda::kMergeParts;
using cuda::MergeArguments;
using cuda::MergeResult;

constexpr int64_t kMostBlocks = 0x7fffffff;  // of a grid; more rows take turns

// Elements that a lane moves at once: the 128 of a common row keep all 32 lanes busy.
template <typename T>
constexpr int kVector = sizeof(T) == 8 ? 2 : 4;

// Packed results, [row, head, dim] and [head, row], have no batch.
MergeResult result_of(const TensorView& out, const TensorView& lse) {
  const auto& o = out.strides;
  const auto& l = lse.strides;
  if (out.rank == 3) return {{out.data, 0, o[0], o[1]}, {lse.data, 0, l[1], l[0]}};
  return {{out.data, o[0], o[1], o[2]}, {lse.data, l[0], l[2], l[1]}};
}

// The memory of this part is written while the result is.
bool is_written(const PartialResult& part, const TensorView& out, const TensorView& lse) {
  return part.out.data == out.data || part.lse.data == lse.data;
}

template <typename T>
class Merger {
 public:
  Merger(const TensorView& out, const TensorView& lse, bool vectors, cudaStream_t stream)
      : vectors_(vectors), stream_(stream) {
    const bool packed = out.rank == 3;
    a_.batch = packed ? 1 : out.sizes[0];
    a_.rows = out.sizes[packed ? 0 : 1];
    a_.heads = out.sizes[packed ? 1 : 2];
    a_.dim = out.sizes[packed ? 2 : 3];
    a_.result = result_of(out, lse);
  }

  // A part that is written comes with the first launch, before anything is.
  cudaError_t run(const PartialResult* parts, int64_t count, const TensorView& out,
                  const TensorView& lse) {
    for (const bool written : {true, false}) {
      for (int64_t n = 0; n < count; ++n) {
        if (is_written(parts[n], out, lse) != written) continue;
        if (a_.parts == kMergeParts) {
          if (const cudaError_t error = launch(); error != cudaSuccess) return error;
          a_.parts = 0;
          a_.part[a_.parts++] = a_.result;
        }
        a_.part[a_.parts++] = result_of(parts[n].out, parts[n].lse);
      }
    }
    return launch();
  }

 private:
  cudaError_t launch() const {
    const int64_t rows = a_.batch * a_.rows * a_.heads;
    const int64_t blocks = ceil_div(rows, cuda::kMergeRows);
    const cuda::Launch how = {dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks))),
                              32 * cuda::kMergeRows, 0, stream_};
    return vectors_ ? cuda::launch<cuda::merge_kernel<T, kVector<T>>>(how, a_)
                    : cuda::launch<cuda::merge_kernel<T, 1>>(how, a_);
  }

  MergeArguments a_{};
  bool vectors_;
  cudaStream_t stream_;
};

template <typename T>
cudaError_t merge_as(const PartialResult* parts, int64_t count, const TensorView& out,
                     const TensorView& lse, cudaStream_t stream) {
  bool vectors = cuda::rows_are_whole(out, kVector<T>);
  for (int64_t n = 0; n < count; ++n) {
    vectors = vectors && cuda::rows_are_whole(parts[n].out, kVector<T>);
  }
  return Merger<T>(out, lse, vectors, stream).run(parts, count, out, lse);
}

}  // namespace

Status cuda_merge(const PartialResult* parts, int64_t count, const TensorView& out,
                  const TensorView& lse, Stream stream) {
  const int64_t written = std::count_if(
      parts, parts + count, [&](const PartialResult& p) { return is_written(p, out, lse); });
  if (written > kMergeParts) {
    return unsupported("merge", "nothing here merges these parts on " + show(out.device),
                       {{"cuda",
                         {"the memory of out or lse is that of " + show(written) +
                          " parts, takes up to " + show(int64_t{kMergeParts})}}});
  }
  const cuda::CurrentDevice current(out.device.index);
  if (Status s = cuda::to_status(current.error(), "merge: choosing the device"); !s.ok()) return s;
  const auto queue = static_cast<cudaStream_t>(stream.handle);
  const auto merge = [&] {
    switch (out.dtype) {
      case DType::kF64: return merge_as<double>(parts, count, out, lse, queue);
      case DType::kF32: return merge_as<float>(parts, count, out, lse, queue);
      case DType::kF16: return merge_as<__half>(parts, count, out, lse, queue);
      default: return merge_as<__nv_bfloat16>(parts, count, out, lse, queue);
    }
  };
  return cuda::to_status(merge(), "merge: launching the kernel");
}

}  // namespace fovea
