#pragma once

#include "common/simd/lanes.h"
#include "common/simd/vector_math.h"
#include "common/term_math.h"

// The Math of common/term_math.h over vectors, MathOf<T>::Math: two vectors of eight floats or four doubles, or sixteen
// floats. For files that are compiled once per instruction set.
namespace grpo_kernels::GRPO_SIMD {
namespace {

// the types of comparisons, which GCC and Clang name differently
using FloatFlags = decltype(Floats{} < Floats{});
using DoubleFlags = decltype(Quad{} < Quad{});

// Two independent vectors in the same steps: an exp is one long dependency chain, and the reorder window of a core does
// not reach the next step.
template <typename V>
struct Twin {
  V a, b;
  Twin& operator+=(const Twin& other) { return *this = *this + other; }
  Twin& operator*=(const Twin& other) { return *this = *this * other; }
};

#define GRPO_TWIN_OPERATOR(op)                                                               \
  template <typename V>                                                                      \
  GRPO_HD auto operator op(const Twin<V>& x, const Twin<V>& y)->Twin<decltype(x.a op y.a)> { \
    return {x.a op y.a, x.b op y.b};                                                         \
  }
GRPO_TWIN_OPERATOR(+)
GRPO_TWIN_OPERATOR(-)
GRPO_TWIN_OPERATOR(*)
GRPO_TWIN_OPERATOR(/)
GRPO_TWIN_OPERATOR(<)
GRPO_TWIN_OPERATOR(>)
GRPO_TWIN_OPERATOR(<=)
GRPO_TWIN_OPERATOR(>=)
GRPO_TWIN_OPERATOR(==)
GRPO_TWIN_OPERATOR(&)
GRPO_TWIN_OPERATOR(|)
#undef GRPO_TWIN_OPERATOR
template <typename V>
GRPO_HD Twin<V> operator-(const Twin<V>& x) {
  return {-x.a, -x.b};
}
template <typename V>
GRPO_HD Twin<V> operator~(const Twin<V>& x) {
  return {~x.a, ~x.b};
}

template <typename T>
struct VectorOf {
  using Value = Floats;
  using Flag = FloatFlags;
  using Integer = int32_t;
};
template <>
struct VectorOf<double> {
  using Value = Quad;
  using Flag = DoubleFlags;
  using Integer = int64_t;
};

// One vector of it.
template <typename T>
struct VectorMath {
  using Value = typename VectorOf<T>::Value;
  using Flag = typename VectorOf<T>::Flag;
  static constexpr int kCount = sizeof(Value) / sizeof(T);

  GRPO_HD static Value select(const Flag& flag, const Value& yes, const Value& no) {
#ifdef __AVX__
    // GCC compares the flag with 0 again, twice, in `flag ? yes : no`
    if constexpr (sizeof(T) == 4) {
      return _mm256_blendv_ps(no, yes, (Value)flag);
    } else {
      return _mm256_blendv_pd(no, yes, (Value)flag);
    }
#else
    return (Value)((flag & (Flag)yes) | (~flag & (Flag)no));
#endif
  }

  GRPO_HD static Value log(Value x) {  // for divergences between two outcomes only
    for (int l = 0; l < kCount; ++l) x[l] = sizeof(T) == 4 ? logf(x[l]) : ::log(x[l]);
    return x;
  }

  // The first `left` lanes.
  GRPO_HD static Flag first(int64_t left) {
    Flag index;
    for (int l = 0; l < kCount; ++l) index[l] = l;
    // limited first, because the comparison narrows it to the width of a lane
    const auto count = static_cast<typename VectorOf<T>::Integer>(left < kCount ? left : kCount);
    return index < count;
  }

  GRPO_HD static Value load(const T* from, int64_t left) {
    Value value{};
    if (left >= kCount) {
      memcpy(&value, from, sizeof value);
      return value;
    }
#ifdef __AVX__
    if constexpr (sizeof(T) == 4) {
      return _mm256_maskload_ps(from, (__m256i)first(left));
    } else {
      return _mm256_maskload_pd(from, (__m256i)first(left));
    }
#else
    for (int l = 0; l < kCount; ++l) {
      if (l < left) value[l] = from[l];
    }
    return value;
#endif
  }

  GRPO_HD static void store(T* to, int64_t left, const Value& value) {
    if (left >= kCount) {
      memcpy(to, &value, sizeof value);
      return;
    }
#ifdef __AVX__
    if constexpr (sizeof(T) == 4) {
      _mm256_maskstore_ps(to, (__m256i)first(left), value);
    } else {
      _mm256_maskstore_pd(to, (__m256i)first(left), value);
    }
#else
    for (int l = 0; l < kCount; ++l) {
      if (l < left) to[l] = value[l];
    }
#endif
  }

