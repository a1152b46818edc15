// The layers' steps on a CUDA device: everything is queued on the call's stream, or on one that
// forks from it and joins it again; nothing is allocated or waited for. Products are cuBLASLt's,
// the rest are kernels of this folder.
#pragma once

#include <algorithm>

#include "backend/cuda/common/error.h"
#include "layers/cuda/fixed_angles.h"
#include "layers/cuda/products.h"
#include "layers/cuda/prologue.h"
#include "layers/cuda/side_stream.h"
#include "layers/engine.h"

namespace fovea::layers::cuda {

class CudaEngine final : public LayerEngine {
 public:
  CudaEngine(const DeviceInfo& device, DType dtype, const EngineNeeds& needs,
             cublasLtHandle_t handle);

  // Before anything forks; on this device.
  Status make_side();

  size_t scratch_bytes() const override { return scratch_bytes_; }
  size_t linear_bytes(const TensorView& x, const Projection& p, const TensorView& y) const override;
  size_t linear_dx_bytes(const TensorView& dy, const Projection& p,
                         const TensorView& dx) const override;
  size_t linear_dw_bytes(const TensorView& dy, const TensorView& x,
                         const Projection& dp) const override;
  size_t prologue_bytes() const override { return 0; }  // p.work is all
  bool forks() const override { return side_.get() != nullptr; }
  Aside fork(Run& run) const override;
  void wait(Run& run, Aside& aside) const override;
  void join(Run& run, Aside& aside) const override;
  void linear(Run& run, const TensorView& x, const Projection& p,
              const TensorView& y) const override;
  void linear_dx(Run& run, const TensorView& dy, const Projection& p, const TensorView& dx,
                 Write write) const override;
  void linear_dw(Run& run, const TensorView& dy, const TensorView& x,
                 const Projection& dp) const override;
  void head_linear(Run& run, const TensorView& x, const TensorView& weight, Block block,
                   const TensorView& y) const override;
  void sum_heads(Run& run, const TensorView& x, const TensorView& y) const override;
  void rotate(Run& run, std::initializer_list<Turn> turns, Direction direction) const override;
  void normalise(Run& run, const TensorView& x, const Norm& norm,
                 const TensorView& y) const override;
  void normalise_backward(Run& run, const TensorView& dy, const TensorView& x, const Norm& norm,
                          const TensorView& dx, const TensorView& dweight,
                          const TensorView& dbias) const override;
  Result<PrologueNeeds> prologue_needs(const Prologue& p, Pass pass) const override;
  bool keeps_keys() const override { return true; }
  bool makes_u_again(const Prologue& p) const override;
  bool goes_back_at_once(const Prologue& p) const override;
  double share_aside(const Prologue& p) const override;
  bool makes_lead(const Prologue& p) const override;
  void prologue(Run& run, const Prologue& p) const override;
  void prologue_backward(Run& run, Aside& aside, const Prologue& p,
                         const PrologueGradients& g) const override;
  bool takes(const AttendedOutput& p) const override;
  void attended_output(Run& run, const AttendedOutput& p) const override;
  void copy(Run& run, std::initializer_list<Copy> copies) const override;
  void fill_lengths(Run& run, int64_t length, const TensorView& to) const override;
  void fill_alibi_slopes(Run& run, const TensorView& to) const override;

 private:
  // body(stream) with this device as the current one; it gives a Status or a cudaError_t.
  template <typename Body>
  void queue(Run& run, const Body& body) const {
    if (!run.status.ok()) return;
    const fovea::cuda::CurrentDevice current(device_);
    run.note(fovea::cuda::to_status(current.error(), "layer: choosing the device"));
    if (run.status.ok()) run.note(status_of(body(static_cast<cudaStream_t>(run.stream.handle))));
  }
  static Status status_of(Status s) { return s; }
  static Status status_of(cudaError_t error) {
    return fovea::cuda::to_status(error, "layer: launching a kernel");
  }

  class ByProducts;

  bool goes_by_tiles(const Prologue& p, Pass pass) const;
  void zero(Run& run, const TensorView& to) const;
  Status multiply(const Run& run, const Product& p, cudaStream_t stream) const;
  size_t product_bytes(const Product& p) const;
  Status column_sums(const Run& run, const TensorView& x, const TensorView& to,
                     cudaStream_t stream) const;
  // Into how many parts sums over rows are cut, of `count` sums in each.
  int sum_parts(const Run& run, int64_t rows, int64_t count) const;

  const int device_;
  const GpuInfo gpu_;
  const DType dtype_;
  const size_t scratch_bytes_;
  const Products products_;
  const FixedAngles angles_;
  const RopeTable rope_;  // the prologue's; without a table
  SideStream side_;
};

}  // namespace fovea::layers::cuda
