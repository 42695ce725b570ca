#pragma once

#include "common/simd/vector_math.h"
#include "similarity_groups/simd.h"

// Arithmetic, minima and sums of vectors by one CPU thread, four doubles at a time.
namespace grpo_kernels::GRPO_SIMD {

struct QuadMath {
  static GRPO_HD Quad every(double value) { return broadcast(value); }
  template <typename Condition>
  static GRPO_HD Quad select(const Condition& condition, const Quad& yes, const Quad& no) {
    return GRPO_SIMD::select((LaneMath<Quad>::Bits)condition, yes, no);
  }
  static GRPO_HD Quad larger(const Quad& a, const Quad& b) { return GRPO_SIMD::larger(a, b); }
};

// The smallest of values[begin..n) and its first index; the padding holds infinity.
GRPO_HD Smallest first_minimum(const double* values, int begin, int n) {
  const Quad offsets = {0, 1, 2, 3}, infinite = broadcast(INFINITY);
  int i = begin / kPad * kPad;
  if (i >= n) return {INFINITY, 0};
  Quad indices = offsets + broadcast(i), best_indices = indices;
  Quad best = select((LaneMath<Quad>::Bits)(indices < broadcast(begin)), infinite, load_quad(values + i));
  for (i += kPad; i < n; i += kPad) {
    indices += broadcast(kPad);
    const Quad next = load_quad(values + i);
    best_indices = select(less(next, best), indices, best_indices);
    best = smaller(next, best);
  }
  Smallest smallest{best[0], static_cast<int>(best_indices[0])};
  for (int l = 1; l < kPad; ++l) {
    const Smallest other{best[l], static_cast<int>(best_indices[l])};
    if (comes_before(other, smallest)) smallest = other;
  }
  return smallest;
}

// The sum of values[0..n) in the order of silhouette.h.
GRPO_HD double ordered_sum(const double* values, int n) {
  constexpr int kParts = 32;
  double parts[kParts] = {};
  int i = 0;
  for (; i + kParts <= n; i += kParts) {
    for (int l = 0; l < kParts; ++l) parts[l] += values[i + l];
  }
  for (int l = 0; i + l < n; ++l) parts[l] += values[i + l];
  for (int half = kParts / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) parts[l] += parts[l + half];
  }
  return parts[0];
}

}  // namespace grpo_kernels::GRPO_SIMD
