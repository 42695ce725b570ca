#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "sampling_correction/cuda.h"
#include "sampling_correction/walk.h"

// One launch, with a block for each row: sums over the row, then its weights and mask from the same tokens, which are
// still in the cache.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerThread = 4;  // below, a row gets fewer threads

// Adds the sums of the block's threads.
#define GRPO_SUM(name) totals.name = team_sum(team, static_cast<double>(own.name), shared);
#define GRPO_MINIMUM(name) totals.name = -team_max(team, -static_cast<double>(own.name), shared);
#define GRPO_MAXIMUM(name) totals.name = team_max(team, static_cast<double>(own.name), shared);
template <typename Own>
__device__ Mismatch block_mismatch(const Own& own, const Team& team, double* shared) {
  Mismatch totals;
  GRPO_MISMATCH_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_MISMATCH_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
  return totals;
}
template <typename Own>
__device__ WeightTotals block_weights(const Own& own, const Team& team, double* shared) {
  WeightTotals totals;
  GRPO_WEIGHT_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_WEIGHT_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
  return totals;
}
template <typename Own>
__device__ EstimateTotals block_estimates(const Own& own, const Team& team, double* shared) {
  EstimateTotals totals;
  GRPO_ESTIMATE_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_ESTIMATE_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
  return totals;
}
#undef GRPO_SUM
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM

// Tokens behind the last packed row take no part.
template <typename T>
__device__ void clear_behind_rows(const CorrectionBatch<T>& batch) {
  if (batch.cu_seqlens == nullptr) return;
  const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t threads = gridDim.x * static_cast<int64_t>(blockDim.x);
  for (int64_t t = batch.cu_seqlens[batch.rows] + thread; t < batch.tokens; t += threads) {
    batch.weights[t] = 0;
    batch.kept[t] = false;
  }
}

template <typename T>
__global__ void GRPO_BOUNDS(kThreads) rows_kernel(const __grid_constant__ CorrectionBatch<T> batch) {
  using Math = ScalarTermMath<T>;
  using Lanes = StepLanes<Math>;
  __shared__ double shared[kMaxWarps];
  clear_behind_rows(batch);
  const Team team = block_team();
  for (int64_t row = blockIdx.x; row < batch.rows; row += gridDim.x) {
    const int64_t count = batch.length(row);
    const CorrectionWalk<Math> walk(tokens_of(batch, row), batch.plan);
    typename Lanes::Mismatches mismatches;
    for (int64_t k = team.rank; k < count; k += team.size) walk.measure(k, 1, mismatches);
    const Mismatch mismatch = block_mismatch(mismatches, team, shared);

    const Verdict<T> verdict = judge<T>(batch.plan, mismatch);
    typename Lanes::Weights weights;
    typename Lanes::Estimates estimates[kEstimators];
    for (int64_t k = team.rank; k < count; k += team.size) walk.apply(k, 1, verdict, weights, estimates);
    Judged judged;
    judged.weights = block_weights(weights, team, shared);
#pragma unroll
    for (int e = 0; e < kEstimators; ++e) {
      if (walk.bounds[e].is_used) judged.estimates[e] = block_estimates(estimates[e], team, shared);
    }
    if (team.rank == 0) {
      write_record(batch.plan, mismatch, verdict, judged, batch.table + row * table_columns(batch.plan.count));
    }
  }
}

}  // namespace

template <typename T>
void launch_sampling_correction(const CorrectionBatch<T>& batch, void* stream) {
  const int64_t length = batch.tokens / std::max<int64_t>(batch.rows, 1);
  int threads = kWarp;
  while (threads < kThreads && threads * kTokensPerThread < length) threads *= 2;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(batch.rows, 1, INT32_MAX));
  launch(rows_kernel<T>, dim3(blocks), dim3(threads), 0, stream, batch);
}

template void launch_sampling_correction<float>(const CorrectionBatch<float>&, void*);
template void launch_sampling_correction<double>(const CorrectionBatch<double>&, void*);

}  // namespace grpo_kernels
