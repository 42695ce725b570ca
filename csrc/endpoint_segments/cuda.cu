#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "endpoint_segments/cuda.h"
#include "endpoint_segments/cut_tile.cuh"
#include "endpoint_segments/row_items.cuh"

// A block works on a row, tile by tile, and a thread on kItems neighbouring tokens of a tile. Launches: without values,
// the returns of rows and their means over groups; the returns of tokens; the scale of their advantages; the segments;
// with a norm, its moments; the results. Advantages of tokens are computed twice, which is faster than writing and
// reading 8 bytes for each. Sums over rows are added in a fixed order. Tiles start at the row's first token, so that
// neither padding after the row nor alignment changes a sum.
namespace grpo_kernels {
namespace {

constexpr int kBatchThreads = 512, kResultThreads = kLongRowThreads, kResultItems = 4;
constexpr int64_t kMaxChunks = 64;  // blocks that write the results of one row

// Promises 32 warps per multiprocessor, half of what it holds, where that costs no spills, else 16.
#define GRPO_ROW_BOUNDS __launch_bounds__(kThreads, (sizeof(T) == 4 && kThreads > kWarp ? 1024 : 512) / kThreads)

template <typename T, int kThreads>
__global__ void GRPO_ROW_BOUNDS returns_kernel(const __grid_constant__ SegmentArrays<T> in) {
  constexpr int kTokens = kThreads * kItems;
  __shared__ __align__(16) AffineMap warp_maps[2][kMaxWarps];
  const RowSpan<T> row(in);
  double carry = 0;
  bool has_tokens = false;
  for (int tile = row.tiles(kTokens) - 1; tile >= 0; --tile) {
    const int64_t t = int64_t{tile} * kTokens + threadIdx.x * kItems, at = row.begin + t;
    const int count = row.count_items(t);
    const bool is_whole = row.is_aligned && count == kItems;
    const unsigned valid = load_mask(in.mask + at, count, is_whole);
    T rewards[kItems];
    load_items(in.rewards + at, count, is_whole, rewards);
    AffineMap own = kIdentity, whole;
#pragma unroll
    for (int j = kItems - 1; j >= 0; --j) {
      if (valid >> j & 1) own = TokenMaps(in.settings.gamma, 1, static_cast<double>(rewards[j]), 0, own).carry;
    }
    maps_after<kThreads>(own, warp_maps[tile % 2], whole);
    carry = whole(carry);
    has_tokens |= valid != 0;
  }
  has_tokens = __syncthreads_or(has_tokens) != 0;
  if (threadIdx.x == 0) in.records[blockIdx.x].own_return = has_tokens && isfinite(carry) ? carry : NAN;
}

// Calls visit(row) in one of the block's threads for every row of the block's group, or for all rows.
template <typename T, typename Visit>
__device__ void for_each_row(const SegmentArrays<T>& in, bool by_group, Visit visit) {
  const int64_t first = by_group ? in.starts[blockIdx.x] : 0, last = by_group ? in.starts[blockIdx.x + 1] : in.rows;
#pragma unroll 1
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) visit(by_group ? in.order[i] : i);
}

template <typename T>
__global__ void GRPO_BOUNDS(kWarp) baselines_kernel(const __grid_constant__ SegmentArrays<T> in) {
  double sum = 0, count = 0;
  for_each_row(in, true, [&](int64_t row) {
    const double value = in.records[row].own_return;
    if (isnan(value)) return;
    sum += value;
    count += 1;
  });
  sum = team_sum(warp_team(), sum, nullptr);
  count = team_sum(warp_team(), count, nullptr);
  for_each_row(in, true, [&](int64_t row) { in.records[row].baseline = count > 0 ? sum / count : 0; });
}

// Writes the returns of tokens, the sums of rows, and the carry that the last token of each tile gets.
template <typename T, int kThreads, bool kHasCritic>
__global__ void GRPO_ROW_BOUNDS tokens_kernel(const __grid_constant__ SegmentArrays<T> in) {
  constexpr int kTokens = kThreads * kItems;
  __shared__ __align__(16) AffineMap warp_maps[2][kMaxWarps];
  __shared__ double shared[kMaxWarps];
  const RowSpan<T> row(in);
  const double gamma = in.settings.gamma, lam = in.settings.lam;
  ItemValues<T, kHasCritic> values(in);
  double carry = 0, squares = 0;
  int64_t tokens = 0;
  for (int tile = row.tiles(kTokens) - 1; tile >= 0; --tile) {
    const int64_t t = int64_t{tile} * kTokens + threadIdx.x * kItems, at = row.begin + t;
    const int count = row.count_items(t);
    const bool is_whole = row.is_aligned && count == kItems;
    T rewards[kItems], logprobs[kItems], old_logprobs[kItems], returns[kItems];
    const unsigned valid = load_mask(in.mask + at, count, is_whole);
    load_items(in.rewards + at, count, is_whole, rewards);
    values.load(in, at, count, is_whole);
    load_items(in.logprobs + at, count, is_whole, logprobs);
    load_items(in.old_logprobs + at, count, is_whole, old_logprobs);
    bool has_ratios = true;
    AffineMap own = kIdentity, whole;
#pragma unroll
    for (int j = kItems - 1; j >= 0; --j) {
      const bool is_valid = (valid >> j & 1) != 0;
      has_ratios = has_ratios && (!is_valid || (isfinite(logprobs[j]) && isfinite(old_logprobs[j])));
      if (is_valid) own = TokenMaps(gamma, lam, static_cast<double>(rewards[j]), values[j], own).carry;
    }
    const AffineMap after = maps_after<kThreads>(own, warp_maps[tile % 2], whole);
    AffineMap next{0, after(carry)};
    if (count > 0) in.carries[row.piece(t, kItems)] = next.shift;
    carry = whole(carry);
#pragma unroll
    for (int j = kItems - 1; j >= 0; --j) {
      returns[j] = 0;
      if ((valid >> j & 1) == 0) continue;
      const TokenMaps maps(gamma, lam, static_cast<double>(rewards[j]), values[j], next);
      next.shift = maps.carry.shift;
      const double advantage = maps.token_return.shift - values[j];
      squares += advantage * advantage;
      returns[j] = static_cast<T>(maps.token_return.shift);
    }
    if (!has_ratios) squares = NAN;
    tokens += __popc(valid);
    store_items(in.returns + at, count, is_whole, returns);
  }
  squares = team_sum(block_team(), squares, shared);
  const double all_tokens = team_sum(block_team(), static_cast<double>(tokens), shared);
  if (threadIdx.x == 0) in.records[blockIdx.x].sums = {static_cast<int64_t>(all_tokens), squares};
}

template <typename T>
__global__ void GRPO_BOUNDS(kBatchThreads) scale_kernel(const __grid_constant__ SegmentArrays<T> in) {
  __shared__ double shared[kMaxWarps];
  double squares = 0, tokens = 0;
  for_each_row(in, false, [&](int64_t row) {
    const TokenSums sums = in.records[row].sums;
    if (!isfinite(sums.squares)) return;
    squares += sums.squares;
    tokens += static_cast<double>(sums.tokens);
  });
  squares = team_sum(block_team(), squares, shared);
  tokens = team_sum(block_team(), tokens, shared);
  if (threadIdx.x == 0) *in.scale = fmax(tokens > 0 ? sqrt(squares / tokens) : 0, in.settings.group_epsilon);
}

// Cuts the row tile by tile, and writes the ids of its tokens and the advantages of its segments: first as maps of the
// carry that their tile's last token gets, and when all carries are known, from the last tile to the first, as numbers.
template <typename T, int kThreads, bool kHasCritic>
__global__ void GRPO_ROW_BOUNDS segments_kernel(const __grid_constant__ SegmentArrays<T> in) {
  using Tile = CutTile<kThreads>;
  constexpr int kTokens = kThreads * kItems;
  __shared__ __align__(16) Tile cut;
  __shared__ __align__(16) AffineMap warp_maps[kMaxWarps];
  __shared__ double shared[kMaxWarps * kMomentsDoubles];
  const RowSpan<T> row(in);
  const int tiles = row.tiles(kTokens);
  const double gamma = in.settings.gamma, lam = in.settings.lam;
  const double inverse_scale = 1 / *in.scale;
  const bool is_bounded = in.settings.rule == SegmentRule::kBounded;
  const bool is_coherent = in.settings.proxy == SegmentProxy::kCoherent;
  const int chunk = static_cast<int>(threadIdx.x) * kItems / kChunk, in_chunk = threadIdx.x * kItems % kChunk;
  ItemValues<T, kHasCritic> values(in);
  if (threadIdx.x == 0) cut.carried = {{0, 0}, 0};
  int32_t segments = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    const int64_t t = int64_t{tile} * kTokens + threadIdx.x * kItems, at = row.begin + t;
    const int count = row.count_items(t);
    const bool is_whole = row.is_aligned && count == kItems;
    const unsigned valid = load_mask(in.mask + at, count, is_whole);
    T rewards[kItems];
    load_items(in.rewards + at, count, is_whole, rewards);
    values.load(in, at, count, is_whole);
    reinterpret_cast<unsigned char*>(cut.valid)[threadIdx.x] = static_cast<unsigned char>(valid);
    AffineMap next{0, count > 0 ? in.carries[row.piece(t, kItems)] : 0};
#pragma unroll
    for (int j = kItems - 1; j >= 0; --j) {
      if ((valid >> j & 1) == 0) continue;
      const TokenMaps maps(gamma, lam, static_cast<double>(rewards[j]), values[j], next);
      next.shift = maps.carry.shift;
      cut.advantages[in_chunk + j][chunk] = (maps.token_return.shift - values[j]) * inverse_scale;
    }
    __syncwarp();  // without it the compiler moves the loads below up here, and spills
    {
      T logprobs[kItems], old_logprobs[kItems];
      load_items(in.logprobs + at, count, is_whole, logprobs);
      load_items(in.old_logprobs + at, count, is_whole, old_logprobs);
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        cut.weights[in_chunk + j][chunk] = token_weight(logprobs[j], old_logprobs[j]);
      }
    }
    __syncthreads();
    const CutRule rule(in.settings, *in.threshold);
    if (is_bounded) {
      is_coherent ? cut_tile<true, true>(cut, rule) : cut_tile<true, false>(cut, rule);
    } else {
      is_coherent ? cut_tile<false, true>(cut, rule) : cut_tile<false, false>(cut, rule);
    }
    const unsigned firsts = cut.firsts[chunk] >> in_chunk & ((1u << kItems) - 1);
    int tile_segments = 0;
    const int32_t begun = segments + firsts_before(cut, firsts, tile_segments);
    int32_t ids[kItems], id = begun - 1;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      id += static_cast<int32_t>(firsts >> j & 1);
      ids[j] = (valid >> j & 1) != 0 ? id : -1;
    }
    store_items(in.segment_ids + at, count, is_whole, ids);
    // again, from a cache: to keep them would take 16 registers while the tile is cut
    load_items(in.rewards + at, count, is_whole, rewards);
    values.load(in, at, count, is_whole);
    // Inside a segment lam is 1, which sums its rewards; values enter where a segment ends.
    AffineMap own = kIdentity, whole;
