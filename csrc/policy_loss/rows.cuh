#pragma once

#include "policy_loss/count.cuh"
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

// Calls visit(token) for the tokens of the segment that ends at `last`, from there back; returns their number where the
// ratio is a mean, else 1.
template <typename T, typename Visit>
__device__ int64_t walk_back(const PolicyBatch<T>& in, int64_t last, int64_t row_start, Visit visit) {
  int64_t size = 0;
  for (int64_t t = last; t >= row_start; --t) {
    if (!in.is_valid(t)) continue;
    if (in.segments[t] != in.segments[last]) break;
    visit(t);
    ++size;
  }
  return in.plan.ratio == Ratio::kSegmentMean ? size : 1;
}

// Writes the joint log ratio and log-prob of every segment at its last token, and 0 elsewhere, where they are loaded
// and not used; returns how many of the thread's tokens have a segment id that does not ascend from 0 along the row.
template <typename T>
__device__ double gather_segments(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row,
                                  const Team& team) {
  const int64_t first = in.start(row), last = first + in.length(row);
  double misplaced = 0;
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    arrays.terms[t] = false;
    arrays.log_ratios[t] = arrays.scores[t] = 0;
    if (!in.is_valid(t)) continue;
    const int64_t next = next_valid(in, t, last);
    const bool descends = next < last && in.segments[next] < in.segments[t];
    if (descends || in.segments[t] >= last - first) misplaced += 1;
    if (!ends_segment(in, t, next, last)) continue;
    arrays.terms[t] = true;
    double log_ratio = 0, score = 0;
    const int64_t divisor = walk_back(in, t, first, [&](int64_t member) {
      log_ratio += in.log_ratio(member);
      score += static_cast<double>(in.logprobs[member]);
    });
    arrays.log_ratios[t] = static_cast<T>(log_ratio / static_cast<double>(divisor));
    arrays.scores[t] = static_cast<T>(score / static_cast<double>(divisor));
  }
  return misplaced;
}

// Adds the gradient of a segment's term, computed at its last token, to all of its tokens.
template <typename T>
__device__ void spread_over_segments(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row,
                                     const Team& team) {
  const int64_t first = in.start(row), last = first + in.length(row);
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    if (!arrays.terms[t]) continue;
    const int64_t divisor = walk_back(in, t, first, [](int64_t) {});
    const T share = arrays.term_gradient[t] / static_cast<T>(divisor);
    walk_back(in, t, first, [&](int64_t member) { arrays.gradient[member] += share; });
  }
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
  __shared__ double shared[kMaxWarps];
  clear_after_rows(arrays);
  if (blockIdx.x == 0 && threadIdx.x == 0) arrays.done->blocks = 0;
  const PolicyBatch<T> in = batch_of(arrays);
  const Counts batch = batch_counts(arrays, shared);
  const Team team = block_team();
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const int64_t first = in.start(row), count = in.length(row);
    PolicyPart part;
    part.counts = count_row(in, row, team, shared);
    const Shares shares = in.shares(batch, part.counts);
    PolicyTokens<T> tokens = tokens_of(in, row, first, shares, arrays.gradient);
    row_statistics(in, row, team, shared).finish(in, row, part.counts, tokens, part.sums);
    if (in.plan.by_segment() || in.plan.loss == Loss::kGeoMean) tokens.terms = arrays.terms + first;
    if (in.plan.loss == Loss::kGeoMean) mark_last_token(arrays, in, row, team, shared);
    if (in.plan.by_segment()) {
      part.misplaced_segments = team_sum(team, gather_segments(arrays, in, row, team), shared);
      tokens.log_ratios = arrays.log_ratios + first;
      tokens.scores = arrays.scores + first;
      tokens.term_gradient = arrays.term_gradient + first;
    }
    __syncthreads();
    const PolicySums sums = team_sums(walk_tokens<T, WalkKind::kAny>(tokens, in.plan, count, team), team, shared);
    __syncthreads();
    if (in.plan.by_segment()) spread_over_segments(arrays, in, row, team);
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
