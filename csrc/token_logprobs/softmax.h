#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"

// From a row of logits to the log-probability of one of them, the row's entropy, and the gradient of both. `Math` has
// the functions of the vectors V of lanes.
namespace grpo_kernels {

constexpr int64_t kIgnoredTarget = -100;
// exp of this is 0 in every type; unlike -inf, its product with 0 is 0.
constexpr double kNoExponent = -10000;

template <typename T>
struct Lowest;
template <>
struct Lowest<float> {
  static constexpr float kValue = -3.402823466e+38f;
};
template <>
struct Lowest<double> {
  static constexpr double kValue = -1.7976931348623157e+308;
};

// z = softcap(logit_scale * x) / temperature.
template <typename T>
struct LogitMap {
  T inner;  // with a softcap z = outer * tanh(inner * x), else z = outer * x
  T outer;
  bool capped;
};

// softcap 0: none. A temperature that is not positive and finite makes every logit NaN.
template <typename T>
GRPO_HD LogitMap<T> make_logit_map(double temperature, double softcap, double logit_scale) {
  const double divisor = temperature > 0 && temperature < INFINITY ? temperature : NAN;
  const bool capped = softcap > 0;
  return {static_cast<T>(capped ? logit_scale / softcap : 0),
          static_cast<T>((capped ? softcap : logit_scale) / divisor), capped};
}

// A logit and its derivative. A softcap leaves infinite logits as they are: -inf masks, and +inf is an overflow that
// should show.
template <typename V>
struct MappedLogit {
  V z, slope;
};

template <typename Math, bool kCapped, typename V, typename T>
GRPO_HD MappedLogit<V> map_logit(const LogitMap<T>& map, const V& x) {
  if constexpr (kCapped) {
    const auto capped = Math::tanh_and_slope(x * map.inner);
    return {Math::infinite_or(x, capped.tanh * map.outer), capped.slope * (map.inner * map.outer)};
  } else {
    return {x * map.outer, Math::every(map.outer)};
  }
}

// Sums over a part of a row's logits, relative to the largest of them. The sum of exponentials is ties + below; apart,
// because log1p(ties - 1 + below) is accurate where the sum is nearly 1.
struct RowSoftmax {
  double top;
  double ties = 0;    // logits equal to top
  double below = 0;   // sum of exp(z - top) over the others
  double spread = 0;  // sum of exp(z - top) (top - z)

  template <typename Math>
  GRPO_HD void raise(double new_top) {
    if (!(new_top > top)) return;
    const double distance = top - new_top;
    const double gap = distance > kNoExponent ? distance : kNoExponent;
    const double decay = Math::exp(gap), sum = ties + below;
    spread = (spread - gap * sum) * decay;
    below = sum * decay;
    ties = 0;
    top = new_top;
  }
};

// The terms of a vector of logits in those sums.
template <typename V>
struct SoftmaxTerms {
  V tie, below, spread;
};

template <typename Math, bool kSpread, typename V, typename T>
GRPO_HD SoftmaxTerms<V> softmax_terms(const V& z, T top) {
  const V distance = z - top;
  SoftmaxTerms<V> terms;
  terms.tie = Math::one_where_equal(z, top);
  terms.below = Math::zero_where_equal(z, top, Math::exp(distance));
  if constexpr (kSpread) terms.spread = terms.below * Math::at_least(distance, T(kNoExponent));
  return terms;
}

struct RowResult {
  double logprob, entropy;
  double normalizer;  // log-sum-exp of z
};

// NaN for rows with +inf or NaN, or with -inf alone.
GRPO_HD RowResult finish_row(const RowSoftmax& row, double target_z) {
  const double top = row.top < INFINITY ? row.top : NAN;
  const double others = (row.ties - 1) + row.below;
  const double log_sum = isnan(top) ? NAN : log1p(others);
  RowResult result;
  result.logprob = (target_z - top) - log_sum;
  result.entropy = log_sum + row.spread / (1 + others);
  result.normalizer = top + log_sum;
  // rounding in the softcap may put a logit just above the largest
  if (result.logprob > 0) result.logprob = 0;
  if (result.entropy < 0) result.entropy = 0;
  return result;
}

// The values of a row that the gradient of its logits depends on. The normalizer is split in two, because rounding it
// to one float would limit the accuracy of the gradient.
template <typename T>
struct RowGradient {
  T high, low;
  T for_logprob, for_entropy, entropy;

  GRPO_HD RowGradient(double normalizer, double upstream_logprob, double upstream_entropy, double row_entropy)
      : high(static_cast<T>(normalizer)),
        low(static_cast<T>(normalizer - static_cast<double>(high))),
        for_logprob(static_cast<T>(upstream_logprob)),
        for_entropy(static_cast<T>(upstream_entropy)),
        entropy(static_cast<T>(row_entropy)) {}

  // Whether the gradient is 0, whatever the row holds.
  GRPO_HD bool is_zero() const { return for_logprob == 0 && for_entropy == 0; }
};

// dL/dz of a logit that is not the target: -p (g + h (log p + H)).
template <typename Math, bool kEntropy, typename V, typename T>
GRPO_HD V other_gradient(const RowGradient<T>& row, const V& z) {
  const V log_p = (z - row.high) - row.low;
  const V p = Math::exp(log_p);
  if constexpr (!kEntropy) return p * -row.for_logprob;
  return -p * ((Math::at_least(log_p, T(kNoExponent)) + row.entropy) * row.for_entropy + row.for_logprob);
}

// dL/dz of the target: g (1 - p) in place of -g p, without cancellation.
template <typename T>
GRPO_HD double target_gradient(const RowGradient<T>& row, double z) {
  const double log_p = (z - static_cast<double>(row.high)) - static_cast<double>(row.low);
  const double surprise = (log_p > kNoExponent ? log_p : kNoExponent) + static_cast<double>(row.entropy);
  const double from_entropy = row.for_entropy == 0 ? 0 : static_cast<double>(row.for_entropy) * exp(log_p) * surprise;
  return static_cast<double>(row.for_logprob) * -expm1(log_p) - from_entropy;
}

// Row r of the logits starts at (r / inner) * outer_stride + (r % inner) * inner_stride; columns are adjacent.
struct LogitLayout {
  int64_t rows, columns, inner, outer_stride, inner_stride;

  GRPO_HD int64_t offset(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

struct LogitScaling {
  double temperature, softcap, logit_scale;  // softcap 0: none
};

}  // namespace grpo_kernels
