#pragma once

#include "similarity_groups/block_tree.cuh"
#include "similarity_groups/silhouette.h"

// silhouette.h by the threads of a block: thread i walks over the merges with column i of the sums alone. Items are
// independent of each other, so that the warps wait for each other only to add up the silhouettes of several cuts at a
// time.
//
// Clusters have slots in the reverse order of their merges: the one that goes away in the last merge has slot 1, and
// the cuts into k clusters always have slots 0 to k - 1.
namespace grpo_kernels {

struct CutMemory {
  double* sums;  // n rows of `stride`, by slot; holds the distances on entry, infinite where an item meets itself
  int stride;
  int32_t* slot;        // [n]: of the cluster that an item is the smallest of
  int32_t* into;        // [n - 1]: the slot that a merge adds to
  double* inverse;      // [n - 1]: 1 / size, of a merge
  double* of_slots;     // [warps, n]: 1 / size, of the cluster in a slot; every warp has its own
  double* silhouettes;  // [warps, n]: of the latest cuts
  double* scores;       // [n + 1]: of the cut into k
};

// Gives slots to the clusters of the first `count` merges of n items. `into` may be merges.low.
template <typename Block>
__device__ void assign_slots(const Block& block, const CutMemory& cuts, const Merges& merges, int count, int n) {
  const int item = block.item();
  const bool is_merge = item < count;
  if (item < n) cuts.slot[item] = -1;
  block.sync();
  if (is_merge) cuts.slot[merges.high[item]] = n - 1 - item;
  block.sync();
  const bool remains = item < n && cuts.slot[item] < 0;
  const unsigned of_warp = __ballot_sync(kAllLanes, remains);
  int earlier, all;
  block.add_up(__popc(of_warp), earlier, all);
  if (remains) cuts.slot[item] = earlier + __popc(of_warp & ((1u << block.lane()) - 1));
  block.sync();
  if (is_merge) {
    cuts.into[item] = cuts.slot[merges.low[item]];
    cuts.inverse[item] = 1.0 / merges.size[item];
  }
  block.sync();
}

// The smallest mean of the slots below k, in steps of eight, of which the last overlaps with the one before it.
__device__ __forceinline__ double nearest_mean(const double* column, int64_t stride, const double* of_slots, int k) {
  constexpr int kStep = 8;
  double nearest = INFINITY;
  if (k < kStep) {
#pragma unroll 1
    for (int s = 0; s < k; ++s) nearest = DoubleMath::smaller(column[s * stride] * of_slots[s], nearest);
    return nearest;
  }
#pragma unroll 1
  for (int begin = 0; begin < k; begin += kStep) {
    const int first = min(begin, k - kStep);
    double means[kStep];
#pragma unroll
    for (int s = 0; s < kStep; ++s) means[s] = column[(first + s) * stride] * of_slots[first + s];
#pragma unroll
    for (int half = kStep / 2; half > 0; half /= 2) {
#pragma unroll
      for (int s = 0; s < half; ++s) means[s] = DoubleMath::smaller(means[s], means[s + half]);
    }
    nearest = DoubleMath::smaller(means[0], nearest);
  }
  return nearest;
}

// Walks from n clusters to k_min; writes scores[k] for k up to k_max, and returns the last silhouette of the thread's
// item.
template <typename Block>
__device__ double score_cuts(const Block& block, const CutMemory& cuts, const Merges& merges, int n, int k_min,
                             int k_max) {
  const int item = block.item(), lane = block.lane();
  const bool is_item = item < n, is_exhaustive = n <= kMaxExhaustive;
  double* const column = cuts.sums + (is_item ? item : 0);
  double* const of_slots = cuts.of_slots + block.warp() * n;
  const int64_t stride = cuts.stride;
  int own = is_item ? cuts.slot[item] : 0, pending = 0;
  double inside = 0, mates = 0, silhouette = 0;
  Smallest nearest{INFINITY, 0};
  bool is_lost = is_item;
  for (int s = lane; s < n; s += kWarp) of_slots[s] = 1;
  for (int k = n; k >= k_min; --k) {
    if (k < n) {
      const int merge = n - 1 - k, gone = k, into = cuts.into[merge];
      const double inverse = cuts.inverse[merge];
      __syncwarp();  // all lanes have read the means of the cut before
      if (lane == 0) of_slots[into] = inverse;
      if (is_item) {
        const double sum_into = column[into * stride], sum_gone = column[gone * stride], sum = sum_into + sum_gone;
        column[into * stride] = sum;
        inside += own == into ? sum_gone : own == gone ? sum_into : 0;
        own = own == gone ? into : own;
        if (own == into) mates = merges.size[merge] - 1;
        if (!is_exhaustive && !update_nearest_cluster(nearest, sum * inverse, into, gone)) is_lost = true;
      }
    }
    __syncwarp();
    if (k > k_max) continue;
    if (is_exhaustive) {
      if (is_item) nearest.value = nearest_mean(column, stride, of_slots, k);
    } else {
      nearest = block.search_for(is_lost, nearest, [&](int i) {
        return block.lane_minimum(0, k, [&](int s) { return cuts.sums[s * stride + i] * of_slots[s]; });
      });
      is_lost = false;
    }
    silhouette = silhouette_of<DoubleMath>(inside, mates, nearest.value);
    if (is_item) cuts.silhouettes[pending * n + item] = silhouette;
    if (++pending < block.warps() && k > k_min) continue;
    block.sync();
    if (block.warp() < pending) {
      const double* const of_cut = cuts.silhouettes + block.warp() * n;
      double part = 0;
#pragma unroll 2
      for (int i = lane; i < n; i += kWarp) part += of_cut[i];
      for (int half = kWarp / 2; half > 0; half /= 2) part += __shfl_down_sync(kAllLanes, part, half);
      if (lane == 0) cuts.scores[k + pending - 1 - block.warp()] = part;
    }
    pending = 0;
    block.sync();
  }
  if (item >= k_min && item <= k_max) cuts.scores[item] /= n;
  block.sync();
  return silhouette;
}

// Label of an item in the cut into `groups`: clusters in the order of their smallest items. `ranks` is [n] of working
// memory.
template <typename Block>
__device__ int label_in_cut(const Block& block, const CutMemory& cuts, int groups, int n, int32_t* ranks) {
  const int item = block.item();
  int slot = item < n ? cuts.slot[item] : 0;
  if (item < n && slot < groups) {
    int rank = 0;
    for (int i = 0; i < item; ++i) rank += cuts.slot[i] < groups;
    ranks[slot] = rank;
  }
  block.sync();
  while (slot >= groups) {
    const int into = cuts.into[n - 1 - slot];
    slot = into < slot ? into : 0;  // always smaller but for distances that are not numbers
  }
  const int label = ranks[slot];
  block.sync();
  return label;
}

}  // namespace grpo_kernels
