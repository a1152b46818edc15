// Reads the machine from /proc and /sys; what cannot be read stays empty.
#include "cli/machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <set>
#include <thread>

#include "cli/process.h"

namespace fovea::cli {
namespace {

// "model name\t: Xeon" in /proc/cpuinfo, NAME="x" in os-release: text after the separator.
std::string field(const std::string& path, const std::string& name, char separator) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, name.size(), name) != 0) continue;
    const size_t at = line.find(separator);
    if (at == std::string::npos) continue;
    std::string value = line.substr(at + 1);
    while (!value.empty() && std::strchr(" \t\"", value.front()) != nullptr) value.erase(0, 1);
    while (!value.empty() && std::strchr(" \t\"", value.back()) != nullptr) value.pop_back();
    if (!value.empty()) return value;
  }
  return {};
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<double> number(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str()) return std::nullopt;
  return value;
}

// Arm's /proc/cpuinfo has no name, only the implementer's and the part's numbers; lscpu knows many.
std::string cpu_name() {
  if (std::string name = field("/proc/cpuinfo", "model name", ':'); !name.empty()) return name;
  const std::string listing = output_of({"lscpu"});
  if (const size_t at = listing.find("Model name:"); at != std::string::npos) {
    const size_t begin = listing.find_first_not_of(' ', at + std::strlen("Model name:"));
    if (begin != std::string::npos) return listing.substr(begin, listing.find('\n', begin) - begin);
  }
  const std::string part = field("/proc/cpuinfo", "CPU part", ':');
  if (part.empty()) return "unknown";
  return "implementer " + field("/proc/cpuinfo", "CPU implementer", ':') + " part " + part;
}

int physical_cores() {
  std::set<std::string> cores;
  const long configured = ::sysconf(_SC_NPROCESSORS_CONF);
  for (long i = 0; i < configured; ++i) {
    const std::string topology = "/sys/devices/system/cpu/cpu" + std::to_string(i) + "/topology/";
    const std::string core = first_line(topology + "core_id");
    if (!core.empty()) cores.insert(first_line(topology + "physical_package_id") + ":" + core);
  }
  return static_cast<int>(cores.size());
}

int usable_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

std::optional<double> highest_mhz() {
  const std::string frequency = "/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq";
  if (const auto khz = number(first_line(frequency))) return *khz / 1000;
  return number(field("/proc/cpuinfo", "cpu MHz", ':'));
}

}  // namespace

Machine this_machine() {
  Machine m;
  m.cpu = cpu_name();
  m.cores = physical_cores();
  m.threads = usable_threads();
  m.mhz = highest_mhz();
  m.memory_bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE);
  if (::getloadavg(&m.load, 1) != 1) m.load = 0;
  utsname name{};
  if (::uname(&name) == 0) {
    m.architecture = name.machine;
    m.os = std::string(name.sysname) + " " + name.release;
  }
  const std::string distribution = field("/etc/os-release", "PRETTY_NAME", '=');
  if (!distribution.empty()) m.os = distribution + ", " + m.os;
#if defined(__clang__)
  m.compiler = "clang " __clang_version__;
#else
  m.compiler = "gcc " __VERSION__;
#endif
  return m;
}

std::string source_commit() {
  const std::string commit = output_of({"git", "-C", FOVEA_SOURCE_DIR, "rev-parse", "HEAD"});
  if (commit.empty()) return "unknown";
  const std::string changed =
      output_of({"git", "-C", FOVEA_SOURCE_DIR, "status", "--porcelain", "--untracked-files=no"});
  return changed.empty() ? commit : commit + "-dirty";
}

std::string date_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace fovea::cli
