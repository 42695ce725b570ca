#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"
#include "common/settings.h"

// The settings of a policy loss, the weight that an aggregation gives each token, and the sums that metrics are made
// of.
namespace grpo_kernels {

// In the order of the names in grpo_kernels/ops/policy_loss/config.py; tests/test_codes.py compares them.
GRPO_CODES(Loss, int64_t, kClip, kCispo, kSapo, kVespo, kGeoMean, kDppoTv, kDppoKl, kReinforce, kDro, kIpo, kIcepop,
           kTopr);
GRPO_CODES(Ratio, int64_t, kToken, kSequence, kSequenceToken, kSegment, kSegmentMean);
GRPO_CODES(Kl, int64_t, kNone, kK1, kK2, kK3, kAbs);
GRPO_CODES(Aggregation, int64_t, kTokenMean, kTokenSum, kSeqMeanTokenMean, kSeqMeanTokenSum, kSeqMeanTokenSumNorm,
           kLocalTokenMean);

// In the order of LossConfig.settings.
// clang-format off: it would nest the entries
#define GRPO_POLICY_SETTINGS(MODE, COEFFICIENT)                                                           \
  MODE(Loss, loss) MODE(Ratio, ratio) MODE(Kl, kl) MODE(bool, kl_straight) MODE(bool, kl_unbiased)        \
  MODE(Aggregation, aggregation) MODE(Aggregation, kl_aggregation) MODE(Aggregation, entropy_aggregation) \
  MODE(bool, count_empty_rows)                                                                            \
  COEFFICIENT(low) COEFFICIENT(high) COEFFICIENT(dual_clip) COEFFICIENT(cap)                              \
  COEFFICIENT(sapo_pos) COEFFICIENT(sapo_neg)                                                             \
  COEFFICIENT(k_pos) COEFFICIENT(lambda_pos) COEFFICIENT(k_neg) COEFFICIENT(lambda_neg)                   \
  COEFFICIENT(dro_beta) COEFFICIENT(clamp_low) COEFFICIENT(clamp_high)                                    \
  COEFFICIENT(kl_coef) COEFFICIENT(kl_clamp_in) COEFFICIENT(kl_clamp_out)                                 \
  COEFFICIENT(entropy_coef) COEFFICIENT(max_length)
// clang-format on

struct PolicyPlan {
  GRPO_SETTINGS(PolicyPlan, GRPO_POLICY_SETTINGS)

  GRPO_HD bool by_segment() const { return ratio == Ratio::kSegment || ratio == Ratio::kSegmentMean; }
  GRPO_HD bool by_sequence() const { return ratio == Ratio::kSequence || ratio == Ratio::kSequenceToken; }
  // Whether gradient through the ratio goes to every token of the row.
  GRPO_HD bool spreads_over_row() const { return ratio == Ratio::kSequence || loss == Loss::kGeoMean; }
  // Whether a token's term depends on sums over its row.
  GRPO_HD bool needs_row_statistics() const { return by_sequence() || loss == Loss::kVespo || loss == Loss::kGeoMean; }
  // Whether a token's term depends on other tokens of its row.
  GRPO_HD bool couples_tokens() const { return by_segment() || needs_row_statistics(); }
};

// Counts of one row, or of the batch.
struct Counts {
  double rows = 0;
  double active_rows = 0;  // rows with at least one valid token
  double tokens = 0, terms = 0;

  GRPO_HD void add(const Counts& row) {
    rows += row.rows;
    active_rows += row.active_rows;
    tokens += row.tokens;
    terms += row.terms;
  }
};

GRPO_HD Counts counts_of_row(double tokens, double terms) {
  Counts counts;
  counts.rows = 1;
  counts.active_rows = tokens > 0 ? 1 : 0;
  counts.tokens = tokens;
  counts.terms = terms;
  return counts;
}

// Counts over the whole batch from the caller, as this call may hold only a part of it; NaN: use this call's count.
struct Normalizers {
  double tokens = NAN, rows = NAN, segments = NAN;

