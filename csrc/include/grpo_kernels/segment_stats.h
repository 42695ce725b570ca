#pragma once

#include <math.h>
#include <stdint.h>

#include "grpo_kernels/host_device.h"

// From the rewards of one segment (a group or a subgroup) to the advantage of each of its rows.
// All statistics are double: rewards are few, and two passes in double make every peer's float32 result
// reproducible.
namespace grpo_kernels {

// The order of names in grpo_kernels/config/advantages.py.
enum class Center : int64_t { kNone, kMean, kLeaveOneOut, kLength, kBaseline, kRunnerUp };
enum class Scale : int64_t { kNone, kStd, kBatchStd, kMean };
enum class Singleton : int64_t { kZero, kRaw, kParent };
enum class Combine : int64_t { kSumThenNormalize, kNormalizeThenSum };
enum class Whiten : int64_t { kNone, kRows, kTokens };
enum class Gain : int64_t { kNone, kNonzero };

constexpr int kModes = 6;
constexpr int kCoefficients = 6;

struct AdvantagePlan {
  Center center;
  Scale scale;
  Singleton singleton;
  Combine combine;
  Whiten whiten;
  Gain gain;
  double ddof, eps, std_floor, shrinkage, clip, whiten_eps;

  GRPO_HD bool needs_parent() const { return singleton == Singleton::kParent || shrinkage > 0; }
  GRPO_HD bool needs_batch() const {
    return scale == Scale::kBatchStd || whiten != Whiten::kNone || gain != Gain::kNone;
  }
  // Every row the same reward: nothing to learn, unless the centre does not come from the group.
  GRPO_HD bool group_centered() const { return center != Center::kNone && center != Center::kBaseline; }
};

inline AdvantagePlan make_plan(const int64_t* modes, const double* coefficients) {
  return {static_cast<Center>(modes[0]),
          static_cast<Scale>(modes[1]),
          static_cast<Singleton>(modes[2]),
          static_cast<Combine>(modes[3]),
          static_cast<Whiten>(modes[4]),
          static_cast<Gain>(modes[5]),
          coefficients[0],
          coefficients[1],
          coefficients[2],
          coefficients[3],
          coefficients[4],
          coefficients[5]};
}

// What one pass over a segment gathers, then what the second pass adds (m2).
struct SegmentStats {
  double count = 0;  // rows that are valid and scored
  double sum = 0;
  double low = INFINITY, high = -INFINITY;
  double second = -INFINITY;             // the largest but one, for pass@k
  double length = 0, length_reward = 0;  // sums of l and of l * r
  double m2 = 0;                         // sum of squared distances from the mean

  GRPO_HD void add(double reward, double row_length) {
    count += 1;
    sum += reward;
    low = reward < low ? reward : low;
    second = reward > high ? high : (reward > second ? reward : second);
    high = reward > high ? reward : high;
    length += row_length;
    length_reward += row_length * reward;
  }

  GRPO_HD void merge_first_pass(const SegmentStats& other) {
    count += other.count;
    sum += other.sum;
    low = other.low < low ? other.low : low;
    const double lower_top = other.high < high ? other.high : high;
    const double seconds = other.second > second ? other.second : second;
    second = lower_top > seconds ? lower_top : seconds;
    high = other.high > high ? other.high : high;
    length += other.length;
    length_reward += other.length_reward;
  }

  // After both passes: the statistics of two segments together.
  GRPO_HD void merge(const SegmentStats& other) {
    const double delta = other.mean() - mean();
    const double total = count + other.count;
    if (count > 0 && other.count > 0) m2 += delta * delta * count * (other.count / total);
    m2 += other.m2;
    merge_first_pass(other);
  }

