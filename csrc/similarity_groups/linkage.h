#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"
#include "common/settings.h"

// Agglomerative clustering of n items by their distances. A cluster is represented by its smallest item; the pair that
// is merged has the smallest (distance, lower item, higher item), so that every backend breaks ties alike.
//
// `Crew` executes the work: one CPU thread (host_crew.h) or the threads of a CUDA block (block_crew.cuh). It has
//   for_each(n, f)                calls f(i) for every i < n; the same thread always gets the same i
//   first_minimum(v, begin, n)    smallest of v[begin..n) and its first index, for all threads, which must all call it
//   scan_minimum(v, begin, n)     the same, in one thread alone
//   sync()                        makes earlier writes visible to all threads
//   is_first()                    true in one thread
// Vectors of n items are read up to n rounded up to kPad; the padding must hold infinity.
namespace grpo_kernels {

// In the order of the names in grpo_kernels/ops/similarity_groups/config.py; tests/test_codes.py compares them.
GRPO_CODES(Linkage, int, kSingle, kComplete, kAverage, kWard);

constexpr int kPad = 4;
constexpr int kMaxItems = 256;

struct Smallest {
  double value;
  int index;
};

GRPO_HD bool comes_before(const Smallest& a, const Smallest& b) {
  return a.value < b.value || (a.value == b.value && a.index < b.index);
}

// Distance of the union of clusters a and b to cluster c, which have na, nb and nc items (Lance and Williams).
template <Linkage kLinkage>
GRPO_HD double merged_distance(double ac, double bc, double ab, double na, double nb, double nc) {
  if constexpr (kLinkage == Linkage::kSingle) return bc < ac ? bc : ac;
  if constexpr (kLinkage == Linkage::kComplete) return bc > ac ? bc : ac;
  if constexpr (kLinkage == Linkage::kAverage) return (na * ac + nb * bc) / (na + nb);
  return ((na + nc) * ac + (nb + nc) * bc - nc * ab) / (na + nb + nc);
}

// Ward's linkage uses the squared distances of unit vectors, 2 (1 - cos), and reports their roots.
GRPO_HD double linkage_distance(Linkage linkage, double cosine_distance) {
  return linkage == Linkage::kWard ? 2 * cosine_distance : cosine_distance;
}
GRPO_HD double merge_height(Linkage linkage, double linkage_distance) {
  return linkage == Linkage::kWard ? sqrt(linkage_distance) : linkage_distance;
}

struct Tree {
  double* distance;  // n rows of `stride`, symmetric, infinite on the diagonal; overwritten
  int stride;
  double* nearest;   // [n]: distance to the nearest higher item
  int32_t* partner;  // [n]: that item
  double* size;      // [n]: items in the cluster; 0: merged into another
  int32_t* merges;   // [2 (n - 1)]: lower item, higher item
  double* heights;   // [n - 1]: linkage distances

  GRPO_HD double* row(int i) const { return distance + static_cast<int64_t>(i) * stride; }
};

template <typename Crew>
GRPO_HD void find_nearest(const Crew& crew, const Tree& tree, int n, int i) {
  const Smallest smallest = crew.scan_minimum(tree.row(i), i + 1, n);
  tree.nearest[i] = smallest.value;
  tree.partner[i] = smallest.index;
}

// Updates the nearest item of i after `high` was merged into `low`; the row of i is up to date.
template <typename Crew>
GRPO_HD void update_nearest(const Crew& crew, const Tree& tree, int n, int i, int low, int high) {
  if (tree.size[i] == 0 || i >= high) return;
  const double merged = i < low ? tree.row(i)[low] : INFINITY;
  const bool lost_partner = tree.partner[i] == low || tree.partner[i] == high;
  if (lost_partner ? merged <= tree.nearest[i] : comes_before({merged, low}, {tree.nearest[i], tree.partner[i]})) {
    tree.nearest[i] = merged;
    tree.partner[i] = low;
  } else if (lost_partner) {
    find_nearest(crew, tree, n, i);
  }
}

template <Linkage kLinkage, typename Crew>
GRPO_HD void merge_all(const Crew& crew, const Tree& tree, int n) {
  crew.for_each(n, [&](int i) {
    tree.size[i] = 1;
    find_nearest(crew, tree, n, i);
  });
  for (int merge = 0; merge + 1 < n; ++merge) {
    crew.sync();
    const Smallest best = crew.first_minimum(tree.nearest, 0, n);
    const int low = best.index, high = tree.partner[low];
    const double na = tree.size[low], nb = tree.size[high];
    double *const row_low = tree.row(low), *const row_high = tree.row(high);
    crew.sync();  // all threads have read the values that change below
    crew.for_each(n, [&](int c) {
      row_low[c] = merged_distance<kLinkage>(row_low[c], row_high[c], best.value, na, nb, tree.size[c]);
    });
    crew.sync();
    if (crew.is_first()) {
      row_low[low] = row_low[high] = INFINITY;
      tree.size[low] = na + nb;
      tree.size[high] = 0;
      tree.nearest[high] = INFINITY;
      tree.merges[2 * merge] = low;
      tree.merges[2 * merge + 1] = high;
      tree.heights[merge] = best.value;
    }
    crew.sync();
    crew.for_each(n, [&](int c) {
      if (c == low) return;  // this row is up to date, and other threads read it
      double* const row = tree.row(c);
      row[low] = row_low[c];
      row[high] = INFINITY;
      update_nearest(crew, tree, n, c, low, high);
    });
    crew.for_each(1, [&](int) { find_nearest(crew, tree, n, low); });
  }
  crew.sync();
}

template <typename Crew>
GRPO_HD void agglomerate(const Crew& crew, Linkage linkage, const Tree& tree, int n) {
  switch (linkage) {
    case Linkage::kSingle:
      return merge_all<Linkage::kSingle>(crew, tree, n);
    case Linkage::kComplete:
      return merge_all<Linkage::kComplete>(crew, tree, n);
    case Linkage::kAverage:
      return merge_all<Linkage::kAverage>(crew, tree, n);
    default:
      return merge_all<Linkage::kWard>(crew, tree, n);
  }
}

}  // namespace grpo_kernels
