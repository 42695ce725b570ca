#pragma once

#include <math.h>
#include <stdint.h>

#include "similarity_groups/block_cuts.cuh"

// Working memory of a block that handles a prompt, and what every kernel reads into it.
namespace grpo_kernels {

__host__ __device__ inline int items_for(int64_t size) { return size > 0 ? static_cast<int>(size) : 1; }
inline int warps_for(int64_t size) { return (items_for(size) + kWarp - 1) / kWarp; }
// Odd, so that a column of the matrix spreads over the banks of shared memory.
__host__ __device__ inline int64_t stride_for(int64_t size) { return size | 1; }
__host__ __device__ inline int64_t doubles_for_matrix(int64_t size) { return size * stride_for(size); }

// Vectors have an element for each item, those marked with a * for each item and warp.
struct Workspace {
  double *matrix, *scores, *inverse, *of_slots, *silhouettes;  // scores: one more; of_slots*, silhouettes*
  Pair* of_warps;
  int32_t *positions, *slot;
  Merges merges;
  int stride;

  static std::size_t shared_bytes(int64_t size, bool has_matrix) {
    const std::size_t items = items_for(size), doubles = (2 + 2 * warps_for(size)) * items + 1, integers = 5 * items;
    return (doubles + (has_matrix ? doubles_for_matrix(size) : 0)) * sizeof(double) + kMaxItemWarps * sizeof(Pair) +
           integers * sizeof(int32_t);
  }

  // The tree needs less than the cuts do: sizes lie where the means of the slots will, heights where the silhouettes.
  __device__ double* sizes() const { return of_slots; }
  __device__ double* heights() const { return silhouettes; }
  __device__ CutMemory cuts() const {
    return {matrix, stride, slot, merges.low, inverse, of_slots, silhouettes, scores};
  }
};

// kIsShared: the matrix is in `shared`, too, rather than the block's of `matrices`.
template <bool kIsShared>
__device__ __forceinline__ Workspace workspace(double* shared, double* matrices, int size, int warps) {
  const int items = items_for(size);
  Workspace work;
  work.stride = static_cast<int>(stride_for(size));
  if constexpr (kIsShared) {
    work.matrix = shared;
    shared += doubles_for_matrix(size);
  } else {
    work.matrix = matrices + blockIdx.x * doubles_for_matrix(size);
  }
  work.scores = shared;
  work.inverse = work.scores + items + 1;
  work.of_slots = work.inverse + items;
  work.silhouettes = work.of_slots + warps * items;
  work.of_warps = reinterpret_cast<Pair*>(work.silhouettes + warps * items);
  work.positions = reinterpret_cast<int32_t*>(work.of_warps + kMaxItemWarps);
  work.slot = work.positions + items;
  work.merges = {work.slot + items, work.slot + 2 * items, work.slot + 3 * items};
  return work;
}

// Writes the positions of the responses to cluster, and returns their number.
template <typename Block, typename IsIncluded>
__device__ int find_positions(const Block& block, const Workspace& work, const float* distances, int size,
                              IsIncluded is_included) {
  const int k = block.item();
  const bool included = k < size && isfinite(distances[static_cast<int64_t>(k) * size + k]) && is_included(k);
  const unsigned of_warp = __ballot_sync(kAllLanes, included);
  int earlier, all;
  block.add_up(__popc(of_warp), earlier, all);
  if (included) work.positions[earlier + __popc(of_warp & ((1u << block.lane()) - 1))] = k;
  block.sync();
  return all;
}

constexpr int kRowsInFlight = 16;

// Copies distances times `factor` to the matrix, with row i at row_of(i) and infinity where an item meets itself.
// Calls visit(distance) for all others of the thread's item.
template <typename Block, typename RowOf, typename Visit>
__device__ __forceinline__ void read_matrix(const Block& block, const Workspace& work, const float* distances, int size,
                                            int n, double factor, RowOf row_of, Visit visit) {
  const int item = block.item();
  if (item < n) {
    const float* const from = distances + work.positions[item];
    double* const to = work.matrix + item;
    for (int begin = 0; begin < n; begin += kRowsInFlight) {
      float row[kRowsInFlight];
      // the last row again rather than a branch for rows beyond it
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) row[r] = from[work.positions[min(begin + r, n - 1)] * size];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int i = min(begin + r, n - 1);
        const float distance = row[r] + 0.0f;  // -0 becomes 0, whose bits are in order
        if (i != item) visit(distance);
        to[static_cast<int64_t>(row_of(i)) * work.stride] = i == item ? INFINITY : factor * distance;
      }
    }
  }
  block.sync();
}

}  // namespace grpo_kernels
