#pragma once

#include "policy_loss/count.cuh"
#include "policy_loss/segments.cuh"
#include "policy_loss/walk_tokens.cuh"

// The second launch where terms depend on their row: a block for each row.
namespace grpo_kernels {
namespace {

using WideTermMath = ScalarTermMath<double>;

template <typename T>
__device__ RowStatistics row_statistics(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared) {
  const int64_t first = in.start(row), last = first + in.length(row);
  RowStatisticsWalk<WideTermMath> walk;
  for (int64_t t = first + team.rank; t < last; t += team.size) walk.add(in, row, t, 1);
  RowStatistics statistics;
#define GRPO_SUM(name) statistics.name = team_sum(team, walk.name, shared);
  GRPO_ROW_STATISTICS(GRPO_SUM)
#undef GRPO_SUM
  return statistics;
}

// GMPO has one term per row, held by the last token that counts.
template <typename T>
__device__ void mark_last_token(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row, const Team& team,
                                double* shared) {
  const int64_t first = in.start(row), last = first + in.length(row);
  double last_valid = -1;
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    if (in.is_valid(t)) last_valid = static_cast<double>(t);
  }
  last_valid = team_max(team, last_valid, shared);
  for (int64_t t = first + team.rank; t < last; t += team.size) arrays.terms[t] = static_cast<double>(t) == last_valid;
}

template <typename T>
__global__ void GRPO_BOUNDS(kThreads) rows_kernel(const __grid_constant__ PolicyArrays<T> arrays) {
  __shared__ double shared[kMaxWarps * kSumsDoubles];
  clear_after_rows(arrays);
  if (blockIdx.x == 0 && threadIdx.x == 0) arrays.done->blocks = 0;
  const PolicyBatch<T> in = batch_of(arrays);
  const Counts batch = batch_counts(arrays, shared);
  const Team team = block_team();
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const int64_t first = in.start(row), count = in.length(row);
    PolicyPart part;
    if (in.plan.by_segment()) {
      part = gather_segments(arrays, in, row, team, shared);
    } else {
      part.counts = count_row(in, row, team, shared);
    }
    const Shares shares = in.shares(batch, part.counts);
    PolicyTokens<T> tokens = tokens_of(in, row, first, shares, arrays.gradient);
    RowStatistics statistics;
    if (in.plan.needs_row_statistics()) statistics = row_statistics(in, row, team, shared);
    statistics.finish(in, row, part.counts, tokens, part.sums);
    if (in.plan.by_segment() || in.plan.loss == Loss::kGeoMean) tokens.terms = arrays.terms + first;
    if (in.plan.loss == Loss::kGeoMean) mark_last_token(arrays, in, row, team, shared);
    if (in.plan.by_segment()) {
      tokens.log_ratios = arrays.log_ratios + first;
      tokens.scores = arrays.scores + first;
      tokens.term_gradient = arrays.term_gradient + first;
    }
    __syncthreads();
    const PolicySums sums = team_sums(walk_tokens<T, WalkKind::kAny>(tokens, in.plan, count, team), team, shared);
    __syncthreads();
    // in a row whose ids do not ascend, an error, segment_ends is not complete
    if (in.plan.by_segment() && part.misplaced_segments == 0) spread_over_segments(arrays, in, row, team);
    if (in.plan.spreads_over_row()) {
      const double members = part.counts.tokens > 1 ? part.counts.tokens : 1;
      const T share = static_cast<T>(sums.ratio_gradient / members);
      for (int64_t k = team.rank; k < count; k += team.size) {
        add_row_gradient<WideTermMath>(in, row, first + k, 1, share, arrays.gradient);
      }
    }
    if (arrays.entropy_gradient != nullptr) {
      for (int64_t k = team.rank; k < count; k += team.size) {
        arrays.entropy_gradient[first + k] = in.entropy_gradient(first + k, shares);
      }
    }
    part.sums.merge(sums);
    if (team.rank == 0) arrays.parts[row] = part;
    __syncthreads();
  }
}

}  // namespace
}  // namespace grpo_kernels
