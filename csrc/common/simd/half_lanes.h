#pragma once

#include "common/half_bits.h"
#include "common/simd/vector_math.h"

// Loads eight numbers of any width as Floats (four doubles as Quad), and stores them rounded to nearest even. Halves
// are converted by integer operations that match the hardware's conversions, so that every instruction set gives the
// same bits.
namespace grpo_kernels::GRPO_SIMD {

typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Shorts __attribute__((vector_size(16)));

template <typename T>
struct LanesOf {
  using Vector = Floats;
};
template <>
struct LanesOf<double> {
  using Vector = Quad;
};

GRPO_HD Words load_words(const void* from) {
  Shorts bits;
  memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, Words);
}

GRPO_HD void store_words(void* to, const Words& words) {
  const Shorts bits = __builtin_convertvector(words, Shorts);
  memcpy(to, &bits, sizeof bits);
}

GRPO_HD Floats load_lanes(const float* from) {
  Floats lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
GRPO_HD Quad load_lanes(const double* from) { return load_quad(from); }
GRPO_HD Floats load_lanes(const BFloat16* from) { return (Floats)(load_words(from) << 16); }
GRPO_HD Floats load_lanes(const Half* from) {
  const Words bits = load_words(from), magnitude = (bits & 0x7fffu) << 13;
  const Words finite = (Words)((Floats)magnitude * 0x1p112f);  // changes the exponent bias, also of subnormals
  const Words not_finite = (Words)(magnitude >= Words{} + (0x7c00u << 13));
  return (Floats)(finite | (not_finite & (magnitude | 0x7f800000u)) | (bits & 0x8000u) << 16);
}

GRPO_HD void store_lanes(float* to, const Floats& lanes) { memcpy(to, &lanes, sizeof lanes); }
GRPO_HD void store_lanes(double* to, const Quad& lanes) { store_quad(to, lanes); }
GRPO_HD void store_lanes(BFloat16* to, const Floats& lanes) {
  const Words bits = (Words)lanes, nan = (Words)(lanes != lanes);
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  store_words(to, (nan & 0x7fc0u) | (~nan & rounded));
}
GRPO_HD void store_lanes(Half* to, const Floats& lanes) {
  const Words bits = (Words)lanes, sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // the last place of the sum is that of a subnormal half
  const Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000u;
  const Words is_subnormal = (Words)(magnitude < Words{} + (113u << 23));
  const Words overflows = (Words)(magnitude >= Words{} + 0x477ff000u);  // 65520
  const Words nan = (Words)(lanes != lanes);
  Words half = (is_subnormal & subnormal) | (~is_subnormal & normal);
  half = (overflows & 0x7c00u) | (~overflows & half);
  half = (nan & 0x7e00u) | (~nan & half);
  store_words(to, half | sign);
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
