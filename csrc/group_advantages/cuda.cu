#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "group_advantages/cuda.h"

// Three steps: statistics of groups, where subgroups borrow from them; advantages of every group; and, for estimators
// that normalise over the batch, a pass over all rows. A small batch takes the last two in one launch of one block.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kOneBlockThreads = 512;  // 128 registers each
constexpr int64_t kOneBlockRows = 65536;
constexpr int64_t kLongGroup = 2048;  // longer ones take a whole block

template <typename T>
struct Rows {
  const AdvantageArrays<T>& a;

  __device__ int64_t at(int64_t position) const { return a.order == nullptr ? position : a.order[position]; }
  __device__ double reward(int64_t row, int column) const { return a.batch.reward(row, column, a.weights); }
};

struct Group {
  int64_t first, count;
};

__device__ __forceinline__ Group group_at(const int64_t* starts, int64_t group_size, int64_t groups, int64_t s) {
  if (s >= groups) return {0, 0};
  if (starts == nullptr) return {s * group_size, group_size};
  return {starts[s], starts[s + 1] - starts[s]};
}

// Two passes; every thread of the team gets the result.
template <typename T>
__device__ GroupStatistics team_stats(const Rows<T>& rows, const Group& group, int column, const Team& team,
                                      double* shared) {
  GroupStatistics own;
  for (int64_t k = team.rank; k < group.count; k += team.size) {
    const int64_t row = rows.at(group.first + k);
    const double reward = rows.reward(row, column);
    if (!isnan(reward)) own.add(reward, rows.a.batch.length(row));
  }
  GroupStatistics all;
  all.count = team_sum(team, own.count, shared);
  all.sum = team_sum(team, own.sum, shared);
  all.low = -team_max(team, -own.low, shared);
  all.high = team_max(team, own.high, shared);
  if (rows.a.batch.plan.center == Center::kRunnerUp) {
    // the largest of all second places, and of the first places below the maximum
    const double winners = team_sum(team, own.count > 0 && own.high == all.high ? 1.0 : 0.0, shared);
    const double lower = own.high == all.high ? own.second : own.high;
    const double runner_up = team_max(team, lower, shared);
    all.second = winners > 1 ? all.high : runner_up;
  }
  if (rows.a.batch.plan.center == Center::kLength) {
    all.length = team_sum(team, own.length, shared);
    all.length_reward = team_sum(team, own.length_reward, shared);
  }
  const double mean = all.mean();
  double squares = 0;
  for (int64_t k = team.rank; k < group.count; k += team.size) {
    const double reward = rows.reward(rows.at(group.first + k), column);
    if (!isnan(reward)) squares += (reward - mean) * (reward - mean);
  }
  all.m2 = team_sum(team, squares, shared);
  return all;
}

// Calls work(number, group, team) for every group with a team of `width` lanes, or with the whole block for
// a long group. All threads of the block take part in every call.
template <typename Work>
__device__ void for_each_group(const int64_t* starts, int64_t group_size, int64_t groups, int width, Work work) {
  const int64_t teams = blockDim.x / width;
  const Team narrow{static_cast<int>(threadIdx.x) % width, width, false};
  const Team wide{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), true};
  for (int64_t base = blockIdx.x * teams; base < groups; base += gridDim.x * teams) {
    const int64_t mine = base + threadIdx.x / width;
    Group group = group_at(starts, group_size, groups, mine);
    const bool is_long = group.count > kLongGroup;
    const int64_t rounds = __syncthreads_or(is_long) ? teams : 0;
    // In round -1 each team has its own group; in round r >= 0 the block has the r-th of them, if that is long. There
    // is one call site, because the work is inlined and a second one would double the registers.
    for (int64_t round = -1; round < rounds; ++round) {
      const bool whole_block = round >= 0;
      Group current = whole_block ? group_at(starts, group_size, groups, base + round) : group;
      if (whole_block && current.count <= kLongGroup) continue;
      if (!whole_block && is_long) current.count = 0;
      work(whole_block ? base + round : mine, current, whole_block ? wide : narrow);
    }
  }
}

