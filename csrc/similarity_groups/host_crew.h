#pragma once

#include "common/simd/vector_math.h"
#include "similarity_groups/silhouette.h"

// One CPU thread as the Crew of linkage.h and silhouette.h, four doubles at a time.
namespace grpo_kernels::GRPO_SIMD {

struct HostCrew {
  using Vector = Quad;
  using Bits = LaneMath<Quad>::Bits;
  static constexpr int kPack = 4;
  static_assert(kPack == kPad);

  template <typename F>
  GRPO_HD void for_each(int n, F f) const {
    for (int i = 0; i < n; ++i) f(i);
  }
  template <typename F>
  GRPO_HD void for_each_pack(int n, F f) const {
    for (int i = 0; i < n; i += kPack) f(i);
  }
  GRPO_HD void sync() const {}
  GRPO_HD bool is_first() const { return true; }

  GRPO_HD Smallest first_minimum(const double* values, int begin, int n) const {
    return scan_minimum(values, begin, n);
  }

  GRPO_HD Smallest scan_minimum(const double* values, int begin, int n) const {
    const Quad offsets = {0, 1, 2, 3}, infinite = broadcast(INFINITY);
    int i = begin / kPack * kPack;
    if (i >= n) return {INFINITY, 0};
    Quad indices = offsets + broadcast(i), best_indices = indices;
    Quad best = select((Bits)(indices < broadcast(begin)), infinite, load_quad(values + i));
    for (i += kPack; i < n; i += kPack) {
      indices += broadcast(kPack);
      const Quad next = load_quad(values + i);
      best_indices = select(less(next, best), indices, best_indices);
      best = smaller(next, best);
    }
    Smallest smallest{best[0], static_cast<int>(best_indices[0])};
    for (int l = 1; l < kPack; ++l) {
      const Smallest other{best[l], static_cast<int>(best_indices[l])};
      if (comes_before(other, smallest)) smallest = other;
    }
    return smallest;
  }

  GRPO_HD double sum(const double* values, int n) const {
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

  static GRPO_HD Quad load(const double* from) { return load_quad(from); }
  static GRPO_HD void store(double* to, const Quad& values) { store_quad(to, values); }
  static GRPO_HD Quad every(double value) { return broadcast(value); }
  template <typename Condition>
  static GRPO_HD Quad select(const Condition& condition, const Quad& yes, const Quad& no) {
    return GRPO_SIMD::select((Bits)condition, yes, no);
  }
  static GRPO_HD Quad smaller(const Quad& a, const Quad& b) { return GRPO_SIMD::smaller(a, b); }
  static GRPO_HD Quad larger(const Quad& a, const Quad& b) { return GRPO_SIMD::larger(a, b); }
};

}  // namespace grpo_kernels::GRPO_SIMD
