// The 16-bit floating-point types of CUDA and their conversions, for the kernel emulator.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#pragma GCC visibility push(hidden)

struct alignas(2) __half {
  std::uint16_t bits;
};
struct alignas(2) __nv_bfloat16 {
  std::uint16_t bits;
};

inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }

inline float __bfloat162float(__nv_bfloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline float __half2float(__half value) {
  const int exponent = value.bits >> 10 & 31;
  const float fraction = static_cast<float>(value.bits & 1023);
  float size = std::ldexp(exponent == 0 ? fraction : fraction + 1024, (exponent == 0 ? 1 : exponent) - 25);
  if (exponent == 31) size = fraction == 0 ? INFINITY : NAN;
  return value.bits & 0x8000 ? -size : size;
}

// Rounds to nearest even.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline __half __float2half_rn(float value) {
  if (value != value) return {0x7fff};
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size >= 65520) return {static_cast<std::uint16_t>(sign | 0x7c00)};
  int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  // in units of the last place; 2048 units carry into the exponent, which the addition below allows for
  const auto units = static_cast<std::uint16_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  const auto biased = static_cast<std::uint16_t>(units < 1024 ? 0 : exponent + 14);
  return {static_cast<std::uint16_t>(sign | ((biased << 10) + units))};
}

#pragma GCC visibility pop