// Statistics of every group: [0] of the combined rewards, [1 + c] of column c.
template <typename T>
__global__ void GRPO_BOUNDS(kThreads) parent_stats_kernel(const __grid_constant__ AdvantageArrays<T> arrays) {
  __shared__ double shared[kMaxWarps];
  const Rows<T> rows{arrays};
  const int columns = arrays.batch.plan.combine == Combine::kNormalizeThenSum ? arrays.batch.columns : 0;
  for_each_group(arrays.parent_starts, 0, arrays.groups, kWarp,
                 [&](int64_t number, const Group& group, const Team& team) {
                   for (int column = kCombined; column < columns; ++column) {
                     const GroupStatistics stats = team_stats(rows, group, column, team, shared);
                     if (team.rank == 0 && group.count > 0) {
                       arrays.parent_stats[(column + 1) * arrays.groups + number] = stats;
                     }
                   }
                 });
}

template <typename T>
__device__ RowMap map_of(const AdvantageArrays<T>& arrays, int64_t number, const Group& group,
                         const GroupStatistics& own, int column) {
  const GroupStatistics* parent = nullptr;
  if (arrays.parent_stats != nullptr && group.count > 0) {
    parent = arrays.parent_stats + (column + 1) * arrays.groups + arrays.parent[number];
  }
  return map_rows(arrays.batch.plan, own, parent);
}

// Writes all outputs of one group, before the step over the batch.
template <typename T>
__device__ void write_group(const Rows<T>& rows, int64_t number, const Group& group, const Team& team, double* shared) {
  const AdvantageArrays<T>& a = rows.a;
  const double bound = a.batch.plan.needs_batch() ? INFINITY : a.batch.plan.clip;
  const GroupStatistics combined = team_stats(rows, group, kCombined, team, shared);
  const RowMap reported = map_of(a, number, group, combined, kCombined);
  bool live = reported.live;
  const bool by_column = a.batch.plan.combine == Combine::kNormalizeThenSum;
  if (by_column) live = false;
  for (int column = by_column ? 0 : kCombined; column < (by_column ? a.batch.columns : 0); ++column) {
    const GroupStatistics own = by_column ? team_stats(rows, group, column, team, shared) : combined;
    const RowMap map = by_column ? map_of(a, number, group, own, column) : reported;
    live = live || map.live;
    const double weight = by_column ? a.weights[column] : 1;
    for (int64_t k = team.rank; k < group.count; k += team.size) {
      const int64_t row = rows.at(group.first + k);
      const double reward = rows.reward(row, column);
      const double before = column > 0 ? static_cast<double>(a.out.advantages[row]) : 0;
      const double part = isnan(reward) ? 0 : row_advantage(a.batch.plan, map, reward, a.batch.baseline(row));
      a.out.advantages[row] = static_cast<T>(before + weight * part);
    }
  }
  for (int64_t k = team.rank; k < group.count; k += team.size) {
    const int64_t row = rows.at(group.first + k);
    a.out.advantages[row] = static_cast<T>(clip_to(static_cast<double>(a.out.advantages[row]), bound));
    a.out.mean[row] = static_cast<T>(reported.mean);
    a.out.std[row] = static_cast<T>(reported.std);
    a.out.size[row] = static_cast<int32_t>(combined.count);
    a.out.degenerate[row] = !live;
  }
}

// Thread 0 gets the moments of all threads, merged in their order.
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

