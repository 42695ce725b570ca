#pragma once

#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "group_advantages/row_quad.cuh"

// Which groups a block takes, and which of its threads take each.
namespace grpo_kernels {

constexpr int kThreadsLog2 = 8, kThreads = 1 << kThreadsLog2;
constexpr int64_t kTaskRows = kQuad * kThreads;  // of groups by id that a block takes at a time
constexpr int64_t kLongGroup = 2048;             // longer ones take a whole block

struct Group {
  int64_t first, count;
  __device__ int64_t end() const { return first + count; }
};

__device__ __forceinline__ Group group_at(const int64_t* starts, int64_t group_size, int64_t number) {
  if (starts == nullptr) return {number * group_size, group_size};
  return {starts[number], starts[number + 1] - starts[number]};
}

// The first of `count` ascending items that is not below `value`, for all lanes of a warp.
__device__ inline int64_t lower_bound(const int64_t* items, int64_t count, int64_t value) {
  int64_t first = 0;
  while (count > 0) {
    const int64_t step = (count + kWarp - 1) / kWarp, probe = (threadIdx.x % kWarp + 1) * step - 1;
    const bool is_below = probe < count && items[first + probe] < value;
    const int64_t passed = __popc(__ballot_sync(kAllLanes, is_below)) * step;
    first += passed;
    count = step - 1 < count - passed ? step - 1 : count - passed;
  }
  return first;
}

// The logarithm of the number of lanes that hold a group of `count` rows, or take turns at one that is larger.
GRPO_HD int team_width_log2(int64_t count) {
  int log2 = 0;
  while (1 << log2 < kWarp && kQuad << log2 < count) ++log2;
  return log2;
}

// Groups that a block takes at a time, each with a team of 1 << width_log2 lanes, or with the whole block if it is
// long.
struct Task {
  int64_t first, last;
  int width_log2;
  bool has_long;
};

struct TaskShared {
  int64_t bounds[2];
  double reduction[kMaxWarps];
};

// Groups of one size: as many as the block has teams.
template <bool kWide>
__device__ __forceinline__ Task uniform_task(int64_t task, int64_t group_size, int64_t groups, int width_log2) {
  const bool is_long = !kWide && group_size > kLongGroup;
  const int64_t per_task = is_long ? 1 : kThreads >> width_log2, first = task * per_task;
  return {first, first + per_task < groups ? first + per_task : groups, width_log2, is_long};
}

// Groups by id: those that start within kTaskRows positions. A block gets as many rows as any other, whatever the sizes
// of groups, and the empty groups after the last one are never visited.
__device__ inline Task task_of_ids(int64_t task, const int64_t* starts, int64_t rows, TaskShared* shared) {
  if (threadIdx.x < 2 * kWarp) {
    const int64_t wanted = (task + threadIdx.x / kWarp) * kTaskRows, position = wanted < rows ? wanted : rows;
    const int64_t bound = lower_bound(starts, position, position);  // groups before it have a row each at least
    if (threadIdx.x % kWarp == 0) shared->bounds[threadIdx.x / kWarp] = bound;
  }
  __syncthreads();
  const int64_t first = shared->bounds[0], last = shared->bounds[1];
  double largest = 0;
#pragma unroll 1
  for (int64_t number = first + threadIdx.x; number < last; number += kThreads) {
    largest = fmax(largest, static_cast<double>(starts[number + 1] - starts[number]));
  }
  largest = team_max(block_team(), largest, shared->reduction);
  return {first, last, team_width_log2(static_cast<int64_t>(largest)), largest > kLongGroup};
}

// Calls work(number, group, team) for every group. All threads of the block take part in every call.
template <typename Work>
__device__ __forceinline__ void for_each_group(const Task& task, const int64_t* starts, int64_t group_size,
                                               const Work& work) {
  const int64_t teams = kThreads >> task.width_log2, groups = task.last - task.first;
  const int64_t turns = (groups + teams - 1) >> (kThreadsLog2 - task.width_log2), rounds = task.has_long ? groups : 0;
  // In turns each team has its own group; in the rounds that follow the block has one long group after the other. There
  // is one call site, because the work is inlined and a second one would double the registers.
#pragma unroll 1
  for (int64_t turn = 0; turn < turns + rounds; ++turn) {
    const bool whole_block = turn >= turns;
    const int64_t number = task.first + (whole_block ? turn - turns : turn * teams + (threadIdx.x >> task.width_log2));
    Group group{0, 0};
    if (number < task.last) group = group_at(starts, group_size, number);
    if (whole_block && group.count <= kLongGroup) continue;
    if (!whole_block && group.count > kLongGroup) group.count = 0;
    const int size = whole_block ? kThreads : 1 << task.width_log2;
    work(number, group, Team{static_cast<int>(threadIdx.x) & (size - 1), size, whole_block});
  }
}

}  // namespace grpo_kernels
