#pragma once

#include "common/cuda/row_items.cuh"
#include "token_advantages/cuda.h"

// The tokens of a tile as the threads of a block hold them.
namespace grpo_kernels {
namespace {

// With turns; 0 for tokens that do not count.
constexpr unsigned char kFirstOfTurn = 1, kLaterOfTurn = 2;

// A bit for each of the thread's tokens.
struct TokenRoles {
  unsigned valid, firsts;
};

__device__ __forceinline__ TokenRoles load_roles(const unsigned char* from, int count, bool is_whole) {
  TokenRoles roles{0, 0};
  if (is_whole) {
    uint32_t words[2];
    const uint2 pair = *reinterpret_cast<const uint2*>(from);
    words[0] = pair.x, words[1] = pair.y;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t firsts = words[w] & 0x01010101, valid = firsts | (words[w] >> 1 & 0x01010101);
      roles.valid |= (valid * 0x01020408 >> 24 & 0xf) << (4 * w);
      roles.firsts |= (firsts * 0x01020408 >> 24 & 0xf) << (4 * w);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) {
      const unsigned role = j < count ? from[j] : 0;
      roles.valid |= (role != 0 ? 1u : 0u) << j;
      roles.firsts |= (role == kFirstOfTurn ? 1u : 0u) << j;
    }
  }
  return roles;
}

// `roles` has a byte for each token.
__device__ __forceinline__ void store_roles(unsigned char* to, int count, bool is_whole, unsigned long long roles) {
  if (is_whole) {
    *reinterpret_cast<unsigned long long*>(to) = roles;
  } else {
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) {
      if (j < count) to[j] = static_cast<unsigned char>(roles >> (8 * j));
    }
  }
}

// The tokens that a block works on: the tiles of chunk blockIdx.y of row blockIdx.x.
template <typename T, int kThreads>
struct TokenSpan {
  static constexpr int kTokens = kThreads * kRowItems;
  int64_t begin, length;  // of the row
  int first_tile, end_tile;
  bool is_aligned;  // whether threads can read and write their tokens in pieces

  __device__ explicit TokenSpan(const TokenArrays<T>& in) {
    begin = in.bounds == nullptr ? blockIdx.x * in.width : in.bounds[blockIdx.x];
    length = (in.bounds == nullptr ? in.width : in.bounds[blockIdx.x + 1] - begin);
    const int tiles = static_cast<int>((length + kTokens - 1) / kTokens);
    const int per_chunk = (tiles + static_cast<int>(gridDim.y) - 1) / static_cast<int>(gridDim.y);
    const int first = static_cast<int>(blockIdx.y) * per_chunk;
    first_tile = first < tiles ? first : tiles;
    end_tile = first_tile + per_chunk < tiles ? first_tile + per_chunk : tiles;
    const auto place = [&](const auto* array) {
      return array == nullptr ? 0 : reinterpret_cast<uintptr_t>(array + begin);
    };
    const uintptr_t addresses = place(in.rewards) | place(in.values) | place(in.turns) | place(in.advantages) |
                                place(in.returns) | place(in.mask) * 2 | place(in.roles) * 2;
    is_aligned = addresses % 16 == 0;
  }
  // The thread's first token of a tile.
  __device__ __forceinline__ int64_t item(int tile) const {
    return int64_t{tile} * kTokens + static_cast<int>(threadIdx.x) * kRowItems;
  }
  // Number of the thread's tokens, from t on, that are in the row.
  __device__ __forceinline__ int count_items(int64_t t) const {
    const int64_t left = length - t;
    return left >= kRowItems ? kRowItems : left > 0 ? static_cast<int>(left) : 0;
  }
  __device__ __forceinline__ bool is_whole(int count) const { return is_aligned && count == kRowItems; }
  __device__ __forceinline__ int64_t record() const {
    return static_cast<int64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
  }
  // The blocks of the last row also write the tokens behind it.
  __device__ void clear_tokens_behind_rows(const TokenArrays<T>& in) const {
    if (blockIdx.x != in.rows - 1) return;
    const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
    for (int64_t t = begin + length + blockIdx.y * int64_t{kThreads} + threadIdx.x; t < in.total; t += step) {
      in.advantages[t] = in.returns[t] = 0;
    }
  }
};

