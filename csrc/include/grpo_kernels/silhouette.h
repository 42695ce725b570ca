#pragma once

#include <math.h>
#include <stdint.h>

#include "grpo_kernels/linkage.h"

// Silhouettes: of every cut of a tree in one walk over its merges, and of given labels.
//
// sums[c][i] is the distance of item i to all items of cluster c, and infinite for its own, so that the nearest other
// cluster is the smallest mean of the item's column; inside[i] is the sum for its own. Merging two clusters adds two
// rows. Items do not need each other.
//
// A Crew, beside what linkage.h asks for, has
//   Vector, Bits, kPack           so many items at once
//   for_each_pack(n, f)           f(i) for every kPack-th i
//   load, store, every, select    of Vectors; smaller, larger: of two
//   sum(v, n)                     of v[0..n): 32 partial sums over i mod 32, then halves; reached by all threads alike
namespace grpo_kernels {

// With more items than that, items look for their nearest cluster only when the one they knew changed.
constexpr int kMostDense = 96;

struct Cuts {
  double* sums;  // n rows of `stride`
  int stride;
  double* own;      // [n]: the item's cluster,
  double* mates;    // [n]: how many others are in it,
  double* inside;   // [n]: the sum of their distances
  double* inverse;  // [n]: of a cluster, 1 / items
  double* size;     // [n]: of a cluster
  int32_t* live;    // [n]: the clusters there are
  double* nearest;  // [n]: mean distance to the nearest other cluster,
  int32_t* which;   // [n]: and which that is; -1: not known
  double* result;   // [n]: the items' silhouettes

