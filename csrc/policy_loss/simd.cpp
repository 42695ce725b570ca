// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "policy_loss/simd.h"

#include "common/simd/term_math.h"
#include "policy_loss/row_steps.h"
#include "policy_loss/walk.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

// Moves the sums from lanes to doubles; the lanes start again at 0.
template <typename Math>
GRPO_HD void flush(StepSums<Math>& lanes, PolicySums& sums) {
#define GRPO_SUM(name) fold(lanes.name, sums.name);
  GRPO_POLICY_SUMS(GRPO_SUM, GRPO_SUM)
#undef GRPO_SUM
  lanes = StepSums<Math>{};
}

template <typename Math>
GRPO_HD void flush(const StepExtremes<Math>& lanes, PolicySums& sums) {
#define GRPO_MINIMUM(name) fold_minimum(lanes.name, sums.name);
#define GRPO_MAXIMUM(name) fold_maximum(lanes.name, sums.name);
  GRPO_POLICY_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
}

template <typename T, WalkKind kKind, bool kAllValid>
void run(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count, PolicySums& sums) {
  using Math = typename MathOf<T>::Math;
  constexpr int64_t kCount = Math::kCount, kBetweenFlushes = 64 * kCount;
  PolicyWalk<Math, kKind> walk(tokens, plan);
  PolicySums walk_sums;
  for (int64_t begin = 0; begin < count; begin += kBetweenFlushes) {
    const int64_t end = count < begin + kBetweenFlushes ? count : begin + kBetweenFlushes;
    int64_t k = begin;
    for (; k + kCount <= end; k += kCount) walk.template step<kAllValid>(k, kCount);
    if (k < end) walk.step(k, end - k);
    walk.complete_sums();
    flush(walk.sums, walk_sums);
  }
  flush(walk.extremes, walk_sums);
  walk_sums.apply_shares(tokens.shares);
  sums.merge(walk_sums);
}

template <typename T>
void walk(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, PolicySums& sums) {
  switch (kind) {
    case WalkKind::kPlainClip:
      return tokens.mask == nullptr ? run<T, WalkKind::kPlainClip, true>(tokens, plan, count, sums)
                                    : run<T, WalkKind::kPlainClip, false>(tokens, plan, count, sums);
    case WalkKind::kPlainReinforce:
      return run<T, WalkKind::kPlainReinforce, false>(tokens, plan, count, sums);
    case WalkKind::kWeightedClip:
      return run<T, WalkKind::kWeightedClip, false>(tokens, plan, count, sums);
    case WalkKind::kClip:
      return run<T, WalkKind::kClip, false>(tokens, plan, count, sums);
    default:
      return run<T, WalkKind::kAny, false>(tokens, plan, count, sums);
  }
}

}  // namespace

void policy_tokens(const PolicyTokens<float>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count,
                   PolicySums& sums) {
  walk(tokens, plan, kind, count, sums);
}
void policy_tokens(const PolicyTokens<double>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count,
                   PolicySums& sums) {
  walk(tokens, plan, kind, count, sums);
}

double difference_sum(const float* logprobs, const float* base, const bool* mask, int64_t count) {
  return sum_of_differences(logprobs, base, mask, count);
}
double difference_sum(const double* logprobs, const double* base, const bool* mask, int64_t count) {
  return sum_of_differences(logprobs, base, mask, count);
}
void future_kl(const FutureKl<float>& row, int64_t count, float* weights) { weights_of_future_kl(row, count, weights); }
void future_kl(const FutureKl<double>& row, int64_t count, double* weights) {
  weights_of_future_kl(row, count, weights);
}

}  // namespace grpo_kernels::GRPO_SIMD
