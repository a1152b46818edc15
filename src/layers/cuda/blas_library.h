// cuBLASLt, loaded when the first layer is planned for a GPU: the library and all that needs no GPU
// run without it.
#pragma once

#include <cublasLt.h>

#include "fovea/status.h"

namespace fovea::layers::cuda {

// What is called of it.
struct BlasLibrary {
  decltype(&::cublasLtCreate) create = nullptr;
  decltype(&::cublasLtMatmul) matmul = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) get_heuristic = nullptr;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) get_algorithm = nullptr;
  decltype(&::cublasLtMatmulDescCreate) create_product = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) destroy_product = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) set_product = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) create_layout = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) destroy_layout = nullptr;
  decltype(&::cublasLtMatrixLayoutSetAttribute) set_layout = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) create_preference = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;
  decltype(&::cublasLtGetStatusString) status_text = nullptr;
};

// Once per process; or why it cannot be had: "libcublasLt.so.13 was not found: ...".
struct LoadedBlas {
  BlasLibrary calls;
  std::string absence;  // empty where it was found
};
const LoadedBlas& loaded_blas();

// The process's handle on a device, which is the current one. Handles are never given back: a
// plan may outlive everything else.
Result<cublasLtHandle_t> blas_handle(int device);

// `what` is what was tried, as the message names it.
Status to_status(cublasStatus_t error, const char* what);

}  // namespace fovea::layers::cuda