  // Sets those that are infinite to the next of `values`. A count from elsewhere can be 0, which counts as 1, as in
  // TRL.
  GRPO_HD void read(const double* values) {
    double* const units[] = {&tokens, &rows, &segments};
    for (double* const unit : units) {
      if (!isinf(*unit)) continue;
      const double value = *values++;
      *unit = value > 0 ? value : 1;
    }
  }
};

GRPO_HD double normalizer_or(double normalizer, double count) {
  return isnan(normalizer) ? (count > 1 ? count : 1) : normalizer;
}

// The weight of each token of a row in the KL or entropy part of the loss, or of each term of a row in the policy part.
GRPO_HD double share_of(const PolicyPlan& plan, Aggregation aggregation, const Normalizers& normalizers,
                        const Counts& batch, const Counts& row, bool is_policy) {
  const double members = is_policy ? row.terms : row.tokens;
  switch (aggregation) {
    case Aggregation::kTokenSum:
      return 1;
    case Aggregation::kLocalTokenMean:
      return 1 / (batch.tokens > 1 ? batch.tokens : 1);
    case Aggregation::kTokenMean:
      if (is_policy && plan.by_segment()) return 1 / normalizer_or(normalizers.segments, batch.terms);
      return 1 / normalizer_or(normalizers.tokens, is_policy ? batch.terms : batch.tokens);
    default:
      break;
  }
  const bool all_rows = plan.count_empty_rows || (is_policy && plan.loss == Loss::kGeoMean);
  double share = 1 / normalizer_or(normalizers.rows, all_rows ? batch.rows : batch.active_rows);
  if (aggregation == Aggregation::kSeqMeanTokenMean) share /= members > 1 ? members : 1;
  if (aggregation == Aggregation::kSeqMeanTokenSumNorm) share /= plan.max_length;
  return share;
}

struct Shares {
  double policy, kl, entropy;
};

GRPO_HD Shares shares_of(const PolicyPlan& plan, const Normalizers& normalizers, const Counts& batch,
                         const Counts& row) {
  return {share_of(plan, plan.aggregation, normalizers, batch, row, true),
          share_of(plan, plan.kl_aggregation, normalizers, batch, row, false),
          share_of(plan, plan.entropy_aggregation, normalizers, batch, row, false)};
}

// Sums over tokens, of numbers (SUM) and flags (COUNT). The three losses are weighted by the aggregation;
// ratio_gradient is the derivative of the row's loss with respect to its log ratio, where plan.spreads_over_row();
// ratio_spread_sum sums (ratio - 1)^2; kept_tokens counts tokens whose policy term counts.
// clang-format off
#define GRPO_POLICY_SUMS(SUM, COUNT)                                                                \
  SUM(policy_loss) SUM(kl_loss) SUM(entropy_loss) SUM(ratio_gradient)                               \
  SUM(log_ratio_sum) SUM(kl_sum) SUM(entropy_sum) SUM(ratio_sum) SUM(ratio_spread_sum) SUM(phi_sum) \
  SUM(is_sum) SUM(is_square_sum)                                                                    \
  COUNT(low_clipped) COUNT(high_clipped) COUNT(clipped) COUNT(dual_clipped)                         \
  COUNT(is_count) COUNT(kept_tokens)
#define GRPO_POLICY_EXTREMES(MINIMUM, MAXIMUM) \
  MINIMUM(ratio_min) MAXIMUM(ratio_max) MINIMUM(is_min) MAXIMUM(is_max)
// clang-format on

struct PolicySums {
#define GRPO_SUM(name) double name = 0;
#define GRPO_MINIMUM(name) double name = INFINITY;
#define GRPO_MAXIMUM(name) double name = -INFINITY;
  GRPO_POLICY_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_POLICY_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
#undef GRPO_SUM
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM

  GRPO_HD void merge(const PolicySums& other) {
#define GRPO_SUM(name) name += other.name;
#define GRPO_MINIMUM(name) name = other.name < name ? other.name : name;
#define GRPO_MAXIMUM(name) name = other.name > name ? other.name : name;
    GRPO_POLICY_SUMS(GRPO_SUM, GRPO_SUM)
    GRPO_POLICY_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
#undef GRPO_SUM
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
  }

  // Turns unweighted sums into parts of the loss.
  GRPO_HD void apply_shares(const Shares& shares) {
    policy_loss *= shares.policy;
    kl_loss *= shares.kl;
    entropy_loss *= shares.entropy;
  }

  GRPO_HD void add_is_weight(double weight) {
    if (weight != weight) return;  // NaN is no weight
    is_sum += weight;
    is_square_sum += weight * weight;
    is_min = weight < is_min ? weight : is_min;
    is_max = weight > is_max ? weight : is_max;
    is_count += 1;
  }
};

// Clipped fractions and mean phi of each row, reduced over the batch.
struct RowMetrics {
  double low_clipped_rows = 0, high_clipped_rows = 0, phi_rows = 0;
  double low_clipped_min = INFINITY, high_clipped_max = -INFINITY;

