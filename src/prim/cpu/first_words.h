// Parts of a short run of 16-bit words, for instruction sets that have no masked loads of them:
// nothing beyond the n words asked for is read or written.
#pragma once

#include <cstdint>

#include "prim/cpu/isa_namespace.h"

namespace fovea::FOVEA_ISA {

// The first n <= 4 words as one integer, the first lowest, zeros above.
FOVEA_INLINE uint64_t first_4_words(const void* from, int n) {
  const auto* p = static_cast<const unsigned char*>(from);
  uint64_t words = 0;
  if (n >= 4) {
    __builtin_memcpy(&words, p, 8);
    return words;
  }
  if ((n & 1) != 0) {
    uint16_t last = 0;
    __builtin_memcpy(&last, p + 2 * (n - 1), 2);
    words = last;
  }
  if ((n & 2) != 0) {
    uint32_t pair = 0;
    __builtin_memcpy(&pair, p, 4);
    words = words << 32 | pair;
  }
  return words;
}

FOVEA_INLINE void store_first_4_words(void* to, uint64_t words, int n) {
  auto* p = static_cast<unsigned char*>(to);
  if (n >= 4) {
    __builtin_memcpy(p, &words, 8);
    return;
  }
  if ((n & 2) != 0) {
    const auto pair = static_cast<uint32_t>(words);
    __builtin_memcpy(p, &pair, 4);
    words >>= 32;
  }
  if ((n & 1) != 0) {
    const auto last = static_cast<uint16_t>(words);
    __builtin_memcpy(p + 2 * (n - 1), &last, 2);
  }
}

struct Words8 {
  uint64_t low, high;
};

FOVEA_INLINE Words8 first_8_words(const void* from, int n) {
  if (n <= 4) return {first_4_words(from, n), 0};
  return {first_4_words(from, 4), first_4_words(static_cast<const uint16_t*>(from) + 4, n - 4)};
}

FOVEA_INLINE void store_first_8_words(void* to, Words8 words, int n) {
  store_first_4_words(to, words.low, n);
  if (n > 4) store_first_4_words(static_cast<uint16_t*>(to) + 4, words.high, n - 4);
}

}  // namespace fovea::FOVEA_ISA
