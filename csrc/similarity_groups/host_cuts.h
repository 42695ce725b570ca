#pragma once

#include "similarity_groups/host_vectors.h"
#include "similarity_groups/silhouette.h"

// silhouette.h by one CPU thread. Vectors of n items are read and written up to n rounded up to kPad.
namespace grpo_kernels::GRPO_SIMD {

struct Cuts {
  double* sums;  // n rows of `stride`
  int stride;
  double* own;               // [n]: the item's cluster
  double* mates;             // [n]: other items in it
  double* inside;            // [n]: sum of the distances to them
  double* inverse;           // [n]: 1 / size, of a cluster
  double* size;              // [n]: items in a cluster
  int32_t* live;             // [n]: the remaining clusters
  double* nearest;           // [n]: mean distance to the nearest other cluster
  int32_t* nearest_cluster;  // [n]: that cluster; -1: not known
  double* result;            // [n]: silhouettes of the items

  GRPO_HD double* row(int c) const { return sums + static_cast<int64_t>(c) * stride; }
};

// Silhouettes of kPad items from i on, from the means of all clusters.
GRPO_HD void score_exhaustively(const Cuts& cuts, int live, int i) {
  const auto mean = [&](int l) {
    const int c = cuts.live[l];
    return load_quad(cuts.row(c) + i) * broadcast(cuts.inverse[c]);
  };
  Quad nearest = mean(0), other = nearest;  // two dependency chains
  for (int l = 1; l + 1 < live; l += 2) {
    nearest = smaller(mean(l), nearest);
    other = smaller(mean(l + 1), other);
  }
  nearest = smaller(smaller(mean(live - 1), other), nearest);
  const Quad inside = load_quad(cuts.inside + i), mates = load_quad(cuts.mates + i);
  store_quad(cuts.result + i, silhouette_of<QuadMath>(inside, mates, nearest));
}

// Silhouette of item i; searches the nearest cluster only if it was merged.
GRPO_HD void score_incrementally(const Cuts& cuts, int live, int i) {
  if (cuts.nearest_cluster[i] < 0) {
    Smallest nearest{INFINITY, -1};
    for (int l = 0; l < live; ++l) {
      const int c = cuts.live[l];
      const double mean = cuts.row(c)[i] * cuts.inverse[c];
      if (mean < nearest.value) nearest = {mean, c};
    }
    cuts.nearest[i] = nearest.value;
    cuts.nearest_cluster[i] = nearest.index;
  }
  cuts.result[i] = silhouette_of<DoubleMath>(cuts.inside[i], cuts.mates[i], cuts.nearest[i]);
}

GRPO_HD double mean_silhouette(const Cuts& cuts, int live, int n) {
  if (n <= kMaxExhaustive) {
    for (int i = 0; i < n; i += kPad) score_exhaustively(cuts, live, i);
  } else {
    for (int i = 0; i < n; ++i) score_incrementally(cuts, live, i);
  }
  return ordered_sum(cuts.result, n) / n;
}

GRPO_HD void start_with_singletons(const Cuts& cuts, int n) {
  for (int i = 0; i < n; ++i) {
    cuts.own[i] = i;
    cuts.mates[i] = cuts.inside[i] = 0;
    cuts.row(i)[i] = INFINITY;
    cuts.inverse[i] = cuts.size[i] = 1;
    cuts.live[i] = i;
    cuts.nearest[i] = -INFINITY;
    cuts.nearest_cluster[i] = -1;
  }
}

// After a merge into `low`, whose sums and 1 / size are given. Hardly ever does rounding bring it nearer than the
// nearest, so one loop without branches asks whether it does for any item.
GRPO_HD void update_nearest_clusters(const Cuts& cuts, const double* sums, double inverse, int low, int high, int n) {
  bool is_any_nearer = false;
  for (int i = 0; i < n; ++i) {
    const bool is_lost = cuts.nearest_cluster[i] == low || cuts.nearest_cluster[i] == high;
    if (is_lost) cuts.nearest_cluster[i] = -1;
  }
  for (int i = 0; i < n; ++i) is_any_nearer |= sums[i] * inverse < cuts.nearest[i];
  if (!is_any_nearer) return;
  for (int i = 0; i < n; ++i) {
    if (cuts.nearest_cluster[i] < 0) continue;
    Smallest nearest{cuts.nearest[i], cuts.nearest_cluster[i]};
    update_nearest_cluster(nearest, sums[i] * inverse, low, high);
    cuts.nearest[i] = nearest.value;
    cuts.nearest_cluster[i] = nearest.index;
  }
}

// Merges cluster `high` into `low`; the last of the `live` clusters takes its place in cuts.live.
GRPO_HD void merge_clusters(const Cuts& cuts, int live, int low, int high, int n) {
  const double size = cuts.size[low] + cuts.size[high], inverse = 1 / size;
  const Quad v_low = broadcast(low), v_high = broadcast(high), others = broadcast(size - 1);
  double *const to = cuts.row(low), *const from = cuts.row(high);
  for (int i = 0; i < n; i += kPad) {
    const Quad sum_low = load_quad(to + i), sum_high = load_quad(from + i), own = load_quad(cuts.own + i);
    store_quad(to + i, sum_low + sum_high);
    const Quad added = QuadMath::select(own == v_low, sum_high, QuadMath::select(own == v_high, sum_low, broadcast(0)));
    store_quad(cuts.inside + i, load_quad(cuts.inside + i) + added);
    const Quad new_own = QuadMath::select(own == v_high, v_low, own);
    store_quad(cuts.own + i, new_own);
    store_quad(cuts.mates + i, QuadMath::select(new_own == v_low, others, load_quad(cuts.mates + i)));
  }
  if (n > kMaxExhaustive) update_nearest_clusters(cuts, to, inverse, low, high, n);
  cuts.size[low] = size;
  cuts.inverse[low] = inverse;
  int index = 0;
  while (cuts.live[index] != high) ++index;
  cuts.live[index] = cuts.live[live - 1];
}

// Writes scores[k] for k from k_min to min(k_max, n - 1). cuts.sums holds the distances on entry, and is overwritten.
GRPO_HD void score_cuts(const Cuts& cuts, const int32_t* merges, int n, int k_min, int k_max, double* scores) {
  start_with_singletons(cuts, n);
  for (int k = n - 1; k >= k_min; --k) {
    const int32_t* const merge = merges + 2 * (n - 1 - k);
    merge_clusters(cuts, k + 1, merge[0], merge[1], n);
    if (k <= k_max) scores[k] = mean_silhouette(cuts, k, n);
  }
}

// Silhouette of given clusters, where first[i] is the first item with the label of i. NaN for a single cluster.
GRPO_HD double score_labels(const Cuts& cuts, const int32_t* first, int n) {
  start_with_singletons(cuts, n);
  int live = n;
  for (int i = 0; i < n; ++i) {
    if (first[i] < i) merge_clusters(cuts, live--, first[i], i, n);
  }
  if (live >= 2) return mean_silhouette(cuts, live, n);
  for (int i = 0; i < n; ++i) cuts.result[i] = NAN;
  return NAN;
}

}  // namespace grpo_kernels::GRPO_SIMD
