// Products of matrices in a GPU's memory, by cuBLASLt. Which algorithm a product takes is asked
// once and kept: sizes come with the plan, but strides and alignment only with a call's tensors.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "fovea/attention.h"
#include "layers/cuda/blas_library.h"
#include "layers/engine.h"

namespace fovea::layers::cuda {

// A matrix whose rows lie `ld` elements apart, the same in every member of a batch.
struct Matrix {
  const void* data = nullptr;
  int64_t ld = 0;
  int64_t batch_stride = 0;
  bool transposed = false;  // what lies there is the transpose
};

// c = scale * a b (+ bias) (+ c), for each member of a batch.
struct Product {
  int64_t batch = 1;
  int64_t rows = 0, cols = 0, depth = 0;
  Matrix a;             // [rows, depth]
  Matrix b;             // [depth, cols]
  Matrix c;             // [rows, cols], written
  bool floats = false;  // c is of f32, whatever a and b are of
  double scale = 1;
  double share = 1;  // of the multiprocessors, that it may count on
  Write write = Write::kSet;
  const void* bias = nullptr;  // [cols], added to every row
  void* row_sums = nullptr;    // [rows]: also gives the sums of a over its depth; not with a bias

  // The vector that goes with the matrices, if there is one.
  const void* vector() const { return bias != nullptr ? bias : row_sums; }
};

class Products {
 public:
  // For cuBLASLt to cut the depth of products that have few tiles, as those of weights' gradients
  // are. With the 32 MiB that it is usually given on Hopper it hardly chooses faster algorithms,
  // and of some products slower ones.
  static constexpr size_t kMostBytes = size_t{2} << 20;
  // Enough for any product: with room to begin it on 256 bytes, which cuBLASLt insists on.
  static constexpr size_t kScratchAlignment = 256, kScratchBytes = kMostBytes + kScratchAlignment;

  Products(cublasLtHandle_t handle, DType dtype, Tf32 tf32, int multiprocessors)
      : handle_(handle), dtype_(dtype), tf32_(tf32), multiprocessors_(multiprocessors) {}

  // Whether there is an algorithm; asks for it where it is not known yet.
  Result<bool> takes(const Product& p) const;
  // The scratch that it takes, if that begins on 256 bytes; so do tensors without an address.
  Result<size_t> scratch_bytes(const Product& p) const;
  // Queues the product on a stream of the current device, by the algorithm that is best or, where
  // its scratch is too small for that, the best that it is enough for.
  Status run(const Product& p, Scratch scratch, cudaStream_t stream) const;

 private:
  // All that the choice of an algorithm depends on.
  struct Key {
    std::array<int64_t, 22> values{};
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Choice;

  static Key key_of(const Product& p, size_t most_bytes);
  Result<std::shared_ptr<Choice>> choice_of(const Product& p, size_t most_bytes = kMostBytes) const;
  Result<std::shared_ptr<Choice>> choose(const Product& p, size_t most_bytes) const;

  cublasLtHandle_t handle_;
  DType dtype_;
  Tf32 tf32_;
  int multiprocessors_;

  // A plan has a dozen products; where a length grows with every call, those beyond are not kept.
  static constexpr size_t kMostKept = 64;
  struct Known {
    Key key;
    std::shared_ptr<Choice> choice;
  };
  mutable std::shared_mutex mutex_;
  mutable std::vector<Known> known_;
};

}  // namespace fovea::layers::cuda
