// Encoding of tensor maps, by the driver.
#include "backend/cuda/hopper/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "backend/cuda/common/alignment.h"

namespace fovea::cuda::hopper {
namespace {

constexpr int64_t kStrideBytes = 16;               // that strides are multiples of
constexpr int64_t kMostStride = int64_t{1} << 40;  // bytes
constexpr int64_t kMostSize = int64_t{1} << 32;

// The library does not link the driver: a machine without one can still use the other engines.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  constexpr unsigned kSince = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kSince, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

bool takes_map(const TensorView& t) {
  if (!rows_begin_on(t, kStrideBytes / dtype_bytes(t.dtype))) return false;
  for (size_t d = 0; d < static_cast<size_t>(t.rank); ++d) {
    if (t.sizes[d] <= 0 || t.sizes[d] > kMostSize) return false;
    const bool apart = t.strides[d] > 0 && t.strides[d] * dtype_bytes(t.dtype) < kMostStride;
    if (t.sizes[d] > 1 && !apart) return false;
  }
  return true;
}

CUresult encode_map(CUtensorMap& map, const TensorView& t, int rows, int columns) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return CUDA_ERROR_NOT_FOUND;
  const bool packed = t.rank == 3;
  const size_t row = packed ? 0 : 1;
  const auto size = [&](size_t d) { return static_cast<cuuint64_t>(t.sizes[d]); };
  // The stride of a dimension of one is not used, but must be a valid one.
  const auto stride = [&](size_t d) {
    return static_cast<cuuint64_t>(t.sizes[d] > 1 ? t.strides[d] * dtype_bytes(t.dtype)
                                                  : kStrideBytes);
  };
  const cuuint64_t sizes[4] = {size(row + 2), size(row), size(row + 1), packed ? 1 : size(0)};
  const cuuint64_t strides[3] = {stride(row), stride(row + 1),
                                 packed ? cuuint64_t{kStrideBytes} : stride(0)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      t.dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(
      &map, type, 4, t.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      columns == tile::kNarrowColumns ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace fovea::cuda::hopper
