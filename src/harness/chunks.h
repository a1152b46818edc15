// Work on many elements, shared among all cores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>

#include "prim/cpu/thread_pool.h"

namespace fovea::harness {

// Calls body(begin, end) for chunks that make up [0, items), where an item is `length` elements: in
// no order, and on any thread, so that what it does to an item may depend on that alone.
template <typename Body>
void for_chunks(int64_t items, int64_t length, const Body& body) {
  constexpr int64_t kElements = 1 << 16;  // of a chunk, about
  const int64_t chunk = std::max<int64_t>(kElements / std::max<int64_t>(length, 1), 1);
  const auto threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  parallel_for((items + chunk - 1) / chunk, threads,
               [&](int64_t i, int) { body(i * chunk, std::min(items, (i + 1) * chunk)); });
}

}  // namespace fovea::harness
