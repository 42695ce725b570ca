#pragma once

#include "policy_loss/batch.h"

// From the arrays to the gradient and the sums, one step at a time. A step is one token for a CUDA thread and two
// vectors of tokens for a CPU core.
namespace grpo_kernels {

// Sums in the type of the terms, over few enough steps to be as accurate as a tree of additions.
template <typename Math>
struct StepSums {
#define GRPO_SUM(name) typename Math::Value name{};
#define GRPO_COUNT(name) typename Math::Counter name{};
  GRPO_POLICY_SUMS(GRPO_SUM, GRPO_COUNT)
#undef GRPO_SUM
#undef GRPO_COUNT
};

template <typename Math>
struct StepExtremes {
#define GRPO_MINIMUM(name) typename Math::Value name = Math::all(INFINITY);
#define GRPO_MAXIMUM(name) typename Math::Value name = Math::all(-INFINITY);
  GRPO_POLICY_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
};

template <typename Math, WalkKind kKind>
struct PolicyWalk {
  using M = Math;
  using T = typename Math::Scalar;
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  static constexpr bool kIsAny = kKind == WalkKind::kAny, kIsSequence = kKind == WalkKind::kPlainSequence;
  static constexpr bool kIsUnbiased = kKind == WalkKind::kUnbiasedClip, kIsCispo = kKind == WalkKind::kPlainCispo;
  static constexpr bool kIsClip = kKind == WalkKind::kPlainClip || kIsUnbiased || kIsSequence;
  static constexpr bool kIsToken = !kIsAny && !kIsSequence;

  const PolicyTokens<T> in;  // a copy: a reference would be read again after every store
  const PolicyPlan plan;
  const TermCoefficients<T> coefficients;
  const T policy_share, kl_share;
  StepSums<Math> sums;
  StepExtremes<Math> extremes;

  GRPO_HD PolicyWalk(const PolicyTokens<T>& tokens, const PolicyPlan& policy_plan)
      : PolicyWalk(tokens, policy_plan, TermCoefficients<T>(policy_plan)) {}

  GRPO_HD PolicyWalk(const PolicyTokens<T>& tokens, const PolicyPlan& policy_plan,
                     const TermCoefficients<T>& term_coefficients)
      : in(tokens),
        plan(policy_plan),
        coefficients(term_coefficients),
        policy_share(static_cast<T>(tokens.shares.policy)),
        kl_share(static_cast<T>(policy_plan.kl_coef * tokens.shares.kl)) {}

  // Repeat what kKind implies, so that the compiler drops the other branches.
  GRPO_HD bool has(const void* optional) const { return kIsAny && optional != nullptr; }
  GRPO_HD bool has_weights() const { return !kIsClip && !kIsCispo && in.is_weights != nullptr; }
  GRPO_HD Loss loss() const { return kIsClip ? Loss::kClip : (kIsCispo ? Loss::kCispo : plan.loss); }
  GRPO_HD Kl kl_kind() const { return kIsAny ? plan.kl : Kl::kK3; }
  GRPO_HD bool is_unbiased_kl() const { return kIsUnbiased || (kIsAny && plan.kl_unbiased); }
  GRPO_HD bool is_local_kl() const { return kIsAny && plan.kl_aggregation == Aggregation::kLocalTokenMean; }
  GRPO_HD bool is_token_ratio() const { return kIsToken || (kIsAny && plan.ratio == Ratio::kToken); }

  // Fills in the sums that follow from others.
  GRPO_HD void complete_sums() {
    if (!has(in.weights)) sums.kl_loss = sums.kl_sum;
    if (kIsClip) sums.clipped = sums.low_clipped + sums.high_clipped;
  }

  // 0 for tokens that are not valid, whatever they hold.
  GRPO_HD V load(const T* values, int64_t k, int64_t left, const Flag& is_valid) const {
    return M::select(is_valid, M::load(values + k, left), M::all(0));
  }

  // The importance weight of the policy term, and its metrics.
  GRPO_HD V importance_weight(int64_t k, int64_t left, const Flag& is_valid) {
    V weight = M::all(in.row_is_weight);
    if (has_weights()) {
      weight = load(in.is_weights, k, left, is_valid);
      add_is_weight(weight, is_valid);
    }
    // VESPO and GMPO have combined the tokens' weights into the row's
    const bool is_of_row = loss() == Loss::kVespo || loss() == Loss::kGeoMean;
    return is_of_row ? M::all(in.row_is_weight) : weight;
  }