#pragma unroll
    for (int j = kItems - 1; j >= 0; --j) {
      if ((valid >> j & 1) == 0) continue;
      const double own_lam = (firsts >> j & 1) != 0 ? lam : 1;
      own = TokenMaps(gamma, own_lam, static_cast<double>(rewards[j]), values[j], own).carry;
    }
    next = maps_after<kThreads>(own, warp_maps, whole);
#pragma unroll
    for (int j = kItems - 1; j >= 0; --j) {
      if ((valid >> j & 1) == 0) continue;
      const bool is_first = (firsts >> j & 1) != 0;
      const TokenMaps maps(gamma, is_first ? lam : 1, static_cast<double>(rewards[j]), values[j], next);
      if (is_first) {
        in.credits[row.begin + id] = {maps.token_return.factor, maps.token_return.shift - values[j]};
        --id;
      }
      next = maps.carry;
    }
    if (threadIdx.x == 0) {
      SegmentTile& record = in.tiles[row.piece(int64_t{tile} * kTokens, kTokens)];
      record.factor = whole.factor;
      record.shift = whole.shift;
      record.first_segment = segments;
    }
    segments += tile_segments;
  }
  __syncthreads();
  RangedMoments moments;
  double carry = 0;
  int32_t last = segments;
  for (int tile = tiles - 1; tile >= 0; --tile) {
    const SegmentTile& record = in.tiles[row.piece(int64_t{tile} * kTokens, kTokens)];
    const int32_t first = static_cast<int32_t>(record.first_segment);
#pragma unroll 1
    for (int32_t id = first + static_cast<int32_t>(threadIdx.x); id < last; id += kThreads) {
      const SegmentCreditMap credit = in.credits[row.begin + id];
      const double advantage = credit.factor * carry + credit.shift;
      in.credits[row.begin + id].shift = advantage;
      moments.add(advantage);
    }
    carry = record.factor * carry + record.shift;
    last = first;
  }
  moments = merge_block(moments, shared);
  if (threadIdx.x != 0) return;
  in.num_segments[blockIdx.x] = segments;
  in.records[blockIdx.x].own = isfinite(in.records[blockIdx.x].sums.squares) ? moments : RangedMoments{};
}

