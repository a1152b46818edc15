// Which problems the portable engine takes.
#include "backend/cuda/portable/backend.h"

#include <string>
#include <tuple>

#include "backend/cuda/portable/kernel.h"
#include "backend/cuda/portable/plan.h"
#include "base/refusal.h"

namespace fovea::cuda {
namespace {

constexpr int kOldestSm = 80;
constexpr int64_t kMaxDim = 256;
constexpr int64_t kMaxLength = int64_t{1} << 30;

class PortableBackend : public Backend {
 public:
  const char* name() const override { return "portable"; }

  std::vector<std::string> refusals(const AttentionProblem& p,
                                    const DeviceInfo& device) const override {
    std::vector<std::string> reasons;
    if (device.device.type != DeviceType::kCuda) return {"device is cpu, takes cuda"};
    if (device.gpu.sm < kOldestSm) {
      reasons.push_back("compute capability is " + std::to_string(device.gpu.sm / 10) + "." +
                        std::to_string(device.gpu.sm % 10) + ", takes 8.0 and later");
    }
    if (p.dtype != DType::kF32 && p.dtype != DType::kF16 && p.dtype != DType::kBf16) {
      reasons.push_back(std::string("dtype is ") + dtype_name(p.dtype) + ", takes f32, f16, bf16");
    }
    for (const auto& [name, value, most] :
         {std::tuple{"dim_qk", p.dim_qk, kMaxDim}, std::tuple{"dim_v", p.dim_v, kMaxDim},
          std::tuple{"q_len", p.q_len, kMaxLength}, std::tuple{"kv_len", p.kv_len, kMaxLength},
          std::tuple{"head_q * q_len", p.head_q * p.q_len, kMaxLength}}) {
      if (value > most) {
        reasons.push_back(std::string(name) + " is " + std::to_string(value) + ", takes up to " +
                          std::to_string(most));
      }
    }
    if (reasons.empty() && find_forward(p, device.gpu) == nullptr) {
      reasons.emplace_back("no instance holds these head dims");
    }
    return reasons;
  }

  std::unique_ptr<BoundKernel> bind(const AttentionProblem& p,
                                    const DeviceInfo& device) const override {
    return std::make_unique<PortableKernel>(p, device);
  }
};

}  // namespace

const Backend& portable_backend() {
  static const PortableBackend backend;
  return backend;
}

}  // namespace fovea::cuda
