#pragma once

#include <stddef.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "policy_loss/cuda.h"

// The last launch: from records to the metrics.
namespace grpo_kernels {
namespace {

constexpr int kReduceThreads = 512, kPartsPerBlock = 64;

template <typename T>
__device__ void write_results(const PolicyArrays<T>& arrays, const PolicyTotal& total) {
  write_metrics(arrays.batch.plan, total.part.counts, total.part.sums, total.rows, arrays.batch.policy_mask != nullptr,
                arrays.metrics);
  arrays.loss[0] = static_cast<T>(arrays.metrics[0]);
  if (arrays.segments_ascend != nullptr) arrays.segments_ascend[0] = total.part.misplaced_segments == 0;
}

// Records are reduced field by field, with a thread for each field of a record, so that reads are contiguous.
constexpr int kFieldThreads = 64, kGroups = kReduceThreads / kFieldThreads, kReduceWarps = kReduceThreads / kWarp;
constexpr int kPartFields = sizeof(PolicyPart) / sizeof(double), kTotalFields = sizeof(PolicyTotal) / sizeof(double);
static_assert(kTotalFields <= kFieldThreads && offsetof(PolicyTotal, part) == 0);

// How a field of PolicyTotal is reduced.
struct FieldReduction {
  bool is_minimum, is_maximum;

  __device__ explicit FieldReduction(int field) {
    const auto is = [&](size_t offset) { return field == static_cast<int>(offset / sizeof(double)); };
    is_minimum = is(offsetof(PolicyTotal, rows.low_clipped_min));
    is_maximum = is(offsetof(PolicyTotal, rows.high_clipped_max));
#define GRPO_MINIMUM(name) is_minimum = is_minimum || is(offsetof(PolicyTotal, part.sums.name));
#define GRPO_MAXIMUM(name) is_maximum = is_maximum || is(offsetof(PolicyTotal, part.sums.name));
    GRPO_POLICY_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
  }

