#pragma once

#include <string.h>

#include "common/term_math.h"
#include "sampling_correction/plan.h"

// A batch, what is measured of a row, and what follows from it for the row's tokens.
namespace grpo_kernels {

// Arrays of optional arguments that are not given are null.
template <typename T>
struct CorrectionBatch {
  const T *old_logprobs, *sampling_logprobs;
  const bool* mask;
  const int64_t* cu_seqlens;  // null: padded rows of `width`
  const float* m2_ceiling;    // [1]
  int64_t rows, width, tokens;
  CorrectionPlan plan;
  T* weights;
  bool* kept;
  double* table;  // [rows, table_columns(plan.count)]

  GRPO_HD int64_t start(int64_t row) const { return cu_seqlens == nullptr ? row * width : cu_seqlens[row]; }
  GRPO_HD int64_t length(int64_t row) const {
    return cu_seqlens == nullptr ? width : cu_seqlens[row + 1] - cu_seqlens[row];
  }
};

// The tokens of one row.
template <typename T>
struct CorrectionTokens {
  const T *old_logprobs, *sampling_logprobs;
  const bool* mask;
  T m2_limit;  // larger squares are dropped
  T* weights;
  bool* kept;
};

// The largest number that is at most `ceiling` once rounded to float32.
template <typename T>
GRPO_HD T m2_limit(float ceiling) {
  if (sizeof(T) == sizeof(float) || !(ceiling < INFINITY)) return ceiling;
  const double middle = 0.5 * (static_cast<double>(ceiling) + static_cast<double>(nextafterf(ceiling, INFINITY)));
  uint32_t bits;
  memcpy(&bits, &ceiling, sizeof bits);
  return static_cast<T>(bits % 2 == 0 ? middle : nextafter(middle, 0.0));  // halves round to even
}

template <typename T>
GRPO_HD CorrectionTokens<T> tokens_of(const CorrectionBatch<T>& batch, int64_t row) {
  const int64_t first = batch.start(row);
  return {batch.old_logprobs + first,
          batch.sampling_logprobs + first,
          offset_or_null(batch.mask, first),
          batch.m2_ceiling == nullptr ? static_cast<T>(INFINITY) : m2_limit<T>(*batch.m2_ceiling),
          batch.weights + first,
          batch.kept + first};
}

// Sums over a row's tokens before any of them is judged, of numbers (SUM) and flags (COUNT). `log_ratio` is as given,
// `limited`, `ratio` and the estimators are of the log ratio within its bound.
// clang-format off
#define GRPO_MISMATCH_SUMS(SUM, COUNT)                                                                 \
  SUM(log_ratio) SUM(gap) SUM(limited) SUM(k2) SUM(k3) SUM(binary_kl) SUM(ratio) SUM(ratio_square)      \
  SUM(old_logprob) SUM(sampling_logprob) SUM(m2) COUNT(tokens) COUNT(scored)
#define GRPO_MISMATCH_EXTREMES(MINIMUM, MAXIMUM) \
  MINIMUM(log_ratio_min) MAXIMUM(log_ratio_max) MAXIMUM(binary_kl_max)
// Sums over a row's tokens once the row is judged.
#define GRPO_WEIGHT_SUMS(SUM, COUNT) \
  SUM(weight) SUM(weight_square) COUNT(high) COUNT(low) COUNT(outside) COUNT(kept) COUNT(m2_dropped)
#define GRPO_WEIGHT_EXTREMES(MINIMUM, MAXIMUM) MINIMUM(weight_min) MAXIMUM(weight_max)
// The same of each rejection of tokens.
#define GRPO_ESTIMATE_SUMS(SUM, COUNT) SUM(sum) SUM(clamped) SUM(clamped_square) COUNT(high) COUNT(low)
#define GRPO_ESTIMATE_EXTREMES(MINIMUM, MAXIMUM) MINIMUM(min) MAXIMUM(max)
// clang-format on

#define GRPO_SUM(name) double name = 0;
#define GRPO_MINIMUM(name) double name = INFINITY;
#define GRPO_MAXIMUM(name) double name = -INFINITY;
struct Mismatch {
  GRPO_MISMATCH_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_MISMATCH_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
};
struct WeightTotals {
  GRPO_WEIGHT_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_WEIGHT_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
};
struct EstimateTotals {
  GRPO_ESTIMATE_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_ESTIMATE_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
};
#undef GRPO_SUM
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM

struct Judged {
  WeightTotals weights;
  EstimateTotals estimates[kEstimators];  // of the rejections of tokens, by their estimator
};

GRPO_HD double limit(double value, double low, double high) {
  return value < low ? low : (value > high ? high : value);
}
GRPO_HD double at_least_one(double count) { return count > 1 ? count : 1; }
GRPO_HD double k3_of(double log_ratio) { return expm1(log_ratio) - log_ratio; }

// The statistic of a row, and the largest and smallest value of its tokens where the level is the maximum.
struct RowStatistic {
  double value, largest, smallest;
};

GRPO_HD RowStatistic row_statistic(const Rejection& rejection, const Mismatch& m, double bound) {
  const double size = at_least_one(m.tokens);
  if (rejection.level != Level::kSeqMax) {
    double sum = 0;
    switch (rejection.estimator) {
      case Estimator::kK1:
        sum = -m.limited;
        break;
      case Estimator::kK2:
        sum = m.k2;
        break;
      case Estimator::kK3:
        sum = m.k3;
        break;
      default:
        sum = m.binary_kl;
    }
    const double value = rejection.level == Level::kSeqSum ? sum : sum / size;
    return {value, value, value};
  }
  if (!(m.scored > 0)) return {0, -INFINITY, INFINITY};
  const double low = limit(m.log_ratio_min, -bound, bound), high = limit(m.log_ratio_max, -bound, bound);
  if (rejection.estimator == Estimator::kK1) return {low + high > 0 ? -high : -low, -low, -high};
  double largest = m.binary_kl_max;
  if (rejection.estimator == Estimator::kK2) {
    largest = 0.5 * fmax(low * low, high * high);
  } else if (rejection.estimator == Estimator::kK3) {  // convex in the log ratio
    largest = fmax(k3_of(low), k3_of(high));
  }
  return {largest, largest, 0};
}

// A row's weight, where it has one, and whether a rejection drops it.
template <typename T>
struct Verdict {
  T ratio = 1;   // before its bounds, where weights are per row
  T weight = 1;  // of every token, where weights are per row or none
  bool is_dropped = false;
};

template <typename T>
GRPO_HD Verdict<T> judge(const CorrectionPlan& plan, const Mismatch& m) {
  const CorrectionSettings& settings = plan.settings;
  Verdict<T> verdict;
  if (settings.weighs_rows()) {
    const bool is_mean = settings.weights == WeightLevel::kGeometric;
    const double log_ratio = is_mean ? m.log_ratio / at_least_one(m.tokens) : m.log_ratio;
    verdict.ratio = static_cast<T>(exp(limit(log_ratio, -settings.bound, settings.bound)));
    const T low = static_cast<T>(settings.low), high = static_cast<T>(settings.high);
    const bool is_outside = verdict.ratio < low || verdict.ratio > high;
    verdict.weight = verdict.ratio;
    if (is_outside) verdict.weight = settings.masks ? T{0} : verdict.ratio < low ? low : high;
  }
  for (int i = 0; i < plan.count; ++i) {
    if (plan.rejections[i].level == Level::kToken) continue;
    const RowStatistic statistic = row_statistic(plan.rejections[i], m, settings.bound);
    const bool is_outside = statistic.largest > plan.rejections[i].high || statistic.smallest < plan.rejections[i].low;
    verdict.is_dropped = verdict.is_dropped || (m.tokens > 0 && is_outside);
  }
  return verdict;
}

// Writes the columns of a row that come from its weights and its mismatch.
template <typename T>
GRPO_HD void write_row(const CorrectionPlan& plan, const Mismatch& m, const Verdict<T>& verdict,
                       const WeightTotals& weights, double* to) {
  const CorrectionSettings& settings = plan.settings;
  const double size = at_least_one(m.tokens), scored = at_least_one(m.scored);
  RowRecord r;
  r.rows = 1;
  r.active_rows = m.tokens > 0;
  r.tokens = m.tokens;
  r.scored_tokens = m.scored;
  r.kept_tokens = weights.kept;
  r.dropped_rows = weights.kept < m.tokens;
  r.weight_sum = weights.weight;
  r.weight_square_sum = weights.weight_square;
  r.outside_tokens = weights.outside;
  r.high_ratios = weights.high;
  r.low_ratios = weights.low;
  double raw_mean = 1;
  if (settings.weighs_rows()) {
    r.high_ratios = weights.high > 0;
    r.low_ratios = weights.low > 0;
    raw_mean = static_cast<double>(verdict.ratio);
  } else if (settings.weights == WeightLevel::kToken) {
    raw_mean = (m.ratio + (m.tokens - m.scored)) / size;
  }
  r.log_ratio_sum = m.log_ratio;
  r.gap_sum = m.gap;
  r.k3_sum = m.k3;
  r.ratio_sum = m.ratio;
  r.ratio_square_sum = m.ratio_square;
  r.m2_sum = m.m2;
  r.m2_dropped_tokens = weights.m2_dropped;
  r.log_ratio_min = m.log_ratio_min;
  r.log_ratio_max = m.log_ratio_max;
  if (m.tokens > 0) {
    const double mean = weights.weight / size;
    const double old = -m.old_logprob / scored, sampling = -m.sampling_logprob / scored, gap = old - sampling;
    r.row_weight_sum = r.row_weight_min = r.row_weight_max = mean;
    r.row_weight_square_sum = mean * mean;
    r.high_rows = raw_mean > settings.high;
    r.low_rows = raw_mean < settings.low_mark;
    r.weight_min = weights.weight_min;
    r.weight_max = weights.weight_max;
    r.product_square_sum = exp(2 * limit(m.log_ratio, -settings.bound, settings.bound));
    r.log_product_min = r.log_product_max = m.log_ratio;
    r.old_perplexity_sum = exp(old);
    r.old_log_perplexity_sum = old;
    r.sampling_perplexity_sum = exp(sampling);
    r.sampling_log_perplexity_sum = sampling;
    r.log_perplexity_gap_sum = fabs(gap);
    r.log_perplexity_gap_min = r.log_perplexity_gap_max = gap;
    r.perplexity_ratio_sum = exp(gap);
  }
  r.write(to, plan.count);
}

// Writes the columns of one rejection.
GRPO_HD void write_rejection(const CorrectionPlan& plan, int index, const Mismatch& m, const EstimateTotals& tokens,
                             double* to) {
  const Rejection& rejection = plan.rejections[index];
  const double size = at_least_one(m.tokens);
  RejectionRecord r;
  double value;
  if (rejection.level == Level::kToken) {
    value = tokens.sum / size;
    r.sum = tokens.sum;
    r.clamped_sum = tokens.clamped;
    r.clamped_square_sum = tokens.clamped_square;
    r.high = tokens.high;
    r.low = tokens.low;
    r.masked_tokens = tokens.high + tokens.low;
    r.high_rows = m.tokens > 0 && value > rejection.high;
    r.low_rows = m.tokens > 0 && value < rejection.low;
    r.min = tokens.min;
    r.max = tokens.max;
  } else {
    const RowStatistic statistic = row_statistic(rejection, m, plan.settings.bound);
    value = statistic.value;
    const double clamped = limit(value, rejection.low, rejection.high);
    r.sum = m.tokens * value;
    r.clamped_sum = m.tokens * clamped;
    r.clamped_square_sum = m.tokens * clamped * clamped;
    r.high = r.high_rows = m.tokens > 0 && statistic.largest > rejection.high;
    r.low = r.low_rows = m.tokens > 0 && statistic.smallest < rejection.low;
    r.masked_tokens = r.high > 0 || r.low > 0 ? m.tokens : 0;
    if (m.tokens > 0) r.min = r.max = value;
  }
  r.masked_rows = r.masked_tokens > 0;
  if (m.tokens > 0) {
    r.row_sum = r.row_min = r.row_max = value;
    r.row_square_sum = value * value;
  }
  r.write(to, index, plan.count);
}

// Writes the record of a row.
template <typename T>
GRPO_HD void write_record(const CorrectionPlan& plan, const Mismatch& mismatch, const Verdict<T>& verdict,
                          const Judged& judged, double* to) {
  write_row(plan, mismatch, verdict, judged.weights, to);
  for (int i = 0; i < plan.count; ++i) {
    if (plan.rejections[i].level != Level::kToken) write_rejection(plan, i, mismatch, EstimateTotals(), to);
  }
  for (int e = 0; e < kEstimators; ++e) {
    const int index = plan.token_rejection(static_cast<Estimator>(e));
    if (index >= 0) write_rejection(plan, index, mismatch, judged.estimates[e], to);
  }
}

}  // namespace grpo_kernels
