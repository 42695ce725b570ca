#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"
#include "common/ranged_moments.h"
#include "common/settings.h"

// Cuts a row of tokens into segments that share an advantage (GROUP-PPO's Algorithm 2), and computes the advantages of
// segments, in walks along the row. Everything is float64, except for the weights of tokens on the CPU.
namespace grpo_kernels {

// In the order of the names in grpo_kernels/ops/endpoint_segments/config.py; tests/test_codes.py compares them.
GRPO_CODES(SegmentRule, int, kBounded, kLiteral);
GRPO_CODES(SegmentProxy, int, kCoherent, kUncorrelated);
GRPO_CODES(SegmentCredit, int, kEndpoint, kBroadcast);
GRPO_CODES(SegmentNorm, int, kNone, kBatch, kPrompt);

constexpr double kMaxLogRatio = 20;

// In the order of SegmentConfig.settings.
#define GRPO_SEGMENT_SETTINGS(MODE, COEFFICIENT) \
  MODE(SegmentRule, rule)                        \
  MODE(SegmentProxy, proxy)                      \
  MODE(SegmentCredit, credit)                    \
  MODE(SegmentNorm, norm)                        \
  MODE(int64_t, max_size)                        \
  COEFFICIENT(group_epsilon)                     \
  COEFFICIENT(gamma)                             \
  COEFFICIENT(lam)

struct SegmentSettings {
  GRPO_SETTINGS(SegmentSettings, GRPO_SEGMENT_SETTINGS)
};

// The tokens of a row. Without values every token has the value `baseline`.
template <typename T>
struct SegmentRow {
  const T* rewards;
  const T* values;
  double baseline;
  const bool* mask;
  int64_t length;

  GRPO_HD double value(int64_t t) const { return values == nullptr ? baseline : static_cast<double>(values[t]); }
};

struct TokenSums {
  int64_t tokens = 0;
  double squares = 0;  // of the tokens' advantages; not finite if one of them is not
};

// Lambda-advantages of the tokens, from the last to the first, as if masked tokens were not there. Calls visit(t,
// advantage, return), also for masked tokens, with 0.
template <typename T, typename Visit>
GRPO_HD TokenSums token_advantages(const SegmentSettings& settings, const SegmentRow<T>& row, Visit visit) {
  double advantage = 0, next_value = 0;
  TokenSums sums;
  for (int64_t t = row.length - 1; t >= 0; --t) {
    if (!row.mask[t]) {
      visit(t, 0.0, 0.0);
      continue;
    }
    const double value = row.value(t);
    advantage = static_cast<double>(row.rewards[t]) + settings.gamma * next_value - value +
                settings.gamma * settings.lam * advantage;
    next_value = value;
    visit(t, advantage, advantage + value);
    sums.squares += advantage * advantage;
    ++sums.tokens;
  }
  return sums;
}

struct Segment {
  double credit;    // rewards discounted to its first token; credit_segments replaces them by the advantage
  double discount;  // gamma to the power of its length
  double value;     // of its first token
  int64_t last;     // token
};

struct RowCuts {
  int32_t segments;
  double weights;  // sum over the tokens; not finite if one of them is not
};

// P and Q of GROUP-PPO's Algorithm 2: the terms of one token, or their sums over a segment.
struct VarianceTerms {
  double p, q;

  GRPO_HD VarianceTerms operator+(const VarianceTerms& other) const { return {p + other.p, q + other.q}; }
};

GRPO_HD VarianceTerms variance_terms(bool is_coherent, double advantage, double weight) {
  const double q = is_coherent ? weight : weight * weight;
  return {is_coherent ? q * advantage : q * advantage * advantage, q};
}

// The rule that ends a segment. Rows have fewer than 2^31 tokens.
struct CutRule {
  double tau, epsilon;
  int32_t max_size;

  GRPO_HD CutRule(const SegmentSettings& settings, double threshold)
      : tau(threshold),
        epsilon(settings.group_epsilon),
        max_size(settings.max_size < INT32_MAX ? static_cast<int32_t>(settings.max_size) : INT32_MAX) {}
};

// Variances of a segment's policy gradient, up to a common factor: with each token's own advantage (PPO), and with that
// of its last token for all (GRPO).
struct SegmentVariances {
  double ppo, grpo;

