#pragma once

#include <string.h>

#include "common/cuda/pieces.cuh"
#include "common/cuda/team.cuh"
#include "endpoint_segments/cuda.h"

// The tokens of a row as the threads of a block hold them, and recurrences from the last token to the first as scans of
// affine maps.
namespace grpo_kernels {
namespace {

constexpr int kItems = kSegmentTokensPerThread;

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }

template <typename T>
__device__ int64_t row_begin(const SegmentArrays<T>& in, int64_t row) {
  return in.bounds == nullptr ? row * in.width : in.bounds[row];
}

// The block's row.
template <typename T>
struct RowSpan {
  int64_t begin, length;
  bool is_aligned;  // whether threads can read and write their tokens in pieces

  __device__ explicit RowSpan(const SegmentArrays<T>& in) {
    begin = row_begin(in, blockIdx.x);
    length = row_begin(in, blockIdx.x + 1) - begin;
    const auto place = [&](const auto* array) {
      return array == nullptr ? 0 : reinterpret_cast<uintptr_t>(array + begin);
    };
    const uintptr_t addresses = place(in.rewards) | place(in.values) | place(in.logprobs) | place(in.old_logprobs) |
                                place(in.returns) | place(in.segment_ids) | place(in.mask) * 2;
    is_aligned = addresses % 16 == 0;
  }
  // Number of the thread's tokens, from t on, that are in the row.
  __device__ __forceinline__ int count_items(int64_t t) const {
    const int64_t left = length - t;
    return left >= kItems ? kItems : left > 0 ? static_cast<int>(left) : 0;
  }
  // Index of the row's token t in arrays with an element for every `tokens` tokens of each row.
  __device__ __forceinline__ int64_t piece(int64_t t, int tokens) const {
    return begin / tokens + blockIdx.x + t / tokens;
  }
  __device__ __forceinline__ int tiles(int tile_tokens) const {
    return static_cast<int>((length + tile_tokens - 1) / tile_tokens);
  }
};

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
    for (int j = 0; j < kItems; ++j) valid |= (j < count && mask[j] ? 1u : 0u) << j;
  }
  return valid;
}

// The map x -> factor * x + shift.
struct AffineMap {
  double factor, shift;

  __device__ __forceinline__ double operator()(double x) const { return factor * x + shift; }
  // x -> (*this)(first(x))
  __device__ __forceinline__ AffineMap operator()(const AffineMap& first) const {
    return {factor * first.factor, (*this)(first.shift)};
  }
};

// Each token passes a carry to the one before it, (1 - lam) * value + lam * return, which enters that token's return
// times gamma. Its return and its carry are maps of the carry that it gets.
struct TokenMaps {
  AffineMap token_return, carry;

  __device__ __forceinline__ TokenMaps(double gamma, double lam, double reward, double value, const AffineMap& next) {
    token_return = AffineMap{gamma, reward}(next);
    carry = {lam * token_return.factor, (1 - lam) * value + lam * token_return.shift};
  }
};

constexpr AffineMap kIdentity{1, 0};

// Composes the maps of the threads behind each thread, and of all threads to `whole`. `shared` has a map for every
// warp; it may be written again after another barrier.
template <int kThreads>
__device__ __forceinline__ AffineMap maps_behind(AffineMap own, AffineMap* shared, AffineMap& whole) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const AffineMap next{__shfl_down_sync(kAllLanes, own.factor, offset),
                         __shfl_down_sync(kAllLanes, own.shift, offset)};
    if (lane() + offset < kWarp) own = own(next);
  }
  AffineMap behind{__shfl_down_sync(kAllLanes, own.factor, 1), __shfl_down_sync(kAllLanes, own.shift, 1)};
  if (lane() == kWarp - 1) behind = kIdentity;
  if (kThreads == kWarp) {
    whole = {__shfl_sync(kAllLanes, own.factor, 0), __shfl_sync(kAllLanes, own.shift, 0)};
    return behind;
  }
  const int own_warp = static_cast<int>(threadIdx.x) / kWarp;
  if (lane() == 0) shared[own_warp] = own;
  __syncthreads();
  whole = kIdentity;
  AffineMap behind_warp = kIdentity;
#pragma unroll
  for (int warp = kThreads / kWarp - 1; warp >= 0; --warp) {
    if (warp == own_warp) behind_warp = whole;
    whole = shared[warp](whole);
  }
  return behind(behind_warp);
}

// The values of the thread's tokens: those of the critic, or the baseline of the row.
template <typename T, bool kHasCritic>
struct ItemValues {
  T items[kItems];

  __device__ explicit ItemValues(const SegmentArrays<T>&) {}
  __device__ __forceinline__ void load(const SegmentArrays<T>& in, int64_t at, int count, bool is_whole) {
    load_items(in.values + at, count, is_whole, items);
  }
  __device__ __forceinline__ double operator[](int j) const { return static_cast<double>(items[j]); }
};
template <typename T>
struct ItemValues<T, false> {
  double baseline;

  __device__ explicit ItemValues(const SegmentArrays<T>& in) : baseline(in.records[blockIdx.x].baseline) {}
  __device__ __forceinline__ void load(const SegmentArrays<T>&, int64_t, int, bool) {}
  __device__ __forceinline__ double operator[](int) const { return baseline; }
};

}  // namespace
}  // namespace grpo_kernels
