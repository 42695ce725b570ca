#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "group_advantages/cuda.h"
#include "group_advantages/row_quad.cuh"
#include "group_advantages/tasks.cuh"

// Three steps: statistics of groups, where subgroups borrow from them; advantages of every group, by a team of lanes
// with four rows each, which hold groups of up to 128 rows in registers; and, for estimators that normalise over the
// batch, a pass over all rows. A small batch takes the last two in one launch of one block.
//
// Statistics are computed in double, so that results do not depend on how rows are spread over lanes. A row of 21 bytes
// leaves time for 200 instructions at the speed of a copy on an H100.
namespace grpo_kernels {
namespace {

constexpr int64_t kWideGroup = kQuad * kWarp;  // the largest for wide accesses
// A second launch of 3 us and its start cost as much as two more turns of one block, of about 3.5 us each.
constexpr int64_t kOneBlockRows = 2 * kTaskRows;

// Adds up the first pass of all threads of a team, for each of them.
template <bool kPlain>
__device__ __forceinline__ void merge_team(GroupStatistics& own, Center center, const Team& team,
                                           GroupStatistics* shared) {
  for (int offset = (team.size < kWarp ? team.size : kWarp) / 2; offset > 0; offset /= 2) {
    GroupStatistics other;
    other.count = __shfl_xor_sync(kAllLanes, own.count, offset);
    other.sum = __shfl_xor_sync(kAllLanes, own.sum, offset);
    other.low = __shfl_xor_sync(kAllLanes, own.low, offset);
    other.high = __shfl_xor_sync(kAllLanes, own.high, offset);
    if (!kPlain && center == Center::kRunnerUp) other.second = __shfl_xor_sync(kAllLanes, own.second, offset);
    if (!kPlain && center == Center::kLength) {
      other.length = __shfl_xor_sync(kAllLanes, own.length, offset);
      other.length_reward = __shfl_xor_sync(kAllLanes, own.length_reward, offset);
    }
    own.merge_first_pass(other);
  }
  if (!team.whole_block) return;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = own;
  __syncthreads();
  own = shared[0];
#pragma unroll 1
  for (int warp = 1; warp < kThreads / kWarp; ++warp) own.merge_first_pass(shared[warp]);
  __syncthreads();
}

struct GroupShared {
  TaskShared task;
  GroupStatistics warps[kThreads / kWarp];
  Moments moments[kThreads / kWarp];
  double reduction[kMaxWarps];
};

// Calls work(k) for the first position k, in the group, of every quad of a thread; with kWide for the only one.
template <bool kWide, typename Work>
__device__ __forceinline__ void for_each_quad(const Group& group, const Team& team, const Work& work) {
  if constexpr (kWide) {
    if (kQuad * team.rank < group.count) work(kQuad * team.rank);
  } else {
#pragma unroll 1
    for (int64_t k = kQuad * team.rank; k < group.count; k += kQuad * team.size) work(k);
  }
}

// Statistics of a group, for every thread of the team, in two passes. A group with at most four rows a thread stays in
// `quad`; a larger one is loaded again.
template <bool kPlain, bool kWide, typename T, typename Quad>
__device__ __forceinline__ GroupStatistics group_statistics(const AdvantageArrays<T>& arrays, const AdvantagePlan& plan,
                                                            const Group& group, int column, const Team& team,
                                                            Quad& quad, GroupShared* shared) {
  const bool is_held = kWide || group.count <= kQuad * team.size;
  GroupStatistics all;
  for_each_quad<kWide>(group, team, [&](int64_t k) {
    quad.load(arrays, arrays.order, group.first + k, group.end(), column);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (!quad.is_scored(j)) continue;
      all.add(quad.rewards[j], !kPlain && plan.center == Center::kLength ? arrays.batch.length(quad.row[j]) : 1);
    }
  });
  merge_team<kPlain>(all, plan.center, team, shared->warps);
  const double mean = all.mean();
  double squares = 0;
  for_each_quad<kWide>(group, team, [&](int64_t k) {
    if (!is_held) quad.load(arrays, arrays.order, group.first + k, group.end(), column);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const double deviation = quad.rewards[j] - mean;
      squares += quad.is_scored(j) ? deviation * deviation : 0;
    }
  });
  all.m2 = team_sum(team, squares, shared->reduction);
  return all;
}

