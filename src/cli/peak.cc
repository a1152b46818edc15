// The table of peaks.
#include "cli/peak.h"

namespace fovea::cli {
namespace {

// Of the largest part of an architecture: a smaller one never reaches its share of it.
struct Peak {
  int sm;
  double half_flops;  // bf16 and f16
};
constexpr Peak kPeaks[] = {
    {80, 312e12},  // A100
    {90, 989e12},  // H100 SXM, H200
};

}  // namespace

std::optional<double> gpu_peak_flops(const GpuInfo& gpu, DType dtype) {
  if (dtype != DType::kBf16 && dtype != DType::kF16) return std::nullopt;
  for (const Peak& peak : kPeaks) {
    if (peak.sm == gpu.sm) return peak.half_flops;
  }
  return std::nullopt;
}

}  // namespace fovea::cli
