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

// All tokens are valid where there is neither a mask nor a segment id that could say otherwise.
template <typename T, WalkKind kKind>
void run_kind(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count, PolicySums& sums) {
  tokens.mask == nullptr ? run<T, kKind, true>(tokens, plan, count, sums)
                         : run<T, kKind, false>(tokens, plan, count, sums);
}

template <typename T>
void walk(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, PolicySums& sums) {
  if (kind == WalkKind::kPlainClip) return run_kind<T, WalkKind::kPlainClip>(tokens, plan, count, sums);
  if constexpr (sizeof(T) == 4) {  // doubles are rare, and every kind takes seconds to compile
    switch (kind) {
#define GRPO_CASE(name) \
  case WalkKind::name:  \
    return run_kind<T, WalkKind::name>(tokens, plan, count, sums);
      GRPO_CASE(kRowClip)
      GRPO_CASE(kSampledClip)
      GRPO_CASE(kWeightedClip)
      GRPO_CASE(kPlainCispo)
      GRPO_CASE(kPlainIpo)
      GRPO_CASE(kPlainIcepop)
      GRPO_CASE(kPlainTopr)
      GRPO_CASE(kPlainReinforce)
      GRPO_CASE(kKindsClip)
      GRPO_CASE(kKindsClipCov)
      GRPO_CASE(kKindsKlCov)
#undef GRPO_CASE
      default:
        break;
    }
  }
  const bool is_clip = kind != WalkKind::kAny && loss_of(kind) == Loss::kClip && !is_of_kinds(kind);
  is_clip ? run<T, WalkKind::kClip, false>(tokens, plan, count, sums)
          : run<T, WalkKind::kAny, false>(tokens, plan, count, sums);
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

template <typename T>
void count_row(const PolicyBatch<T>& in, int64_t row, double& tokens, double& kept) {
  using Math = typename MathOf<T>::Math;
  using Walk = RowStatisticsWalk<Math>;
  const int64_t first = in.start(row);
  typename Math::Counter policy_lanes{}, kept_lanes{};
  for_each_step<Math>(first, first + in.length(row), [&](int64_t t, int64_t left) __attribute__((always_inline)) {
    const auto has_policy = Walk::policy_flags(in, t, left);
    Math::count(policy_lanes, has_policy);
    Math::count(kept_lanes, Walk::kept_flags(in, has_policy, t, left));
  });
  fold(policy_lanes, tokens);
  fold(kept_lanes, kept);
}

template <typename T>
DoubleMath::Flag covariance_flags(const PolicyBatch<T>& in, int64_t t, int64_t left) {
  const DoubleMath::Flag flags = DoubleMath::load_flags(offset_or_null(in.mask, t), left);
  return in.kinds == nullptr ? flags : flags & DoubleMath::of_kinds(kind_bit(Kind::kPolicy), in.kinds + t, left);
}

template <typename T>
CovarianceSums sum_covariances(const PolicyBatch<T>& in, int64_t row) {
  using Walk = RowStatisticsWalk<DoubleMath>;
  const int64_t first = in.start(row);
  DoubleMath::Value advantage{}, logprob{};
  DoubleMath::Counter tokens{};
  for_each_step<DoubleMath>(first, first + in.length(row), [&](int64_t t, int64_t left) __attribute__((always_inline)) {
    const auto flags = covariance_flags(in, t, left);
    advantage += Walk::advantage_of(in, row, t, left, flags);
    logprob += Walk::load(in.logprobs + t, left, flags);
    DoubleMath::count(tokens, flags);
  });
  CovarianceSums sums;
  fold(advantage, sums.advantage);
  fold(logprob, sums.logprob);
  fold(tokens, sums.tokens);
  return sums;
}

template <typename T>
int64_t match_covariances(const PolicyBatch<T>& in, int64_t row, int64_t first, int64_t count,
                          const CovarianceQuery& query, int64_t& place, CovarianceMatch* matches) {
  using Walk = RowStatisticsWalk<DoubleMath>;
  int64_t found = 0;
  for_each_step<DoubleMath>(first, first + count, [&](int64_t t, int64_t left) __attribute__((always_inline)) {
    const auto valid = covariance_flags(in, t, left);
    const auto advantage = Walk::advantage_of(in, row, t, left, valid) - DoubleMath::all(query.advantage);
    const auto covariance = advantage * (Walk::load(in.logprobs + t, left, valid) - DoubleMath::all(query.logprob));
    auto flags = DoubleMath::negate(covariance <= DoubleMath::all(query.low));
    if (query.is_bounded)
      flags = flags & (covariance > DoubleMath::all(query.low)) & (covariance < DoubleMath::all(query.high));
    const uint32_t is_valid = DoubleMath::bits(valid), is_match = DoubleMath::bits(flags & valid);
    if (is_match != 0) {
      double values[DoubleMath::kCount];
      DoubleMath::store(values, DoubleMath::kCount, covariance);
      int64_t at = place;
      for (int l = 0; l < DoubleMath::kCount; ++l) {
        at += is_valid >> l & 1;
        if ((is_match >> l & 1) != 0) matches[found++] = {values[l], t + l, at};
      }
    }
    place += __builtin_popcount(is_valid);
  });
  return found;
}

}  // namespace

#define GRPO_DEFINE(T)                                                                                       \
  void policy_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count,    \
                     PolicySums& sums) {                                                                     \
    walk(tokens, plan, kind, count, sums);                                                                   \
  }                                                                                                          \
  RowStatistics row_statistics(const PolicyBatch<T>& in, int64_t row) { return sum_row(in, row); }           \
  void add_row_share(const PolicyBatch<T>& in, int64_t row, T share, T* gradient) {                          \
    if (in.plan.loss == Loss::kGeoMean) { /* judges log ratios as row_statistics does */                     \
      spread_over_row<DoubleMath>(in, row, share, gradient);                                                 \
    } else {                                                                                                 \
      spread_over_row<typename MathOf<T>::Math>(in, row, share, gradient);                                   \
    }                                                                                                        \
  }                                                                                                          \
  void count_policy(const PolicyBatch<T>& in, int64_t row, double& tokens, double& kept) {                   \
    count_row(in, row, tokens, kept);                                                                        \
  }                                                                                                          \
  CovarianceSums covariance_sums(const PolicyBatch<T>& in, int64_t row) { return sum_covariances(in, row); } \
  int64_t find_covariances(const PolicyBatch<T>& in, int64_t row, int64_t first, int64_t count,              \
                           const CovarianceQuery& query, int64_t& place, CovarianceMatch* matches) {         \
    return match_covariances(in, row, first, count, query, place, matches);                                  \
  }
GRPO_DEFINE(float)
GRPO_DEFINE(double)
#undef GRPO_DEFINE

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
