#pragma once

#include "similarity_groups/prompt_block.cuh"

// linkage.h by the threads of a block: thread i keeps the nearest higher item of item i in registers, so that a merge
// costs one comparison a thread, one new distance a thread, and a search by a whole warp for each of the few items
// whose nearest was merged. Two barriers a merge.
namespace grpo_kernels {

// The merges of a tree from the lowest to the highest; clusters are named by their smallest items.
struct Merges {
  int32_t *low, *high;  // [n - 1]
  int32_t* size;        // [n - 1]: items in both
};

template <Linkage kLinkage, typename Block>
__device__ __forceinline__ void merge_all(const Block& block, double* distances, int stride, int n, double* sizes,
                                          const Merges& merges, double* heights) {
  const int item = block.item();
  double size = item < n ? 1 : 0, height = 0;
  Smallest nearest{INFINITY, 0};
  bool is_lost = item < n;
  for (int merge = 0; merge + 1 < n; ++merge) {
    block.sync();
    if (item < n) sizes[item] = size;
    nearest = block.search_for(is_lost, nearest, [&](int i) {
      const double* const row = distances + static_cast<int64_t>(i) * stride;
      return block.lane_minimum(i + 1, n, [&](int j) { return row[j]; });
    });
    is_lost = false;
    const auto [distance, low, high] = block.smallest_pair(nearest);
    const double size_low = sizes[low], size_high = sizes[high];
    double* const row_low = distances + static_cast<int64_t>(low) * stride;
    if (item == high) {
      size = 0;
      nearest = {INFINITY, 0};
      row_low[high] = INFINITY;
    } else if (item == low) {
      size = size_low + size_high;
      is_lost = true;
    } else if (size != 0) {
      const double* const row_high = distances + static_cast<int64_t>(high) * stride;
      double* const row = distances + static_cast<int64_t>(item) * stride;
      const double merged =
          merged_distance<kLinkage>(row_low[item], row_high[item], distance, size_low, size_high, size);
      row_low[item] = row[low] = merged;
      row[high] = INFINITY;
      if (item < high) is_lost = !update_nearest(nearest, item < low ? merged : INFINITY, low, high);
    }
    height = distance > height ? distance : height;  // rounding may put a later one of equal heights below
    if (block.is_first()) {
      merges.low[merge] = low;
      merges.high[merge] = high;
      merges.size[merge] = static_cast<int32_t>(size_low + size_high);
      heights[merge] = height;
    }
  }
  block.sync();
}

// Builds the tree of n items from their linkage distances: n rows of `stride`, symmetric, infinite on the diagonal,
// overwritten. `sizes` is [n] of working memory; heights [n - 1] ascend.
template <typename Block>
__device__ void agglomerate(const Block& block, Linkage linkage, double* distances, int stride, int n, double* sizes,
                            const Merges& merges, double* heights) {
  switch (linkage) {
    case Linkage::kSingle:
      return merge_all<Linkage::kSingle>(block, distances, stride, n, sizes, merges, heights);
    case Linkage::kComplete:
      return merge_all<Linkage::kComplete>(block, distances, stride, n, sizes, merges, heights);
    case Linkage::kAverage:
      return merge_all<Linkage::kAverage>(block, distances, stride, n, sizes, merges, heights);
    default:
      return merge_all<Linkage::kWard>(block, distances, stride, n, sizes, merges, heights);
  }
}

}  // namespace grpo_kernels