// Statistics of every group: [0] of the combined rewards, [1 + c] of column c.
template <typename T>
__global__ void GRPO_BOUNDS(kThreads) parent_stats_kernel(const __grid_constant__ AdvantageArrays<T> arrays) {
  __shared__ __align__(16) unsigned char memory[sizeof(GroupShared)];
  GroupShared* const shared = reinterpret_cast<GroupShared*>(memory);
  const AdvantagePlan& plan = arrays.batch.plan;
  const int columns = plan.combine == Combine::kNormalizeThenSum ? arrays.batch.columns : 0;
  const Task task = task_of_ids(blockIdx.x, arrays.parent_starts, arrays.batch.rows, &shared->task);
  for_each_group(task, arrays.parent_starts, 0, [&](int64_t number, const Group& group, const Team& team) {
    for (int column = kCombined; column < columns; ++column) {
      RowQuad<T, false, false> quad;
      const GroupStatistics stats = group_statistics<false, false>(arrays, plan, group, column, team, quad, shared);
      if (team.rank == 0 && group.count > 0) arrays.parent_stats[(column + 1) * arrays.groups + number] = stats;
    }
  });
}

// The settings of a launch. With kPlain those of GRPO are known at compile time: advantages are centered by the mean
// and scaled by the deviation, and nothing is computed over the batch.
template <bool kPlain>
__device__ __forceinline__ const AdvantagePlan& plan_of(const AdvantagePlan& given, AdvantagePlan& plain) {
  if constexpr (!kPlain) return given;
  plain = given;
  plain.center = Center::kMean;
  plain.scale = Scale::kStd;
  plain.combine = Combine::kSumThenNormalize;
  plain.whiten = Whiten::kNone;
  plain.gain = Gain::kNone;
  plain.shrinkage = 0;
  return plain;
}

template <bool kPlain, typename T>
__device__ __forceinline__ RowMap map_of(const AdvantageArrays<T>& arrays, const AdvantagePlan& plan, int64_t number,
                                         const Group& group, const GroupStatistics& own, int column) {
  if (kPlain || arrays.parent_stats == nullptr || group.count == 0) return map_rows(plan, own, nullptr);
  return map_rows(plan, own, arrays.parent_stats + (column + 1) * arrays.groups + arrays.parent[number]);
}

// Adds the scored rows of a quad, in two passes.
template <typename T, typename Quad>
__device__ void add_to_batch(Moments& moments, const AdvantageArrays<T>& arrays, const Quad& quad, bool by_column,
                             const T (&advantages)[kQuad], bool is_singleton, bool is_degenerate) {
  const AdvantageBatch<T>& batch = arrays.batch;
  double weights[kQuad], values[kQuad];
  Moments own;
  double base = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    double reward = quad.rewards[j];
    if (!Quad::kIsWide && by_column && quad.has(j)) reward = batch.reward(quad.row[j], kCombined, arrays.weights);
    weights[j] = 0;
    if (!isnan(reward)) weights[j] = batch_weight(batch.plan, batch.length(quad.row[j]), is_singleton, is_degenerate);
    values[j] = isnan(reward) ? 0 : batch_value(batch.plan, reward, static_cast<double>(advantages[j]));
    if (weights[j] > 0) base = values[j];
    own.weight += weights[j];
  }
  if (!(own.weight > 0)) return;
  // differences from one value, so that the mean of equal values is exact
#pragma unroll
  for (int j = 0; j < kQuad; ++j) own.mean += weights[j] > 0 ? weights[j] * (values[j] - base) : 0;
  own.mean = base + own.mean / own.weight;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    const double deviation = values[j] - own.mean;
    own.m2 += weights[j] > 0 ? weights[j] * deviation * deviation : 0;
  }
  if (moments.weight > 0) {
    moments.merge(own);
  } else {
    moments = own;
  }
}

