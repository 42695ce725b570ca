#pragma once

#include <math.h>
#include <stdint.h>

#include "similarity_groups/linkage.h"

// Silhouettes of every cut of a tree, in one walk over its merges, and of given labels.
//
// sums[c][i] is the sum of the distances of item i to the items of cluster c, infinite for its own cluster, so that the
// nearest other cluster is the smallest mean in column i; inside[i] is the sum over its own cluster. Merging two
// clusters adds two rows. Items are independent of each other.
//
// Beyond what linkage.h asks for, a Crew has
//   Vector, Bits, kPack           kPack items at once
//   for_each_pack(n, f)           calls f(i) for every kPack-th i
//   load, store, every, select, smaller, larger    for Vectors
//   sum(v, n)                     sum of v[0..n), for all threads, which must all call it: 32 partial sums over i mod
//   32,
//                                 which are then added in halves
namespace grpo_kernels {

// With more items than this, an item searches its nearest cluster again only if that cluster was merged.
constexpr int kMaxExhaustive = 96;

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

template <typename Crew, typename V>
GRPO_HD V silhouette_of(const V& inside, const V& mates, const V& nearest) {
  const V zero = Crew::every(0);
  const V own = inside / mates, top = Crew::larger(own, nearest);
  const V value = (nearest - own) / top;
  return Crew::select(mates == zero, zero, Crew::select(top == zero, zero, value));
}

// Silhouettes of kPack items from i on, from the means of all clusters.
template <typename Crew>
GRPO_HD void score_exhaustively(const Cuts& cuts, int live, int i) {
  using V = typename Crew::Vector;
  const auto mean = [&](int l) {
    const int c = cuts.live[l];
    return Crew::load(cuts.row(c) + i) * Crew::every(cuts.inverse[c]);
  };
  V nearest = mean(0), other = nearest;  // two dependency chains
  for (int l = 1; l + 1 < live; l += 2) {
    nearest = Crew::smaller(mean(l), nearest);
    other = Crew::smaller(mean(l + 1), other);
  }
  nearest = Crew::smaller(Crew::smaller(mean(live - 1), other), nearest);
  const V inside = Crew::load(cuts.inside + i), mates = Crew::load(cuts.mates + i);
  Crew::store(cuts.result + i, silhouette_of<Crew>(inside, mates, nearest));
}

struct ScalarCrew {
  static GRPO_HD double every(double x) { return x; }
  static GRPO_HD double larger(double a, double b) { return a > b ? a : b; }
  static GRPO_HD double select(bool condition, double yes, double no) { return condition ? yes : no; }
};

// Silhouette of item i; searches the nearest cluster only if it was merged. Others cannot become nearer: the mean of a
// merged cluster lies between those of its parts.
GRPO_HD void score_incrementally(const Cuts& cuts, int live, int i) {
  if (cuts.nearest_cluster[i] < 0) {
    double nearest = INFINITY;
    int nearest_cluster = -1;
    for (int l = 0; l < live; ++l) {
      const int c = cuts.live[l];
      const double mean = cuts.row(c)[i] * cuts.inverse[c];
      if (mean < nearest) {
        nearest = mean;
        nearest_cluster = c;
      }
    }
    cuts.nearest[i] = nearest;
    cuts.nearest_cluster[i] = nearest_cluster;
  }
  cuts.result[i] = silhouette_of<ScalarCrew>(cuts.inside[i], cuts.mates[i], cuts.nearest[i]);
}

template <typename Crew>
GRPO_HD double mean_silhouette(const Crew& crew, const Cuts& cuts, int live, int n) {
  if (n <= kMaxExhaustive) {
    crew.for_each_pack(n, [&](int i) { score_exhaustively<Crew>(cuts, live, i); });
  } else {
    crew.for_each(n, [&](int i) { score_incrementally(cuts, live, i); });
  }
  crew.sync();
  return crew.sum(cuts.result, n) / n;
}

template <typename Crew>
GRPO_HD void start_with_singletons(const Crew& crew, const Cuts& cuts, int n) {
  crew.for_each(n, [&](int i) {
    cuts.own[i] = i;
    cuts.mates[i] = cuts.inside[i] = 0;
    cuts.row(i)[i] = INFINITY;
    cuts.inverse[i] = cuts.size[i] = 1;
    cuts.live[i] = i;
    cuts.nearest_cluster[i] = -1;
  });
  crew.sync();
}

// Merges cluster `high` into `low`; the last of the `live` clusters takes its place in cuts.live.
template <typename Crew>
GRPO_HD void merge_clusters(const Crew& crew, const Cuts& cuts, int live, int low, int high, int n) {
  using V = typename Crew::Vector;
  const double size = cuts.size[low] + cuts.size[high];
  const V v_low = Crew::every(low), v_high = Crew::every(high), others = Crew::every(size - 1);
  double *const to = cuts.row(low), *const from = cuts.row(high);
  crew.for_each_pack(n, [&](int i) {
    const V sum_low = Crew::load(to + i), sum_high = Crew::load(from + i), own = Crew::load(cuts.own + i);
    Crew::store(to + i, sum_low + sum_high);
    const V added = Crew::select(own == v_low, sum_high, Crew::select(own == v_high, sum_low, Crew::every(0)));
    Crew::store(cuts.inside + i, Crew::load(cuts.inside + i) + added);
    const V new_own = Crew::select(own == v_high, v_low, own);
    Crew::store(cuts.own + i, new_own);
    Crew::store(cuts.mates + i, Crew::select(new_own == v_low, others, Crew::load(cuts.mates + i)));
  });
  if (n > kMaxExhaustive) {
    crew.for_each(n, [&](int i) {
      if (cuts.nearest_cluster[i] == low || cuts.nearest_cluster[i] == high) cuts.nearest_cluster[i] = -1;
    });
  }
  crew.sync();  // all threads have read the sizes
  if (crew.is_first()) {
    cuts.size[low] = size;
    cuts.inverse[low] = 1 / size;
    int index = 0;
    while (cuts.live[index] != high) ++index;
    cuts.live[index] = cuts.live[live - 1];
  }
  crew.sync();
}

// Writes scores[k] for k from k_min to min(k_max, n - 1). cuts.sums holds the distances on entry, and is overwritten.
template <typename Crew>
GRPO_HD void score_cuts(const Crew& crew, const Cuts& cuts, const int32_t* merges, int n, int k_min, int k_max,
                        double* scores) {
  start_with_singletons(crew, cuts, n);
  for (int k = n - 1; k >= k_min; --k) {
    const int32_t* const merge = merges + 2 * (n - 1 - k);
    merge_clusters(crew, cuts, k + 1, merge[0], merge[1], n);
    if (k > k_max) continue;
    const double score = mean_silhouette(crew, cuts, k, n);
    if (crew.is_first()) scores[k] = score;
  }
  crew.sync();
}

// Silhouette of given clusters, where first[i] is the first item with the label of i. NaN for a single cluster.
template <typename Crew>
GRPO_HD double score_labels(const Crew& crew, const Cuts& cuts, const int32_t* first, int n) {
  start_with_singletons(crew, cuts, n);
  int live = n;
  for (int i = 0; i < n; ++i) {
    if (first[i] < i) merge_clusters(crew, cuts, live--, first[i], i, n);
  }
  if (live < 2) {
    crew.for_each(n, [&](int i) { cuts.result[i] = NAN; });
    crew.sync();
    return NAN;
  }
  return mean_silhouette(crew, cuts, live, n);
}

}  // namespace grpo_kernels