template <typename T, bool kHasValues, bool kHasTurns>
struct TokenTile {
  T rewards[kRowItems], values[kHasValues ? kRowItems : 1];
  int count;
  bool is_whole;
  TokenRoles roles;

  template <int kThreads>
  __device__ __forceinline__ TokenTile(const TokenArrays<T>& in, const TokenSpan<T, kThreads>& row, int64_t t) {
    const int64_t at = row.begin + t;
    count = row.count_items(t);
    is_whole = row.is_whole(count);
    if (kHasTurns) {
      roles = load_roles(in.roles + at, count, is_whole);
    } else {
      roles.valid = roles.firsts = load_mask(in.mask + at, count, is_whole);
    }
    load_items(in.rewards + at, count, is_whole, rewards);
    if constexpr (kHasValues) load_items(in.values + at, count, is_whole, values);
  }
  __device__ __forceinline__ bool is_valid(int j) const { return (roles.valid >> j & 1) != 0; }
  __device__ __forceinline__ double reward(int j) const { return static_cast<double>(rewards[j]); }
  __device__ __forceinline__ double value(int j) const {
    if constexpr (kHasValues) return static_cast<double>(values[j]);
    return 0;
  }
  __device__ __forceinline__ AffineMap map(const TokenAdvantageSettings& settings, int j) const {
    if (!is_valid(j)) return {1, carried_reward(settings, rewards[j])};
    if (kHasTurns && (roles.firsts >> j & 1) == 0) return {1, reward(j)};
    return step_map(settings, reward(j), value(j));
  }
  // From what the thread's last token gets to what its first one passes on.
  __device__ __forceinline__ AffineMap compose(const TokenAdvantageSettings& settings) const {
    AffineMap own = kIdentity;
#pragma unroll
    for (int j = kRowItems - 1; j >= 0; --j) {
      own = map(settings, j)(own);
    }
    return own;
  }
  __device__ __forceinline__ bool has_nan() const {
    bool result = false;
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) result |= is_valid(j) && rewards[j] != rewards[j];
    return result;
  }
};

// The latest number that is not negative among those of the threads before each thread; `latest` is that of the tiles
// before, and then of this one, too. `shared` has a number for every warp; it may be written again after another
// barrier.
template <int kThreads>
__device__ __forceinline__ int32_t latest_before(int32_t own, int32_t* shared, int32_t& latest) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int32_t before = __shfl_up_sync(kAllLanes, own, offset);
    if (lane() >= offset && own < 0) own = before;
  }
  const int own_warp = static_cast<int>(threadIdx.x) / kWarp;
  int32_t before = __shfl_up_sync(kAllLanes, own, 1), before_warp = latest, all = latest;
  if (lane() == 0) before = -1;
  if (kThreads == kWarp) {
    const int32_t last = __shfl_sync(kAllLanes, own, kWarp - 1);
    all = last >= 0 ? last : latest;
  } else {
    if (lane() == kWarp - 1) shared[own_warp] = own;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / kWarp; ++warp) {
      if (warp == own_warp) before_warp = all;
      all = shared[warp] >= 0 ? shared[warp] : all;
    }
  }
  latest = all;
  return before >= 0 ? before : before_warp;
}

// Sums of advantages about the first of them, which keeps the difference of squares exact enough in float64.
template <typename T>
struct TokenSums {
  int count = 0;
  T pivot = 0, low = static_cast<T>(INFINITY), high = static_cast<T>(-INFINITY);
  double sum = 0, squares = 0;

  __device__ __forceinline__ void add(T x) {
    if (count == 0) pivot = x;
    const double distance = static_cast<double>(x) - static_cast<double>(pivot);
    ++count;
    sum += distance;
    squares += distance * distance;
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  __device__ RangedMoments moments() const {
    RangedMoments result;
    if (count == 0) return result;
    result.count = count;
    result.mean = static_cast<double>(pivot) + sum / count;
    const double rest = squares - sum * (sum / count);
    result.squares = rest < 0 ? 0 : rest;
    result.low = static_cast<double>(low);
    result.high = static_cast<double>(high);
    return result;
  }
};

}  // namespace
}  // namespace grpo_kernels
