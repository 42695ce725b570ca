// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "policy_loss/simd.h"

#include "common/simd/term_math.h"
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

// All tokens are valid where there is neither a mask nor a segment id that could say otherwise.
template <typename T, WalkKind kKind>
void run_kind(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count, PolicySums& sums) {
  tokens.mask == nullptr ? run<T, kKind, true>(tokens, plan, count, sums)
                         : run<T, kKind, false>(tokens, plan, count, sums);
}

template <typename T>
void walk(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, PolicySums& sums) {
  switch (kind) {
#define GRPO_CASE(name) \
  case WalkKind::name:  \
    return run_kind<T, WalkKind::name>(tokens, plan, count, sums);
    GRPO_CASE(kPlainClip)
    GRPO_CASE(kClip)
    GRPO_CASE(kRowClip)
    GRPO_CASE(kSampledClip)
    GRPO_CASE(kPlainCispo)
    GRPO_CASE(kPlainIpo)
    GRPO_CASE(kPlainIcepop)
    GRPO_CASE(kPlainTopr)
    GRPO_CASE(kKindsClip)
    GRPO_CASE(kKindsClipCov)
    GRPO_CASE(kKindsKlCov)
#undef GRPO_CASE
    default:
      return run<T, WalkKind::kAny, false>(tokens, plan, count, sums);
  }
}

// Eight doubles, whatever the instruction set.
using WideMath = TwinMath<double>;

template <typename T>
RowStatistics sum_row(const PolicyBatch<T>& in, int64_t row) {
  const int64_t first = in.start(row), count = in.length(row), whole = count / WideMath::kCount * WideMath::kCount;
  RowStatisticsWalk<WideMath> walk;
  for (int64_t k = 0; k < whole; k += WideMath::kCount) walk.add(in, row, first + k, WideMath::kCount);
  if (whole < count) walk.add(in, row, first + whole, count - whole);
  RowStatistics statistics;
#define GRPO_SUM(name) fold(walk.name, statistics.name);
  GRPO_ROW_STATISTICS(GRPO_SUM)
#undef GRPO_SUM
  return statistics;
}

template <typename Math, typename T>
void spread_over_row(const PolicyBatch<T>& in, int64_t row, T share, T* gradient) {
  const int64_t first = in.start(row), count = in.length(row), whole = count / Math::kCount * Math::kCount;
  for (int64_t k = 0; k < whole; k += Math::kCount) {
    add_row_gradient<Math>(in, row, first + k, Math::kCount, share, gradient);
  }
  if (whole < count) add_row_gradient<Math>(in, row, first + whole, count - whole, share, gradient);
}

template <typename T>
void count_row(const PolicyBatch<T>& in, int64_t row, double& tokens, double& kept) {
  using Math = typename MathOf<T>::Math;
  using Walk = RowStatisticsWalk<Math>;
  const int64_t first = in.start(row), count = in.length(row);
  typename Math::Counter policy_lanes{}, kept_lanes{};
  for (int64_t k = 0; k < count; k += Math::kCount) {
    const auto has_policy = Walk::policy_flags(in, first + k, count - k);
    Math::count(policy_lanes, has_policy);
    Math::count(kept_lanes, Walk::kept_flags(in, has_policy, first + k, count - k));
  }
  fold(policy_lanes, tokens);
  fold(kept_lanes, kept);
}

}  // namespace

#define GRPO_DEFINE(T)                                                                                      \
  void policy_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count,   \
                     PolicySums& sums) {                                                                    \
    walk(tokens, plan, kind, count, sums);                                                                  \
  }                                                                                                         \
  RowStatistics row_statistics(const PolicyBatch<T>& in, int64_t row) { return sum_row(in, row); }          \
  void add_row_share(const PolicyBatch<T>& in, int64_t row, T share, T* gradient) {                         \
    if (in.plan.loss == Loss::kGeoMean) { /* judges log ratios as row_statistics does */                    \
      spread_over_row<WideMath>(in, row, share, gradient);                                                  \
    } else {                                                                                                \
      spread_over_row<typename MathOf<T>::Math>(in, row, share, gradient);                                  \
    }                                                                                                       \
  }                                                                                                         \
  void count_policy(const PolicyBatch<T>& in, int64_t row, double& tokens, double& kept) {                  \
    count_row(in, row, tokens, kept);                                                                       \
  }
GRPO_DEFINE(float)
GRPO_DEFINE(double)
#undef GRPO_DEFINE

}  // namespace grpo_kernels::GRPO_SIMD