// Moments over the batch, of rows first, first + stride, ...; two passes.
template <typename T>
__device__ Moments thread_moments(const Rows<T>& rows, int64_t first, int64_t stride) {
  Moments own;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t row = first; row < rows.a.batch.rows; row += stride) {
      const double reward = rows.reward(row, kCombined);
      if (isnan(reward)) continue;
      const double weight = batch_weight(rows.a.batch.plan, rows.a.batch.length(row), rows.a.out.size[row] == 1,
                                         rows.a.out.degenerate[row]);
      const double value = batch_value(rows.a.batch.plan, reward, static_cast<double>(rows.a.out.advantages[row]));
      if (pass == 0) {
        own.weight += weight;
        own.mean += weight * value;  // the sum, until the end of the pass
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
  for (int64_t row = first; row < a.batch.rows; row += stride) {
    const bool live = !a.out.degenerate[row] && !isnan(rows.reward(row, kCombined));
    const double advantage = (static_cast<double>(a.out.advantages[row]) - map.shift) * map.factor;
    a.out.advantages[row] = static_cast<T>(live ? clip_to(advantage, a.batch.plan.clip) : 0);
    if (a.batch.plan.scale == Scale::kBatchStd) a.out.std[row] = static_cast<T>(map.std);
  }
}

template <typename T>
__global__ void GRPO_BOUNDS(kThreads) groups_kernel(const __grid_constant__ AdvantageArrays<T> arrays, int width) {
  __shared__ double shared[kMaxWarps];
  const Rows<T> rows{arrays};
  for_each_group(
      arrays.starts, arrays.group_size, arrays.groups, width,
      [&](int64_t number, const Group& group, const Team& team) { write_group(rows, number, group, team, shared); });
}

template <typename T>
__global__ void GRPO_BOUNDS(kThreads) moments_kernel(const __grid_constant__ AdvantageArrays<T> arrays) {
  __shared__ Moments shared[kMaxWarps];
  const Rows<T> rows{arrays};
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const Moments all = block_moments(thread_moments(rows, first, gridDim.x * static_cast<int64_t>(blockDim.x)), shared);
  if (threadIdx.x == 0) arrays.partials[blockIdx.x] = all;
}

template <typename T>
__global__ void GRPO_BOUNDS(kThreads) finish_kernel(const __grid_constant__ AdvantageArrays<T> arrays, int parts) {
  __shared__ Moments shared[kMaxWarps];
  __shared__ BatchMap map;
  Moments own;
  for (int part = threadIdx.x; part < parts; part += blockDim.x) own.merge(arrays.partials[part]);
  own = block_moments(own, shared);
  if (threadIdx.x == 0) map = map_batch(arrays.batch.plan, own);
  __syncthreads();
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  finish_rows(Rows<T>{arrays}, map, first, gridDim.x * static_cast<int64_t>(blockDim.x));
}

// All in one launch of one block, for batches whose time is that of the launches.
template <typename T>
__global__ void __launch_bounds__(kOneBlockThreads)
    one_block_kernel(const __grid_constant__ AdvantageArrays<T> arrays, int width) {
  __shared__ double shared[kMaxWarps];
  __shared__ Moments moments[kMaxWarps];
  __shared__ BatchMap map;
  const Rows<T> rows{arrays};
  for_each_group(
      arrays.starts, arrays.group_size, arrays.groups, width,
      [&](int64_t number, const Group& group, const Team& team) { write_group(rows, number, group, team, shared); });
  __syncthreads();
  const Moments all = block_moments(thread_moments(rows, threadIdx.x, blockDim.x), moments);
  if (threadIdx.x == 0) map = map_batch(arrays.batch.plan, all);
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
void launch_group_advantages(const AdvantageArrays<T>& arrays, void* stream) {
  // with ids the host does not know the sizes of groups, and a warp each suits most
  const int width = arrays.starts == nullptr ? team_width(arrays.group_size) : kWarp;
  if (arrays.parent_stats != nullptr) {
    const int64_t blocks = blocks_for(arrays.groups, kThreads / kWarp);
    launch(parent_stats_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, arrays);
  }
  if (arrays.batch.plan.needs_batch() && arrays.batch.rows <= kOneBlockRows) {
    launch(one_block_kernel<T>, dim3(1), dim3(kOneBlockThreads), 0, stream, arrays, width);
    return;
  }
  const int64_t blocks = blocks_for(arrays.groups, kThreads / width);
  launch(groups_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, arrays, width);
  if (!arrays.batch.plan.needs_batch()) return;
  const int64_t wanted = blocks_for(arrays.batch.rows, kThreads);
  const unsigned parts = static_cast<unsigned>(wanted < kMaxPartials ? wanted : kMaxPartials);
  launch(moments_kernel<T>, dim3(parts), dim3(kThreads), 0, stream, arrays);
  launch(finish_kernel<T>, dim3(parts), dim3(kThreads), 0, stream, arrays, static_cast<int>(parts));
}

template void launch_group_advantages<float>(const AdvantageArrays<float>&, void*);
template void launch_group_advantages<double>(const AdvantageArrays<double>&, void*);

}  // namespace grpo_kernels
