// Discovery of the machine this process runs on.
#include "plan/device.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "backend/cpu/isa.h"
#include "backend/cuda/device.h"
#include "base/refusal.h"

namespace fovea {
namespace {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = 0;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
  // The fixed-size set is too small for machines of more than 1024 cores; the call then fails.
  if (cores < 1) cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cores, 1, kMaxThreads);
}

// An environment variable's text as a number in 1..most; `absent` where it is not set.
Result<int> count_in(const char* name, const char* text, int most, int absent) {
  if (text == nullptr || *text == '\0') return absent;
  int count = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, count);
  if (error != std::errc() || rest != end || count < 1 || count > most) {
    return refuse("make_plan", name, "\"" + std::string(text) + "\"", must_be_in(1, most));
  }
  return count;
}

}  // namespace

Result<int> thread_count(int asked, const char* variable, int cores) {
  if (asked < 0 || asked > kMaxThreads) {
    return refuse("make_plan", "options.threads", show(int64_t{asked}), must_be_in(0, kMaxThreads));
  }
  if (asked > 0) return asked;
  return count_in("FOVEA_NUM_THREADS", variable, kMaxThreads, cores);
}

Result<int> sm_count(const char* variable, int there) {
  return count_in("FOVEA_SM_COUNT", variable, there, there);
}

Result<DeviceInfo> discover(Device device, const PlanOptions& options) {
  if (device.type != DeviceType::kCpu && device.type != DeviceType::kCuda) {
    return refuse("make_plan", "device", show(device), must("be cpu or cuda"));
  }
  if (device.index < 0) {
    return refuse("make_plan", "device.index", show(int64_t{device.index}), must_be_at_least(0));
  }
  if (options.softmax != SoftmaxRule::kAny && options.softmax != SoftmaxRule::kRunningMax) {
    return refuse("make_plan", "options.softmax", show(static_cast<int64_t>(options.softmax)),
                  must("be kAny (0) or kRunningMax (1)"));
  }
  if (options.arithmetic != Arithmetic::kExact && options.arithmetic != Arithmetic::kPlain) {
    return refuse("make_plan", "options.arithmetic", show(static_cast<int64_t>(options.arithmetic)),
                  must("be kExact (0) or kPlain (1)"));
  }
  Result<int> threads = thread_count(options.threads, std::getenv("FOVEA_NUM_THREADS"),
                                     options.threads > 0 ? 0 : usable_cores());
  if (!threads.ok()) return threads.status();
  if (device.type == DeviceType::kCuda) {
    Result<DeviceInfo> found = discover_cuda(device);
    if (!found.ok()) return found;
    Result<int> sms = sm_count(std::getenv("FOVEA_SM_COUNT"), found->gpu.sm_count);
    if (!sms.ok()) return sms.status();
    found->gpu.sm_count = *sms;
    found->softmax = options.softmax;
    return found;
  }
  DeviceInfo info;
  info.device = Device::cpu();  // there is one CPU; an index given to it means nothing
  info.threads = *threads;
  info.softmax = options.softmax;
  info.arithmetic = options.arithmetic;
  info.isa = cpu_isa_name();
  const auto& have = cpu_isas();
  if (std::find(have.begin(), have.end(), info.isa) == have.end()) {
    std::string names;
    for (const std::string& isa : have) names += (names.empty() ? "" : ", ") + isa;
    return refuse("make_plan", "FOVEA_ISA", "\"" + info.isa + "\"",
                  must("be one that this machine has: " + names));
  }
  return info;
}

}  // namespace fovea