  GRPO_HD double* row(int c) const { return sums + static_cast<int64_t>(c) * stride; }
};

template <typename Crew, typename V>
GRPO_HD V silhouette_of(const V& inside, const V& mates, const V& nearest) {
  const V zero = Crew::every(0);
  const V own = inside / mates, top = Crew::larger(own, nearest);
  const V value = (nearest - own) / top;
  return Crew::select(mates == zero, zero, Crew::select(top == zero, zero, value));
}

// All clusters, for kPack items from i on.
template <typename Crew>
GRPO_HD void look_at_all(const Cuts& cuts, int live, int i) {
  using V = typename Crew::Vector;
  const auto mean = [&](int l) {
    const int c = cuts.live[l];
    return Crew::load(cuts.row(c) + i) * Crew::every(cuts.inverse[c]);
  };
  V nearest = mean(0), other = nearest;  // two, so that they need not wait for each other
  for (int l = 1; l + 1 < live; l += 2) {
    nearest = Crew::smaller(mean(l), nearest);
    other = Crew::smaller(mean(l + 1), other);
  }
  nearest = Crew::smaller(Crew::smaller(mean(live - 1), other), nearest);
  const V inside = Crew::load(cuts.inside + i), mates = Crew::load(cuts.mates + i);
  Crew::store(cuts.result + i, silhouette_of<Crew>(inside, mates, nearest));
}

struct Plain {
  static GRPO_HD double every(double x) { return x; }
  static GRPO_HD double larger(double a, double b) { return a > b ? a : b; }
  static GRPO_HD double select(bool condition, double yes, double no) { return condition ? yes : no; }
};

// The clusters only if the nearest is not known any more: means of merged clusters lie between those of the two.
GRPO_HD void look_if_needed(const Cuts& cuts, int live, int i) {
  if (cuts.which[i] < 0) {
    double nearest = INFINITY;
    int which = -1;
    for (int l = 0; l < live; ++l) {
      const int c = cuts.live[l];
      const double mean = cuts.row(c)[i] * cuts.inverse[c];
      if (mean < nearest) {
        nearest = mean;
        which = c;
      }
    }
    cuts.nearest[i] = nearest;
    cuts.which[i] = which;
  }
  cuts.result[i] = silhouette_of<Plain>(cuts.inside[i], cuts.mates[i], cuts.nearest[i]);
}

template <typename Crew>
GRPO_HD double mean_silhouette(const Crew& crew, const Cuts& cuts, int live, int n) {
  if (n <= kMostDense) {
    crew.for_each_pack(n, [&](int i) { look_at_all<Crew>(cuts, live, i); });
  } else {
    crew.for_each(n, [&](int i) { look_if_needed(cuts, live, i); });
  }
  crew.sync();
  return crew.sum(cuts.result, n) / n;
}

template <typename Crew>
GRPO_HD void start_alone(const Crew& crew, const Cuts& cuts, int n) {
  crew.for_each(n, [&](int i) {
    cuts.own[i] = i;
    cuts.mates[i] = cuts.inside[i] = 0;
    cuts.row(i)[i] = INFINITY;
    cuts.inverse[i] = cuts.size[i] = 1;
    cuts.live[i] = i;
    cuts.which[i] = -1;
  });
  crew.sync();
}

// Cluster `high` becomes part of `low`, the last but one of `live` clusters is kept in its place.
template <typename Crew>
GRPO_HD void join(const Crew& crew, const Cuts& cuts, int live, int low, int high, int n) {
  using V = typename Crew::Vector;
  const double size = cuts.size[low] + cuts.size[high];
  const V v_low = Crew::every(low), v_high = Crew::every(high), others = Crew::every(size - 1);
  double *const to = cuts.row(low), *const from = cuts.row(high);
  crew.for_each_pack(n, [&](int i) {
    const V sum_low = Crew::load(to + i), sum_high = Crew::load(from + i), own = Crew::load(cuts.own + i);
    Crew::store(to + i, sum_low + sum_high);
    const V joined = Crew::select(own == v_low, sum_high, Crew::select(own == v_high, sum_low, Crew::every(0)));
    Crew::store(cuts.inside + i, Crew::load(cuts.inside + i) + joined);
    const V now = Crew::select(own == v_high, v_low, own);
    Crew::store(cuts.own + i, now);
    Crew::store(cuts.mates + i, Crew::select(now == v_low, others, Crew::load(cuts.mates + i)));
  });
  if (n > kMostDense) {
    crew.for_each(n, [&](int i) {
      if (cuts.which[i] == low || cuts.which[i] == high) cuts.which[i] = -1;
    });
  }
  crew.sync();  // all have read the sizes
  if (crew.is_first()) {
    cuts.size[low] = size;
    cuts.inverse[low] = 1 / size;
    int place = 0;
    while (cuts.live[place] != high) ++place;
    cuts.live[place] = cuts.live[live - 1];
  }
  crew.sync();
}

// scores[k] for k from k_min to min(k_max, n - 1); the others are left alone. `sums` holds the distances and is used
// up.
template <typename Crew>
GRPO_HD void score_cuts(const Crew& crew, const Cuts& cuts, const int32_t* merges, int n, int k_min, int k_max,
                        double* scores) {
  start_alone(crew, cuts, n);
  for (int k = n - 1; k >= k_min; --k) {
    const int32_t* const merge = merges + 2 * (n - 1 - k);
    join(crew, cuts, k + 1, merge[0], merge[1], n);
    if (k > k_max) continue;
    const double score = mean_silhouette(crew, cuts, k, n);
    if (crew.is_first()) scores[k] = score;
  }
  crew.sync();
}

// Of given clusters: first[i] is the first item with the label of i. NaN where all are in one.
template <typename Crew>
GRPO_HD double score_labels(const Crew& crew, const Cuts& cuts, const int32_t* first, int n) {
  start_alone(crew, cuts, n);
  int live = n;
  for (int i = 0; i < n; ++i) {
    if (first[i] < i) join(crew, cuts, live--, first[i], i, n);
  }
  if (live < 2) {
    crew.for_each(n, [&](int i) { cuts.result[i] = NAN; });
    crew.sync();
    return NAN;
  }
  return mean_silhouette(crew, cuts, live, n);
}

}  // namespace grpo_kernels
