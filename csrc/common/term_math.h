#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"

// The arithmetic that formulas of tokens are templates of, so that CUDA threads (Math over float or double) and CPU
// lanes (Math over vectors, common/simd/term_math.h) share them. A Math has Value, Flag, Scalar, and exp, expm1, log,
// select, select_flag, negate, all, none; lower and higher return their second argument if the first is NaN, and
// at_most(limit, x) and at_least(limit, x) keep a NaN in x. For walks over arrays it has Counter, count, load,
// load_flags and store; the last three touch the first `left` elements only. A Math over doubles also loads and stores
// arrays of floats.
namespace grpo_kernels {

template <typename T>
GRPO_HD const T* offset_or_null(const T* array, int64_t offset) {
  return array == nullptr ? nullptr : array + offset;
}

// One number at a time.
template <typename T>
struct ScalarTermMath {
  using Scalar = T;
  using Value = T;
  using Flag = bool;
  using Counter = T;
  GRPO_HD static T all(T value) { return value; }
  GRPO_HD static bool none() { return false; }
  GRPO_HD static bool negate(bool flag) { return !flag; }
  GRPO_HD static T select(bool flag, T yes, T no) { return flag ? yes : no; }
  GRPO_HD static T lower(T a, T b) { return a < b ? a : b; }
  GRPO_HD static T higher(T a, T b) { return a > b ? a : b; }
  GRPO_HD static T at_most(T limit, T x) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 4) {
      asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(limit));  // no expression compiles to this instruction
      return x;
    }
#endif
    return lower(limit, x);
  }
  GRPO_HD static T at_least(T limit, T x) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(T) == 4) {
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(limit));
      return x;
    }
#endif
    return higher(limit, x);
  }
  GRPO_HD static bool select_flag(bool flag, bool yes, bool no) { return flag ? yes : no; }
  GRPO_HD static T exp(T x) { return sizeof(T) == 4 ? expf(x) : ::exp(x); }
  GRPO_HD static T expm1(T x) { return sizeof(T) == 4 ? expm1f(x) : ::expm1(x); }
  GRPO_HD static T log(T x) { return sizeof(T) == 4 ? logf(x) : ::log(x); }
  GRPO_HD static void count(T& counter, bool flag) { counter += flag ? T{1} : T{0}; }
  template <typename From>
  GRPO_HD static T load(const From* from, int64_t) {
    return *from;
  }
  template <typename To>
  GRPO_HD static void store(To* to, int64_t, T value) {
    *to = static_cast<To>(value);
  }
  GRPO_HD static bool load_flags(const bool* from, int64_t) { return from == nullptr || *from; }
  GRPO_HD static bool not_negative(const int32_t* from, int64_t) { return *from >= 0; }
};

// NaN stays NaN.
template <typename Math>
GRPO_HD typename Math::Value clamp_to(const typename Math::Value& x, typename Math::Scalar low,
                                      typename Math::Scalar high) {
  return Math::at_most(Math::all(high), Math::at_least(Math::all(low), x));
}

}  // namespace grpo_kernels
