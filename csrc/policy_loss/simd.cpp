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
GRPO_HD void run_with(const PolicyTokens<T>& tokens, const PolicyPlan& plan, const TermCoefficients<T>& coefficients,
                      int64_t count, PolicySums& sums) {
  using Math = typename MathOf<T>::Math;
  constexpr int64_t kCount = Math::kCount, kBetweenFlushes = 64 * kCount;
  PolicyWalk<Math, kKind> walk(tokens, plan, coefficients);
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

// A clip without a cap, clamps and a dual clip, as in GRPO, is compiled without them.
template <typename T, WalkKind kKind, bool kAllValid>
void run(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count, PolicySums& sums) {
  const TermCoefficients<T> coefficients(plan);
  const bool is_clip = kKind == WalkKind::kPlainClip || kKind == WalkKind::kPlainSequence;
  if (is_clip && !coefficients.has_limits() && !coefficients.has_dual) {
    TermCoefficients<T> without = coefficients.without_limits();
    without.has_dual = false;
    run_with<T, kKind, kAllValid>(tokens, plan, without, count, sums);
  } else {
    run_with<T, kKind, kAllValid>(tokens, plan, coefficients, count, sums);
  }
}

// All tokens are valid where there is neither a mask nor a segment id that could say otherwise.
template <typename T, WalkKind kKind>
void run_kind(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count, PolicySums& sums) {
  tokens.mask == nullptr ? run<T, kKind, true>(tokens, plan, count, sums)
                         : run<T, kKind, false>(tokens, plan, count, sums);
}

template <typename T>
void walk(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, PolicySums& sums) {
  if (kind == WalkKind::kPlainClip) return run_kind<T, WalkKind::kPlainClip>(tokens, plan, count, sums);
  if (kind == WalkKind::kPlain) return run_kind<T, WalkKind::kPlain>(tokens, plan, count, sums);
  if (kind == WalkKind::kPlainSequence) return run_kind<T, WalkKind::kPlainSequence>(tokens, plan, count, sums);
  run<T, WalkKind::kAny, false>(tokens, plan, count, sums);
}

// Eight doubles, whatever the instruction set.
using DoubleMath = TwinMath<double>;

// Calls step(t, left) for tokens `first` to `last`; `left` is a constant but for the last step.
template <typename Math, typename Step>
GRPO_HD void for_each_step(int64_t first, int64_t last, const Step& step) {
  int64_t t = first;
  for (; t + Math::kCount <= last; t += Math::kCount) step(t, Math::kCount);
  if (t < last) step(t, last - t);
}

template <typename T>
RowStatistics sum_row(const PolicyBatch<T>& in, int64_t row) {
  const int64_t first = in.start(row);
  RowStatisticsWalk<DoubleMath> walk;
  for_each_step<DoubleMath>(first, first + in.length(row), [&](int64_t t, int64_t left) __attribute__((always_inline)) {
    walk.add(in, row, t, left);
  });
  RowStatistics statistics;
#define GRPO_SUM(name) fold(walk.name, statistics.name);
  GRPO_ROW_STATISTICS(GRPO_SUM)
#undef GRPO_SUM
  return statistics;
}

template <typename Math, typename T>
void spread_over_row(const PolicyBatch<T>& in, int64_t row, T share, T* gradient) {
  const int64_t first = in.start(row);
  for_each_step<Math>(first, first + in.length(row), [&](int64_t t, int64_t left) __attribute__((always_inline)) {
    add_row_gradient<Math>(in, row, t, left, share, gradient);
  });
}

}  // namespace

#define GRPO_DEFINE(T)                                                                                    \
  void policy_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, \
                     PolicySums& sums) {                                                                  \
    walk(tokens, plan, kind, count, sums);                                                                \
  }                                                                                                       \
  RowStatistics row_statistics(const PolicyBatch<T>& in, int64_t row) { return sum_row(in, row); }        \
  void add_row_share(const PolicyBatch<T>& in, int64_t row, T share, T* gradient) {                       \
    if (in.plan.loss == Loss::kGeoMean) { /* judges log ratios as row_statistics does */                  \
      spread_over_row<DoubleMath>(in, row, share, gradient);                                              \
    } else {                                                                                              \
      spread_over_row<typename MathOf<T>::Math>(in, row, share, gradient);                                \
    }                                                                                                     \
  }
GRPO_DEFINE(float)
GRPO_DEFINE(double)
#undef GRPO_DEFINE

}  // namespace grpo_kernels::GRPO_SIMD
