// Products as cuBLASLt is asked for them. It counts in columns: what lies here by rows is the
// transpose there, so that c^T = b^T a^T, and b comes first.
#include "layers/cuda/products.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/refusal.h"

namespace fovea::layers::cuda {
namespace {

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::kF32 ? CUDA_R_32F : dtype == DType::kF16 ? CUDA_R_16F : CUDA_R_16BF;
}

// The largest power of two up to 256 that an address is a multiple of.
uint32_t alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return address == 0 ? 256 : static_cast<uint32_t>(std::min<uintptr_t>(256, address & -address));
}

// cuBLASLt's descriptors, given back with their owner.
template <typename Handle, auto kDestroy>
struct Destroy {
  using pointer = Handle;  // NOLINT(readability-identifier-naming): as unique_ptr looks for it
  void operator()(Handle handle) const { (void)(loaded_blas().calls.*kDestroy)(handle); }
};
template <typename Handle, auto kDestroy>
using Owned = std::unique_ptr<Handle, Destroy<Handle, kDestroy>>;
using Description = Owned<cublasLtMatmulDesc_t, &BlasLibrary::destroy_product>;
using Layout = Owned<cublasLtMatrixLayout_t, &BlasLibrary::destroy_layout>;
using Preference = Owned<cublasLtMatmulPreference_t, &BlasLibrary::destroy_preference>;

// Remembers the first failure of many calls that are all expected to succeed.
class Calls {
 public:
  void operator()(cublasStatus_t status) {
    if (status_ == CUBLAS_STATUS_SUCCESS) status_ = status;
  }
  cublasStatus_t status() const { return status_; }

 private:
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
};

struct Size {
  int64_t rows = 0, cols = 0;
};

Layout layout_of(const Matrix& m, Size size, int64_t batch, DType dtype, Calls& calls) {
  const BlasLibrary& blas = loaded_blas().calls;
  if (m.transposed) std::swap(size.rows, size.cols);
  cublasLtMatrixLayout_t layout = nullptr;
  calls(blas.create_layout(&layout, type_of(dtype), static_cast<uint64_t>(size.cols),
                           static_cast<uint64_t>(size.rows), m.ld));
  const auto count = static_cast<int32_t>(batch);
  calls(blas.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
  calls(blas.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &m.batch_stride,
                        sizeof(m.batch_stride)));
  return Layout(layout);
}

template <typename Attribute, typename Value>
cublasStatus_t set(cublasLtMatmulDesc_t description, Attribute attribute, const Value& value) {
  return loaded_blas().calls.set_product(description, attribute, &value, sizeof(value));
}

