// The threads of the host engines: started once, reused by every call.
#pragma once

#include <cstdint>

namespace fovea {

// Runs body(context, item, worker) for every item in [0, items) on up to `threads` threads, the
// caller's among them; returns when all are done. Items are handed out in order, one at a time.
// Worker numbers are below `threads`, and no two items run under the same number at once. When
// another call holds the threads, this one runs alone on the caller's.
using ParallelBody = void (*)(void* context, int64_t item, int worker);
void parallel_for(int64_t items, int threads, ParallelBody body, void* context);

template <typename Body>
void parallel_for(int64_t items, int threads, Body&& body) {
  parallel_for(
      items, threads,
      [](void* context, int64_t item, int worker) { (*static_cast<Body*>(context))(item, worker); },
      &body);
}

}  // namespace fovea