  // Doubles of an array of floats.
  GRPO_HD static Value load_widened(const float* from, int64_t left) {
    if (left >= kCount) return load_quad(from);
    Value value{};
    for (int l = 0; l < kCount; ++l) {
      if (l < left) value[l] = from[l];
    }
    return value;
  }
  GRPO_HD static void store_narrowed(float* to, int64_t left, const Value& value) {
    if (left >= kCount) return store_quad(to, value);
    for (int l = 0; l < kCount; ++l) {
      if (l < left) to[l] = static_cast<float>(value[l]);
    }
  }

  // Those of the first `left` lanes whose byte is not 0, all of them where `from` is null.
  GRPO_HD static Flag load_flags(const bool* from, int64_t left) {
    if (left >= kCount) {
      if (from == nullptr) return ~Flag{};
      // each lane masks its own byte of a broadcast word: converting bytes to lanes costs as much as an exp
      constexpr int kLast = kCount - 1;
      uint32_t words[2];
      memcpy(words, from, kCount);
      Flag bytes;
      if constexpr (sizeof(T) == 4) {
        const int32_t a = static_cast<int32_t>(words[0]), b = static_cast<int32_t>(words[kLast / 4]);
        bytes =
            Flag{a, a, a, a, b, b, b, b} & Flag{0xFF, 0xFF00, 0xFF0000, ~0xFFFFFF, 0xFF, 0xFF00, 0xFF0000, ~0xFFFFFF};
      } else {
        const int64_t a = static_cast<int64_t>(words[0]);
        bytes = Flag{a, a, a, a} & Flag{0xFF, 0xFF00, 0xFF0000, 0xFF000000};
      }
      return bytes != 0;
    }
    if (from == nullptr) return first(left);
    Flag flags{};
    for (int l = 0; l < kCount; ++l) flags[l] = l < left && from[l] ? -1 : 0;
    return flags;
  }

  GRPO_HD static Flag not_negative(const int32_t* from, int64_t left) {
    Flag flags{};
    for (int l = 0; l < kCount; ++l) flags[l] = l < left && from[l] >= 0 ? -1 : 0;
    return flags;
  }
};

// The Math of common/term_math.h, on two vectors.
template <typename T>
struct TwinMath {
  using One = VectorMath<T>;
  using Scalar = T;
  using Value = Twin<typename One::Value>;
  using Flag = Twin<typename One::Flag>;
  using Counter = Flag;
  static constexpr int kCount = 2 * One::kCount, kHalf = One::kCount;

