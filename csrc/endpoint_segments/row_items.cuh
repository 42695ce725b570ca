#pragma once

#include "endpoint_segments/cuda.h"
#include "endpoint_segments/row_scans.cuh"

// The tokens of a row as the threads of a block hold them, and recurrences from the last token to the first as scans of
// affine maps.
namespace grpo_kernels {
namespace {

constexpr int kItems = kRowItems;

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

// Each token passes a carry to the one before it, (1 - lam) * value + lam * return, which enters that token's return
// times gamma. Its return and its carry are maps of the carry that it gets.
struct TokenMaps {
  AffineMap token_return, carry;

  __device__ __forceinline__ TokenMaps(double gamma, double lam, double reward, double value, const AffineMap& next) {
    token_return = AffineMap{gamma, reward}(next);
    carry = {lam * token_return.factor, (1 - lam) * value + lam * token_return.shift};
  }
};

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
