#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"
#include "common/settings.h"

// From the rewards of one group (or subgroup) to the advantage of each of its rows. Statistics are computed
// in double and in two passes, which reproduces the float32 results of every peer to rounding.
namespace grpo_kernels {

// In the order of the names in grpo_kernels/ops/group_advantages/config.py; tests/test_codes.py compares them.
GRPO_CODES(Center, int64_t, kNone, kMean, kLeaveOneOut, kLength, kBaseline, kRunnerUp);
GRPO_CODES(Scale, int64_t, kNone, kStd, kBatchStd, kMean, kLeaveOneOutStd);
GRPO_CODES(Singleton, int64_t, kZero, kRaw, kParent);
GRPO_CODES(Combine, int64_t, kSumThenNormalize, kNormalizeThenSum);
GRPO_CODES(Whiten, int64_t, kNone, kRows, kTokens);
GRPO_CODES(Gain, int64_t, kNone, kNonzero);

// In the order of AdvantageConfig.settings.
#define GRPO_ADVANTAGE_SETTINGS(MODE, COEFFICIENT) \
  MODE(Center, center)                             \
  MODE(Scale, scale)                               \
  MODE(Singleton, singleton)                       \
  MODE(Combine, combine)                           \
  MODE(Whiten, whiten)                             \
  MODE(Gain, gain)                                 \
  COEFFICIENT(ddof)                                \
  COEFFICIENT(eps)                                 \
  COEFFICIENT(std_floor)                           \
  COEFFICIENT(shrinkage)                           \
  COEFFICIENT(clip)                                \
  COEFFICIENT(whiten_eps)

struct AdvantagePlan {
  GRPO_SETTINGS(AdvantagePlan, GRPO_ADVANTAGE_SETTINGS)

  GRPO_HD bool needs_parent() const { return singleton == Singleton::kParent || shrinkage > 0; }
  GRPO_HD bool needs_batch() const {
    return scale == Scale::kBatchStd || whiten != Whiten::kNone || gain != Gain::kNone;
  }
  // Whether the center is a statistic of the group, so that equal rewards have zero advantages.
  GRPO_HD bool is_group_centered() const { return center != Center::kNone && center != Center::kBaseline; }
};

// Statistics of a group; the second pass adds m2.
struct GroupStatistics {
  double count = 0;  // valid, scored rows
  double sum = 0;
  double low = INFINITY, high = -INFINITY;
  double second = -INFINITY;             // the second largest reward, for pass@k
  double length = 0, length_reward = 0;  // sums of length and length * reward
  double m2 = 0;                         // sum of squared deviations from the mean

  GRPO_HD void add(double reward, double row_length) {
    count += 1;
    sum += reward;
    low = reward < low ? reward : low;
    second = reward > high ? high : (reward > second ? reward : second);
    high = reward > high ? reward : high;
    length += row_length;
    length_reward += row_length * reward;
  }

  GRPO_HD void merge_first_pass(const GroupStatistics& other) {
    count += other.count;
    sum += other.sum;
    low = other.low < low ? other.low : low;
    const double lower_high = other.high < high ? other.high : high;
    const double higher_second = other.second > second ? other.second : second;
    second = lower_high > higher_second ? lower_high : higher_second;
    high = other.high > high ? other.high : high;
    length += other.length;
    length_reward += other.length_reward;
  }

  // Merges the statistics of both passes.
  GRPO_HD void merge(const GroupStatistics& other) {
    const double delta = other.mean() - mean();
    const double total = count + other.count;
    if (count > 0 && other.count > 0) m2 += delta * delta * count * (other.count / total);
    m2 += other.m2;
    merge_first_pass(other);
  }

