#pragma once

#include <math.h>
#include <stdint.h>

#include "grpo_kernels/host_device.h"

// What a policy loss is made of, the share of a row's tokens in the mean that an aggregation asks for, and what is
// added up along the way.
namespace grpo_kernels {

// The order of names in grpo_kernels/config/loss.py.
enum class Loss : int64_t { kClip, kCispo, kSapo, kVespo, kGeoMean, kDppoTv, kDppoKl, kReinforce, kDro };
enum class Ratio : int64_t { kToken, kSequence, kSequenceToken, kSegment, kSegmentMean };
enum class Kl : int64_t { kNone, kK1, kK2, kK3, kAbs };
enum class Aggregation : int64_t { kTokenMean, kTokenSum, kRowTokenMean, kRowTokenSum, kRowTokenNorm, kLocalTokenMean };
enum class Correction : int64_t { kNone, kTokenTruncate, kTokenMask, kSequenceTruncate, kSequenceMask };

constexpr int kPolicyModes = 10;
constexpr int kPolicyCoefficients = 21;
constexpr int kPolicyMetrics = 35;

struct PolicyPlan {
  Loss loss;
  Ratio ratio;
  Kl kl;
  bool kl_straight, kl_unbiased;
  Aggregation aggregation, kl_aggregation, entropy_aggregation;
  bool count_empty_rows;
  Correction correction;
  double low, high, dual_clip, cap, sapo_pos, sapo_neg, k_pos, lambda_pos, k_neg, lambda_neg, dro_beta;
  double clamp_low, clamp_high, kl_coef, kl_clamp_in, kl_clamp_out, entropy_coef, max_length;
  double correction_min, correction_max, off_policy_threshold;

  GRPO_HD bool by_segment() const { return ratio == Ratio::kSegment || ratio == Ratio::kSegmentMean; }
  GRPO_HD bool by_sequence() const { return ratio == Ratio::kSequence || ratio == Ratio::kSequenceToken; }
  GRPO_HD bool corrects_sequences() const {
    return correction == Correction::kSequenceTruncate || correction == Correction::kSequenceMask;
  }
  // Whether what flows through the ratio flows to all tokens of the row.
  GRPO_HD bool spreads_over_row() const { return ratio == Ratio::kSequence || loss == Loss::kGeoMean; }
  // Whether a token's term depends on other tokens of its row.
  GRPO_HD bool needs_row() const {
    return by_segment() || by_sequence() || loss == Loss::kVespo || loss == Loss::kGeoMean || corrects_sequences() ||
           off_policy_threshold < INFINITY;
  }
};

inline PolicyPlan make_policy_plan(const int64_t* m, const double* c) {
  return {static_cast<Loss>(m[0]),
          static_cast<Ratio>(m[1]),
          static_cast<Kl>(m[2]),
          m[3] != 0,
          m[4] != 0,
          static_cast<Aggregation>(m[5]),
          static_cast<Aggregation>(m[6]),
          static_cast<Aggregation>(m[7]),
          m[8] != 0,
          static_cast<Correction>(m[9]),
          c[0],
          c[1],
          c[2],
          c[3],
          c[4],
          c[5],
          c[6],
          c[7],
          c[8],
          c[9],
          c[10],
          c[11],
          c[12],
          c[13],
          c[14],
          c[15],
          c[16],
          c[17],
          c[18],
          c[19],
          c[20]};
}

// Of one row, or of the batch.
struct Counts {
  double rows = 0;    // of the batch: all of them
  double active = 0;  // rows with a token
  double tokens = 0, kept = 0, terms = 0;

  GRPO_HD void add(const Counts& row) {
    rows += row.rows;
    active += row.active;
    tokens += row.tokens;
    kept += row.kept;
    terms += row.terms;
  }
};

// What the caller knows of the whole batch, of which this call may be a part; NaN: nothing.
struct Normalizers {
  double tokens = NAN, rows = NAN, segments = NAN;
};

GRPO_HD double known_or(double known, double counted) { return isnan(known) ? (counted > 1 ? counted : 1) : known; }

// The weight of each of a row's tokens (or, of the policy term, each of its terms).
GRPO_HD double share_of(const PolicyPlan& plan, Aggregation aggregation, const Normalizers& known, const Counts& batch,
                        const Counts& row, bool policy) {
  const double members = policy ? row.terms : row.tokens;
  switch (aggregation) {
    case Aggregation::kTokenSum:
      return 1;
    case Aggregation::kLocalTokenMean:
      return 1 / (batch.kept > 1 ? batch.kept : 1);
    case Aggregation::kTokenMean:
      if (policy && plan.by_segment()) return 1 / known_or(known.segments, batch.terms);
      return 1 / known_or(known.tokens, policy ? batch.terms : batch.tokens);
    default:
      break;
  }
  const bool all_rows = plan.count_empty_rows || (policy && plan.loss == Loss::kGeoMean);
  double share = 1 / known_or(known.rows, all_rows ? batch.rows : batch.active);
  if (aggregation == Aggregation::kRowTokenMean) share /= members > 1 ? members : 1;
  if (aggregation == Aggregation::kRowTokenNorm) share /= plan.max_length;
  return share;
}

struct Shares {
  double policy, kl, entropy;
};

GRPO_HD Shares shares_of(const PolicyPlan& plan, const Normalizers& known, const Counts& batch, const Counts& row) {
  return {share_of(plan, plan.aggregation, known, batch, row, true),
          share_of(plan, plan.kl_aggregation, known, batch, row, false),
          share_of(plan, plan.entropy_aggregation, known, batch, row, false)};
}

// Sums over the tokens of a row. Weighted ones are the parts of the loss.
struct PolicySums {
  double policy = 0, kl = 0, entropy = 0;  // weighted
  double through = 0;                      // derivative of the row's loss by its log ratio, where it has one
  double low = 0, high = 0, clipped = 0, dual = 0;
  double log_ratio = 0, plain_kl = 0, plain_entropy = 0;
  double ratio = 0, ratio_spread = 0, ratio_min = INFINITY, ratio_max = -INFINITY;  // spread: of (ratio - 1)^2
  double phi = 0;
  double is = 0, is_square = 0, is_min = INFINITY, is_max = -INFINITY, is_count = 0;
  double gap = 0, gap_max = -INFINITY, gap_count = 0;
  double off_policy = 0;

