// Bit, arithmetic and vector functions of CUDA, for the kernel emulator.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#pragma GCC visibility push(hidden)

template <typename T>
inline T __ldg(const T* address) {
  return *address;
}

template <typename T>
inline void __stcg(T* address, T value) {
  *address = value;
}

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
inline int __clzll(long long bits) { return std::countl_zero(static_cast<unsigned long long>(bits)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }

// Overloads, not templates, for the same conversions as in CUDA. NaN loses against a number.
#define GRPO_MIN_MAX(T)                               \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
GRPO_MIN_MAX(int)
GRPO_MIN_MAX(unsigned)
GRPO_MIN_MAX(long)
GRPO_MIN_MAX(unsigned long)
GRPO_MIN_MAX(long long)
GRPO_MIN_MAX(unsigned long long)
#undef GRPO_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Aligned as in CUDA, so that UndefinedBehaviorSanitizer reports misaligned vector loads.
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#pragma GCC visibility pop