// Writes all outputs of one group, before the step over the batch, and adds its rows to the moments for that step.
template <bool kPlain, bool kWide, bool kOthers, typename T>
__device__ __forceinline__ void write_group(const AdvantageArrays<T>& arrays, const AdvantagePlan& plan, int64_t number,
                                            const Group& group, const Team& team, GroupShared* shared,
                                            Moments& moments) {
  const AdvantageOutputs<T>& out = arrays.out;
  const bool by_column = plan.combine == Combine::kNormalizeThenSum;
  const T bound = static_cast<T>(plan.needs_batch() ? INFINITY : plan.clip);
  const int columns = by_column ? arrays.batch.columns : 0;
  RowQuad<T, kWide, kPlain> quad;
  RowMap reported;
  double count = 0;
  bool is_live = false;
#pragma unroll 1
  for (int column = kCombined; column < columns || column == kCombined; ++column) {
    const GroupStatistics stats = group_statistics<kPlain, kWide>(arrays, plan, group, column, team, quad, shared);
    const RowMap map = map_of<kPlain>(arrays, plan, number, group, stats, column);
    if (column == kCombined) {
      reported = map;
      count = stats.count;
      if (by_column) continue;
    }
    is_live = is_live || map.live;
    const double weight = by_column ? arrays.weights[column] : 1;
    const bool is_last = column + 1 >= columns;
    const bool is_held = kWide || group.count <= kQuad * team.size;
    for_each_quad<kWide>(group, team, [&](int64_t k) {
      if (!is_held) quad.load(arrays, arrays.order, group.first + k, group.end(), column);
      T advantages[kQuad] = {0, 0, 0, 0};
      if (!kWide && column > 0) quad.gather(out.advantages, advantages);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        const double baseline = kPlain || !quad.has(j) ? 0 : arrays.batch.baseline(quad.row[j]);
        const double reward = quad.rewards[j];
        double part = 0;
        if (quad.is_scored(j)) {
          part = kOthers ? row_advantage(plan, map, reward, 0) : linear_advantage(plan, map, reward, baseline);
        }
        const double sum = by_column ? static_cast<double>(advantages[j]) + weight * part : part;
        advantages[j] = static_cast<T>(sum);
        if (!is_last) continue;
        // NaN stays NaN, so that an infinite reward shows in the results
        advantages[j] = advantages[j] > bound ? bound : (advantages[j] < -bound ? -bound : advantages[j]);
      }
      quad.scatter(out.advantages, advantages);
      if (!is_last) return;
      quad.fill(out.mean, static_cast<T>(reported.mean));
      quad.fill(out.std, static_cast<T>(reported.std));
      quad.fill(out.size, static_cast<int32_t>(count));
      quad.fill(out.degenerate, !is_live);
      if (!kPlain && plan.needs_batch()) {
        add_to_batch(moments, arrays, quad, by_column, advantages, count == 1, !is_live);
      }
    });
  }
}

// The moments of kWidth neighbouring lanes, for each of them. Below the width of a warp, all teams must hold the same
// values. The mean of equal values is exactly that value, because sums are of differences from one of them.
template <int kWidth>
__device__ __forceinline__ Moments lane_moments(const Moments& own) {
  const bool has_rows = own.weight > 0;
  const unsigned lanes_with_rows = __ballot_sync(kAllLanes, has_rows);
  const double base = __shfl_sync(kAllLanes, own.mean, lanes_with_rows == 0 ? 0 : __ffs(lanes_with_rows) - 1);
  Moments all;
  all.weight = own.weight;
  double sum = has_rows ? own.weight * (own.mean - base) : 0;
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    all.weight += __shfl_xor_sync(kAllLanes, all.weight, offset);
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  if (all.weight > 0) all.mean = base + sum / all.weight;
  const double deviation = own.mean - all.mean;
  all.m2 = has_rows ? own.m2 + own.weight * deviation * deviation : 0;
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) all.m2 += __shfl_xor_sync(kAllLanes, all.m2, offset);
  return all;
}

// The moments of all threads of a block, for each of them.
__device__ Moments block_moments(Moments moments, Moments* shared) {
  constexpr int kWarps = kThreads / kWarp;
  moments = lane_moments<kWarp>(moments);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = moments;
  __syncthreads();
  return lane_moments<kWarps>(shared[threadIdx.x % kWarps]);
}

