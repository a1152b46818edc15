// Integer arithmetic on sizes that says when a result does not fit in 64 bits.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace fovea {

constexpr std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

constexpr std::optional<int64_t> checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// The product of all factors, from the left; a zero hides no overflow that came before it.
constexpr std::optional<int64_t> checked_product(std::initializer_list<int64_t> factors) {
  std::optional<int64_t> product = 1;
  for (const int64_t factor : factors) {
    if (!product) return std::nullopt;
    product = checked_mul(*product, factor);
  }
  return product;
}

}  // namespace fovea
