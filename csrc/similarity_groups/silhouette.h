#pragma once

#include <math.h>
#include <stdint.h>

#include "similarity_groups/linkage.h"

// Silhouettes of every cut of a tree, in one walk over its merges, and of given labels.
//
// sums[c][i] is the sum of the distances of item i to the items of cluster c, infinite for its own cluster, so that the
// nearest other cluster is the smallest mean in column i; inside[i] is the sum over its own cluster. Merging two
// clusters adds two rows. Items are independent of each other. Scores are sums of 32 partial sums over i mod 32, which
// are then added in halves.
//
// Here is what decides; host_cuts.h and block_cuts.cuh walk over the merges.
namespace grpo_kernels {

// With more items than this, an item searches its nearest cluster again only if that cluster was merged.
constexpr int kMaxExhaustive = 96;

// Arithmetic on single numbers; host_vectors.h has that on several.
struct DoubleMath {
  static GRPO_HD double every(double x) { return x; }
  static GRPO_HD double smaller(double a, double b) { return a < b ? a : b; }
  static GRPO_HD double larger(double a, double b) { return a > b ? a : b; }
  static GRPO_HD double select(bool condition, double yes, double no) { return condition ? yes : no; }
};

template <typename Math, typename V>
GRPO_HD V silhouette_of(const V& inside, const V& mates, const V& nearest) {
  const V zero = Math::every(0);
  const V own = inside / mates, top = Math::larger(own, nearest);
  const V value = (nearest - own) / top;
  return Math::select(mates == zero, zero, Math::select(top == zero, zero, value));
}

// Updates an item's nearest cluster after `high` was merged into `low`, at a mean distance of `merged`. Returns false
// if it was one of them, and must be searched. Otherwise the mean of the merged cluster lies between those of its
// parts, but for a last digit that rounding may take away.
GRPO_HD bool update_nearest_cluster(Smallest& nearest, double merged, int low, int high) {
  if (nearest.index == low || nearest.index == high) return false;
  if (merged < nearest.value) nearest = {merged, low};
  return true;
}

}  // namespace grpo_kernels
