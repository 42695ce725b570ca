#pragma once

#include "grpo_kernels/policy_batch.h"

// From the arrays to the gradient and the sums, one step at a time: a step is a token for a thread of CUDA, and eight
// or four for the CPU's lanes. Besides what policy_terms.h wants, Math has Counter, count, load, load_flags and store,
// which touch only the first `left` elements.
namespace grpo_kernels {

// Sums over few enough steps to lose no more digits than a tree of additions would.
template <typename Math>
struct StepSums {
  using V = typename Math::Value;
  using Counter = typename Math::Counter;
  V policy{}, kl{}, plain_kl{}, entropy{}, plain_entropy{}, through{}, log_ratio{}, ratio{}, ratio_spread{}, phi{};
  V is{}, is_square{}, gap{};
  Counter low{}, high{}, clipped{}, dual{}, is_count{}, gap_count{}, off_policy{};
};

template <typename Math>
struct StepExtremes {
  using V = typename Math::Value;
  V ratio_min = Math::all(INFINITY), ratio_max = Math::all(-INFINITY), is_min = Math::all(INFINITY),
    is_max = Math::all(-INFINITY), gap_max = Math::all(-INFINITY);
};

template <typename Math, WalkKind kKind>
struct PolicyWalk {
  using M = Math;
  using T = typename Math::Scalar;
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  static constexpr bool kIsClip = kKind != WalkKind::kAny;
  static constexpr bool kIsPlain = kKind == WalkKind::kPlainClip;

  const PolicyTokens<T> a;  // not a reference: the compiler would read it again after every store
  const PolicyPlan plan;
  const TermNumbers<T> numbers;
  const T policy_share, kl_share;
  StepSums<Math> sums;
  StepExtremes<Math> extremes;

  GRPO_HD PolicyWalk(const PolicyTokens<T>& tokens, const PolicyPlan& given)
      : a(tokens),
        plan(given),
        numbers(given),
        policy_share(static_cast<T>(tokens.shares.policy)),
        kl_share(static_cast<T>(given.kl_coef * tokens.shares.kl)) {}

  // What the kind says, in a form that the compiler sees.
  GRPO_HD bool has(const void* optional) const { return !kIsPlain && optional != nullptr; }
  GRPO_HD Loss loss() const { return kIsClip ? Loss::kClip : plan.loss; }
  GRPO_HD Kl kl_kind() const { return kIsPlain ? Kl::kK3 : plan.kl; }
  GRPO_HD bool is_token_ratio() const { return kIsPlain || plan.ratio == Ratio::kToken; }

  // Completes the sums of which another tells.
  GRPO_HD void settle() {
    if (!has(a.weights)) sums.kl = sums.plain_kl;
    if (kIsClip) sums.clipped = sums.low + sums.high;
  }

  // 0 where the slot takes no part, whatever it holds.
  GRPO_HD V load(const T* values, int64_t k, int64_t left, const Flag& valid) const {
    return M::select(valid, M::load(values + k, left), M::all(0));
  }

  // The factor of the policy term for rollout mismatch, and what is measured of it.
  GRPO_HD V correction(int64_t k, int64_t left, const Flag& valid, const V& old) {
    V weight = M::all(a.row_is);
    if (has(a.sampling)) {
      const V gap = old - load(a.sampling, k, left, valid);
      const Flag scored = valid & (gap == gap);
      const V known = M::select(scored, gap, M::all(0));
      const V size = M::select(known < M::all(0), -known, known);
      sums.gap += size;
      M::count(sums.gap_count, scored);
      extremes.gap_max = M::select(scored & (size > extremes.gap_max), size, extremes.gap_max);
      if (plan.correction == Correction::kTokenTruncate || plan.correction == Correction::kTokenMask) {
        weight = mismatch_weight<M>(plan, known, numbers);
        measure(weight, valid);
      }
    }
    if (has(a.is_weights)) {
      weight = load(a.is_weights, k, left, valid);
      measure(weight, valid);
    }
    // these two have taken the tokens' weights into one of the row
    const bool of_row = loss() == Loss::kVespo || loss() == Loss::kGeoMean;
    return of_row ? M::all(a.row_is) : weight;
  }

  GRPO_HD void measure(const V& weight, const Flag& valid) {
    const V some = M::select(valid, weight, M::all(0));
    sums.is += some;
    sums.is_square += some * some;
    M::count(sums.is_count, valid);
    extremes.is_min = M::select(valid & (weight < extremes.is_min), weight, extremes.is_min);
    extremes.is_max = M::select(valid & (weight > extremes.is_max), weight, extremes.is_max);
  }

  // Entropy of the tokens, and which of them are kept for their entropy.
  GRPO_HD Flag entropies(int64_t k, int64_t left, const Flag& valid, const V& weight) {
    if (!has(a.entropy)) return valid;
    const V entropy = load(a.entropy, k, left, valid);
    const Flag kept = valid & (entropy >= M::all(a.entropy_floor));
    sums.plain_entropy += entropy;
    const bool local = plan.entropy_aggregation == Aggregation::kLocalTokenMean;
    sums.entropy += local ? M::select(kept, entropy, M::all(0)) : entropy * weight;
    return kept;
  }