  GRPO_HD void merge(const PolicySums& other) {
    policy += other.policy;
    kl += other.kl;
    entropy += other.entropy;
    through += other.through;
    low += other.low;
    high += other.high;
    clipped += other.clipped;
    dual += other.dual;
    log_ratio += other.log_ratio;
    plain_kl += other.plain_kl;
    plain_entropy += other.plain_entropy;
    ratio += other.ratio;
    ratio_spread += other.ratio_spread;
    ratio_min = other.ratio_min < ratio_min ? other.ratio_min : ratio_min;
    ratio_max = other.ratio_max > ratio_max ? other.ratio_max : ratio_max;
    phi += other.phi;
    is += other.is;
    is_square += other.is_square;
    is_min = other.is_min < is_min ? other.is_min : is_min;
    is_max = other.is_max > is_max ? other.is_max : is_max;
    is_count += other.is_count;
    gap += other.gap;
    gap_max = other.gap_max > gap_max ? other.gap_max : gap_max;
    gap_count += other.gap_count;
    off_policy += other.off_policy;
  }

  // What was added up unweighted becomes part of the loss.
  GRPO_HD void weigh(const Shares& shares) {
    policy *= shares.policy;
    kl *= shares.kl;
    entropy *= shares.entropy;
  }

  GRPO_HD void add_is(double weight) {
    is += weight;
    is_square += weight * weight;
    is_min = weight < is_min ? weight : is_min;
    is_max = weight > is_max ? weight : is_max;
    is_count += 1;
  }
};

// What is measured per row and only then over the batch.
struct RowExtremes {
  double low_sum = 0, high_sum = 0, phi_sum = 0;
  double low_min = INFINITY, high_max = -INFINITY;

  GRPO_HD void add(const Counts& row, const PolicySums& sums, const PolicyPlan& plan) {
    const double count = plan.loss == Loss::kGeoMean ? row.tokens : row.terms;
    if (!(count > 0)) return;
    const double low = sums.low / count, high = sums.high / count;
    low_sum += low;
    high_sum += high;
    low_min = low < low_min ? low : low_min;
    high_max = high > high_max ? high : high_max;
    phi_sum += sums.phi / count;
  }

  GRPO_HD void merge(const RowExtremes& other) {
    low_sum += other.low_sum;
    high_sum += other.high_sum;
    phi_sum += other.phi_sum;
    low_min = other.low_min < low_min ? other.low_min : low_min;
    high_max = other.high_max > high_max ? other.high_max : high_max;
  }
};

// In the order of METRICS in grpo_kernels/config/loss.py.
GRPO_HD void write_metrics(const PolicyPlan& plan, const Counts& batch, const PolicySums& sums, const RowExtremes& rows,
                           double* metrics) {
  const auto found = [](double extreme) { return isinf(extreme) ? NAN : extreme; };
  const double values[kPolicyMetrics] = {
      // what is only measured may overflow
      sums.policy + (plan.kl_coef != 0 ? plan.kl_coef * sums.kl : 0) -
          (plan.entropy_coef != 0 ? plan.entropy_coef * sums.entropy : 0),
      sums.policy,
      sums.kl,
      sums.entropy,
      batch.rows,
      batch.active,
      batch.tokens,
      batch.terms,
      batch.kept,
      sums.low,
      sums.high,
      sums.clipped,
      sums.dual,
      rows.low_sum,
      rows.high_sum,
      found(rows.low_min),
      found(rows.high_max),
      sums.log_ratio,
      sums.plain_kl,
      sums.plain_entropy,
      sums.ratio,
      sums.ratio_spread,
      sums.ratio_min <= sums.ratio_max ? sums.ratio_min : NAN,
      sums.ratio_min <= sums.ratio_max ? sums.ratio_max : NAN,
      sums.phi,
      rows.phi_sum,
      sums.is,
      sums.is_square,
      sums.is_count > 0 ? sums.is_min : NAN,
      sums.is_count > 0 ? sums.is_max : NAN,
      sums.is_count,
      sums.gap,
      sums.gap_count > 0 ? sums.gap_max : NAN,
      sums.gap_count,
      sums.off_policy,
  };
  for (int i = 0; i < kPolicyMetrics; ++i) metrics[i] = values[i];
}

}  // namespace grpo_kernels