  GRPO_HD bool all_equal() const { return !(low < high); }
  // Exact for equal rewards, where sum / count need not be.
  GRPO_HD double mean() const { return all_equal() ? (count > 0 ? low : 0) : sum / count; }
  GRPO_HD double std(double ddof) const { return all_equal() || count <= ddof ? 0 : sqrt(m2 / (count - ddof)); }
  GRPO_HD double length_mean() const { return length > 0 ? length_reward / length : mean(); }
};

// NaN stays NaN: an infinite reward is to be seen in the results.
GRPO_HD double at_least(double value, double floor) { return value < floor ? floor : value; }

// advantage = (reward - center) * factor for the rows of a live segment, 0 for those of a dead one.
struct RowMap {
  double mean = 0, std = 0;  // what is reported
  double center = 0, factor = 0;
  bool live = false;
};

GRPO_HD RowMap map_singleton(const AdvantagePlan& plan, const SegmentStats& own) {
  RowMap map;
  map.mean = own.mean();
  map.live = plan.singleton == Singleton::kRaw;
  map.factor = plan.scale == Scale::kStd ? 1 / (1 + plan.eps) : 1;
  return map;
}

// `parent` is the group that the subgroup belongs to; null where the segment is the group.
GRPO_HD RowMap map_rows(const AdvantagePlan& plan, const SegmentStats& own, const SegmentStats* parent) {
  RowMap map;
  if (own.count == 0) return map;
  const bool borrow = own.count == 1 && plan.singleton == Singleton::kParent && parent != nullptr && parent->count > 1;
  if (own.count == 1 && !borrow) return map_singleton(plan, own);

  SegmentStats used = own;
  if (borrow) used = *parent;
  map.mean = used.mean();
  map.std = used.std(plan.ddof);
  bool flat = used.all_equal();
  if (plan.shrinkage > 0 && !borrow && parent != nullptr) {
    const double keep = own.count / (own.count + plan.shrinkage);
    map.mean = keep * map.mean + (1 - keep) * parent->mean();
    map.std = keep * map.std + (1 - keep) * parent->std(plan.ddof);
    flat = parent->all_equal();
  }
  map.center = map.mean;
  map.factor = 1;
  if (plan.center == Center::kLeaveOneOut) map.factor = used.count / (used.count - 1);
  if (plan.center == Center::kLength) map.center = used.length_mean();
  if (plan.center == Center::kRunnerUp) map.center = used.second;
  if (!plan.group_centered()) map.center = 0;
  map.live = !(flat && (plan.group_centered() || plan.scale == Scale::kStd));
  if (plan.scale == Scale::kStd) {
    map.factor /= at_least(map.std, plan.std_floor) + plan.eps;
  }
  if (plan.scale == Scale::kMean) {
    map.live = map.live && map.mean > 0;  // MaxRL divides by a success rate; without successes there is none
    map.factor /= map.mean + plan.eps;
  }
  // A divisor of 0 can only come from eps = 0 and no spread: nothing to learn from either.
  map.live = map.live && map.factor != INFINITY;
  return map;
}

GRPO_HD double row_advantage(const AdvantagePlan& plan, const RowMap& map, double reward, double baseline) {
  const double distance = reward - (plan.center == Center::kBaseline ? baseline : map.center);
  // Only the best row is above the runner-up, and none is if two share the first place. As a maximum, since a
  // branch on the sign of a distance is one that no processor predicts.
  const double least = plan.center == Center::kRunnerUp ? 0 : -INFINITY;
  return map.live ? (distance < least ? least : distance) * map.factor : 0;
}

// Weighted mean and spread of a stream, mergeable in a fixed order without losing digits (Chan et al.).
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

// The last step, over the whole batch: advantage = clip((advantage - shift) * factor), for live rows.
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
  if (plan.gain == Gain::kNonzero) {  // the moments are those of (reward != 0)
    const double nonzero = batch.mean * batch.weight;
    divisor = (nonzero > 1 ? nonzero : 1) / (batch.weight > 1 ? batch.weight : 1);
  }
  const bool by_spread = plan.whiten != Whiten::kNone || plan.scale == Scale::kBatchStd;
  map.factor = by_spread && variance == 0 ? 0 : 1 / divisor;
  return map;
}

// What a scored row counts for in the batch's moments. A row alone in its group has no leave-one-out mean, so no
// advantage that could count; a raw reward in its place does.
GRPO_HD double batch_weight(const AdvantagePlan& plan, double length, bool alone, bool degenerate) {
  if (plan.center == Center::kLeaveOneOut && alone && degenerate) return 0;
  return plan.whiten == Whiten::kTokens ? length : 1;
}

// The value whose batch moments map_batch needs.
GRPO_HD double batch_value(const AdvantagePlan& plan, double reward, double advantage) {
  if (plan.gain == Gain::kNonzero) return reward != 0;
  return plan.scale == Scale::kBatchStd ? reward : advantage;
}

GRPO_HD double clip_to(double value, double bound) { return value > bound ? bound : (value < -bound ? -bound : value); }

}  // namespace grpo_kernels
