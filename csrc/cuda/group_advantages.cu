#include <math.h>
#include <stdint.h>

#include "group_advantages.h"
#include "launch.h"
#include "team.cuh"

// Three kernels: statistics of groups where subgroups borrow from them; advantages of every segment; and, for
// the estimators that normalise over the batch, a last step over all rows, which a batch that one block can
// hold does not need a launch of its own for.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;
// With one block named as enough, ptxas does not trade spills for occupancy that these kernels have no use for.
#define GRPO_BOUNDS __launch_bounds__(kThreads, 1)
constexpr int kOneBlockThreads = 512;  // 128 registers each
constexpr int64_t kOneBlockRows = 65536;
constexpr int64_t kLongSegment = 2048;  // longer ones are worked on by a whole block
constexpr int64_t kMaxBlocks = 1024;    // also the number of partial moments that the last step merges

template <typename T>
struct Rows {
  const AdvantageArrays<T>& a;

  __device__ int64_t at(int64_t position) const { return a.order == nullptr ? position : a.order[position]; }

  // NaN where the row takes no part or is not scored; column -1: the weighted sum of the scored columns.
  __device__ double reward(int64_t row, int column) const {
    if ((a.valid != nullptr && !a.valid[row]) || (a.subgroups != nullptr && a.subgroups[row] < 0)) return NAN;
    const T* of_row = a.rewards + row * a.columns;
    if (column >= 0) return static_cast<double>(of_row[column]);
    if (a.columns == 1) return a.weights[0] * static_cast<double>(of_row[0]);
    double sum = 0;
    bool scored = false;
    for (int c = 0; c < a.columns; ++c) {
      const double reward = static_cast<double>(of_row[c]);
      if (isnan(reward)) continue;
      sum += a.weights[c] * reward;
      scored = true;
    }
    return scored ? sum : NAN;
  }
  __device__ double length(int64_t row) const { return a.lengths == nullptr ? 1 : a.lengths[row]; }
  __device__ double baseline(int64_t row) const {
    return a.baselines == nullptr ? 0 : static_cast<double>(a.baselines[row]);
  }
};

struct Segment {
  int64_t first, count;
};

__device__ __forceinline__ Segment segment_at(const int64_t* starts, int64_t group_size, int64_t segments, int64_t s) {
  if (s >= segments) return {0, 0};
  if (starts == nullptr) return {s * group_size, group_size};
  return {starts[s], starts[s + 1] - starts[s]};
}

// Two passes; every thread of the team gets all of it.
template <typename T>
__device__ SegmentStats team_stats(const Rows<T>& rows, const Segment& segment, int column, const Team& team,
                                   double* shared) {
  SegmentStats own;
  for (int64_t k = team.rank; k < segment.count; k += team.size) {
    const int64_t row = rows.at(segment.first + k);
    const double reward = rows.reward(row, column);
    if (!isnan(reward)) own.add(reward, rows.length(row));
  }
  SegmentStats all;
  all.count = team_sum(team, own.count, shared);
  all.sum = team_sum(team, own.sum, shared);
  all.low = -team_max(team, -own.low, shared);
  all.high = team_max(team, own.high, shared);
  if (rows.a.plan.center == Center::kRunnerUp) {
    // the best of everyone's second, and of the first places that are not the winner's own
    const double winners = team_sum(team, own.count > 0 && own.high == all.high ? 1.0 : 0.0, shared);
    const double lower = own.high == all.high ? own.second : own.high;
    const double runner_up = team_max(team, lower, shared);
    all.second = winners > 1 ? all.high : runner_up;
  }
  if (rows.a.plan.center == Center::kLength) {
    all.length = team_sum(team, own.length, shared);
    all.length_reward = team_sum(team, own.length_reward, shared);
  }
  const double mean = all.mean();
  double squares = 0;
  for (int64_t k = team.rank; k < segment.count; k += team.size) {
    const double reward = rows.reward(rows.at(segment.first + k), column);
    if (!isnan(reward)) squares += (reward - mean) * (reward - mean);
  }
  all.m2 = team_sum(team, squares, shared);
  return all;
}

// Calls work(segment number, segment, team) for every segment with a team of `width` lanes, or with the whole
// block where a segment is long. All threads of the block take part in every call.
template <typename Work>
__device__ void for_each_segment(const int64_t* starts, int64_t group_size, int64_t segments, int width, Work work) {
  const int64_t teams = blockDim.x / width;
  const Team narrow{static_cast<int>(threadIdx.x) % width, width, false};
  const Team wide{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), true};
  for (int64_t base = blockIdx.x * teams; base < segments; base += gridDim.x * teams) {
    const int64_t mine = base + threadIdx.x / width;
    Segment segment = segment_at(starts, group_size, segments, mine);
    const bool is_long = segment.count > kLongSegment;
    const int64_t rounds = __syncthreads_or(is_long) ? teams : 0;
    // Round -1 is for the teams, each on its own segment, round r for the whole block on the r-th of them if
    // that is long. One call site: the work is inlined, and twice would be twice the registers.
    for (int64_t round = -1; round < rounds; ++round) {
      const bool whole_block = round >= 0;
      Segment each = whole_block ? segment_at(starts, group_size, segments, base + round) : segment;
      if (whole_block && each.count <= kLongSegment) continue;
      if (!whole_block && is_long) each.count = 0;
      work(whole_block ? base + round : mine, each, whole_block ? wide : narrow);
    }
  }
}

