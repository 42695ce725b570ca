#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/row_items.cuh"
#include "token_advantages/cuda.h"
#include "token_advantages/token_tile.cuh"

// A block works on a row, or on a chunk of one, tile by tile from the last. Launches: with turns, the roles of tokens;
// with several chunks a row, their maps; the advantages; with turns, those of their tokens; with whitening, the norm of
// the batch and the advantages again. Tiles start at the row's first token, so that neither padding behind the row nor
// alignment changes a sum.
namespace grpo_kernels {
namespace {

constexpr int kBatchThreads = 512;

// The walk promises 24 warps per multiprocessor, whose loads are enough in flight, and the other kernels 32.
#define GRPO_WALK_BOUNDS __launch_bounds__(kThreads, (sizeof(T) == 4 && kThreads > kWarp ? 768 : 512) / kThreads)
#define GRPO_ROW_BOUNDS __launch_bounds__(kThreads, (sizeof(T) == 4 && kThreads > kWarp ? 1024 : 512) / kThreads)

// Writes the role of each token.
template <typename T, int kThreads>
__global__ void GRPO_ROW_BOUNDS roles_kernel(const __grid_constant__ TokenArrays<T> in) {
  __shared__ int32_t warp_turns[2][kMaxWarps];
  const TokenSpan<T, kThreads> row(in);
  int32_t open_turn = -1;
  for (int tile = row.first_tile; tile < row.end_tile; ++tile) {
    const int64_t t = row.item(tile), at = row.begin + t;
    const int count = row.count_items(t);
    int32_t turns[kRowItems], own = -1, turn;
    const unsigned valid = load_mask(in.mask + at, count, row.is_whole(count));
    load_items(in.turns + at, count, row.is_whole(count), turns);
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) own = (valid >> j & 1) != 0 ? turns[j] : own;
    turn = latest_before<kThreads>(own, warp_turns[tile % 2], open_turn);
    unsigned long long roles = 0;
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) {
      if ((valid >> j & 1) == 0) continue;
      roles |= static_cast<unsigned long long>(turns[j] == turn ? kLaterOfTurn : kFirstOfTurn) << (8 * j);
      turn = turns[j];
    }
    store_roles(in.roles + at, count, row.is_whole(count), roles);
  }
}

template <typename T, int kThreads, bool kHasValues>
__global__ void GRPO_ROW_BOUNDS maps_kernel(const __grid_constant__ TokenArrays<T> in) {
  __shared__ __align__(16) AffineMap warp_maps[2][kMaxWarps];
  const TokenSpan<T, kThreads> row(in);
  AffineMap chunk = kIdentity;
  bool has_nan = false;
  for (int tile = row.end_tile - 1; tile >= row.first_tile; --tile) {
    TokenTile<T, kHasValues, false> tokens(in, row, row.item(tile));
    AffineMap whole;
    maps_behind<kThreads>(tokens.compose(in.settings), warp_maps[tile % 2], whole);
    chunk = whole(chunk);
    has_nan |= tokens.has_nan();
  }
  has_nan = __syncthreads_or(has_nan) != 0;
  if (threadIdx.x == 0) in.chunks[row.record()] = {chunk, has_nan ? 0 : 1};
}

