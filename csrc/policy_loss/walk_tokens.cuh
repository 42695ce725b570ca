#pragma once

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "policy_loss/cuda.h"

// One token a thread at a time.
namespace grpo_kernels {
namespace {

// Zeroes the gradients of tokens after the last packed row.
template <typename T>
__device__ void clear_after_rows(const PolicyArrays<T>& arrays) {
  const PolicyBatch<T>& in = arrays.batch;
  if (in.cu_seqlens == nullptr) return;
  const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  for (int64_t t = in.cu_seqlens[in.rows] + thread; t < in.tokens; t += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    arrays.gradient[t] = 0;
    if (arrays.entropy_gradient != nullptr) arrays.entropy_gradient[t] = 0;
  }
}

__device__ PolicySums team_sums(PolicySums sums, const Team& team, double* shared) {
#define GRPO_SUM(name) sums.name = team_sum(team, sums.name, shared);
#define GRPO_MINIMUM(name) sums.name = -team_max(team, -sums.name, shared);
#define GRPO_MAXIMUM(name) sums.name = team_max(team, sums.name, shared);
  GRPO_POLICY_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_POLICY_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
#undef GRPO_SUM
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
  return sums;
}

// Converts the sums of a thread to double.
template <typename T>
__device__ PolicySums widen(const StepSums<ScalarTermMath<T>>& step_sums,
                            const StepExtremes<ScalarTermMath<T>>& step_extremes) {
  PolicySums sums;
#define GRPO_SUM(name) sums.name = step_sums.name;
#define GRPO_EXTREME(name) sums.name = step_extremes.name;
  GRPO_POLICY_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_POLICY_EXTREMES(GRPO_EXTREME, GRPO_EXTREME)
#undef GRPO_SUM
#undef GRPO_EXTREME
  return sums;
}

// Each thread takes tokens rank, rank + size, ... below count: few enough for sums in the type of the terms.
template <typename T, WalkKind kKind>
__device__ PolicySums walk_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count,
                                  const Team& team) {
  PolicyWalk<ScalarTermMath<T>, kKind> walk(tokens, plan);
  for (int64_t k = team.rank; k < count; k += team.size) walk.step(k, 1);
  walk.complete_sums();
  PolicySums sums = widen(walk.sums, walk.extremes);
  sums.apply_shares(tokens.shares);
  return sums;
}

}  // namespace
}  // namespace grpo_kernels