  // kAllTakePart: there is no mask, and all lanes have a token.
  template <bool kAllTakePart = false>
  GRPO_HD void step(int64_t k, int64_t left) {
    const V zero = M::all(0);
    Flag valid = M::negate(M::none());
    if (!kAllTakePart) valid = M::load_flags(at_or_null(a.mask, k), left);
    if (has(a.segments)) valid = valid & M::not_negative(a.segments + k, left);
    TermInput<M> in;
    in.lp = load(a.logprobs, k, left, valid);
    in.old = !kIsPlain && a.old == nullptr ? in.lp : load(a.old, k, left, valid);
    const V of_row = M::all(a.row_advantage);
    const V advantage = a.advantages == nullptr ? of_row : load(a.advantages, k, left, valid);
    in.advantage = loss() == Loss::kGeoMean ? of_row : advantage;
    in.phi_positive = M::all(a.phi_positive);
    in.phi_other = M::all(a.phi_other);
    in.score = in.lp;
    const V distance = in.lp - in.old;
    in.log_ratio = distance;
    if (!kIsPlain && (plan.by_sequence() || loss() == Loss::kGeoMean)) in.log_ratio = M::all(a.row_log_ratio);
    Flag here = valid;
    if (has(a.terms)) {
      here = valid & M::load_flags(a.terms + k, left);
      if (a.log_ratios != nullptr) {
        in.log_ratio = load(a.log_ratios, k, left, here);
        in.score = load(a.scores, k, left, here);
      }
    }
    const V weight = has(a.weights) ? load(a.weights, k, left, valid) : M::all(1);
    const Flag kept = entropies(k, left, valid, weight);
    const Term<M> term = policy_term<M>(loss(), in, numbers);

    V factor = weight;
    if (!kIsPlain) factor = correction(k, left, valid, in.old) * weight;
    Flag counts = here;
    if (loss() != Loss::kGeoMean) counts = counts & kept;
    if (!kIsPlain && a.row_is_far) {
      const Flag dropped = valid & (advantage < zero);
      M::count(sums.off_policy, dropped);
      counts = counts & M::negate(dropped);
    }
    factor = M::select(counts, factor, zero);
    sums.policy += M::select(counts, term.value, zero) * factor;
    const V scale = factor * M::all(policy_share);
    V gradient = zero;
    if (!kIsClip) gradient = M::select(counts, term.by_score, zero) * scale;
    V through = M::select(counts, term.by_ratio, zero) * scale;
    const V of_kl = kl(k, left, valid, weight, in.lp, term, through);
    finish(k, left, gradient, through, of_kl);
    tally(valid, here, distance, advantage, term);
  }

  // Adds the KL term; returns its own gradient, and adds to `through` what flows through the ratio.
  GRPO_HD V kl(int64_t k, int64_t left, const Flag& valid, const V& weight, const V& lp, const Term<M>& term,
               V& through) {
    if (a.ref == nullptr) return M::all(0);
    KlTerm<M> kl = kl_term<M>(kl_kind(), lp - load(a.ref, k, left, valid), numbers);
    if (!kIsPlain && plan.kl_straight) kl.slope = lp - load(a.ref, k, left, valid);
    const V scale = M::select(valid, weight * M::all(kl_share), M::all(0));
    if (!kIsPlain && plan.kl_unbiased) {
      kl.value *= term.ratio;
      kl.slope *= term.ratio;
      if (plan.kl_coef != 0) through += M::select(term.inside & valid, kl.value, M::all(0)) * scale;
    }
    kl.value = M::select(valid, kl.value, M::all(0));
    sums.plain_kl += kl.value;
    if (has(a.weights)) sums.kl += kl.value * weight;
    if (plan.kl_coef == 0) return M::all(0);  // what is only measured may overflow
    return M::select(valid, kl.slope, M::all(0)) * scale;
  }

  GRPO_HD void finish(int64_t k, int64_t left, const V& own, const V& through, const V& of_kl) {
    V gradient = own + of_kl;
    if (has(a.term_gradient)) {
      M::store(a.term_gradient + k, left, own + through);
      gradient = of_kl;
    } else if (!kIsPlain && plan.spreads_over_row()) {
      sums.through += through;
    } else {
      gradient += through;
    }
    M::store(a.gradient + k, left, gradient);
  }

  GRPO_HD void tally(const Flag& valid, const Flag& here, const V& distance, const V& advantage, const Term<M>& term) {
    const V zero = M::all(0);
    V log_ratio = distance;
    if (is_token_ratio() && loss() != Loss::kGeoMean) log_ratio = term.log_ratio;
    sums.log_ratio += M::select(valid, log_ratio, zero);
    if (loss() == Loss::kGeoMean) {  // counted where tokens are clipped, not where the row has its term
      const Flag below = distance<M::all(-numbers.low), above = distance> M::all(numbers.high);
      const Flag better = valid & (advantage > zero), worse = valid & (advantage < zero);
      M::count(sums.high, above & better);
      M::count(sums.low, below & worse);
      // verl counts tokens outside on either side, apart for better and worse rows
      M::count(sums.clipped, (below | above) & better);
      M::count(sums.dual, (below | above) & worse);
    } else {
      M::count(sums.low, term.low & here);
      M::count(sums.high, term.high & here);
      if (!kIsClip) M::count(sums.clipped, term.clipped & here);
      if (!kIsClip || numbers.has_dual) M::count(sums.dual, term.dual & here);
    }
    if (loss() == Loss::kVespo) sums.phi += M::select(here, term.weight, zero);
    sums.ratio += M::select(here, term.ratio, zero);
    const V off = M::select(here, term.ratio - M::all(1), zero);
    sums.ratio_spread += off * off;
    // what is no number is neither
    extremes.ratio_min = M::lower(M::select(here, term.ratio, M::all(INFINITY)), extremes.ratio_min);
    extremes.ratio_max = M::higher(M::select(here, term.ratio, M::all(-INFINITY)), extremes.ratio_max);
  }
};

}  // namespace grpo_kernels
