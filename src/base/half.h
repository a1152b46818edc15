// The two 16-bit float formats as storage types, with conversions that round to nearest even; and
// floats rounded to tf32, which is no storage type.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace fovea {

struct Bf16 {
  uint16_t bits = 0;
};

struct F16 {
  uint16_t bits = 0;
};

[[gnu::always_inline]] inline float to_float(float x) { return x; }
[[gnu::always_inline]] inline float to_float(Bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

[[gnu::always_inline]] inline Bf16 to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // NaN: keep it one, whatever the low bits were
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  const uint32_t round = 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>((bits + round) >> 16)};
}

[[gnu::always_inline]] inline float to_float(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf, NaN
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude < 0x400u) {  // zero, subnormal: the integer times 2^-24 is exact
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

[[gnu::always_inline]] inline F16 to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and up
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal in the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t round = 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((magnitude + round - (112u << 23)) >> 13))};
}

// The nearest float with 10 bits of mantissa, ties away from zero, as GPUs round to tf32.
[[gnu::always_inline]] inline float round_to_tf32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;  // inf, NaN
  return std::bit_cast<float>((bits + 0x1000u) & 0xffffe000u);
}

}  // namespace fovea
