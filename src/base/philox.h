// Philox 4x32-10, the counter-based generator behind dropout: the four words of one block depend on
// the counter and the key alone, so any engine can make the word of any element in any order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fovea {

struct PhiloxKey {
  uint32_t k0 = 0;
  uint32_t k1 = 0;
};

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key.k0, static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key.k1, static_cast<uint32_t>(p0)};
    key.k0 += 0x9E3779B9u;
    key.k1 += 0xBB67AE85u;
  }
  return counter;
}

// Dropout of element (batch b, query head h, query i, key j), i and j counted inside the sequence:
// counter (j / 4, i, b * head_q + h, low offset), key (low seed, high seed ^ high offset), word j
// % 4. The element is kept when its word is at least dropout_threshold(p).
constexpr PhiloxKey dropout_key(uint64_t seed, uint64_t offset) {
  return {static_cast<uint32_t>(seed),
          static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32)};
}

constexpr uint32_t dropout_threshold(double p) {
  return static_cast<uint32_t>(p * 4294967296.0);  // p < 1, so below 2^32
}

constexpr uint32_t dropout_word(uint64_t seed, uint64_t offset, int64_t batch_head, int64_t i,
                                int64_t j) {
  return philox4x32({static_cast<uint32_t>(j / 4), static_cast<uint32_t>(i),
                     static_cast<uint32_t>(batch_head), static_cast<uint32_t>(offset)},
                    dropout_key(seed, offset))[static_cast<size_t>(j % 4)];
}

}  // namespace fovea
