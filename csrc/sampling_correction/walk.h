#pragma once

#include "sampling_correction/batch.h"

// From the arrays to the sums of a row, and from these to weights and mask, one step at a time. A step is one token for
// a CUDA thread and two vectors of tokens for a CPU core.
namespace grpo_kernels {

template <typename Math>
struct StepLanes {
#define GRPO_SUM(name) typename Math::Value name{};
#define GRPO_COUNT(name) typename Math::Counter name{};
#define GRPO_MINIMUM(name) typename Math::Value name = Math::all(INFINITY);
#define GRPO_MAXIMUM(name) typename Math::Value name = Math::all(-INFINITY);
  struct Mismatches {
    GRPO_MISMATCH_SUMS(GRPO_SUM, GRPO_COUNT)
    GRPO_MISMATCH_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
  };
  struct Weights {
    GRPO_WEIGHT_SUMS(GRPO_SUM, GRPO_COUNT)
    GRPO_WEIGHT_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
  };
  struct Estimates {
    GRPO_ESTIMATE_SUMS(GRPO_SUM, GRPO_COUNT)
    GRPO_ESTIMATE_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
  };
#undef GRPO_SUM
#undef GRPO_COUNT
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
};

// A token's log-probs, 0 where it is not scored.
template <typename Math>
struct Scored {
  using V = typename Math::Value;
  typename Math::Flag is_valid, is_scored;
  V old_logprob, sampling_logprob, log_ratio, limited;

  template <typename T>
  GRPO_HD static Scored load(const CorrectionTokens<T>& in, T bound, int64_t k, int64_t left) {
    const V zero = Math::all(0);
    Scored token;
    token.is_valid = Math::load_flags(offset_or_null(in.mask, k), left);
    const V old_logprob = Math::load(in.old_logprobs + k, left);
    const V sampling_logprob = Math::load(in.sampling_logprobs + k, left), log_ratio = old_logprob - sampling_logprob;
    token.is_scored = token.is_valid & (log_ratio == log_ratio);
    token.old_logprob = Math::select(token.is_scored, old_logprob, zero);
    token.sampling_logprob = Math::select(token.is_scored, sampling_logprob, zero);
    token.log_ratio = Math::select(token.is_scored, log_ratio, zero);
    token.limited = clamp_to<Math>(token.log_ratio, -bound, bound);
    return token;
  }
};

// The larger divergence between the two outcomes "this token" and "another", whose probabilities stay 1e-6 from 0
// and 1.
template <typename Math>
GRPO_HD typename Math::Value binary_kl(const Scored<Math>& token) {
  using V = typename Math::Value;
  using T = typename Math::Scalar;
  constexpr T kLeast = T(1e-6), kMost = T(1 - 1e-6);
  constexpr T kLogLeast = T(-13.815510557964274), kLogMost = T(-1.0000005000003334e-06);
  const V old_log = clamp_to<Math>(token.old_logprob, kLogLeast, kLogMost);
  const V sampling_log = clamp_to<Math>(token.sampling_logprob, kLogLeast, kLogMost);
  const V old_other = clamp_to<Math>(-Math::expm1(token.old_logprob), kLeast, kMost);
  const V sampling_other = clamp_to<Math>(-Math::expm1(token.sampling_logprob), kLeast, kMost);
  const V by_token = old_log - sampling_log, by_others = Math::log(old_other) - Math::log(sampling_other);
  const V from_old = Math::exp(old_log) * by_token + old_other * by_others;
  const V from_sampling = -(Math::exp(sampling_log) * by_token + sampling_other * by_others);
  return Math::select(token.is_scored, Math::select(from_old > from_sampling, from_old, from_sampling), Math::all(0));
}

template <typename Math>
struct CorrectionWalk {
  using M = Math;
  using T = typename Math::Scalar;
  using V = typename Math::Value;
  using Flag = typename Math::Flag;

  // Bounds of the rejection of tokens by an estimator, if there is one.
  struct TokenBounds {
    T low, high;
    bool is_used;
  };

  // Copies: references would be read again after every store.
  const CorrectionTokens<T> in;
  const T bound, low, high, low_mark;
  const bool weighs_tokens, masks, needs_binary_kl;
  TokenBounds bounds[kEstimators];

  GRPO_HD CorrectionWalk(const CorrectionTokens<T>& tokens, const CorrectionPlan& plan)
      : in(tokens),
        bound(static_cast<T>(plan.settings.bound)),
        low(static_cast<T>(plan.settings.low)),
        high(static_cast<T>(plan.settings.high)),
        low_mark(static_cast<T>(plan.settings.low_mark)),
        weighs_tokens(plan.settings.weights == WeightLevel::kToken),
        masks(plan.settings.masks),
        needs_binary_kl(plan.needs_binary_kl()) {
    for (int e = 0; e < kEstimators; ++e) {
      const int index = plan.token_rejection(static_cast<Estimator>(e));
      bounds[e] = {0, 0, index >= 0};
      if (index < 0) continue;
      bounds[e].low = static_cast<T>(plan.rejections[index].low);
      bounds[e].high = static_cast<T>(plan.rejections[index].high);
    }
  }