// Statistics of the groups for every column: [0] of the combined rewards, [1 + c] of column c.
template <typename T>
__global__ void GRPO_BOUNDS parent_stats_kernel(const __grid_constant__ AdvantageArrays<T> arrays) {
  __shared__ double shared[kMaxWarps];
  const Rows<T> rows{arrays};
  const int columns = arrays.plan.combine == Combine::kNormalizeThenSum ? arrays.columns : 0;
  for_each_segment(arrays.parent_starts, 0, arrays.segments, kWarp,
                   [&](int64_t number, const Segment& segment, const Team& team) {
                     for (int column = -1; column < columns; ++column) {
                       const SegmentStats stats = team_stats(rows, segment, column, team, shared);
                       if (team.rank == 0 && segment.count > 0) {
                         arrays.parent_stats[(column + 1) * arrays.segments + number] = stats;
                       }
                     }
                   });
}

template <typename T>
__device__ RowMap map_of(const AdvantageArrays<T>& arrays, int64_t number, const Segment& segment,
                         const SegmentStats& own, int column) {
  const SegmentStats* parent = nullptr;
  if (arrays.parent_stats != nullptr && segment.count > 0) {
    parent = arrays.parent_stats + (column + 1) * arrays.segments + arrays.parent[number];
  }
  return map_rows(arrays.plan, own, parent);
}

// All outputs of one segment, before the step over the batch.
template <typename T>
__device__ void write_segment(const Rows<T>& rows, int64_t number, const Segment& segment, const Team& team,
                              double* shared) {
  const AdvantageArrays<T>& a = rows.a;
  const double bound = a.plan.needs_batch() ? INFINITY : a.plan.clip;
  const SegmentStats combined = team_stats(rows, segment, -1, team, shared);
  const RowMap reported = map_of(a, number, segment, combined, -1);
  bool live = reported.live;
  const bool by_column = a.plan.combine == Combine::kNormalizeThenSum;
  if (by_column) live = false;
  for (int column = by_column ? 0 : -1; column < (by_column ? a.columns : 0); ++column) {
    const SegmentStats own = by_column ? team_stats(rows, segment, column, team, shared) : combined;
    const RowMap map = by_column ? map_of(a, number, segment, own, column) : reported;
    live = live || map.live;
    const double weight = by_column ? a.weights[column] : 1;
    for (int64_t k = team.rank; k < segment.count; k += team.size) {
      const int64_t row = rows.at(segment.first + k);
      const double reward = rows.reward(row, column);
      const double before = column > 0 ? static_cast<double>(a.advantages[row]) : 0;
      const double part = isnan(reward) ? 0 : row_advantage(a.plan, map, reward, rows.baseline(row));
      a.advantages[row] = static_cast<T>(before + weight * part);
    }
  }
  for (int64_t k = team.rank; k < segment.count; k += team.size) {
    const int64_t row = rows.at(segment.first + k);
    a.advantages[row] = static_cast<T>(clip_to(static_cast<double>(a.advantages[row]), bound));
    a.mean[row] = static_cast<T>(reported.mean);
    a.std[row] = static_cast<T>(reported.std);
    a.size[row] = static_cast<int32_t>(combined.count);
    a.degenerate[row] = !live;
  }
}

// Thread 0 gets the moments of all threads of the block, merged in the order of the threads.
__device__ Moments block_moments(Moments own, Moments* shared) {
#pragma unroll 1
  for (int offset = 1; offset < kWarp; offset *= 2) {
    Moments other;
    other.weight = __shfl_down_sync(kAllLanes, own.weight, offset);
    other.mean = __shfl_down_sync(kAllLanes, own.mean, offset);
    other.m2 = __shfl_down_sync(kAllLanes, own.m2, offset);
    if (threadIdx.x % (2 * offset) == 0) own.merge(other);
  }
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) own.merge(shared[warp]);
  }
  return own;
}

// The batch moments of rows first, first + stride, ...; two passes.
template <typename T>
__device__ Moments thread_moments(const Rows<T>& rows, int64_t first, int64_t stride) {
  Moments own;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t row = first; row < rows.a.rows; row += stride) {
      const double reward = rows.reward(row, -1);
      if (isnan(reward)) continue;
      const double weight = batch_weight(rows.a.plan, rows.length(row), rows.a.size[row] == 1, rows.a.degenerate[row]);
      const double value = batch_value(rows.a.plan, reward, static_cast<double>(rows.a.advantages[row]));
      if (pass == 0) {
        own.weight += weight;
        own.mean += weight * value;  // a sum until the end of the pass
      } else {
        own.m2 += weight * (value - own.mean) * (value - own.mean);
      }
    }
    if (pass == 0 && own.weight > 0) own.mean /= own.weight;
  }
  return own;
}

