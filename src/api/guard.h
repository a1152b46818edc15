// The border that no exception crosses: public calls run their body inside guarded().
#pragma once

#include <exception>
#include <new>

#include "fovea/status.h"

namespace fovea {

// `Outcome` is Status, or a Result. The texts are short enough to need no allocation.
template <typename Outcome, typename Body>
Outcome guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "out of memory");
  } catch (...) {
    return Status(StatusCode::kInternal, "internal error");
  }
}

}  // namespace fovea