  GRPO_HD static Value all(T value) {
    const auto lanes = every<typename One::Value>(value);
    return {lanes, lanes};
  }
  GRPO_HD static Flag none() { return Flag{}; }
  GRPO_HD static Flag negate(const Flag& flag) { return ~flag; }
  GRPO_HD static Value select(const Flag& flag, const Value& yes, const Value& no) {
    return {One::select(flag.a, yes.a, no.a), One::select(flag.b, yes.b, no.b)};
  }
  GRPO_HD static Flag select_flag(const Flag& flag, const Flag& yes, const Flag& no) {
    return (flag & yes) | (~flag & no);
  }
  GRPO_HD static Value lower(const Value& x, const Value& y) { return {smaller(x.a, y.a), smaller(x.b, y.b)}; }
  GRPO_HD static Value higher(const Value& x, const Value& y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
  GRPO_HD static Value at_most(const Value& limit, const Value& x) { return lower(limit, x); }
  GRPO_HD static Value at_least(const Value& limit, const Value& x) { return higher(limit, x); }
  GRPO_HD static Value exp(const Value& x) { return {GRPO_SIMD::exp(x.a), GRPO_SIMD::exp(x.b)}; }
  GRPO_HD static Value expm1(const Value& x) { return {GRPO_SIMD::expm1(x.a), GRPO_SIMD::expm1(x.b)}; }
  GRPO_HD static Value log(const Value& x) { return {One::log(x.a), One::log(x.b)}; }
  GRPO_HD static void count(Counter& counter, const Flag& flag) { counter = counter - flag; }  // a true lane is -1
  GRPO_HD static Value load(const T* from, int64_t left) {
    return {One::load(from, left), One::load(from + kHalf, left - kHalf)};
  }
  GRPO_HD static void store(T* to, int64_t left, const Value& value) {
    One::store(to, left, value.a);
    One::store(to + kHalf, left - kHalf, value.b);
  }
  template <typename From>  // float, of doubles
  GRPO_HD static Value load(const From* from, int64_t left) {
    return {One::load_widened(from, left), One::load_widened(from + kHalf, left - kHalf)};
  }
  template <typename To>
  GRPO_HD static void store(To* to, int64_t left, const Value& value) {
    One::store_narrowed(to, left, value.a);
    One::store_narrowed(to + kHalf, left - kHalf, value.b);
  }
  GRPO_HD static Flag load_flags(const bool* from, int64_t left) {
    return {One::load_flags(from, left), One::load_flags(offset_or_null(from, kHalf), left - kHalf)};
  }
  GRPO_HD static Flag not_negative(const int32_t* from, int64_t left) {
    return {One::not_negative(from, left), One::not_negative(from + kHalf, left - kHalf)};
  }
};

template <typename T>
struct MathOf {
  using Math = TwinMath<T>;
};

#if defined(__AVX512F__)

// Sixteen floats, and sixteen flags in a mask register: lanes 0 to 7 are the first vector of a twin, the others the
// second, so that all sums have the same bits.
struct Wide {
  WideFloats lanes;
  Wide& operator+=(const Wide& other) { return lanes += other.lanes, *this; }
  Wide& operator*=(const Wide& other) { return lanes *= other.lanes, *this; }
};
struct WideFlag {
  __mmask16 bits;
};
struct WideCounter {
  __m512i lanes;
};

GRPO_HD Wide operator+(const Wide& x, const Wide& y) { return {x.lanes + y.lanes}; }
GRPO_HD Wide operator-(const Wide& x, const Wide& y) { return {x.lanes - y.lanes}; }
GRPO_HD Wide operator*(const Wide& x, const Wide& y) { return {x.lanes * y.lanes}; }
GRPO_HD Wide operator/(const Wide& x, const Wide& y) { return {x.lanes / y.lanes}; }
GRPO_HD Wide operator-(const Wide& x) { return {-x.lanes}; }
#define GRPO_WIDE_COMPARISON(op, code)                                   \
  GRPO_HD WideFlag operator op(const Wide& x, const Wide& y) {           \
    return {_mm512_cmp_ps_mask((__m512)x.lanes, (__m512)y.lanes, code)}; \
  }
GRPO_WIDE_COMPARISON(<, _CMP_LT_OQ)
GRPO_WIDE_COMPARISON(>, _CMP_GT_OQ)
GRPO_WIDE_COMPARISON(<=, _CMP_LE_OQ)
GRPO_WIDE_COMPARISON(>=, _CMP_GE_OQ)
GRPO_WIDE_COMPARISON(==, _CMP_EQ_OQ)
#undef GRPO_WIDE_COMPARISON
// The compiler sees through operations on constants, but not through these intrinsics.
GRPO_HD bool is_known(const WideFlag& flag, __mmask16 bits) {
  return __builtin_constant_p(flag.bits) && flag.bits == bits;
}
GRPO_HD WideFlag operator&(const WideFlag& x, const WideFlag& y) {
  if (is_known(x, 0xffff) || is_known(y, 0)) return y;
  if (is_known(y, 0xffff) || is_known(x, 0)) return x;
  return {_kand_mask16(x.bits, y.bits)};
}
GRPO_HD WideFlag operator|(const WideFlag& x, const WideFlag& y) {
  if (is_known(x, 0) || is_known(y, 0xffff)) return y;
  if (is_known(y, 0) || is_known(x, 0xffff)) return x;
  return {_kor_mask16(x.bits, y.bits)};
}
GRPO_HD WideCounter operator+(const WideCounter& x, const WideCounter& y) {
  return {_mm512_add_epi32(x.lanes, y.lanes)};
}

// The Math of common/term_math.h, on sixteen floats.
struct WideMath {
  using Scalar = float;
  using Value = Wide;
  using Flag = WideFlag;
  using Counter = WideCounter;
  static constexpr int kCount = 16;

