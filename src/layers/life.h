// When memory is in use. A pass is a sequence of steps, and what lies somewhere lives from the step
// that makes it to the last one that reads it: two that never live at once may share a place.
#pragma once

#include <climits>
#include <cstddef>

namespace fovea::layers {

inline constexpr int kAllSteps = INT_MAX;

struct Life {
  int first = 0, last = kAllSteps;  // all of a pass, if nothing is said

  bool meets(const Life& other) const { return first <= other.last && other.first <= last; }
};

// Memory that somebody will cut up by himself.
struct Need {
  size_t bytes = 0;
  Life life;
};

struct Scratch {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

}  // namespace fovea::layers