template <typename T>
__device__ void finish_rows(const Rows<T>& rows, const BatchMap& map, int64_t first, int64_t stride) {
  const AdvantageArrays<T>& a = rows.a;
  for (int64_t row = first; row < a.rows; row += stride) {
    const bool live = !a.degenerate[row] && !isnan(rows.reward(row, -1));
    const double advantage = (static_cast<double>(a.advantages[row]) - map.shift) * map.factor;
    a.advantages[row] = static_cast<T>(live ? clip_to(advantage, a.plan.clip) : 0);
    if (a.plan.scale == Scale::kBatchStd) a.std[row] = static_cast<T>(map.std);
  }
}

template <typename T>
__global__ void GRPO_BOUNDS segments_kernel(const __grid_constant__ AdvantageArrays<T> arrays, int width) {
  __shared__ double shared[kMaxWarps];
  const Rows<T> rows{arrays};
  for_each_segment(arrays.starts, arrays.group_size, arrays.segments, width,
                   [&](int64_t number, const Segment& segment, const Team& team) {
                     write_segment(rows, number, segment, team, shared);
                   });
}

template <typename T>
__global__ void GRPO_BOUNDS moments_kernel(const __grid_constant__ AdvantageArrays<T> arrays, Moments* partials) {
  __shared__ Moments shared[kMaxWarps];
  const Rows<T> rows{arrays};
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const Moments all = block_moments(thread_moments(rows, first, gridDim.x * static_cast<int64_t>(blockDim.x)), shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = all;
}

template <typename T>
__global__ void GRPO_BOUNDS finish_kernel(const __grid_constant__ AdvantageArrays<T> arrays, const Moments* partials,
                                          int parts) {
  __shared__ Moments shared[kMaxWarps];
  __shared__ BatchMap map;
  Moments own;
  for (int part = threadIdx.x; part < parts; part += blockDim.x) own.merge(partials[part]);
  own = block_moments(own, shared);
  if (threadIdx.x == 0) map = map_batch(arrays.plan, own);
  __syncthreads();
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  finish_rows(Rows<T>{arrays}, map, first, gridDim.x * static_cast<int64_t>(blockDim.x));
}

// Everything in one launch of one block: for batches so small that launches are what they cost.
template <typename T>
__global__ void __launch_bounds__(kOneBlockThreads)
    one_block_kernel(const __grid_constant__ AdvantageArrays<T> arrays, int width) {
  __shared__ double shared[kMaxWarps];
  __shared__ Moments moments[kMaxWarps];
  __shared__ BatchMap map;
  const Rows<T> rows{arrays};
  for_each_segment(arrays.starts, arrays.group_size, arrays.segments, width,
                   [&](int64_t number, const Segment& segment, const Team& team) {
                     write_segment(rows, number, segment, team, shared);
                   });
  __syncthreads();
  const Moments all = block_moments(thread_moments(rows, threadIdx.x, blockDim.x), moments);
  if (threadIdx.x == 0) map = map_batch(arrays.plan, all);
  __syncthreads();
  finish_rows(rows, map, threadIdx.x, blockDim.x);
}

int team_width(int64_t group_size) {
  int width = 1;
  while (width < kWarp && width < group_size) width *= 2;
  return width;
}

int64_t blocks_for(int64_t items, int64_t per_block) { return (items + per_block - 1) / per_block; }

}  // namespace

template <typename T>
void launch_group_advantages(const AdvantageArrays<T>& arrays, Moments* partials, void* stream) {
  // Ids leave the sizes of segments unknown here; a warp each serves small and middling ones alike.
  const int width = arrays.starts == nullptr ? team_width(arrays.group_size) : kWarp;
  if (arrays.parent_stats != nullptr) {
    const int64_t blocks = blocks_for(arrays.segments, kThreads / kWarp);
    launch(parent_stats_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, arrays);
  }
  if (arrays.plan.needs_batch() && arrays.rows <= kOneBlockRows) {
    launch(one_block_kernel<T>, dim3(1), dim3(kOneBlockThreads), 0, stream, arrays, width);
    return;
  }
  const int64_t blocks = blocks_for(arrays.segments, kThreads / width);
  launch(segments_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, arrays, width);
  if (!arrays.plan.needs_batch()) return;
  const int64_t wanted = blocks_for(arrays.rows, kThreads);
  const unsigned parts = static_cast<unsigned>(wanted < kMaxBlocks ? wanted : kMaxBlocks);
  launch(moments_kernel<T>, dim3(parts), dim3(kThreads), 0, stream, arrays, partials);
  launch(finish_kernel<T>, dim3(parts), dim3(kThreads), 0, stream, arrays, partials, static_cast<int>(parts));
}

template void launch_group_advantages<float>(const AdvantageArrays<float>&, Moments*, void*);
template void launch_group_advantages<double>(const AdvantageArrays<double>&, Moments*, void*);

}  // namespace grpo_kernels