template <typename T, int kThreads, bool kHasValues, bool kHasTurns>
__global__ void GRPO_WALK_BOUNDS walk_kernel(const __grid_constant__ TokenArrays<T> in) {
  __shared__ __align__(16) AffineMap warp_maps[2][kMaxWarps];
  __shared__ double shared[kMaxWarps * kMomentsDoubles];
  const TokenSpan<T, kThreads> row(in);
  const bool has_chunks = gridDim.y > 1;
  double carry = 0;
  bool is_scored = true;
  if (has_chunks) {
    const int behind = static_cast<int>(blockIdx.y) + 1 + lane(), chunks = static_cast<int>(gridDim.y);
    const TokenChunk* const records = in.chunks + static_cast<int64_t>(blockIdx.x) * chunks;
    AffineMap own = kIdentity, whole;
    if (behind < chunks) own = records[behind].map;
    maps_behind<kWarp>(own, nullptr, whole);
    carry = whole(0);
    is_scored = __all_sync(kAllLanes, lane() >= chunks || records[lane()].is_scored != 0) != 0;
  }
  TokenSums<T> sums;
  while (true) {  // a second time if a reward of the row turns out to be NaN
    sums = TokenSums<T>();
    bool has_nan = false;
    for (int tile = row.end_tile - 1; tile >= row.first_tile; --tile) {
      const int64_t t = row.item(tile), at = row.begin + t;
      TokenTile<T, kHasValues, kHasTurns> tokens(in, row, t);
      has_nan |= tokens.has_nan();
      AffineMap whole;
      const AffineMap behind = maps_behind<kThreads>(tokens.compose(in.settings), warp_maps[tile % 2], whole);
      double entering = behind(carry);
      carry = whole(carry);
      T advantages[kRowItems], returns[kRowItems];
#pragma unroll
      for (int j = kRowItems - 1; j >= 0; --j) {
        advantages[j] = returns[j] = 0;
        const double token_return = is_scored ? tokens.reward(j) + entering : tokens.value(j);
        entering = tokens.map(in.settings, j)(entering);
        if (!tokens.is_valid(j)) continue;
        returns[j] = static_cast<T>(token_return);
        advantages[j] = static_cast<T>(is_scored ? token_return - tokens.value(j) : 0);
        if (!kHasTurns) sums.add(advantages[j]);
      }
      store_items(in.advantages + at, tokens.count, tokens.is_whole, advantages);
      store_items(in.returns + at, tokens.count, tokens.is_whole, returns);
    }
    if (has_chunks || !is_scored || __syncthreads_or(has_nan) == 0) break;
    is_scored = false;
    carry = 0;
  }
  row.clear_tokens_behind_rows(in);
  if (kHasTurns && threadIdx.x == 0) in.chunks[row.record()].is_scored = is_scored ? 1 : 0;
  if (kHasTurns || in.settings.whiten == TokenWhiten::kNone) return;
  const RangedMoments moments = merge_block(sums.moments(), shared);
  if (threadIdx.x == 0) in.moments[row.record()] = is_scored ? moments : RangedMoments{};
}

// Gives every token of a turn what its first token has, and computes moments of the advantages.
template <typename T, int kThreads>
__global__ void GRPO_ROW_BOUNDS turns_kernel(const __grid_constant__ TokenArrays<T> in) {
  __shared__ int32_t warp_firsts[2][kMaxWarps];
  __shared__ double shared[kMaxWarps * kMomentsDoubles];
  const TokenSpan<T, kThreads> row(in);
  int32_t open_first = -1;
  TokenSums<T> sums;
  for (int tile = row.first_tile; tile < row.end_tile; ++tile) {
    const int64_t t = row.item(tile), at = row.begin + t;
    const int count = row.count_items(t);
    const TokenRoles roles = load_roles(in.roles + at, count, row.is_whole(count));
    int32_t own = -1;
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) own = (roles.firsts >> j & 1) != 0 ? static_cast<int32_t>(t) + j : own;
    int32_t first = latest_before<kThreads>(own, warp_firsts[tile % 2], open_first);
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) {
      if ((roles.valid >> j & 1) == 0) continue;
      const bool is_first = (roles.firsts >> j & 1) != 0;
      if (is_first) first = static_cast<int32_t>(t) + j;
      // no thread writes what a first token has
      const T advantage = in.advantages[row.begin + first];
      sums.add(advantage);
      if (is_first) continue;
      in.advantages[at + j] = advantage;
      in.returns[at + j] = in.returns[row.begin + first];
    }
  }
  if (in.settings.whiten == TokenWhiten::kNone) return;
  const RangedMoments moments = merge_block(sums.moments(), shared);
  if (threadIdx.x == 0) in.moments[row.record()] = in.chunks[row.record()].is_scored != 0 ? moments : RangedMoments{};
}

