#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "common/host_device.h"

// Eight doubles at a time, as two vectors of four in the vector types of GCC and Clang, which split wider ones badly on
// AVX2. Always eight, so that additions happen in the same order, and results have the same bits, on every instruction
// set.
namespace grpo_kernels::GRPO_SIMD {

constexpr int kLanes = 8;
typedef double Quad __attribute__((vector_size(32)));
typedef double Pair __attribute__((vector_size(16)));
typedef float FloatQuad __attribute__((vector_size(16)));

struct Lanes {
  Quad part[2];
};

GRPO_HD Quad broadcast(double value) { return Quad{value, value, value, value}; }

GRPO_HD Quad load_quad(const double* from) {
  Quad quad;
  memcpy(&quad, from, sizeof quad);
  return quad;
}

GRPO_HD Quad load_quad(const float* from) {
  FloatQuad quad;
  memcpy(&quad, from, sizeof quad);
#ifdef __AVX__  // GCC converts halves and joins them
  return _mm256_cvtps_pd(quad);
#else
  return __builtin_convertvector(quad, Quad);
#endif
}

// The first `count` of the eight doubles, NaN in the others.
template <typename T>
GRPO_HD Lanes load(const T* from, int64_t count) {
  if (count >= kLanes) return {{load_quad(from), load_quad(from + 4)}};
  T padded[kLanes];
  for (int l = 0; l < kLanes; ++l) padded[l] = l < count ? from[l] : static_cast<T>(NAN);
  return {{load_quad(padded), load_quad(padded + 4)}};
}

GRPO_HD void store_quad(double* to, const Quad& quad) { memcpy(to, &quad, sizeof quad); }
GRPO_HD void store_quad(float* to, const Quad& quad) {
  const FloatQuad narrow = __builtin_convertvector(quad, FloatQuad);
  memcpy(to, &narrow, sizeof narrow);
}

template <typename T>
GRPO_HD void store(T* to, int64_t count, const Lanes& lanes) {
  if (count >= kLanes) {
    store_quad(to, lanes.part[0]);
    store_quad(to + 4, lanes.part[1]);
    return;
  }
  T all[kLanes];
  store_quad(all, lanes.part[0]);
  store_quad(all + 4, lanes.part[1]);
  for (int l = 0; l < kLanes && l < count; ++l) to[l] = all[l];
}

GRPO_HD Quad lower(const Quad& a, const Quad& b) { return b < a ? b : a; }  // a where b is NaN
GRPO_HD Quad higher(const Quad& a, const Quad& b) { return b > a ? b : a; }

GRPO_HD double sum_lanes(const Quad& lanes) {
  const Pair pair = __builtin_shufflevector(lanes, lanes, 0, 1) + __builtin_shufflevector(lanes, lanes, 2, 3);
  return pair[0] + pair[1];
}
// The sum of eight 32-bit or four 64-bit lanes, floating-point numbers or counters.
template <typename V>
GRPO_HD double sum_lanes(const V& lanes) {
  if constexpr (sizeof(lanes[0]) == 4) {
    const Quad low = __builtin_convertvector(__builtin_shufflevector(lanes, lanes, 0, 1, 2, 3), Quad);
    return sum_lanes(low + __builtin_convertvector(__builtin_shufflevector(lanes, lanes, 4, 5, 6, 7), Quad));
  } else {
    return sum_lanes(__builtin_convertvector(lanes, Quad));
  }
}

GRPO_HD double fold_sum(const Lanes& lanes) { return sum_lanes(lanes.part[0] + lanes.part[1]); }

GRPO_HD double fold_low(const Lanes& lanes) {
  const Quad half = lower(lanes.part[0], lanes.part[1]);
  const Pair a = __builtin_shufflevector(half, half, 0, 1), b = __builtin_shufflevector(half, half, 2, 3);
  const Pair pair = b < a ? b : a;
  return pair[1] < pair[0] ? pair[1] : pair[0];
}

}  // namespace grpo_kernels::GRPO_SIMD