  __device__ double identity() const { return is_minimum ? INFINITY : (is_maximum ? -INFINITY : 0); }
  __device__ double operator()(double a, double b) const {
    if (is_minimum) return b < a ? b : a;
    if (is_maximum) return b > a ? b : a;
    return a + b;
  }
};

// Reduces records first to last - 1 of `fields` numbers; the first threads of the block get their field.
__device__ double reduce_records(const double* records, int fields, int64_t first, int64_t last,
                                 const FieldReduction& reduction, double (*groups)[kFieldThreads]) {
  constexpr int kBatch = 8;
  const int group = threadIdx.x / kFieldThreads, field = threadIdx.x % kFieldThreads;
  double value = reduction.identity();
  for (int64_t record = first + group; field < fields && record < last; record += kBatch * kGroups) {
    double batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t own = record + k * kGroups;
      // volatile, because other blocks of the same launch may have written it
      batch[k] = own < last ? static_cast<const volatile double*>(records)[own * fields + field] : reduction.identity();
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) value = reduction(value, batch[k]);
  }
  groups[group][field] = value;
  __syncthreads();
  for (int other = 0; other < kGroups; ++other) {
    if (other != group) value = reduction(value, groups[other][field]);
  }
  __syncthreads();
  return value;
}

__device__ RowMetrics warp_metrics(RowMetrics metrics) {
  const Team warp = warp_team();
  metrics.low_clipped_rows = team_sum(warp, metrics.low_clipped_rows, nullptr);
  metrics.high_clipped_rows = team_sum(warp, metrics.high_clipped_rows, nullptr);
  metrics.phi_rows = team_sum(warp, metrics.phi_rows, nullptr);
  metrics.low_clipped_min = -team_max(warp, -metrics.low_clipped_min, nullptr);
  metrics.high_clipped_max = team_max(warp, metrics.high_clipped_max, nullptr);
  return metrics;
}

// The results that need all parts of a row, over rows first to last - 1, for lane 0 of every warp. A row is reduced
// by `width` lanes.
template <typename T>
__device__ PolicyTotal total_of_rows(const PolicyArrays<T>& arrays, bool has_whole_rows, int width, int64_t first,
                                     int64_t last) {
  const PolicyBatch<T>& batch = arrays.batch;
  const Team lanes{static_cast<int>(threadIdx.x) % width, width, false};
  const int64_t teams = kReduceThreads / width;
  PolicyTotal total;
  for (int64_t base = first; base < last; base += teams) {
    const int64_t row = base + threadIdx.x / width;
    int64_t task = row, end = row < last ? row + 1 : row;
    if (row < last && !has_whole_rows) task = first_task(arrays, row), end = first_task(arrays, row + 1);
    PolicyPart own;
    for (task += lanes.rank; task < end; task += width) {
      const PolicyPart& part = arrays.parts[task];
      own.counts.tokens += part.counts.tokens;
      own.counts.terms += part.counts.terms;
      own.sums.low_clipped += part.sums.low_clipped;
      own.sums.high_clipped += part.sums.high_clipped;
      own.sums.phi_sum += part.sums.phi_sum;
    }
    own.counts.tokens = team_sum(lanes, own.counts.tokens, nullptr);
    own.counts.terms = team_sum(lanes, own.counts.terms, nullptr);
    own.sums.low_clipped = team_sum(lanes, own.sums.low_clipped, nullptr);
    own.sums.high_clipped = team_sum(lanes, own.sums.high_clipped, nullptr);
    own.sums.phi_sum = team_sum(lanes, own.sums.phi_sum, nullptr);
    if (row >= last || lanes.rank != 0) continue;
    total.rows.add(own.counts, own.sums, batch.plan);
    if (has_whole_rows) continue;  // the rest is in the part of the row
    total.part.counts.rows += 1;
    total.part.counts.active_rows += own.counts.tokens > 0 ? 1 : 0;
    if (batch.is_weights_by_row && own.counts.tokens > 0) {
      total.part.sums.add_is_weight(static_cast<double>(batch.is_weights[row]));
    }
  }
  const Team warp = warp_team();
  total.part.counts.rows = team_sum(warp, total.part.counts.rows, nullptr);
  total.part.counts.active_rows = team_sum(warp, total.part.counts.active_rows, nullptr);
  total.rows = warp_metrics(total.rows);
  if (batch.is_weights_by_row && !has_whole_rows) {
    total.part.sums.is_sum = team_sum(warp, total.part.sums.is_sum, nullptr);
    total.part.sums.is_square_sum = team_sum(warp, total.part.sums.is_square_sum, nullptr);
    total.part.sums.is_count = team_sum(warp, total.part.sums.is_count, nullptr);
    total.part.sums.is_min = -team_max(warp, -total.part.sums.is_min, nullptr);
    total.part.sums.is_max = team_max(warp, total.part.sums.is_max, nullptr);
  }
  return total;
}

// Every block reduces its share of the tasks and rows; the last one to finish reduces the blocks.
template <typename T>
__global__ void GRPO_BOUNDS(kReduceThreads)
    reduce_kernel(const __grid_constant__ PolicyArrays<T> arrays, bool has_whole_rows, int width) {
  __shared__ double groups[kGroups][kFieldThreads];
  __shared__ __align__(16) unsigned char shared_rows[kReduceWarps * sizeof(PolicyTotal)];
  __shared__ bool is_last;
  PolicyTotal* const rows = reinterpret_cast<PolicyTotal*>(shared_rows);
  const int field = threadIdx.x % kFieldThreads;
  const FieldReduction reduction(field);
  const auto share = [&](int64_t count, int64_t index) { return count * index / gridDim.x; };
  const int64_t block = blockIdx.x, parts = has_whole_rows ? arrays.batch.rows : arrays.tasks;
  const PolicyTotal of_rows = total_of_rows(arrays, has_whole_rows, width, share(arrays.batch.rows, block),
                                            share(arrays.batch.rows, block + 1));
  if (threadIdx.x % kWarp == 0) rows[threadIdx.x / kWarp] = of_rows;
  double value = reduce_records(reinterpret_cast<const double*>(arrays.parts), kPartFields, share(parts, block),
                                share(parts, block + 1), reduction, groups);
  if (threadIdx.x < kTotalFields) {
    for (int warp = 0; warp < kReduceWarps; ++warp) {
      value = reduction(value, reinterpret_cast<const double*>(rows + warp)[field]);
    }
  }
  if (gridDim.x > 1) {
    if (threadIdx.x < kTotalFields) reinterpret_cast<double*>(arrays.blocks + block)[field] = value;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&arrays.done->blocks, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    value =
        reduce_records(reinterpret_cast<const double*>(arrays.blocks), kTotalFields, 0, gridDim.x, reduction, groups);
  }
  __syncthreads();
  if (threadIdx.x < kTotalFields) reinterpret_cast<double*>(rows)[field] = value;
  __syncthreads();
  if (threadIdx.x == 0) write_results(arrays, rows[0]);
}

}  // namespace
}  // namespace grpo_kernels
