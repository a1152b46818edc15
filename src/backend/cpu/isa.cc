// Detection of instruction sets, and the peak rate of each.
#include "backend/cpu/isa.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "backend/cpu/isa_table.h"
#include "prim/cpu/thread_pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace fovea {
namespace {

#if defined(__x86_64__)

// The kernel hands out tile registers only to a process that asks.
bool amx_granted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023,
                 kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_avx512bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 5)) != 0;
}

bool available(const std::string& isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  if (isa == "amx") return avx512 && has_avx512bf16() && amx_granted();
  if (isa == "avx512bf16") return avx512 && has_avx512bf16();
  if (isa == "avx512") return avx512;
  if (isa == "avx2") return avx2;
  return isa == "baseline";
}

#elif defined(__aarch64__)

bool available(const std::string& isa) {
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
  if (isa == "neon-bf16") return (getauxval(AT_HWCAP2) & kBf16) != 0;
  return isa == "neon";
}

#else

bool available(const std::string& isa) { return isa == "baseline"; }

#endif

}  // namespace

const std::vector<std::string>& cpu_isas() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    for (const cpu::IsaEntry& entry : cpu::isa_table()) {
      if (available(entry.name)) found.emplace_back(entry.name);
    }
    return found;
  }();
  return names;
}

std::string cpu_isa_name() {
  const char* asked = std::getenv("FOVEA_ISA");
  return asked != nullptr && *asked != '\0' ? asked : cpu_isas().front();
}

const cpu::Kernels* cpu::kernels_for(const std::string& isa, DType dtype) {
  const auto& have = cpu_isas();
  if (std::find(have.begin(), have.end(), isa) == have.end()) return nullptr;
  for (const IsaEntry& entry : isa_table()) {
    if (isa == entry.name) return entry.kernels(dtype);
  }
  return nullptr;
}

double cpu_peak_flops(DType dtype, int threads) {
  const cpu::Kernels* kernels = cpu::kernels_for(cpu_isa_name(), dtype);
  if (kernels == nullptr) return 0;
  double peak = 0;
  for (int round = 0; round < 3; ++round) {  // the best of three: others may be using the cores
    std::vector<double> rates(static_cast<size_t>(threads));
    parallel_for(threads, threads, [&](int64_t item, int) {
      rates[static_cast<size_t>(item)] = kernels->peak_flops_of_a_thread();
    });
    peak = std::max(peak, std::accumulate(rates.begin(), rates.end(), 0.0));
  }
  return peak;
}

}  // namespace fovea
