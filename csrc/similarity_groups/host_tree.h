#pragma once

#include "similarity_groups/host_vectors.h"
#include "similarity_groups/linkage.h"

// linkage.h by one CPU thread, with the nearest higher item of every item. Vectors of n items are read up to n rounded
// up to kPad; the padding must hold infinity.
namespace grpo_kernels::GRPO_SIMD {

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

GRPO_HD void find_nearest(const Tree& tree, int n, int i) {
  const Smallest smallest = first_minimum(tree.row(i), i + 1, n);
  tree.nearest[i] = smallest.value;
  tree.partner[i] = smallest.index;
}

template <Linkage kLinkage>
GRPO_HD void merge_all(const Tree& tree, int n) {
  for (int i = 0; i < n; ++i) {
    tree.size[i] = 1;
    find_nearest(tree, n, i);
  }
  for (int merge = 0; merge + 1 < n; ++merge) {
    const Smallest best = first_minimum(tree.nearest, 0, n);
    const int low = best.index, high = tree.partner[low];
    const double na = tree.size[low], nb = tree.size[high];
    double *const row_low = tree.row(low), *const row_high = tree.row(high);
    for (int c = 0; c < n; ++c) {
      row_low[c] = merged_distance<kLinkage>(row_low[c], row_high[c], best.value, na, nb, tree.size[c]);
    }
    row_low[low] = row_low[high] = INFINITY;
    tree.size[low] = na + nb;
    tree.size[high] = 0;
    tree.nearest[high] = INFINITY;
    tree.merges[2 * merge] = low;
    tree.merges[2 * merge + 1] = high;
    tree.heights[merge] = best.value;
    for (int c = 0; c < n; ++c) {
      if (c == low) continue;
      double* const row = tree.row(c);
      row[low] = row_low[c];
      row[high] = INFINITY;
      if (tree.size[c] == 0 || c >= high) continue;
      Smallest nearest{tree.nearest[c], tree.partner[c]};
      if (update_nearest(nearest, c < low ? row[low] : INFINITY, low, high)) {
        tree.nearest[c] = nearest.value;
        tree.partner[c] = nearest.index;
      } else {
        find_nearest(tree, n, c);
      }
    }
    find_nearest(tree, n, low);
  }
}

GRPO_HD void agglomerate(Linkage linkage, const Tree& tree, int n) {
  switch (linkage) {
    case Linkage::kSingle:
      return merge_all<Linkage::kSingle>(tree, n);
    case Linkage::kComplete:
      return merge_all<Linkage::kComplete>(tree, n);
    case Linkage::kAverage:
      return merge_all<Linkage::kAverage>(tree, n);
    default:
      return merge_all<Linkage::kWard>(tree, n);
  }
}

}  // namespace grpo_kernels::GRPO_SIMD
