// From a dtype that is known at run time to the type of its elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fovea/tensor.h"

namespace fovea::layers::cuda {

// body(T{}) for f32, f16 and bf16, which are all that the layers take on a GPU.
template <typename Body>
auto by_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kF32: return body(float{});
    case DType::kF16: return body(__half{});
    default: return body(__nv_bfloat16{});
  }
}

}  // namespace fovea::layers::cuda
