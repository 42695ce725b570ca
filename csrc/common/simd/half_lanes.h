#pragma once

#include "common/half_bits.h"
#include "common/simd/vector_math.h"

// Loads eight or sixteen numbers of any width as Floats or WideFloats (four doubles as Quad), and stores them rounded
// to nearest even. Halves are converted by integer operations that match the hardware's conversions, so that every
// instruction set gives the same bits.
namespace grpo_kernels::GRPO_SIMD {

// The vectors that sums are defined by, the same for every instruction set, and the widest ones.
template <typename T>
struct LanesOf {
  using Vector = Floats;
  using Widest = WideFloats;
};
template <>
struct LanesOf<double> {
  using Vector = Quad;
  using Widest = Quad;
};

template <typename V>
using ShortsOf __attribute__((vector_size(sizeof(V) / 2))) = uint16_t;
template <typename V>
using WordsOf = typename LaneMath<V>::Bits;

template <typename V>
GRPO_HD WordsOf<V> load_words(const void* from) {
  ShortsOf<V> bits;
  memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, WordsOf<V>);
}

template <typename V>
GRPO_HD void store_words(void* to, const WordsOf<V>& words) {
  const ShortsOf<V> bits = __builtin_convertvector(words, ShortsOf<V>);
  memcpy(to, &bits, sizeof bits);
}

template <typename V = Floats>
GRPO_HD V load_lanes(const float* from) {
  V lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
template <typename V = Quad>
GRPO_HD V load_lanes(const double* from) {
  return load_quad(from);
}
template <typename V = Floats>
GRPO_HD V load_lanes(const BFloat16* from) {
  return (V)(load_words<V>(from) << 16);
}
template <typename V = Floats>
GRPO_HD V load_lanes(const Half* from) {
  using Words = WordsOf<V>;
  const Words bits = load_words<V>(from), magnitude = (bits & 0x7fffu) << 13;
  const Words finite = (Words)((V)magnitude * 0x1p112f);  // changes the exponent bias, also of subnormals
  const Words not_finite = (Words)(magnitude >= Words{} + (0x7c00u << 13));
  return (V)(finite | (not_finite & (magnitude | 0x7f800000u)) | (bits & 0x8000u) << 16);
}

template <typename V>
GRPO_HD void store_lanes(float* to, const V& lanes) {
  memcpy(to, &lanes, sizeof lanes);
}
GRPO_HD void store_lanes(double* to, const Quad& lanes) { store_quad(to, lanes); }
template <typename V>
GRPO_HD void store_lanes(BFloat16* to, const V& lanes) {
  using Words = WordsOf<V>;
  const Words bits = (Words)lanes, nan = (Words)(lanes != lanes);
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  store_words<V>(to, (nan & 0x7fc0u) | (~nan & rounded));
}
template <typename V>
GRPO_HD void store_lanes(Half* to, const V& lanes) {
  using Words = WordsOf<V>;
  const Words bits = (Words)lanes, sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // the last place of the sum is that of a subnormal half
  const Words subnormal = (Words)((V)magnitude + 0.5f) - 0x3f000000u;
  const Words is_subnormal = (Words)(magnitude < Words{} + (113u << 23));
  const Words overflows = (Words)(magnitude >= Words{} + 0x477ff000u);  // 65520
  const Words nan = (Words)(lanes != lanes);
  Words half = (is_subnormal & subnormal) | (~is_subnormal & normal);
  half = (overflows & 0x7c00u) | (~overflows & half);
  half = (nan & 0x7e00u) | (~nan & half);
  store_words<V>(to, half | sign);
}

// The first `count` lanes; `padding` in the others.
template <typename T>
GRPO_HD auto load_padded(const T* from, int64_t count, T padding) {
  constexpr int kCount = LaneMath<typename LanesOf<T>::Vector>::kCount;
  T padded[kCount];
  for (int l = 0; l < kCount; ++l) padded[l] = l < count ? from[l] : padding;
  return load_lanes(padded);
}

template <typename T, typename V>
GRPO_HD void store_first(T* to, int64_t count, const V& lanes) {
  T all[LaneMath<V>::kCount];
  store_lanes(all, lanes);
  for (int l = 0; l < count; ++l) to[l] = all[l];
}

}  // namespace grpo_kernels::GRPO_SIMD