Description description_of(const Product& p, DType dtype, Tf32 tf32, Calls& calls) {
  const bool rounded = dtype == DType::kF32 && tf32 == Tf32::kAllowed;
  cublasLtMatmulDesc_t d = nullptr;
  calls(loaded_blas().calls.create_product(
      &d, rounded ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F));
  calls(set(d, CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
  calls(set(d, CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
  calls(set(d, CUBLASLT_MATMUL_DESC_EPILOGUE,
            p.bias != nullptr       ? CUBLASLT_EPILOGUE_BIAS
            : p.row_sums != nullptr ? CUBLASLT_EPILOGUE_BGRADB
                                    : CUBLASLT_EPILOGUE_DEFAULT));
  return Description(d);
}

using Proposals = std::array<cublasLtMatmulHeuristicResult_t, 8>;

// Which of cuBLASLt's proposals to take, of which it believes the first to be the fastest. It likes
// tiles of 128 by 256, one to a multiprocessor. Smaller ones, of which one is multiplied while
// another is stored, are faster where there are enough of them, if depth is neither so short that
// storing is all there is, nor so long that it hardly matters.
size_t best_of(const Product& p, DType dtype, const Proposals& proposed, int count) {
  constexpr int64_t kLeastDepth = 512, kMostDepth = 4096;
  constexpr float kLeastWaves = 1.4f;
  if (dtype == DType::kF32 || p.depth < kLeastDepth || p.depth > kMostDepth) return 0;
  for (const uint32_t wanted : {CUBLASLT_MATMUL_TILE_128x128, CUBLASLT_MATMUL_TILE_128x160}) {
    for (size_t n = 0; n < static_cast<size_t>(count); ++n) {
      uint32_t tile = 0;
      size_t written = 0;
      const cublasStatus_t asked = loaded_blas().calls.get_algorithm(
          &proposed[n].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof(tile), &written);
      if (asked != CUBLAS_STATUS_SUCCESS) return 0;
      if (tile == wanted && proposed[n].wavesCount >= kLeastWaves) return n;
    }
  }
  return 0;
}

}  // namespace

// A product with its algorithm. Bias and row sums are addressed by the description itself, which
// is therefore one call's at a time.
struct Products::Choice {
  std::mutex mutex;
  Description description;
  Layout a, b, c;
  cublasLtMatmulAlgo_t algorithm{};
  size_t bytes = 0;  // of scratch
  bool found = false;

  Status bind(const Product& p) {
    return to_status(set(description.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.vector()),
                     "layer: describing a product");
  }
};

Products::Key Products::key_of(const Product& p, size_t most_bytes) {
  return {{p.batch,
           p.rows,
           p.cols,
           p.depth,
           p.a.ld,
           p.a.batch_stride,
           p.a.transposed,
           p.b.ld,
           p.b.batch_stride,
           p.b.transposed,
           p.c.ld,
           p.c.batch_stride,
           p.floats,
           std::bit_cast<int64_t>(p.share),
           p.write == Write::kAdd,
           p.bias != nullptr,
           p.row_sums != nullptr,
           alignment_of(p.a.data),
           alignment_of(p.b.data),
           alignment_of(p.c.data),
           alignment_of(p.vector()),
           static_cast<int64_t>(most_bytes)}};
}

Result<std::shared_ptr<Products::Choice>> Products::choice_of(const Product& p,
                                                              size_t most_bytes) const {
  const Key key = key_of(p, most_bytes);
  const auto known = [&]() -> std::shared_ptr<Choice> {
    const auto at = std::find_if(known_.begin(), known_.end(),
                                 [&](const Known& one) { return one.key == key; });
    return at == known_.end() ? nullptr : at->choice;
  };
  {
    const std::shared_lock lock(mutex_);
    if (auto choice = known()) return choice;
  }
  auto made = choose(p, most_bytes);
  if (!made.ok()) return made;
  const std::unique_lock lock(mutex_);
  if (known_.size() < kMostKept && known() == nullptr) known_.push_back({key, *made});
  return made;
}

Result<std::shared_ptr<Products::Choice>> Products::choose(const Product& p,
                                                           size_t most_bytes) const {
  const BlasLibrary& blas = loaded_blas().calls;
  auto choice = std::make_shared<Choice>();
  Calls calls;
  choice->description = description_of(p, dtype_, tf32_, calls);
  if (p.share < 1) {
    const auto count = static_cast<int32_t>(std::lround(p.share * multiprocessors_));
    calls(set(choice->description.get(), CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, count));
  }
  choice->a = layout_of(p.a, {p.rows, p.depth}, p.batch, dtype_, calls);
  choice->b = layout_of(p.b, {p.depth, p.cols}, p.batch, dtype_, calls);
  choice->c = layout_of(p.c, {p.rows, p.cols}, p.batch, p.floats ? DType::kF32 : dtype_, calls);
  cublasLtMatmulPreference_t made = nullptr;
  calls(blas.create_preference(&made));
  const Preference preference(made);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    calls(blas.set_preference(preference.get(), attribute, &value, sizeof(value)));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{most_bytes});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.c.data));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.c.data));
  if (Status s = to_status(calls.status(), "layer: describing a product"); !s.ok()) return s;
  if (p.vector() != nullptr) {
    if (Status s = choice->bind(p); !s.ok()) return s;
  }
  Proposals proposed{};
  int count = 0;
  const cublasStatus_t asked =
      blas.get_heuristic(handle_, choice->description.get(), choice->b.get(), choice->a.get(),
                         choice->c.get(), choice->c.get(), preference.get(),
                         static_cast<int>(proposed.size()), proposed.data(), &count);
  if (asked != CUBLAS_STATUS_SUCCESS && asked != CUBLAS_STATUS_NOT_SUPPORTED) {
    return to_status(asked, "layer: choosing an algorithm for a product");
  }
  // Heuristics know nothing of a vector's alignment, and kernels trap over it.
  choice->found = asked == CUBLAS_STATUS_SUCCESS && count > 0 && alignment_of(p.vector()) >= 16;
  const cublasLtMatmulHeuristicResult_t& best = proposed[best_of(p, dtype_, proposed, count)];
  choice->algorithm = best.algo;
  choice->bytes = best.workspaceSize;
  return choice;
}

Result<bool> Products::takes(const Product& p) const {
  const auto choice = choice_of(p);
  if (!choice.ok()) return choice.status();
  return (*choice)->found;
}

Result<size_t> Products::scratch_bytes(const Product& p) const {
  const auto choice = choice_of(p);
  if (!choice.ok()) return choice.status();
  return (*choice)->bytes;
}

Status Products::run(const Product& p, Scratch scratch, cudaStream_t stream) const {
  void* aligned = scratch.data;
  size_t room = scratch.bytes;
  if (std::align(kScratchAlignment, 1, aligned, room) == nullptr) room = 0;
  auto found = choice_of(p);
  if (found.ok() && (*found)->bytes > room) found = choice_of(p, room);
  if (!found.ok()) return found.status();
  Choice& choice = **found;
  if (!choice.found) {
    const std::string bias = p.bias == nullptr
                                 ? ""
                                 : " and a bias that begins on " +
                                       show(int64_t{alignment_of(p.bias)}) + " bytes (takes 16)";
    return {StatusCode::kUnsupported, "layer: cuBLASLt has no algorithm for a product of " +
                                          show(p.rows) + " x " + show(p.depth) + " x " +
                                          show(p.cols) + " in " + show(dtype_) + bias};
  }
  std::unique_lock<std::mutex> mine;
  if (p.vector() != nullptr) {
    mine = std::unique_lock(choice.mutex);
    if (Status s = choice.bind(p); !s.ok()) return s;
  }
  const auto scale = static_cast<float>(p.scale);
  const float keep = p.write == Write::kAdd ? 1.0f : 0.0f;
  void* const c = const_cast<void*>(p.c.data);
  return to_status(
      loaded_blas().calls.matmul(handle_, choice.description.get(), &scale, p.b.data,
                                 choice.b.get(), p.a.data, choice.a.get(), &keep, c, choice.c.get(),
                                 c, choice.c.get(), &choice.algorithm,
                                 choice.bytes > 0 ? aligned : nullptr, choice.bytes, stream),
      "layer: launching a product");
}

}  // namespace fovea::layers::cuda