template <typename T>
__global__ void GRPO_BOUNDS(kBatchThreads) moments_kernel(const __grid_constant__ SegmentArrays<T> in) {
  __shared__ double shared[kMaxWarps * kMomentsDoubles];
  __shared__ double shared_norm[sizeof(EndpointNorm) / sizeof(double)];
  const bool by_group = in.settings.norm == SegmentNorm::kPrompt;
  RangedMoments merged;
  for_each_row(in, by_group, [&](int64_t row) { merged.merge(in.records[row].own); });
  merged = merge_block(merged, shared);
  EndpointNorm& norm = *reinterpret_cast<EndpointNorm*>(shared_norm);
  if (threadIdx.x == 0) norm = {merged, in.settings.group_epsilon};
  __syncthreads();
  for_each_row(in, by_group, [&](int64_t row) { in.records[row].norm = norm; });
}

// The blocks of the last row also write the tokens after it.
template <typename T>
__global__ void __launch_bounds__(kResultThreads, sizeof(T) == 4 ? 6 : 1)
    results_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = blockIdx.x, begin = row_begin(in, row), end = row_begin(in, row + 1);
  const int64_t last = row == in.rows - 1 ? in.total : end;
  const bool is_finite = isfinite(in.records[row].sums.squares);
  EndpointNorm norm;
  if (in.settings.norm != SegmentNorm::kNone) norm = in.records[row].norm;
  const bool is_broadcast = in.settings.credit == SegmentCredit::kBroadcast;
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(in.advantages + begin) |
                              reinterpret_cast<uintptr_t>(in.segment_ids + begin) |
                              reinterpret_cast<uintptr_t>(in.endpoint_mask + begin) * 4;
  const bool is_aligned = addresses % 16 == 0;
  const int64_t step = gridDim.y * static_cast<int64_t>(blockDim.x) * kResultItems;
  for (int64_t t = begin + (blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x) * kResultItems; t < last;
       t += step) {
    const int64_t left = end - t;
    const int count = left >= kResultItems ? kResultItems : left > 0 ? static_cast<int>(left) : 0;
    const bool is_whole = is_aligned && count == kResultItems;
    int32_t ids[kResultItems + 1];
    {
      int32_t own[kResultItems];
      load_items(in.segment_ids + t, count, is_whole, own);
#pragma unroll
      for (int j = 0; j < kResultItems; ++j) ids[j] = j < count ? own[j] : -1;
      ids[kResultItems] = left > kResultItems ? in.segment_ids[t + kResultItems] : -1;
    }
    uint32_t ends = 0, wanted = 0;  // a byte for each token
#pragma unroll
    for (int j = 0; j < kResultItems; ++j) {
      const bool is_valid = ids[j] >= 0, is_end = is_valid && ids[j + 1] != ids[j];
      ends |= (is_end ? 1u : 0u) << (8 * j);
      wanted |= (is_finite && (is_end || (is_valid && is_broadcast)) ? 1u : 0u) << (8 * j);
    }
    double credits[kResultItems];
#pragma unroll
    for (int j = 0; j < kResultItems; ++j) {
      credits[j] = norm.mean;
      if ((wanted >> (8 * j) & 1) != 0) credits[j] = in.credits[begin + ids[j]].shift;
    }
    T advantages[kResultItems];
#pragma unroll
    for (int j = 0; j < kResultItems; ++j) {
      advantages[j] = static_cast<T>(ids[j] >= 0 && !is_finite ? NAN : norm(credits[j]));
    }
    const int stored = last - t < kResultItems ? static_cast<int>(last - t) : kResultItems;
    store_items(in.advantages + t, stored, is_whole, advantages);
    if (is_whole) {
      *reinterpret_cast<uint32_t*>(in.endpoint_mask + t) = ends;
      if (is_finite) continue;
    }
#pragma unroll
    for (int j = 0; j < kResultItems; ++j) {
      if (j >= stored) break;
      if (!is_whole) in.endpoint_mask[t + j] = (ends >> (8 * j) & 1) != 0;
      if (ids[j] >= 0 && !is_finite) in.returns[t + j] = static_cast<T>(NAN);
      if (j < count) continue;
      in.returns[t + j] = 0;
      in.segment_ids[t + j] = -1;
    }
  }
}