  GRPO_HD bool all_equal() const { return !(low < high); }
  // Exact for equal rewards, where sum / count may be off by a rounding.
  GRPO_HD double mean() const { return all_equal() ? (count > 0 ? low : 0) : sum / count; }
  GRPO_HD double std(double ddof) const { return all_equal() || count <= ddof ? 0 : sqrt(m2 / (count - ddof)); }
  GRPO_HD double length_mean() const { return length > 0 ? length_reward / length : mean(); }
};

// NaN stays NaN, so that an infinite reward shows in the results.
GRPO_HD double at_least(double value, double floor) { return value < floor ? floor : value; }

// advantage = (reward - center) * factor for the rows of a live group, 0 for the rows of a degenerate one. Under
// Scale::kLeaveOneOutStd factor is the sum of squared deviations, from which each row subtracts its own.
struct RowMap {
  double mean = 0, std = 0;  // reported to the user
  double center = 0, factor = 0;
  bool live = false;
  double count = 0;
};

GRPO_HD RowMap map_singleton(const AdvantagePlan& plan, const GroupStatistics& own) {
  RowMap map;
  map.mean = own.mean();
  map.count = 1;
  map.live = plan.singleton == Singleton::kRaw;
  map.factor = plan.scale == Scale::kStd ? 1 / (1 + plan.eps) : 1;
  return map;
}

// `parent` has the statistics of the group that a subgroup belongs to; null without subgroups.
GRPO_HD RowMap map_rows(const AdvantagePlan& plan, const GroupStatistics& own, const GroupStatistics* parent) {
  RowMap map;
  if (own.count == 0) return map;
  const bool borrows = own.count == 1 && plan.singleton == Singleton::kParent && parent != nullptr && parent->count > 1;
  if (own.count == 1 && !borrows) return map_singleton(plan, own);

  GroupStatistics used = own;
  if (borrows) used = *parent;
  map.mean = used.mean();
  map.std = used.std(plan.ddof);
  bool is_flat = used.all_equal();
  if (plan.shrinkage > 0 && !borrows && parent != nullptr) {
    const double own_weight = own.count / (own.count + plan.shrinkage);
    map.mean = own_weight * map.mean + (1 - own_weight) * parent->mean();
    map.std = own_weight * map.std + (1 - own_weight) * parent->std(plan.ddof);
    is_flat = parent->all_equal();
  }
  map.count = used.count;
  map.center = map.mean;
  map.factor = 1;
  if (plan.center == Center::kLeaveOneOut) map.factor = used.count / (used.count - 1);
  if (plan.center == Center::kLength) map.center = used.length_mean();
  if (plan.center == Center::kRunnerUp) map.center = used.second;
  if (!plan.is_group_centered()) map.center = 0;
  map.live = !(is_flat && (plan.is_group_centered() || plan.scale == Scale::kStd));
  if (plan.scale == Scale::kStd) {
    map.factor /= at_least(map.std, plan.std_floor) + plan.eps;
  }
  if (plan.scale == Scale::kMean) {
    map.live = map.live && map.mean > 0;  // MaxRL divides by the success rate
    map.factor /= map.mean + plan.eps;
  }
  if (plan.scale == Scale::kLeaveOneOutStd) map.factor = used.m2;
  // a divisor of 0 needs eps = 0 and no spread, which carries no learning signal
  map.live = map.live && map.factor != INFINITY;
  return map;
}

// A row against the mean and the deviation of the others. Equal others have no deviation to divide by; differences of
// squares find them up to rounding.
GRPO_HD double against_others(const AdvantagePlan& plan, const RowMap& map, double centered) {
  const double others = map.count - 1, stretch = map.count / others;
  const double squares = map.factor - centered * centered * stretch;
  const bool has_deviation = others > plan.ddof && squares > 1e-12 * map.factor;
  const double std = has_deviation ? sqrt(squares / (others - plan.ddof)) : 0;
  return centered * stretch / (has_deviation ? at_least(std, plan.std_floor) + plan.eps : 1);
}

// The advantage of a row, except under Scale::kLeaveOneOutStd.
GRPO_HD double linear_advantage(const AdvantagePlan& plan, const RowMap& map, double reward, double baseline) {
  const double centered = reward - (plan.center == Center::kBaseline ? baseline : map.center);
  // only the best row is above the runner-up, and none is in a tie; a maximum, because a branch on the sign would be
  // mispredicted
  const double least = plan.center == Center::kRunnerUp ? 0 : -INFINITY;
  return map.live ? (centered < least ? least : centered) * map.factor : 0;
}

GRPO_HD double row_advantage(const AdvantagePlan& plan, const RowMap& map, double reward, double baseline) {
  if (plan.scale == Scale::kLeaveOneOutStd && map.live && map.count > 1) {
    return against_others(plan, map, reward - map.center);
  }
  return linear_advantage(plan, map, reward, baseline);
}

// Weighted mean and squared deviations, merged without cancellation (Chan et al.).
struct Moments {
  double weight = 0, mean = 0, m2 = 0;

  GRPO_HD void merge(const Moments& other) {
    const double total = weight + other.weight;
    if (!(total > 0)) return;
    const double share = other.weight / total;
    const double delta = other.mean - mean;
    mean += delta * share;
    m2 += other.m2 + delta * delta * weight * share;
    weight = total;
  }
};

// The last step, over the whole batch: advantage = clip((advantage - shift) * factor) for live rows.
struct BatchMap {
  double shift = 0, factor = 1, std = 0;
};

GRPO_HD double batch_variance(const Moments& batch, double ddof) {
  return batch.weight > ddof && batch.m2 != 0 ? batch.m2 / (batch.weight - ddof) : 0;
}

GRPO_HD BatchMap map_batch(const AdvantagePlan& plan, const Moments& batch) {
  BatchMap map;
  const double variance = batch_variance(batch, plan.ddof);
  map.std = sqrt(variance);
  double divisor = 1;
  if (plan.scale == Scale::kBatchStd) divisor = at_least(map.std, plan.std_floor) + plan.eps;
  if (plan.whiten == Whiten::kRows) divisor = map.std + plan.whiten_eps;
  if (plan.whiten == Whiten::kTokens) divisor = sqrt(variance + plan.whiten_eps);
  if (plan.whiten != Whiten::kNone) map.shift = batch.mean;
  if (plan.gain == Gain::kNonzero) {  // the moments are of (reward != 0)
    const double nonzero = batch.mean * batch.weight;
    divisor = (nonzero > 1 ? nonzero : 1) / (batch.weight > 1 ? batch.weight : 1);
  }
  const bool divides_by_spread = plan.whiten != Whiten::kNone || plan.scale == Scale::kBatchStd;
  map.factor = divides_by_spread && variance == 0 ? 0 : 1 / divisor;
  return map;
}

// The weight of a scored row in the moments of the batch. In those of advantages a singleton has no leave-one-out mean
// and hence nothing to count, unless its raw reward stands in.
GRPO_HD double batch_weight(const AdvantagePlan& plan, double length, bool is_singleton, bool is_degenerate) {
  if (plan.whiten != Whiten::kNone && plan.center == Center::kLeaveOneOut && is_singleton && is_degenerate) return 0;
  return plan.whiten == Whiten::kTokens ? length : 1;
}

// The value whose moments over the batch map_batch needs.
GRPO_HD double batch_value(const AdvantagePlan& plan, double reward, double advantage) {
  if (plan.gain == Gain::kNonzero) return reward != 0;
  return plan.scale == Scale::kBatchStd ? reward : advantage;
}

GRPO_HD double clip_to(double value, double bound) { return value > bound ? bound : (value < -bound ? -bound : value); }

}  // namespace grpo_kernels