  GRPO_HD void add(const Counts& row, const PolicySums& sums, const PolicyPlan& plan) {
    const double count = plan.by_segment() ? row.terms : row.tokens;
    if (!(count > 0)) return;
    const double low = sums.low_clipped / count, high = sums.high_clipped / count;
    low_clipped_rows += low;
    high_clipped_rows += high;
    low_clipped_min = low < low_clipped_min ? low : low_clipped_min;
    high_clipped_max = high > high_clipped_max ? high : high_clipped_max;
    phi_rows += sums.phi_sum / count;
  }

  GRPO_HD void merge(const RowMetrics& other) {
    low_clipped_rows += other.low_clipped_rows;
    high_clipped_rows += other.high_clipped_rows;
    phi_rows += other.phi_rows;
    low_clipped_min = other.low_clipped_min < low_clipped_min ? other.low_clipped_min : low_clipped_min;
    high_clipped_max = other.high_clipped_max > high_clipped_max ? other.high_clipped_max : high_clipped_max;
  }
};

// A term whose coefficient is 0 is only measured, and may overflow without harm to the loss.
GRPO_HD double total_loss(const PolicyPlan& plan, const PolicySums& sums) {
  return sums.policy_loss + (plan.kl_coef != 0 ? plan.kl_coef * sums.kl_loss : 0) -
         (plan.entropy_coef != 0 ? plan.entropy_coef * sums.entropy_loss : 0);
}
GRPO_HD double finite_or_nan(double extreme) { return isinf(extreme) ? NAN : extreme; }

// METRIC(name, value), in the order of METRICS in grpo_kernels/ops/policy_loss/reference/metrics.py.
#define GRPO_POLICY_METRICS(METRIC)                                          \
  METRIC(loss, total_loss(plan, sums))                                       \
  METRIC(policy_loss, sums.policy_loss)                                      \
  METRIC(kl_loss, sums.kl_loss)                                              \
  METRIC(entropy_loss, sums.entropy_loss)                                    \
  METRIC(rows, batch.rows)                                                   \
  METRIC(active_rows, batch.active_rows)                                     \
  METRIC(tokens, batch.tokens)                                               \
  METRIC(terms, batch.terms)                                                 \
  METRIC(kept_tokens, sums.kept_tokens)                                      \
  METRIC(low_clipped, sums.low_clipped)                                      \
  METRIC(high_clipped, sums.high_clipped)                                    \
  METRIC(clipped, sums.clipped)                                              \
  METRIC(dual_clipped, sums.dual_clipped)                                    \
  METRIC(low_clipped_rows, rows.low_clipped_rows)                            \
  METRIC(high_clipped_rows, rows.high_clipped_rows)                          \
  METRIC(low_clipped_min, finite_or_nan(rows.low_clipped_min))               \
  METRIC(high_clipped_max, finite_or_nan(rows.high_clipped_max))             \
  METRIC(log_ratio_sum, sums.log_ratio_sum)                                  \
  METRIC(kl_sum, sums.kl_sum)                                                \
  METRIC(entropy_sum, sums.entropy_sum)                                      \
  METRIC(ratio_sum, sums.ratio_sum)                                          \
  METRIC(ratio_spread_sum, sums.ratio_spread_sum)                            \
  METRIC(ratio_min, sums.ratio_min <= sums.ratio_max ? sums.ratio_min : NAN) \
  METRIC(ratio_max, sums.ratio_min <= sums.ratio_max ? sums.ratio_max : NAN) \
  METRIC(phi_sum, sums.phi_sum)                                              \
  METRIC(phi_rows, rows.phi_rows)                                            \
  METRIC(is_sum, sums.is_sum)                                                \
  METRIC(is_square_sum, sums.is_square_sum)                                  \
  METRIC(is_min, sums.is_count > 0 ? sums.is_min : NAN)                      \
  METRIC(is_max, sums.is_count > 0 ? sums.is_max : NAN)                      \
  METRIC(is_count, sums.is_count)

#define GRPO_METRIC(name, value) +1
constexpr int kPolicyMetrics = 0 GRPO_POLICY_METRICS(GRPO_METRIC);
#undef GRPO_METRIC
#define GRPO_METRIC(name, value) #name " "
constexpr const char* kPolicyMetricNames = GRPO_POLICY_METRICS(GRPO_METRIC);
#undef GRPO_METRIC

GRPO_HD void write_metrics(const PolicyPlan& plan, const Counts& batch, PolicySums sums, const RowMetrics& rows,
                           bool has_policy_mask, double* metrics) {
  if (!has_policy_mask) sums.kept_tokens = batch.tokens;
#define GRPO_METRIC(name, value) *metrics++ = value;
  GRPO_POLICY_METRICS(GRPO_METRIC)
#undef GRPO_METRIC
}

}  // namespace grpo_kernels