  GRPO_HD static __mmask16 first(int64_t left) {
    return left >= kCount ? 0xffff : static_cast<__mmask16>((1u << (left < 0 ? 0 : left)) - 1);
  }
  GRPO_HD static Value all(float value) { return {every<WideFloats>(value)}; }
  GRPO_HD static Flag none() { return {0}; }
  GRPO_HD static Flag negate(const Flag& flag) {
    if (is_known(flag, 0)) return {0xffff};
    if (is_known(flag, 0xffff)) return {0};
    return {_knot_mask16(flag.bits)};
  }
  GRPO_HD static Value select(const Flag& flag, const Value& yes, const Value& no) {
    return {(WideFloats)_mm512_mask_blend_ps(flag.bits, (__m512)no.lanes, (__m512)yes.lanes)};
  }
  GRPO_HD static Flag select_flag(const Flag& flag, const Flag& yes, const Flag& no) {
    return (flag & yes) | (negate(flag) & no);
  }
  GRPO_HD static Value lower(const Value& x, const Value& y) { return {smaller(x.lanes, y.lanes)}; }
  GRPO_HD static Value higher(const Value& x, const Value& y) { return {larger(x.lanes, y.lanes)}; }
  GRPO_HD static Value at_most(const Value& limit, const Value& x) { return lower(limit, x); }
  GRPO_HD static Value at_least(const Value& limit, const Value& x) { return higher(limit, x); }
  GRPO_HD static Value exp(const Value& x) { return {GRPO_SIMD::exp(x.lanes)}; }
  GRPO_HD static Value expm1(const Value& x) { return {GRPO_SIMD::expm1(x.lanes)}; }
  GRPO_HD static Value log(Value x) {  // for divergences between two outcomes only
    for (int l = 0; l < kCount; ++l) x.lanes[l] = logf(x.lanes[l]);
    return x;
  }
  GRPO_HD static void count(Counter& counter, const Flag& flag) {
    counter.lanes = _mm512_mask_add_epi32(counter.lanes, flag.bits, counter.lanes, _mm512_set1_epi32(1));
  }
  GRPO_HD static Value load(const float* from, int64_t left) {
    return {(WideFloats)(left >= kCount ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(first(left), from))};
  }
  GRPO_HD static void store(float* to, int64_t left, const Value& value) {
    if (left >= kCount) {
      _mm512_storeu_ps(to, (__m512)value.lanes);
    } else {
      _mm512_mask_storeu_ps(to, first(left), (__m512)value.lanes);
    }
  }
  // Those of the first `left` lanes whose byte is not 0, all of them where `from` is null.
  GRPO_HD static Flag load_flags(const bool* from, int64_t left) {
    if (from == nullptr) return {first(left)};
    const __m128i bytes = _mm_maskz_loadu_epi8(first(left), from);
    return {_mm_test_epi8_mask(bytes, bytes)};
  }
  GRPO_HD static Flag not_negative(const int32_t* from, int64_t left) {
    const __mmask16 present = first(left);
    return {_mm512_mask_cmpge_epi32_mask(present, _mm512_maskz_loadu_epi32(present, from), _mm512_setzero_si512())};
  }
};

template <>
struct MathOf<float> {
  using Math = WideMath;
};

GRPO_HD Twin<Floats> halves(const Wide& wide) {
  Twin<Floats> twin;
  memcpy(&twin, &wide, sizeof twin);
  return twin;
}
GRPO_HD void fold(const Wide& wide, double& sum) {
  const Twin<Floats> twin = halves(wide);
  sum += sum_lanes(twin.a + twin.b);
}
GRPO_HD void fold(const WideCounter& counter, double& sum) {
  Twin<FloatFlags> twin;
  memcpy(&twin, &counter, sizeof twin);
  sum += sum_lanes(twin.a + twin.b);
}

#endif

// Adds the sum of all lanes.
template <typename Lanes>
GRPO_HD void fold(const Twin<Lanes>& twin, double& sum) {
  sum += sum_lanes(twin.a + twin.b);
}

template <typename Lanes>
GRPO_HD const Twin<Lanes>& halves(const Twin<Lanes>& twin) {
  return twin;
}

template <typename Lanes>
GRPO_HD void fold_minimum(const Lanes& lanes, double& minimum) {
  const auto& twin = halves(lanes);
  const auto one = smaller(twin.a, twin.b);
  for (unsigned l = 0; l < sizeof(one) / sizeof(one[0]); ++l) {
    if (one[l] < minimum) minimum = one[l];
  }
}

template <typename Lanes>
GRPO_HD void fold_maximum(const Lanes& lanes, double& maximum) {
  const auto& twin = halves(lanes);
  const auto one = larger(twin.a, twin.b);
  for (unsigned l = 0; l < sizeof(one) / sizeof(one[0]); ++l) {
    if (one[l] > maximum) maximum = one[l];
  }
}

}  // namespace
}  // namespace grpo_kernels::GRPO_SIMD