// Four rows in the step over the batch.
template <typename T, bool kWide>
struct FinishQuad {
  RowQuad<T, kWide, false> quad;
  T advantages[kQuad];
  bool is_degenerate[kQuad];

  __device__ __forceinline__ void load(const AdvantageArrays<T>& arrays, int64_t row) {
    quad.load(arrays, nullptr, row, arrays.batch.rows, kCombined);
    quad.gather(arrays.out.advantages, advantages);
    quad.gather(arrays.out.degenerate, is_degenerate);
  }

  __device__ __forceinline__ void store(const AdvantageArrays<T>& arrays, const BatchMap& map) {
    const AdvantagePlan& plan = arrays.batch.plan;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      const double advantage = (static_cast<double>(advantages[j]) - map.shift) * map.factor;
      const bool is_live = !is_degenerate[j] && quad.is_scored(j);
      advantages[j] = static_cast<T>(is_live ? clip_to(advantage, plan.clip) : 0);
    }
    quad.scatter(arrays.out.advantages, advantages);
    if (plan.scale == Scale::kBatchStd) quad.fill(arrays.out.std, static_cast<T>(map.std));
  }
};

// The step over the batch, for quads first, first + stride, ... of all rows. The first one is loaded before batch_map()
// is called.
template <bool kWide, typename T, typename Map>
__device__ __forceinline__ void finish_rows(const AdvantageArrays<T>& arrays, int64_t first, int64_t stride,
                                            const Map& batch_map) {
  const int64_t rows = arrays.batch.rows;
  int64_t row = kQuad * first;
  FinishQuad<T, kWide> quad;
  if (row < rows) quad.load(arrays, row);
  const BatchMap map = batch_map();
#pragma unroll 1
  while (row < rows) {
    quad.store(arrays, map);
    row += kQuad * stride;
    if (row < rows) quad.load(arrays, row);
  }
}

// Resident blocks promised to ptxas: half of a multiprocessor's threads where the kernel has few settings, fewer where
// it would spill.
template <bool kWide, bool kPlain>
constexpr int kMinBlocks = kWide ? (kPlain ? 4 : 2) : 1;

// Blocks take every gridDim.x-th of the tasks. kOthers: for Scale::kLeaveOneOutStd, apart from the other settings,
// which it would slow.
template <typename T, bool kWide, bool kPlain, bool kOthers = false>
__global__ void __launch_bounds__(kThreads, kMinBlocks<kWide, kPlain>)
    groups_kernel(const __grid_constant__ AdvantageArrays<T> arrays, int width_log2, int64_t tasks) {
  __shared__ __align__(16) unsigned char memory[sizeof(GroupShared)];
  GroupShared* const shared = reinterpret_cast<GroupShared*>(memory);
  AdvantagePlan plain;
  const AdvantagePlan& plan = plan_of<kPlain>(arrays.batch.plan, plain);
  const int64_t* const starts = kWide ? nullptr : arrays.starts;
  Moments moments;
  for (int64_t number = blockIdx.x; number < tasks; number += gridDim.x) {
    const Task task = starts == nullptr ? uniform_task<kWide>(number, arrays.group_size, arrays.groups, width_log2)
                                        : task_of_ids(number, starts, arrays.batch.rows, &shared->task);
    for_each_group(task, starts, arrays.group_size, [&](int64_t index, const Group& group, const Team& team) {
      write_group<kPlain, kWide, kOthers>(arrays, plan, index, group, team, shared, moments);
    });
  }
  if constexpr (!kPlain) {
    if (!plan.needs_batch()) return;
    const Moments all = block_moments(moments, shared->moments);
    if (gridDim.x == 1) {
      finish_rows<kWide>(arrays, threadIdx.x, kThreads, [&] { return map_batch(plan, all); });
    } else if (threadIdx.x == 0) {
      arrays.partials[blockIdx.x] = all;
    }
  }
}

