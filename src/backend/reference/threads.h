// Runs a job on several threads, the caller being one of them.
#pragma once

#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace fovea::reference {

// job(thread, unit) for every unit in [0, units); each thread takes the next unit that is left.
// Where the system gives fewer threads, fewer do the same work.
template <typename Job>
void for_each_unit(int threads, int64_t units, const Job& job) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int thread) {
    for (int64_t unit = next++; unit < units; unit = next++) job(thread, unit);
  };
  std::vector<std::thread> others;
  try {
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace fovea::reference
