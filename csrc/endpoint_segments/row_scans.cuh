#pragma once

#include <string.h>

#include "common/affine_map.h"
#include "common/cuda/pieces.cuh"
#include "common/cuda/team.cuh"
#include "common/ranged_moments.h"
#include "endpoint_segments/cuda.h"

// The tokens of a row as the threads of a block hold them, kRowItems neighbouring ones each; scans of affine maps, and
// moments of what the threads hold.
namespace grpo_kernels {

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// `count` of the thread's tokens are in the row.
template <typename T, int kCount>
__device__ __forceinline__ void load_items(const T* from, int count, bool is_whole, T (&items)[kCount]) {
  constexpr int kPieces = kCount / Piece<T>::kItems;
  if (is_whole) {
    Piece<T> pieces[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) pieces[p] = reinterpret_cast<const Piece<T>*>(from)[p];
    memcpy(items, pieces, sizeof(items));
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) items[j] = j < count ? from[j] : T{0};
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void store_items(T* to, int count, bool is_whole, const T (&items)[kCount]) {
  constexpr int kPieces = kCount / Piece<T>::kItems;
  if (is_whole) {
    Piece<T> pieces[kPieces];
    memcpy(pieces, items, sizeof(items));
#pragma unroll
    for (int p = 0; p < kPieces; ++p) reinterpret_cast<Piece<T>*>(to)[p] = pieces[p];
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j < count) to[j] = items[j];
    }
  }
}

// A bit for each of the thread's tokens.
__device__ __forceinline__ unsigned load_mask(const bool* mask, int count, bool is_whole) {
  unsigned valid = 0;
  if (is_whole) {
    uint32_t words[2];
    const uint2 pair = *reinterpret_cast<const uint2*>(mask);
    words[0] = pair.x, words[1] = pair.y;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      // the top bit of every byte that is not 0, and then the four side by side
      const uint32_t flags = ((((words[w] & 0x7f7f7f7f) + 0x7f7f7f7f) | words[w]) & 0x80808080) >> 7;
      valid |= (flags * 0x01020408 >> 24 & 0xf) << (4 * w);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) valid |= (j < count && mask[j] ? 1u : 0u) << j;
  }
  return valid;
}

// Composes the maps of the threads after each thread, and of all threads to `whole`. `shared` has a map for every
// warp; it may be written again after another barrier.
template <int kThreads>
__device__ __forceinline__ AffineMap maps_after(AffineMap own, AffineMap* shared, AffineMap& whole) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const AffineMap next{__shfl_down_sync(kAllLanes, own.factor, offset),
                         __shfl_down_sync(kAllLanes, own.shift, offset)};
    if (lane() + offset < kWarp) own = own(next);
  }
  AffineMap after{__shfl_down_sync(kAllLanes, own.factor, 1), __shfl_down_sync(kAllLanes, own.shift, 1)};
  if (lane() == kWarp - 1) after = kIdentity;
  if (kThreads == kWarp) {
    whole = {__shfl_sync(kAllLanes, own.factor, 0), __shfl_sync(kAllLanes, own.shift, 0)};
    return after;
  }
  const int own_warp = static_cast<int>(threadIdx.x) / kWarp;
  if (lane() == 0) shared[own_warp] = own;
  __syncthreads();
  whole = kIdentity;
  AffineMap after_warp = kIdentity;
#pragma unroll
  for (int warp = kThreads / kWarp - 1; warp >= 0; --warp) {
    if (warp == own_warp) after_warp = whole;
    whole = shared[warp](whole);
  }
  return after(after_warp);
}

// Lane 0 gets the moments of the first `lanes` lanes (a power of two), merged in their order.
__device__ inline RangedMoments merge_lanes(RangedMoments own, int lanes) {
#pragma unroll 1
  for (int offset = 1; offset < lanes; offset *= 2) {
    RangedMoments other;
    other.count = __shfl_down_sync(kAllLanes, own.count, offset);
    other.mean = __shfl_down_sync(kAllLanes, own.mean, offset);
    other.squares = __shfl_down_sync(kAllLanes, own.squares, offset);
    other.low = __shfl_down_sync(kAllLanes, own.low, offset);
    other.high = __shfl_down_sync(kAllLanes, own.high, offset);
    if (lane() % (2 * offset) == 0) own.merge(other);
  }
  return own;
}

// As doubles, because a shared variable cannot have a constructor.
constexpr int kMomentsDoubles = sizeof(RangedMoments) / sizeof(double);

// Thread 0 gets the moments of the block's threads, merged in their order; `shared` holds those of kMaxWarps warps.
__device__ inline RangedMoments merge_block(RangedMoments own, double* shared) {
  own = merge_lanes(own, kWarp);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  if (warps == 1) return own;
  RangedMoments* const warp_moments = reinterpret_cast<RangedMoments*>(shared);
  if (lane() == 0) warp_moments[threadIdx.x / kWarp] = own;
  __syncthreads();
  return merge_lanes(lane() < warps ? warp_moments[lane()] : RangedMoments{}, warps);
}

}  // namespace grpo_kernels
