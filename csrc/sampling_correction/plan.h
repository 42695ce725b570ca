#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"
#include "common/settings.h"

// The settings of a sampling correction, and the record that is measured of every row.
namespace grpo_kernels {

// In the order of the names in grpo_kernels/ops/sampling_correction/config.py; tests/test_codes.py compares them.
GRPO_CODES(WeightLevel, int64_t, kNone, kToken, kSequence, kGeometric);
GRPO_CODES(Level, int64_t, kToken, kSeqSum, kSeqMean, kSeqMax);
GRPO_CODES(Estimator, int64_t, kK1, kK2, kK3, kBinaryKl);
constexpr int kLevels = 4, kEstimators = 4;
constexpr int kMaxRejections = kLevels * kEstimators;  // each statistic at most once

// clang-format off: it would nest the entries
#define GRPO_CORRECTION_SETTINGS(MODE, COEFFICIENT) \
  MODE(WeightLevel, weights) MODE(bool, masks)      \
  COEFFICIENT(low) COEFFICIENT(high) COEFFICIENT(low_mark) COEFFICIENT(bound)
// clang-format on

struct CorrectionSettings {
  GRPO_SETTINGS(CorrectionSettings, GRPO_CORRECTION_SETTINGS)

  GRPO_HD bool weighs_rows() const { return weights == WeightLevel::kSequence || weights == WeightLevel::kGeometric; }
};

struct Rejection {
  Level level;
  Estimator estimator;
  double low, high;
};

struct CorrectionPlan {
  CorrectionSettings settings;
  int count;
  Rejection rejections[kMaxRejections];

  // Index of the rejection of tokens by this estimator, or -1.
  GRPO_HD int token_rejection(Estimator estimator) const {
    for (int i = 0; i < count; ++i) {
      if (rejections[i].level == Level::kToken && rejections[i].estimator == estimator) return i;
    }
    return -1;
  }
  GRPO_HD bool needs_binary_kl() const {
    for (int i = 0; i < count; ++i) {
      if (rejections[i].estimator == Estimator::kBinaryKl) return true;
    }
    return false;
  }
};

// The measurements of a row, in the order of the table's columns: sums, then minima, then maxima, each followed by
// those of every rejection. Python adds the rows up.
// clang-format off
#define GRPO_ROW_SUMS(FIELD)                                                                        \
  FIELD(rows) FIELD(active_rows) FIELD(tokens) FIELD(scored_tokens) FIELD(kept_tokens)              \
  FIELD(dropped_rows) FIELD(weight_sum) FIELD(weight_square_sum) FIELD(row_weight_sum)              \
  FIELD(row_weight_square_sum) FIELD(high_ratios) FIELD(low_ratios) FIELD(outside_tokens)           \
  FIELD(high_rows) FIELD(low_rows) FIELD(log_ratio_sum) FIELD(gap_sum) FIELD(k3_sum)                \
  FIELD(ratio_sum) FIELD(ratio_square_sum) FIELD(product_square_sum) FIELD(old_perplexity_sum)      \
  FIELD(old_log_perplexity_sum) FIELD(sampling_perplexity_sum) FIELD(sampling_log_perplexity_sum)   \
  FIELD(log_perplexity_gap_sum) FIELD(perplexity_ratio_sum) FIELD(m2_sum) FIELD(m2_dropped_tokens)
#define GRPO_ROW_MINIMA(FIELD) \
  FIELD(weight_min) FIELD(row_weight_min) FIELD(log_ratio_min) FIELD(log_product_min) FIELD(log_perplexity_gap_min)
#define GRPO_ROW_MAXIMA(FIELD) \
  FIELD(weight_max) FIELD(row_weight_max) FIELD(log_ratio_max) FIELD(log_product_max) FIELD(log_perplexity_gap_max)
#define GRPO_REJECTION_SUMS(FIELD)                                                             \
  FIELD(sum) FIELD(clamped_sum) FIELD(clamped_square_sum) FIELD(high) FIELD(low)               \
  FIELD(masked_tokens) FIELD(masked_rows) FIELD(row_sum) FIELD(row_square_sum) FIELD(high_rows) FIELD(low_rows)
#define GRPO_REJECTION_MINIMA(FIELD) FIELD(min) FIELD(row_min)
#define GRPO_REJECTION_MAXIMA(FIELD) FIELD(max) FIELD(row_max)
// clang-format on
#define GRPO_COUNT_FIELD(name) +1
#define GRPO_FIELD_NAME(name) #name " "
constexpr int kRowSums = 0 GRPO_ROW_SUMS(GRPO_COUNT_FIELD), kRejectionSums = 0 GRPO_REJECTION_SUMS(GRPO_COUNT_FIELD);
constexpr int kRowExtremes = 0 GRPO_ROW_MINIMA(GRPO_COUNT_FIELD);
constexpr int kRejectionExtremes = 0 GRPO_REJECTION_MINIMA(GRPO_COUNT_FIELD);
constexpr const char* kRowNames =
    GRPO_ROW_SUMS(GRPO_FIELD_NAME) GRPO_ROW_MINIMA(GRPO_FIELD_NAME) GRPO_ROW_MAXIMA(GRPO_FIELD_NAME);
constexpr const char* kRejectionNames =
    GRPO_REJECTION_SUMS(GRPO_FIELD_NAME) GRPO_REJECTION_MINIMA(GRPO_FIELD_NAME) GRPO_REJECTION_MAXIMA(GRPO_FIELD_NAME);

GRPO_HD constexpr int table_columns(int rejections) {
  return kRowSums + 2 * kRowExtremes + rejections * (kRejectionSums + 2 * kRejectionExtremes);
}

struct RejectionRecord {
#define GRPO_SUM(name) double name = 0;
#define GRPO_MINIMUM(name) double name = INFINITY;
#define GRPO_MAXIMUM(name) double name = -INFINITY;
  GRPO_REJECTION_SUMS(GRPO_SUM)
  GRPO_REJECTION_MINIMA(GRPO_MINIMUM)
  GRPO_REJECTION_MAXIMA(GRPO_MAXIMUM)

  // Writes this record, number `index` of `count`, into the table's row.
  GRPO_HD void write(double* row, int index, int count) const {
    double* to = row + kRowSums + index * kRejectionSums;
#define GRPO_WRITE(name) *to++ = name;
    GRPO_REJECTION_SUMS(GRPO_WRITE)
    to = row + kRowSums + count * kRejectionSums + kRowExtremes + index * kRejectionExtremes;
    GRPO_REJECTION_MINIMA(GRPO_WRITE)
    to += kRowExtremes + (count - 1) * kRejectionExtremes;
    GRPO_REJECTION_MAXIMA(GRPO_WRITE)
  }
};

struct RowRecord {
  GRPO_ROW_SUMS(GRPO_SUM)
  GRPO_ROW_MINIMA(GRPO_MINIMUM)
  GRPO_ROW_MAXIMA(GRPO_MAXIMUM)

  GRPO_HD void write(double* row, int rejections) const {
    double* to = row;
    GRPO_ROW_SUMS(GRPO_WRITE)
    to += rejections * kRejectionSums;
    GRPO_ROW_MINIMA(GRPO_WRITE)
    to += rejections * kRejectionExtremes;
    GRPO_ROW_MAXIMA(GRPO_WRITE)
  }
#undef GRPO_SUM
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
#undef GRPO_WRITE
};

}  // namespace grpo_kernels