template <typename T, int kThreads, bool kHasCritic>
void launch_rows(const SegmentArrays<T>& arrays, void* stream) {
  const unsigned rows = static_cast<unsigned>(arrays.rows);
  const dim3 row_blocks(rows), row_threads(kThreads);
  if (!kHasCritic) {
    launch(returns_kernel<T, kThreads>, row_blocks, row_threads, 0, stream, arrays);
    launch(baselines_kernel<T>, row_blocks, dim3(kWarp), 0, stream, arrays);
  }
  launch(tokens_kernel<T, kThreads, kHasCritic>, row_blocks, row_threads, 0, stream, arrays);
  launch(scale_kernel<T>, dim3(1), dim3(kBatchThreads), 0, stream, arrays);
  launch(segments_kernel<T, kThreads, kHasCritic>, row_blocks, row_threads, 0, stream, arrays);
  if (arrays.settings.norm == SegmentNorm::kBatch) {
    launch(moments_kernel<T>, dim3(1), dim3(kBatchThreads), 0, stream, arrays);
  } else if (arrays.settings.norm == SegmentNorm::kPrompt) {
    launch(moments_kernel<T>, row_blocks, dim3(kWarp), 0, stream, arrays);
  }
  constexpr int64_t kBlockItems = kThreads * kResultItems;
  const int64_t wanted = (arrays.total / arrays.rows + kBlockItems - 1) / kBlockItems;
  const unsigned chunks = static_cast<unsigned>(wanted < 1 ? 1 : wanted < kMaxChunks ? wanted : kMaxChunks);
  launch(results_kernel<T>, dim3(rows, chunks), row_threads, 0, stream, arrays);
}

}  // namespace

template <typename T>
void launch_endpoint_segments(const SegmentArrays<T>& arrays, void* stream) {
  if (arrays.has_long_rows()) {
    arrays.has_critic ? launch_rows<T, kLongRowThreads, true>(arrays, stream)
                      : launch_rows<T, kLongRowThreads, false>(arrays, stream);
  } else {
    arrays.has_critic ? launch_rows<T, kShortRowThreads, true>(arrays, stream)
                      : launch_rows<T, kShortRowThreads, false>(arrays, stream);
  }
}

template void launch_endpoint_segments<float>(const SegmentArrays<float>&, void*);
template void launch_endpoint_segments<double>(const SegmentArrays<double>&, void*);

}  // namespace grpo_kernels
