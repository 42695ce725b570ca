#pragma once

#include "common/simd/lanes.h"

// exp, expm1 and tanh of vectors: Floats (eight floats), Quad (four doubles), and WideFloats (sixteen floats), which
// are Floats where the instruction set has no such vectors. Free of calls. Multiply-adds are fused where the source
// says so and nowhere else, so that AVX-512 and AVX2 give the same bits; the baseline rounds products. Errors are at
// most 2 units in the last place, tanh 4. NaN gives NaN. exp is 0 where the result would be below 2^-125 (floats) or
// 2^-1021 (doubles), because subnormal numbers take some processors a hundred cycles.
namespace grpo_kernels::GRPO_SIMD {

typedef float Floats __attribute__((vector_size(32)));

#if defined(__AVX512F__)
typedef float WideFloats __attribute__((vector_size(64)));
#else
typedef Floats WideFloats;  // GCC splits wider vectors badly
#endif

template <typename V>
struct LaneMath;

// x = n ln 2 + r with |r| <= ln 2 / 2. kLn2High has so few bits that its product with n is exact. Adding kRound rounds
// x to an integer, in the low bits of the sum.
struct FloatMath {
  using Scalar = float;
  static constexpr float kLow = -87.5f, kHigh = 89.0f;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr float kLog2e = 1.44269504f, kLn2High = 0.693145751953125f, kLn2Low = 1.42860682e-6f;
  static constexpr int kMantissa = 23;
  static constexpr uint32_t kHalfExponent = 126;  // of 2^-1
  // (exp(r) - 1 - r) / r^2, interpolated at the Chebyshev nodes: error 1e-8 of exp(r)
  static constexpr float kTerms[] = {0.5f, 0.16666577f, 0.0416665546f, 8.36318503e-3f, 1.39261911e-3f};
};

template <>
struct LaneMath<Floats> : FloatMath {
  using Bits = uint32_t __attribute__((vector_size(32)));
  static constexpr int kCount = 8;
};

#if defined(__AVX512F__)
template <>
struct LaneMath<WideFloats> : FloatMath {
  using Bits = uint32_t __attribute__((vector_size(64)));
  static constexpr int kCount = 16;
};
#endif

template <>
struct LaneMath<Quad> {
  using Scalar = double;
  using Bits = uint64_t __attribute__((vector_size(32)));
  static constexpr int kCount = 4;
  static constexpr double kLow = -708.5, kHigh = 710.0;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLog2e = 1.4426950408889634, kLn2High = 0.6931471805596629565,
                          kLn2Low = 2.823529056303157713e-13;
  static constexpr int kMantissa = 52;
  static constexpr uint64_t kHalfExponent = 1022;
  static constexpr double kTerms[] = {0.5,
                                      0.1666666666666667099,
                                      0.04166666666666666976,
                                      8.333333333326129364e-3,
                                      1.388888888888374419e-3,
                                      1.984126987486076864e-4,
                                      2.480158732556212581e-5,
                                      2.755725537465874205e-6,
                                      2.755727362486647633e-7,
                                      2.510522763655175914e-8,
                                      2.091469456035159159e-9};
};

template <typename V>
GRPO_HD V every(typename LaneMath<V>::Scalar value) {
  return value - V{};  // one broadcast, where GCC 12 turns a loop over the lanes into eight insertions
}

template <typename V>
GRPO_HD V select(const typename LaneMath<V>::Bits& condition, const V& yes, const V& no) {
  using Bits = typename LaneMath<V>::Bits;
  return (V)((condition & (Bits)yes) | (~condition & (Bits)no));
}

template <typename V>
GRPO_HD typename LaneMath<V>::Bits less(const V& a, const V& b) {
  return (typename LaneMath<V>::Bits)(a < b);
}

template <typename V>
GRPO_HD V absolute(const V& x) {
  using Math = LaneMath<V>;
  return (V)((typename Math::Bits)x & (~typename Math::Bits{} >> 1));
}

// b where either is NaN, as in the instructions: a running maximum in b ignores NaN in a, and a bound in a keeps NaN in
// b.
template <typename V>
GRPO_HD V larger(const V& a, const V& b) {
#ifdef __AVX__  // GCC does not select the instruction if one operand is constant
  if constexpr (sizeof(a[0]) == 4) {
    return _mm256_max_ps(a, b);
  } else {
    return _mm256_max_pd(a, b);
  }
#else
  return a > b ? a : b;
#endif
}
template <typename V>
GRPO_HD V smaller(const V& a, const V& b) {
#ifdef __AVX__
  if constexpr (sizeof(a[0]) == 4) {
    return _mm256_min_ps(a, b);
  } else {
    return _mm256_min_pd(a, b);
  }
#else
  return a < b ? a : b;
#endif
}

#if defined(__AVX512F__)
GRPO_HD WideFloats larger(const WideFloats& a, const WideFloats& b) { return _mm512_maskz_max_ps(0xffff, a, b); }
GRPO_HD WideFloats smaller(const WideFloats& a, const WideFloats& b) { return _mm512_maskz_min_ps(0xffff, a, b); }

// The two vectors that a wide one holds.
GRPO_HD void split(const WideFloats& wide, Floats& low, Floats& high) {
  low = __builtin_shufflevector(wide, wide, 0, 1, 2, 3, 4, 5, 6, 7);
  high = __builtin_shufflevector(wide, wide, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif

// a * b + c, rounded once on AVX2 and AVX-512.
template <typename V>
GRPO_HD V fused(const V& a, const V& b, const V& c) {
#if defined(__FMA__)
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return _mm512_fmadd_ps(a, b, c);
#endif
  if constexpr (sizeof(V) == 32 && sizeof(a[0]) == 4) return _mm256_fmadd_ps(a, b, c);
  if constexpr (sizeof(V) == 32 && sizeof(a[0]) == 8) return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

template <typename V>
struct Reduced {
  V half_scale;  // 2^(n - 1), because 2^n may overflow
  V expm1_r;     // exp(r) - 1
};

// kMayOverflow: x may exceed kHigh.
template <bool kMayOverflow = true, typename V>
GRPO_HD Reduced<V> reduce_exp(const V& unclamped) {
  using Math = LaneMath<V>;
  V x = larger(every<V>(Math::kLow), unclamped);
  if constexpr (kMayOverflow) x = smaller(every<V>(Math::kHigh), x);
  const V rounded = fused(x, every<V>(Math::kLog2e), every<V>(Math::kRound));
  const V n = rounded - Math::kRound;
  const V r = fused(n, every<V>(-Math::kLn2Low), fused(n, every<V>(-Math::kLn2High), x));
  const auto term = [](int i) __attribute__((always_inline)) { return every<V>(Math::kTerms[i]); };
  constexpr int kDegree = sizeof(Math::kTerms) / sizeof(Math::kTerms[0]) - 1;
  const V square = r * r;
  V sum;
  if constexpr (kDegree == 4) {
    // floats: even and odd powers in parallel, which shortens the dependency chain
    const V odd = fused(square, term(3), term(1));
    sum = fused(odd, r, fused(fused(square, term(4), term(2)), square, term(0)));
  } else {  // doubles: parallel sums would cost half a unit in the last place
    sum = term(kDegree);
    for (int i = kDegree - 1; i >= 0; --i) sum = fused(sum, r, term(i));
  }
  Reduced<V> reduced;
  reduced.expm1_r = fused(square, sum, r);
  reduced.half_scale = (V)(((typename Math::Bits)rounded + Math::kHalfExponent) << Math::kMantissa);
  return reduced;
}

template <typename V>
GRPO_HD V exp_of(const Reduced<V>& reduced) {
  const V half = fused(reduced.expm1_r, reduced.half_scale, reduced.half_scale);
  return half + half;
}

template <typename V>
GRPO_HD V expm1_of(const Reduced<V>& reduced) {
  const V half = fused(reduced.expm1_r, reduced.half_scale, reduced.half_scale - typename LaneMath<V>::Scalar(0.5));
  return half + half;
}

template <typename V>
GRPO_HD V exp(const V& x) {
  return exp_of(reduce_exp(x));
}

// exp of numbers that are not positive, up to rounding.
template <typename V>
GRPO_HD V exp_of_negative(const V& x) {
  return exp_of(reduce_exp<false>(x));
}

template <typename V>
GRPO_HD V expm1(const V& x) {
  return expm1_of(reduce_exp(x));
}

// tanh(x) and its slope 1 - tanh(x)^2, the latter without cancellation.
template <typename V>
struct TanhAndSlope {
  V tanh, slope;
};

template <typename V>
GRPO_HD TanhAndSlope<V> tanh_and_slope(const V& x) {
  using Math = LaneMath<V>;
  using Scalar = typename Math::Scalar;
  const Reduced<V> reduced = reduce_exp<false>(V(absolute(x) * Scalar(-2)));
  const V decay = expm1_of(reduced);  // in [-1, 0]
  const V divisor = decay + Scalar(2);
  const V magnitude = -decay / divisor;
  const typename Math::Bits sign = (typename Math::Bits)x & ~(~typename Math::Bits{} >> 1);
  return {(V)((typename Math::Bits)magnitude | sign), exp_of(reduced) * Scalar(4) / (divisor * divisor)};
}

}  // namespace grpo_kernels::GRPO_SIMD