// Every block reduces the partial moments anew: they are few, and another launch would cost more.
template <typename T, bool kWide>
__global__ void GRPO_BOUNDS(kThreads) finish_kernel(const __grid_constant__ AdvantageArrays<T> arrays, int parts) {
  __shared__ Moments shared[kThreads / kWarp];
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  Moments own;
  if (static_cast<int>(threadIdx.x) < parts) own = arrays.partials[threadIdx.x];
  finish_rows<kWide>(arrays, first, gridDim.x * static_cast<int64_t>(kThreads), [&] {
#pragma unroll 1
    for (int part = threadIdx.x + kThreads; part < parts; part += kThreads) own.merge(arrays.partials[part]);
    return map_batch(arrays.batch.plan, block_moments(own, shared));
  });
}

int64_t divided_up(int64_t items, int64_t by) { return (items + by - 1) / by; }

bool is_aligned(const void* address, size_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

// Whether rows can be accessed four at a time: one column, and arrays that are aligned, as every new tensor is.
template <typename T>
bool has_wide_rows(const AdvantageArrays<T>& arrays) {
  const AdvantageBatch<T>& batch = arrays.batch;
  const AdvantageOutputs<T>& out = arrays.out;
  return batch.columns == 1 && batch.subgroups == nullptr && is_aligned(batch.rewards, 16) &&
         is_aligned(out.advantages, 16) && is_aligned(out.mean, 16) && is_aligned(out.std, 16) &&
         is_aligned(out.size, 16) && is_aligned(out.degenerate, 4) && is_aligned(batch.valid, 4);
}

// The settings and inputs for which kernels are compiled with kPlain.
template <typename T>
bool is_plain(const AdvantageArrays<T>& arrays) {
  const AdvantagePlan& plan = arrays.batch.plan;
  return plan.center == Center::kMean && plan.scale == Scale::kStd && plan.combine == Combine::kSumThenNormalize &&
         plan.whiten == Whiten::kNone && plan.gain == Gain::kNone && arrays.parent_stats == nullptr &&
         arrays.batch.columns == 1 && arrays.batch.subgroups == nullptr;
}

}  // namespace

template <typename T>
void launch_group_advantages(const AdvantageArrays<T>& arrays, void* stream) {
  const int64_t rows = arrays.batch.rows, group_size = arrays.group_size;
  const bool has_ids = arrays.starts != nullptr, needs_batch = arrays.batch.plan.needs_batch();
  const int width_log2 = has_ids ? 0 : team_width_log2(group_size);  // with ids the device chooses
  const int64_t groups_per_task = group_size > kLongGroup ? 1 : kThreads >> width_log2;
  const int64_t tasks = has_ids ? divided_up(rows, kTaskRows) : divided_up(arrays.groups, groups_per_task);
  if (arrays.parent_stats != nullptr) {
    const dim3 grid(static_cast<unsigned>(divided_up(rows, kTaskRows)));
    launch(parent_stats_kernel<T>, grid, dim3(kThreads), 0, stream, arrays);
  }
  int64_t blocks = tasks;
  if (needs_batch) blocks = rows <= kOneBlockRows ? 1 : (tasks < kMaxPartials ? tasks : kMaxPartials);
  const bool has_wide = has_wide_rows(arrays),
             is_wide = has_wide && !has_ids && group_size % kQuad == 0 && group_size <= kWideGroup,
             is_of_others = arrays.batch.plan.scale == Scale::kLeaveOneOutStd;
  auto* kernel = is_wide ? groups_kernel<T, true, false> : groups_kernel<T, false, false>;
  if (is_plain(arrays)) kernel = is_wide ? groups_kernel<T, true, true> : groups_kernel<T, false, true>;
  if (is_of_others) kernel = groups_kernel<T, false, false, true>;
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, arrays, width_log2, tasks);
  if (!needs_batch || blocks == 1) return;
  const int64_t finish_blocks = divided_up(rows, kTaskRows);
  auto* finish = has_wide && rows % kQuad == 0 ? finish_kernel<T, true> : finish_kernel<T, false>;
  launch(finish, dim3(static_cast<unsigned>(finish_blocks < kMaxPartials ? finish_blocks : kMaxPartials)),
         dim3(kThreads), 0, stream, arrays, static_cast<int>(blocks));
}

template void launch_group_advantages<float>(const AdvantageArrays<float>&, void*);
template void launch_group_advantages<double>(const AdvantageArrays<double>&, void*);

}  // namespace grpo_kernels
