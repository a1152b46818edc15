// Whether one tensor is what a call takes: rank, sizes, dtype, device, strides, pointer.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "fovea/attention.h"

namespace fovea {

// One dimension as the caller knows it: "k.<name> is 96, must equal <origin>.<name> = 128".
struct Dim {
  const char* name = "";
  int64_t size = 0;
};

enum class Broadcast { kNo, kAllButLast };  // kAllButLast: a leading dimension may be 1
enum class LastStride { kOne, kAny };
enum class Access { kRead, kWrite };  // kWrite: no two elements may share memory

// What one argument must be. Filled per call on the stack; the names are literals.
struct TensorRule {
  const char* call = "";      // "forward"
  const char* argument = "";  // "k"
  Device device;
  std::array<DType, 2> dtypes{};  // either will do
  std::array<Dim, TensorView::kMaxRank> dims{};
  int rank = 0;
  const char* origin = "problem";  // where the sizes come from
  Broadcast broadcast = Broadcast::kNo;
  LastStride last_stride = LastStride::kOne;
  Access access = Access::kRead;

  void set_dims(std::initializer_list<Dim> list) {
    rank = 0;
    for (const Dim& dim : list) dims[static_cast<size_t>(rank++)] = dim;
  }
};

// The tensor is given; everything else is checked here.
Status check_tensor(const TensorView& t, const TensorRule& rule);

// Elements of a checked tensor's rank and sizes: true when there is at least one.
bool has_elements(const TensorView& t);

// Whether views start at the same element and both hold any.
bool same_start(const TensorView& a, const TensorView& b);

}  // namespace fovea
