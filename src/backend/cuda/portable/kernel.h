// A problem that the portable engine has bound: which kernels it gets and how it is cut.
#pragma once

#include <string>

#include "backend/cuda/portable/plan.h"
#include "backend/sequence.h"

namespace fovea::cuda {

class PortableKernel : public BoundKernel {
 public:
  PortableKernel(const AttentionProblem& problem, const DeviceInfo& device);

  std::string name() const override;
  std::string describe() const override;
  size_t workspace_bytes(Pass pass) const override;
  Status forward(const ForwardTensors& t, Workspace workspace, Stream stream) const override;
  Status backward(const BackwardTensors& t, Workspace workspace, Stream stream) const override;

 protected:
  // For an engine with its own kernel of the pass that does all, whose blocks are of this shape.
  PortableKernel(const AttentionProblem& problem, const DeviceInfo& device,
                 const BackwardConfig& one_pass);
  virtual cudaError_t launch_backward(const BackwardArguments& a, const BackwardTensors& t,
                                      cudaStream_t stream) const;

 private:
  // Whether the pass that reads the bias may store its gradient too.
  bool stores_dbias(const Problem& p, const BackwardTensors& t) const;
  int64_t partial_rows() const { return p_.batch * p_.head_q * p_.q_len; }
  int64_t stat_rows() const {
    return p_.head_q * (p_.layout == Layout::kPacked ? p_.total_q : p_.batch * p_.q_len);
  }
  // delta and lse2, in whole 16 bytes: sums follow.
  int64_t padded_stats() const { return ceil_div(2 * stat_rows(), 4) * 4; }
  int64_t sum_floats() const {
    const BackwardConfig& c = backward_.config;
    return backward_cut_.query_sum_rows * c.dim_qk +
           backward_cut_.key_sum_rows * (c.dim_qk + c.dim_v) + backward_cut_.turns;
  }

  const AttentionProblem p_;
  const int device_;
  const ForwardKernel& forward_;
  const BackwardKernel& backward_;
  const BackwardConfig one_pass_;
  const ForwardCut cut_;
  const BackwardCut backward_cut_;
  const ForwardArguments planned_forward_;
  const BackwardArguments planned_backward_;
};

}  // namespace fovea::cuda
