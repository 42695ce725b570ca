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

inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<std::uint64_t>(high) << 32) | low) >> (shift & 31));
}

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
// Mixed signs compare as unsigned, by the usual arithmetic conversions.
#define GRPO_MIN_MAX(A, B, T)                                                     \
  constexpr T min(A a, B b) { return min(static_cast<T>(a), static_cast<T>(b)); } \
  constexpr T max(A a, B b) { return max(static_cast<T>(a), static_cast<T>(b)); }
GRPO_MIN_MAX(int, unsigned, unsigned)
GRPO_MIN_MAX(unsigned, int, unsigned)
GRPO_MIN_MAX(long, unsigned long, unsigned long)
GRPO_MIN_MAX(unsigned long, long, unsigned long)
GRPO_MIN_MAX(long long, unsigned long long, unsigned long long)
GRPO_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef GRPO_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }

// Aligned as in CUDA, so that UndefinedBehaviorSanitizer reports misaligned vector loads.
#define GRPO_VECTOR2(name, T)          \
  struct alignas(2 * sizeof(T)) name { \
    T x, y;                            \
  };                                   \
  inline name make_##name(T x, T y) { return {x, y}; }
#define GRPO_VECTOR4(name, T, alignment) \
  struct alignas(alignment) name {       \
    T x, y, z, w;                        \
  };                                     \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
GRPO_VECTOR2(short2, short)
GRPO_VECTOR2(ushort2, unsigned short)
GRPO_VECTOR2(int2, int)
GRPO_VECTOR2(uint2, unsigned)
GRPO_VECTOR2(longlong2, long long)
GRPO_VECTOR2(float2, float)
GRPO_VECTOR2(double2, double)
GRPO_VECTOR4(short4, short, 8)
GRPO_VECTOR4(ushort4, unsigned short, 8)
GRPO_VECTOR4(int4, int, 16)
GRPO_VECTOR4(uint4, unsigned, 16)
GRPO_VECTOR4(float4, float, 16)
#undef GRPO_VECTOR4
#undef GRPO_VECTOR2

#pragma GCC visibility pop