  GRPO_HD bool opens_next(const CutRule& rule) const { return grpo > rule.tau * ppo + rule.epsilon; }
  GRPO_HD bool is_reached(const CutRule& rule, int32_t length) const {
    return static_cast<double>(length) * rule.tau * (ppo + rule.epsilon) >= grpo;
  }
};

GRPO_HD SegmentVariances segment_variances(bool is_coherent, const VarianceTerms& sums, double last_advantage) {
  const double shared = sums.q * last_advantage;
  return {is_coherent ? sums.p * sums.p : sums.p, shared * (is_coherent ? shared : last_advantage)};
}

// The segment that is open between two tokens. If its length is 0, the next token begins one, whatever the sums are.
struct OpenSegment {
  VarianceTerms sums;
  int32_t length;

  // Adds a token; returns whether it is the first of a segment. The length is 0 afterwards if no other token may
  // follow.
  template <bool kIsBounded, bool kIsCoherent>
  GRPO_HD bool add(const CutRule& rule, double advantage, const VarianceTerms& own) {
    const VarianceTerms joint = sums + own;
    const SegmentVariances variances = segment_variances(kIsCoherent, joint, advantage);
    const bool is_first = length == 0 || (kIsBounded && variances.opens_next(rule));
    sums = is_first ? own : joint;
    length = is_first ? 1 : length + 1;
    const bool is_reached = !kIsBounded && length >= 2 && variances.is_reached(rule, length);
    if (is_reached || length == rule.max_size) length = 0;
    return is_first;
  }
};

// Cuts a row from left to right. `weights` stand in for the norms of the tokens' gradients.
template <bool kIsBounded, bool kIsCoherent, typename T>
GRPO_HD RowCuts cut_row(const SegmentSettings& settings, const SegmentRow<T>& row, const double* advantages,
                        const T* weights, double scale, double tau, int32_t* ids, Segment* segments) {
  const double inverse_scale = 1 / scale;
  const CutRule rule(settings, tau);
  OpenSegment open{{0, 0}, 0};
  double rewards = 0, discount = 1, value = 0;  // of the open segment
  RowCuts cuts{0, 0};
  const auto close = [&](int64_t last) {
    segments[cuts.segments++] = {rewards, discount, value, last};
    rewards = 0;
    discount = 1;
  };
  for (int64_t t = 0; t < row.length; ++t) {
    if (!row.mask[t]) {
      ids[t] = -1;
      if (open.length > 0) close(t - 1);
      open.length = 0;
      continue;
    }
    const double advantage = advantages[t] * inverse_scale;
    const VarianceTerms own = variance_terms(kIsCoherent, advantage, static_cast<double>(weights[t]));
    const bool was_open = open.length > 0;
    if (open.template add<kIsBounded, kIsCoherent>(rule, advantage, own)) {
      if (was_open) close(t - 1);
      value = row.value(t);
    }
    ids[t] = cuts.segments;
    cuts.weights += own.q;
    rewards += discount * static_cast<double>(row.rewards[t]);
    discount *= settings.gamma;
    if (open.length == 0) close(t);
  }
  if (open.length > 0) close(row.length - 1);
  return cuts;
}

// The normalisation of endpoints' advantages: 0 for a single endpoint, and where all are equal.
struct EndpointNorm {
  double mean = 0, factor = 1;

  EndpointNorm() = default;
  GRPO_HD EndpointNorm(const RangedMoments& moments, double epsilon) : mean(moments.mean), factor(0) {
    if (moments.differ()) factor = 1 / (sqrt(moments.variance()) + epsilon);
  }
  GRPO_HD double operator()(double x) const { return (x - mean) * factor; }
};

// Replaces the credits of a row's segments by their lambda-advantages, from the last to the first.
GRPO_HD RangedMoments credit_segments(const SegmentSettings& settings, Segment* segments, int32_t count) {
  double advantage = 0, next_value = 0;
  RangedMoments moments;
  for (int32_t j = count - 1; j >= 0; --j) {
    Segment& segment = segments[j];
    advantage =
        segment.credit + segment.discount * next_value - segment.value + segment.discount * settings.lam * advantage;
    next_value = segment.value;
    segment.credit = advantage;
    moments.add(advantage);
  }
  return moments;
}

}  // namespace grpo_kernels
