// Finding and opening cuBLASLt.
#include "layers/cuda/blas_library.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace fovea::layers::cuda {
namespace {

std::string library_name() { return "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR); }

// Where it may lie, in this order: where the caller says, where the system looks (or a library of
// that name that the process has loaded already), where NVIDIA's installer puts it, beside the
// header that this library was built with.
std::vector<std::string> candidates() {
  std::vector<std::string> all;
  if (const char* said = std::getenv("FOVEA_CUBLASLT"); said != nullptr && *said != '\0') {
    return {said};
  }
  all.push_back(library_name());
  for (const char* folder : {"/usr/local/cuda/lib64", FOVEA_CUBLASLT_FOLDER}) {
    all.push_back(std::string(folder) + "/" + library_name());
  }
  return all;
}

template <typename Function>
bool find(void* library, const char* name, Function& to) {
  to = reinterpret_cast<Function>(dlsym(library, name));
  return to != nullptr;
}

bool find_all(void* library, BlasLibrary& b) {
  return find(library, "cublasLtCreate", b.create) && find(library, "cublasLtMatmul", b.matmul) &&
         find(library, "cublasLtMatmulAlgoGetHeuristic", b.get_heuristic) &&
         find(library, "cublasLtMatmulAlgoConfigGetAttribute", b.get_algorithm) &&
         find(library, "cublasLtMatmulDescCreate", b.create_product) &&
         find(library, "cublasLtMatmulDescDestroy", b.destroy_product) &&
         find(library, "cublasLtMatmulDescSetAttribute", b.set_product) &&
         find(library, "cublasLtMatrixLayoutCreate", b.create_layout) &&
         find(library, "cublasLtMatrixLayoutDestroy", b.destroy_layout) &&
         find(library, "cublasLtMatrixLayoutSetAttribute", b.set_layout) &&
         find(library, "cublasLtMatmulPreferenceCreate", b.create_preference) &&
         find(library, "cublasLtMatmulPreferenceDestroy", b.destroy_preference) &&
         find(library, "cublasLtMatmulPreferenceSetAttribute", b.set_preference) &&
         find(library, "cublasLtGetStatusString", b.status_text);
}

LoadedBlas load() {
  LoadedBlas loaded;
  std::string first_fault;
  for (const std::string& path : candidates()) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr && find_all(library, loaded.calls)) return loaded;
    const char* const fault = dlerror();
    if (first_fault.empty() && fault != nullptr) first_fault = fault;
  }
  loaded.absence = library_name() + " was not found (" + first_fault +
                   "); it comes with the CUDA toolkit, or with the Python package nvidia-cublas, "
                   "and FOVEA_CUBLASLT may say where it is";
  return loaded;
}

}  // namespace

const LoadedBlas& loaded_blas() {
  static const LoadedBlas loaded = load();
  return loaded;
}

Result<cublasLtHandle_t> blas_handle(int device) {
  constexpr size_t kMaxDevices = 64;
  static std::mutex mutex;
  static std::array<cublasLtHandle_t, kMaxDevices> handles{};
  const std::lock_guard lock(mutex);
  cublasLtHandle_t& handle = handles.at(static_cast<size_t>(device));
  if (handle == nullptr) {
    if (Status s = to_status(loaded_blas().calls.create(&handle), "make_layer: starting cuBLASLt");
        !s.ok()) {
      return s;
    }
  }
  return handle;
}

Status to_status(cublasStatus_t error, const char* what) {
  if (error == CUBLAS_STATUS_SUCCESS) return {};
  const StatusCode code = error == CUBLAS_STATUS_ALLOC_FAILED    ? StatusCode::kOutOfMemory
                          : error == CUBLAS_STATUS_NOT_SUPPORTED ? StatusCode::kUnsupported
                                                                 : StatusCode::kInternal;
  return {code, std::string(what) + ": " + loaded_blas().calls.status_text(error)};
}

}  // namespace fovea::layers::cuda