  // NaN is no weight.
  GRPO_HD void add_is_weight(const V& weight, const Flag& is_valid) {
    const Flag is_number = is_valid & (weight == weight);
    const V number = M::select(is_number, weight, M::all(0));
    sums.is_sum += number;
    sums.is_square_sum += number * number;
    M::count(sums.is_count, is_number);
    extremes.is_min = M::lower(M::select(is_valid, weight, M::all(INFINITY)), extremes.is_min);
    extremes.is_max = M::higher(M::select(is_valid, weight, M::all(-INFINITY)), extremes.is_max);
  }

  GRPO_HD void add_entropy(int64_t k, int64_t left, const Flag& is_valid, const V& weight) {
    if (!has(in.entropy)) return;
    const V entropy = load(in.entropy, k, left, is_valid);
    sums.entropy_sum += entropy;
    const bool is_local = plan.entropy_aggregation == Aggregation::kLocalTokenMean;
    sums.entropy_loss += is_local ? entropy : entropy * weight;
  }

  // The valid tokens whose policy term counts; without a policy mask the caller knows their number.
  GRPO_HD Flag kept_flags(int64_t k, int64_t left, const Flag& is_valid) {
    if (!has(in.policy_mask)) return is_valid;
    const Flag is_kept = is_valid & M::load_flags(in.policy_mask + k, left);
    M::count(sums.kept_tokens, is_kept);
    return is_kept;
  }

  // kAllValid: there is no mask, and every lane has a token.
  template <bool kAllValid = false>
  GRPO_HD void step(int64_t k, int64_t left) {
    const V zero = M::all(0);
    Flag is_valid = M::negate(M::none());
    if (!kAllValid) is_valid = M::load_flags(offset_or_null(in.mask, k), left);
    if (has(in.segments)) is_valid = is_valid & M::not_negative(in.segments + k, left);
    TermInput<M> input;
    input.logprob = load(in.logprobs, k, left, is_valid);
    const bool is_on_policy = kIsAny && in.old_logprobs == nullptr;
    input.old_logprob = is_on_policy ? input.logprob : load(in.old_logprobs, k, left, is_valid);
    const V row_advantage = M::all(in.row_advantage);
    V advantage = in.advantages == nullptr ? row_advantage : load(in.advantages, k, left, is_valid);
    const Flag is_kept = kept_flags(k, left, is_valid);
    if (has(in.policy_mask)) {  // NaN and inf of tokens without a policy term are 0
      advantage = M::select(is_kept | (advantage - advantage == zero), advantage, zero);
    }
    input.advantage = loss() == Loss::kGeoMean ? row_advantage : advantage;
    input.phi_positive = M::all(in.phi_positive);
    input.phi_other = M::all(in.phi_other);
    input.score = input.logprob;
    const V token_log_ratio = input.logprob - input.old_logprob;
    input.log_ratio = token_log_ratio;
    if (kIsSequence || (kIsAny && (plan.by_sequence() || loss() == Loss::kGeoMean))) {
      input.log_ratio = M::all(in.row_log_ratio);
    }
    Flag is_term = is_valid;
    if (has(in.terms)) {
      is_term = is_valid & M::load_flags(in.terms + k, left);
      if (in.log_ratios != nullptr) {
        input.log_ratio = load(in.log_ratios, k, left, is_term);
        input.score = load(in.scores, k, left, is_term);
      }
    }
    const V weight = has(in.weights) ? load(in.weights, k, left, is_valid) : M::all(1);
    add_entropy(k, left, is_valid, weight);
    const Term<M> term = policy_term<M>(loss(), input, coefficients);

    V factor = weight;
    if (!kIsClip) factor = importance_weight(k, left, is_valid) * weight;
    const Flag has_loss = is_term & is_kept;
    factor = M::select(has_loss, factor, zero);
    sums.policy_loss += M::select(has_loss, term.value, zero) * factor;
    const V scale = factor * M::all(policy_share);
    V score_gradient = zero;
    if (!kIsClip) score_gradient = M::select(has_loss, term.by_score, zero) * scale;
    V ratio_gradient = M::select(has_loss, term.by_ratio, zero) * scale;
    const V kl_weight = is_local_kl() ? M::all(1) : weight;
    const V kl_gradient = add_kl(k, left, is_valid, kl_weight, input.logprob, term, ratio_gradient);
    store_gradient(k, left, score_gradient, ratio_gradient, kl_gradient);
    add_metrics(is_valid, is_term, token_log_ratio, advantage, term);
  }

