// Sizes rounded up.
#pragma once

#include <cstdint>

namespace fovea {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

}  // namespace fovea
