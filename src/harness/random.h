// Deterministic random numbers indexed by element: the same value in any order, on any machine.
#pragma once

#include <cstdint>

namespace fovea::harness {

// SplitMix64's finaliser: every bit of the result depends on every bit of x.
constexpr uint64_t hash64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr double uniform(uint64_t word) {  // in [0, 1)
  return static_cast<double>(word >> 11) * 0x1p-53;
}

// About a standard normal: eight 16-bit uniforms summed, so it ends at +-4.9. No libm call, so the
// data of a case has the same bits everywhere.
constexpr double normal(uint64_t word) {
  const uint64_t other = hash64(word);
  uint64_t sum = 0;
  for (int shift = 0; shift < 64; shift += 16) {
    sum += ((word >> shift) & 0xFFFFu) + ((other >> shift) & 0xFFFFu);
  }
  constexpr double kMean = 8 * 32767.5;
  constexpr double kDeviation = 53509.9;  // sqrt(8 (2^32 - 1) / 12)
  return (static_cast<double>(sum) - kMean) / kDeviation;
}

}  // namespace fovea::harness
