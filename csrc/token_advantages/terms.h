#pragma once

#include <math.h>
#include <stdint.h>

#include "common/affine_map.h"
#include "common/host_device.h"
#include "common/ranged_moments.h"
#include "common/settings.h"

// Lambda-returns of the tokens of a row, from the last to the first, in float64.
namespace grpo_kernels {

// In the order of the names in grpo_kernels/ops/token_advantages/config.py; tests/test_codes.py compares them.
GRPO_CODES(TokenWhiten, int, kNone, kTokens);

// In the order of TokenAdvantageConfig.settings.
#define GRPO_TOKEN_ADVANTAGE_SETTINGS(MODE, COEFFICIENT) \
  MODE(TokenWhiten, whiten)                              \
  MODE(bool, carry_rewards)                              \
  COEFFICIENT(gamma)                                     \
  COEFFICIENT(lam)                                       \
  COEFFICIENT(whiten_eps)

struct TokenAdvantageSettings {
  GRPO_SETTINGS(TokenAdvantageSettings, GRPO_TOKEN_ADVANTAGE_SETTINGS)
};

// The first token of a step passes gamma * ((1 - lam) * value + lam * return) to the step before it, as a map of what
// the step after passes to the token. A token that is not the first of its step passes its return.
GRPO_HD AffineMap step_map(const TokenAdvantageSettings& settings, double reward, double value) {
  const double factor = settings.gamma * settings.lam;
  return {factor, settings.gamma * (1 - settings.lam) * value + factor * reward};
}

// The reward of a token that does not count, for the last token before it that does. What is no number is padding.
template <typename T>
GRPO_HD double carried_reward(const TokenAdvantageSettings& settings, T reward) {
  return settings.carry_rewards && reward - reward == 0 ? static_cast<double>(reward) : 0;
}

// The normalisation over the batch: 0 for a single token, and where all are equal.
struct TokenNorm {
  double mean = 0, factor = 1;

  TokenNorm() = default;
  GRPO_HD TokenNorm(const TokenAdvantageSettings& settings, const RangedMoments& moments)
      : mean(moments.mean), factor(0) {
    if (moments.differ()) factor = 1 / sqrt(moments.variance() + settings.whiten_eps);
  }
  GRPO_HD double operator()(double x) const { return (x - mean) * factor; }
};

}  // namespace grpo_kernels