  // The first pass: sums over all tokens.
  GRPO_HD void measure(int64_t k, int64_t left, typename StepLanes<M>::Mismatches& sums) const {
    const V zero = M::all(0);
    const Scored<M> token = Scored<M>::load(in, bound, k, left);
    const V negative = -token.log_ratio;
    const V excess = M::expm1(token.limited);
    const V ratio = M::select(token.is_scored, excess + M::all(1), zero);
    sums.log_ratio += token.log_ratio;
    sums.gap += M::select(token.log_ratio < zero, negative, token.log_ratio);
    sums.limited += token.limited;
    sums.k2 += M::all(T(0.5)) * (token.limited * token.limited);
    sums.k3 += excess - token.limited;
    sums.ratio += ratio;
    sums.ratio_square += ratio * ratio;
    sums.old_logprob += token.old_logprob;
    sums.sampling_logprob += token.sampling_logprob;
    sums.m2 += token.log_ratio * token.log_ratio;
    M::count(sums.tokens, token.is_valid);
    M::count(sums.scored, token.is_scored);
    // lower and higher ignore a NaN in their first argument
    sums.log_ratio_min = M::lower(M::select(token.is_scored, token.log_ratio, M::all(INFINITY)), sums.log_ratio_min);
    sums.log_ratio_max = M::higher(M::select(token.is_scored, token.log_ratio, M::all(-INFINITY)), sums.log_ratio_max);
    if (needs_binary_kl) {
      const V divergence = binary_kl<M>(token);
      sums.binary_kl += divergence;
      sums.binary_kl_max = M::higher(M::select(token.is_scored, divergence, M::all(-INFINITY)), sums.binary_kl_max);
    }
  }

  GRPO_HD V estimate(Estimator estimator, const Scored<M>& token) const {
    switch (estimator) {
      case Estimator::kK1:
        return -token.limited;
      case Estimator::kK2:
        return M::all(T(0.5)) * (token.limited * token.limited);
      case Estimator::kK3:
        return M::expm1(token.limited) - token.limited;
      default:
        return binary_kl<M>(token);
    }
  }

  // Sums the estimates of the tokens, and returns which of them are outside of the rejection's bounds.
  GRPO_HD Flag reject(Estimator estimator, const TokenBounds& rejection, const Scored<M>& token,
                      typename StepLanes<M>::Estimates& sums) const {
    const V zero = M::all(0), value = estimate(estimator, token);
    const Flag above = token.is_scored & (value > M::all(rejection.high));
    const Flag below = token.is_scored & (value < M::all(rejection.low));
    const V clamped = M::select(token.is_scored, clamp_to<M>(value, rejection.low, rejection.high), zero);
    sums.sum += value;
    sums.clamped += clamped;
    sums.clamped_square += clamped * clamped;
    M::count(sums.high, above);
    M::count(sums.low, below);
    sums.min = M::lower(M::select(token.is_scored, value, M::all(INFINITY)), sums.min);
    sums.max = M::higher(M::select(token.is_scored, value, M::all(-INFINITY)), sums.max);
    return above | below;
  }

  // The second pass: writes weight and mask of the tokens.
  GRPO_HD void apply(int64_t k, int64_t left, const Verdict<T>& verdict, typename StepLanes<M>::Weights& sums,
                     typename StepLanes<M>::Estimates* estimates) const {
    const V zero = M::all(0);
    const Scored<M> token = Scored<M>::load(in, bound, k, left);
    Flag kept = verdict.is_dropped ? M::none() : token.is_valid;
    for (int e = 0; e < kEstimators; ++e) {
      if (!bounds[e].is_used) continue;
      kept = kept & M::negate(reject(static_cast<Estimator>(e), bounds[e], token, estimates[e]));
    }
    const Flag is_far = token.is_scored & (token.log_ratio * token.log_ratio > M::all(in.m2_limit));
    M::count(sums.m2_dropped, is_far);
    kept = kept & M::negate(is_far);

    V raw = M::all(verdict.ratio), weight = M::all(verdict.weight);
    if (weighs_tokens) raw = M::exp(token.limited);
    const Flag is_high = raw > M::all(high), is_low = raw < M::all(low);
    if (weighs_tokens) weight = masks ? M::select(is_high | is_low, zero, raw) : clamp_to<M>(raw, low, high);
    M::count(sums.high, token.is_valid & is_high);
    M::count(sums.low, token.is_valid & (raw < M::all(low_mark)));
    M::count(sums.outside, token.is_valid & (is_high | is_low));
    M::count(sums.kept, kept);
    const V counted = M::select(token.is_valid, weight, zero);
    sums.weight += counted;
    sums.weight_square += counted * counted;
    sums.weight_min = M::lower(M::select(token.is_valid, weight, M::all(INFINITY)), sums.weight_min);
    sums.weight_max = M::higher(M::select(token.is_valid, weight, M::all(-INFINITY)), sums.weight_max);
    M::store(in.weights + k, left, M::select(kept, weight, zero));
    M::store_flags(in.kept + k, left, kept);
  }
};

}  // namespace grpo_kernels