  // Adds the KL term; returns its gradient, but adds the part through the ratio to ratio_gradient.
  GRPO_HD V add_kl(int64_t k, int64_t left, const Flag& is_valid, const V& weight, const V& logprob,
                   const Term<M>& term, V& ratio_gradient) {
    if (in.ref_logprobs == nullptr) return M::all(0);
    const V log_ratio = logprob - load(in.ref_logprobs, k, left, is_valid);
    KlTerm<M> kl = kl_term<M>(kl_kind(), log_ratio, coefficients);
    if (kIsAny && plan.kl_straight) kl.slope = log_ratio;
    const V scale = M::select(is_valid, weight * M::all(kl_share), M::all(0));
    if (is_unbiased_kl()) {
      kl.value *= term.ratio;
      kl.slope *= term.ratio;
      if (coefficients.has_kl) ratio_gradient += M::select(term.is_unclamped & is_valid, kl.value, M::all(0)) * scale;
    }
    kl.value = M::select(is_valid, kl.value, M::all(0));
    sums.kl_sum += kl.value;
    if (has(in.weights)) sums.kl_loss += kl.value * weight;
    if (!coefficients.has_kl) return M::all(0);
    return M::select(is_valid, kl.slope, M::all(0)) * scale;
  }

  GRPO_HD void store_gradient(int64_t k, int64_t left, const V& score_gradient, const V& ratio_gradient,
                              const V& kl_gradient) {
    V gradient = kIsClip ? kl_gradient : score_gradient + kl_gradient;
    if (has(in.term_gradient)) {
      M::store(in.term_gradient + k, left, score_gradient + ratio_gradient);
      gradient = kl_gradient;
    } else if (kIsAny && plan.spreads_over_row()) {  // in kPlainSequence all tokens have the same gradient
      sums.ratio_gradient += ratio_gradient;
    } else {
      gradient += ratio_gradient;
    }
    M::store(in.gradient + k, left, gradient);
  }

  GRPO_HD void add_metrics(const Flag& is_valid, const Flag& is_term, const V& token_log_ratio, const V& advantage,
                           const Term<M>& term) {
    const V zero = M::all(0);
    V log_ratio = token_log_ratio;
    if (is_token_ratio() && loss() != Loss::kGeoMean) log_ratio = term.log_ratio;
    sums.log_ratio_sum += M::select(is_valid, log_ratio, zero);
    if (loss() == Loss::kGeoMean) {  // GMPO clips tokens, although the term is the row's
      const Flag below = token_log_ratio<M::all(-coefficients.low), above = token_log_ratio> M::all(coefficients.high);
      const Flag is_better = is_valid & (advantage > zero), is_worse = is_valid & (advantage < zero);
      M::count(sums.high_clipped, above & is_better);
      M::count(sums.low_clipped, below & is_worse);
      // verl's clip fractions count tokens outside on either side, separately for better and worse rows
      M::count(sums.clipped, (below | above) & is_better);
      M::count(sums.dual_clipped, (below | above) & is_worse);
    } else {
      M::count(sums.low_clipped, term.low_clipped & is_term);
      M::count(sums.high_clipped, term.high_clipped & is_term);
      if (!kIsClip) M::count(sums.clipped, term.clipped & is_term);
      if (!kIsClip || coefficients.has_dual) M::count(sums.dual_clipped, term.dual_clipped & is_term);
    }
    if (loss() == Loss::kVespo) sums.phi_sum += M::select(is_term, term.weight, zero);
    sums.ratio_sum += M::select(is_term, term.ratio, zero);
    const V excess = M::select(is_term, term.ratio - M::all(1), zero);
    sums.ratio_spread_sum += excess * excess;
    // lower and higher ignore a NaN in their first argument
    extremes.ratio_min = M::lower(M::select(is_term, term.ratio, M::all(INFINITY)), extremes.ratio_min);
    extremes.ratio_max = M::higher(M::select(is_term, term.ratio, M::all(-INFINITY)), extremes.ratio_max);
  }
};

}  // namespace grpo_kernels