template <typename T>
__global__ void GRPO_BOUNDS(kBatchThreads) norm_kernel(const __grid_constant__ TokenArrays<T> in, int64_t records) {
  __shared__ double shared[kMaxWarps * kMomentsDoubles];
  RangedMoments merged;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < records; i += blockDim.x) merged.merge(in.moments[i]);
  merged = merge_block(merged, shared);
  if (threadIdx.x == 0) *in.norm = TokenNorm(in.settings, merged);
}

// `num_chunks` is that of the walk; the grid here may be another.
template <typename T, int kThreads>
__global__ void GRPO_ROW_BOUNDS whiten_kernel(const __grid_constant__ TokenArrays<T> in, int num_chunks) {
  const RangedMoments* const records = in.moments + static_cast<int64_t>(blockIdx.x) * num_chunks;
  // Rows that are not scored have no moments, and keep their zeros.
  if (__any_sync(kAllLanes, lane() < num_chunks && records[lane()].count > 0) == 0) return;
  const TokenSpan<T, kThreads> row(in);
  const TokenNorm norm = *in.norm;
  for (int tile = row.first_tile; tile < row.end_tile; ++tile) {
    const int64_t t = row.item(tile), at = row.begin + t;
    const int count = row.count_items(t);
    const bool is_whole = row.is_whole(count);
    const unsigned valid = load_mask(in.mask + at, count, is_whole);
    T advantages[kRowItems];
    load_items(in.advantages + at, count, is_whole, advantages);
#pragma unroll
    for (int j = 0; j < kRowItems; ++j) {
      if ((valid >> j & 1) != 0) advantages[j] = static_cast<T>(norm(static_cast<double>(advantages[j])));
    }
    store_items(in.advantages + at, count, is_whole, advantages);
  }
}

template <typename T, int kThreads, bool kHasValues>
void launch_rows(const TokenArrays<T>& arrays, void* stream) {
  const int chunks = static_cast<int>(arrays.num_chunks());
  const dim3 rows(static_cast<unsigned>(arrays.rows)), threads(kThreads);
  const dim3 row_chunks(rows.x, static_cast<unsigned>(chunks));
  if (arrays.turns != nullptr) {
    launch(roles_kernel<T, kThreads>, rows, threads, 0, stream, arrays);
    launch(walk_kernel<T, kThreads, kHasValues, true>, rows, threads, 0, stream, arrays);
    launch(turns_kernel<T, kThreads>, rows, threads, 0, stream, arrays);
  } else {
    if (chunks > 1) launch(maps_kernel<T, kThreads, kHasValues>, row_chunks, threads, 0, stream, arrays);
    launch(walk_kernel<T, kThreads, kHasValues, false>, row_chunks, threads, 0, stream, arrays);
  }
  if (arrays.settings.whiten == TokenWhiten::kNone) return;
  launch(norm_kernel<T>, dim3(1), dim3(kBatchThreads), 0, stream, arrays, arrays.rows * chunks);
  launch(whiten_kernel<T, kThreads>, row_chunks, threads, 0, stream, arrays, chunks);
}

}  // namespace

template <typename T>
void launch_token_advantages(const TokenArrays<T>& arrays, void* stream) {
  if (arrays.has_long_rows()) {
    arrays.has_values ? launch_rows<T, kLongRowThreads, true>(arrays, stream)
                      : launch_rows<T, kLongRowThreads, false>(arrays, stream);
  } else {
    arrays.has_values ? launch_rows<T, kShortRowThreads, true>(arrays, stream)
                      : launch_rows<T, kShortRowThreads, false>(arrays, stream);
  }
}

template void launch_token_advantages<float>(const TokenArrays<float>&, void*);
template void launch_token_advantages<double>(const TokenArrays<double>&, void*);

}  // namespace grpo_kernels
