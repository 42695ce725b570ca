#pragma once

#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "similarity_groups/linkage.h"

// The threads of a block that handle a prompt together, thread i its item i, and their barriers and minima. A single
// warp needs neither barriers of the block nor memory for the results of its warps.
namespace grpo_kernels {

constexpr int kMaxItemWarps = kMaxItems / kWarp;

// The clusters to merge next, by their smallest items.
struct Pair {
  double distance;
  int low, high;
};

// Smallest value of a warp's lanes, and the smallest index of those that have it. Numbers from +0 on are in the order
// of their bits, which the hardware reduces in one instruction for each half. The upper half is signed, so that even
// a number below 0, which no distance is, comes before the infinity of a thread without an item.
__device__ __forceinline__ Smallest warp_minimum(const Smallest& own) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(own.value));
  const auto upper = static_cast<int>(bits >> 32);
  const auto lower = static_cast<unsigned>(bits);
  const int least_upper = __reduce_min_sync(kAllLanes, upper);
  const unsigned least_lower = __reduce_min_sync(kAllLanes, upper == least_upper ? lower : ~0u);
  const bool is_smallest = upper == least_upper && lower == least_lower;
  const unsigned index = __reduce_min_sync(kAllLanes, is_smallest ? static_cast<unsigned>(own.index) : ~0u);
  const uint64_t least = static_cast<uint64_t>(static_cast<unsigned>(least_upper)) << 32 | least_lower;
  return {__longlong_as_double(static_cast<long long>(least)), static_cast<int>(index)};
}

// kInFlight: loads of a search at a time, of which one must reach the end for a single warp.
template <bool kIsWarp, int kInFlight>
struct PromptBlock {
  static_assert(!kIsWarp || kInFlight == 1);

  Pair* of_warps;  // [kMaxItemWarps], in shared memory

  __device__ __forceinline__ int item() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ int warp() const { return kIsWarp ? 0 : static_cast<int>(threadIdx.x) / kWarp; }
  __device__ __forceinline__ int warps() const { return kIsWarp ? 1 : static_cast<int>(blockDim.x) / kWarp; }
  __device__ __forceinline__ bool is_first() const { return threadIdx.x == 0; }

  __device__ __forceinline__ void sync() const {
    if constexpr (kIsWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // The lane's share of the smallest value_of(j), from `begin` to n, and its first index.
  template <typename ValueOf>
  __device__ __forceinline__ Smallest lane_minimum(int begin, int n, ValueOf value_of) const {
    Smallest smallest{INFINITY, 0};
#pragma unroll 1
    for (int j = begin + lane(); j < n; j += kInFlight * kWarp) {
      double values[kInFlight];
#pragma unroll
      for (int v = 0; v < kInFlight; ++v) values[v] = j + v * kWarp < n ? value_of(j + v * kWarp) : INFINITY;
#pragma unroll
      for (int v = 0; v < kInFlight; ++v) {
        if (values[v] < smallest.value) smallest = {values[v], j + v * kWarp};
      }
      if constexpr (kIsWarp) break;
    }
    return smallest;
  }

  // Calls search(i) with a whole warp for every item i of its threads with is_wanted; the thread of i gets the result.
  template <typename Search>
  __device__ __forceinline__ Smallest search_for(bool is_wanted, Smallest otherwise, Search search) const {
    for (unsigned wanted = __ballot_sync(kAllLanes, is_wanted); wanted != 0; wanted &= wanted - 1) {
      const int owner = __ffs(static_cast<int>(wanted)) - 1;
      const Smallest result = warp_minimum(search(warp() * kWarp + owner));
      if (owner == lane()) otherwise = result;
    }
    return otherwise;
  }

  // The smallest of the threads' pairs (nearest.value, item, nearest.index). Also a barrier; another one must follow
  // before the next call.
  __device__ __forceinline__ Pair smallest_pair(const Smallest& nearest) const {
    Smallest best = warp_minimum({nearest.value, item()});
    const Pair pair{best.value, best.index, __shfl_sync(kAllLanes, nearest.index, best.index % kWarp)};
    if constexpr (kIsWarp) {
      sync();
      return pair;
    } else {
      if (lane() == 0) of_warps[warp()] = pair;
      sync();
      best = warp_minimum({lane() < warps() ? of_warps[lane()].distance : INFINITY, lane()});
      return of_warps[best.index];
    }
  }

  // Sum of an integer of every warp over the earlier warps, and over all.
  __device__ __forceinline__ void add_up(int of_warp, int& earlier, int& all) const {
    earlier = 0;
    all = of_warp;
    if constexpr (!kIsWarp) {
      if (lane() == 0) of_warps[warp()].low = of_warp;
      sync();
      all = 0;
#pragma unroll 1
      for (int w = 0; w < warps(); ++w) {
        if (w == warp()) earlier = all;
        all += of_warps[w].low;
      }
      sync();
    }
  }

  __device__ __forceinline__ unsigned minimum(unsigned own) const {
    unsigned least = __reduce_min_sync(kAllLanes, own);
    if constexpr (!kIsWarp) {
      if (lane() == 0) of_warps[warp()].low = static_cast<int>(least);
      sync();
      least = __reduce_min_sync(kAllLanes, lane() < warps() ? static_cast<unsigned>(of_warps[lane()].low) : ~0u);
      sync();
    }
    return least;
  }
};

}  // namespace grpo_kernels
