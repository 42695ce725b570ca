#pragma once

#include "grpo_kernels/policy_plan.h"

// One token of a policy loss: its term, its KL estimate and their derivatives. Written once for CUDA's threads (Math
// over float or double) and for the CPU's lanes (Math over vectors): Math has Value, Flag, Scalar, and exp, expm1, log,
// select, negate, all, none.
namespace grpo_kernels {

// The plan's numbers in the arithmetic's own type.
template <typename Scalar>
struct TermNumbers {
  Scalar low, high, dual_clip, cap, sapo_pos, sapo_neg, dro_beta, clamp_low, clamp_high, kl_clamp_in, kl_clamp_out;
  Scalar correction_min, correction_max;
  Scalar log_limit;  // an infinite ratio would make NaN of terms that are clipped or have no advantage

  GRPO_HD explicit TermNumbers(const PolicyPlan& plan)
      : low(static_cast<Scalar>(plan.low)),
        high(static_cast<Scalar>(plan.high)),
        dual_clip(static_cast<Scalar>(plan.dual_clip)),
        cap(static_cast<Scalar>(plan.cap)),
        sapo_pos(static_cast<Scalar>(plan.sapo_pos)),
        sapo_neg(static_cast<Scalar>(plan.sapo_neg)),
        dro_beta(static_cast<Scalar>(plan.dro_beta)),
        clamp_low(static_cast<Scalar>(plan.clamp_low)),
        clamp_high(static_cast<Scalar>(plan.clamp_high)),
        kl_clamp_in(static_cast<Scalar>(plan.kl_clamp_in)),
        kl_clamp_out(static_cast<Scalar>(plan.kl_clamp_out)),
        correction_min(static_cast<Scalar>(plan.correction_min)),
        correction_max(static_cast<Scalar>(plan.correction_max)),
        log_limit(sizeof(Scalar) == 4 ? 88 : 709) {}
};

// One number at a time.
template <typename T>
struct ScalarTermMath {
  using Scalar = T;
  using Value = T;
  using Flag = bool;
  using Counter = T;
  GRPO_HD static T all(T value) { return value; }
  GRPO_HD static bool none() { return false; }
  GRPO_HD static bool negate(bool flag) { return !flag; }
  GRPO_HD static T select(bool flag, T yes, T no) { return flag ? yes : no; }
  GRPO_HD static T exp(T x) { return sizeof(T) == 4 ? expf(x) : ::exp(x); }
  GRPO_HD static T expm1(T x) { return sizeof(T) == 4 ? expm1f(x) : ::expm1(x); }
  GRPO_HD static T log(T x) { return sizeof(T) == 4 ? logf(x) : ::log(x); }
  GRPO_HD static void count(T& counter, bool flag) { counter += flag ? T{1} : T{0}; }
  GRPO_HD static T load(const T* from, int64_t) { return *from; }
  GRPO_HD static void store(T* to, int64_t, T value) { *to = value; }
  GRPO_HD static bool load_flags(const bool* from, int64_t) { return from == nullptr || *from; }
  GRPO_HD static bool not_negative(const int32_t* from, int64_t) { return *from >= 0; }
};

template <typename Math>
GRPO_HD typename Math::Value clamp_to(const typename Math::Value& x, typename Math::Scalar low,
                                      typename Math::Scalar high) {
  using V = typename Math::Value;
  const V floor = Math::all(low), ceiling = Math::all(high);
  return Math::select(x < floor, floor, Math::select(x > ceiling, ceiling, x));
}

template <typename Math>
struct TermInput {
  using V = typename Math::Value;
  V lp, old, advantage;
  V log_ratio;                // of the token, or of its row or segment
  V score;                    // the log-prob of the same
  V phi_positive, phi_other;  // VESPO's weight of the row, for advantages of at least 0 and others
};

template <typename Math>
struct Term {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  V value;
  V by_score;  // derivative by the score
  V by_ratio;  // derivative by the log ratio
  V ratio, log_ratio;
  V weight;                 // VESPO's
  Flag inside;              // the log ratio is not clamped
  Flag low, high, clipped;  // clipped below with advantage < 0, above with > 0, by the loss's own count
  Flag dual;                // stopped by the second bound
};

// exp of the log ratio, which is limited first.
template <typename Math>
GRPO_HD void take_ratio(const TermInput<Math>& in, const TermNumbers<typename Math::Scalar>& n, Term<Math>& term) {
  term.log_ratio = clamp_to<Math>(in.log_ratio, n.clamp_low, n.clamp_high);
  term.inside = (in.log_ratio >= Math::all(n.clamp_low)) & (in.log_ratio <= Math::all(n.clamp_high));
  const typename Math::Value limit = Math::all(n.log_limit);
  term.ratio = Math::exp(Math::select(term.log_ratio > limit, limit, term.log_ratio));
}

template <typename Math>
GRPO_HD void clip_term(const TermInput<Math>& in, const TermNumbers<typename Math::Scalar>& n, Term<Math>& term) {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  const V zero = Math::all(0), low = Math::all(n.low), high = Math::all(n.high), cap = Math::all(n.cap);
  const V ratio = term.ratio, loss = -in.advantage;
  const Flag capped = ratio > cap, below = ratio<low, above = ratio> high;
  const V capped_ratio = Math::select(capped, cap, ratio);
  const V plain = loss * capped_ratio, clipped = loss * clamp_to<Math>(ratio, n.low, n.high);
  const Flag takes_plain = plain >= clipped;
  const Flag negative = in.advantage < zero;
  term.low = (capped_ratio < low) & negative;
  term.high = (capped_ratio > high) & (in.advantage > zero);
  term.clipped = term.low | term.high;
  term.value = Math::select(takes_plain, plain, clipped);
  const V ceiling = loss * Math::all(n.dual_clip);
  // an infinite bound times an advantage of 0 is NaN, which compares as false
  term.dual = negative & (term.value > ceiling);
  term.value = Math::select(term.dual, ceiling, term.value);
  const Flag flat = term.dual | (takes_plain & capped) | (Math::negate(takes_plain) & (below | above));
  term.by_ratio = Math::select(flat | Math::negate(term.inside), zero, loss * ratio);
}

template <typename Math>
GRPO_HD void sapo_term(const TermInput<Math>& in, const TermNumbers<typename Math::Scalar>& n, Term<Math>& term) {
  using V = typename Math::Value;
  const V zero = Math::all(0), one = Math::all(1), four = Math::all(4);
  const V tau = Math::select(in.advantage > zero, Math::all(n.sapo_pos), Math::all(n.sapo_neg));
  const V decay = Math::exp(tau * (one - term.ratio));
  const V gate = one / (one + decay);
  term.value = -in.advantage * gate * (four / tau);
  // decay is at most e^tau, and 0 where the ratio is so large that the product with it would be 0 * infinity
  const V slope = Math::select(decay > zero, four * gate * (decay * gate) * term.ratio, zero);
  term.by_ratio = Math::select(term.inside, -in.advantage * slope, zero);
}

// DPPO: whether a token's probability moved little, or back, as seen by the outcomes "this token" and "another".
template <typename Math>
GRPO_HD typename Math::Flag trusted(const PolicyPlan& plan, const TermInput<Math>& in,
                                    const TermNumbers<typename Math::Scalar>& n) {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  const V one = Math::all(1), tiny = Math::all(static_cast<typename Math::Scalar>(1e-8));
  const V now = Math::exp(in.lp), before = Math::exp(in.old);
  const Flag upward = in.advantage > Math::all(0);
  if (plan.loss == Loss::kDppoTv) {
    const V moved = now - before;
    return (upward & (moved <= Math::all(n.high))) | (Math::negate(upward) & (moved >= Math::all(-n.low)));
  }
  const V others = (one - before) * Math::log((one - before + tiny) / (one - now + tiny));
  const V divergence = before * (in.old - in.lp) + others;
  return (upward & ((divergence <= Math::all(n.high)) | (now <= before))) |
         (Math::negate(upward) & ((divergence <= Math::all(n.low)) | (now >= before)));
}

// Losses of the form -weight * advantage * score, whose weight has no derivative.
template <typename Math>
GRPO_HD void score_term(const PolicyPlan& plan, const TermInput<Math>& in, const TermNumbers<typename Math::Scalar>& n,
                        Term<Math>& term) {
  using V = typename Math::Value;
  const V zero = Math::all(0);
  V weight = Math::all(1);
  if (plan.loss == Loss::kCispo) {
    weight = clamp_to<Math>(term.ratio, n.low, n.high);
    const auto below = term.ratio<Math::all(n.low), above = term.ratio> Math::all(n.high);
    term.low = below & (in.advantage < zero);
    term.high = above & (in.advantage > zero);
    term.clipped = below | above;
  }
  if (plan.loss == Loss::kDppoTv || plan.loss == Loss::kDppoKl) {
    const auto within = trusted<Math>(plan, in, n), capped = term.ratio > Math::all(n.cap);
    weight = Math::select(within, Math::select(capped, Math::all(n.cap), term.ratio), zero);
    term.clipped = Math::negate(within);
    term.dual = within & capped;
  }
  if (plan.loss == Loss::kVespo) weight = Math::select(in.advantage >= zero, in.phi_positive, in.phi_other);
  term.weight = weight;
  term.by_score = -weight * in.advantage;
  term.value = term.by_score * in.score;
}

template <typename Math>
GRPO_HD Term<Math> policy_term(const PolicyPlan& plan, const TermInput<Math>& in,
                               const TermNumbers<typename Math::Scalar>& n) {
  Term<Math> term;
  term.by_score = term.by_ratio = term.weight = Math::all(0);
  term.low = term.high = term.clipped = term.dual = Math::none();
  take_ratio<Math>(in, n, term);
  switch (plan.loss) {
    case Loss::kClip:
      clip_term<Math>(in, n, term);
      break;
    case Loss::kSapo:
      sapo_term<Math>(in, n, term);
      break;
    case Loss::kGeoMean:
      term.value = term.by_ratio = -in.advantage * term.ratio;
      break;
    case Loss::kDro: {
      const auto distance = in.lp - in.old;
      const auto pull = Math::all(n.dro_beta) * distance;
      term.value = Math::all(static_cast<typename Math::Scalar>(0.5)) * pull * distance - in.lp * in.advantage;
      term.by_score = pull - in.advantage;
      break;
    }
    default:
      score_term<Math>(plan, in, n, term);
  }
  return term;
}

template <typename Math>
struct KlTerm {
  typename Math::Value value, slope;
};

// Of the log ratio to the reference policy, before kl_unbiased.
template <typename Math>
GRPO_HD KlTerm<Math> kl_term(const PolicyPlan& plan, const typename Math::Value& distance,
                             const TermNumbers<typename Math::Scalar>& n) {
  using V = typename Math::Value;
  const V zero = Math::all(0), one = Math::all(1), bound = Math::all(n.kl_clamp_in), top = Math::all(n.kl_clamp_out);
  const V d = clamp_to<Math>(distance, -n.kl_clamp_in, n.kl_clamp_in);
  KlTerm<Math> kl{d, one};
  if (plan.kl == Kl::kK2) kl = {Math::all(static_cast<typename Math::Scalar>(0.5)) * d * d, d};
  if (plan.kl == Kl::kK3) {
    const V rest = Math::expm1(-d);
    kl = {rest + d, -rest};
  }
  if (plan.kl == Kl::kAbs) {
    const V sign = Math::select(d < zero, -one, Math::select(d > zero, one, zero));
    kl = {sign * d, sign};
  }
  const auto inside = (distance >= -bound) & (distance <= bound) & (kl.value >= -top) & (kl.value <= top);
  kl.value = clamp_to<Math>(kl.value, -n.kl_clamp_out, n.kl_clamp_out);
  kl.slope = plan.kl_straight ? distance : Math::select(inside, kl.slope, zero);
  return kl;
}

// The weight for rollout mismatch of a token, or of a row from the sum of its gaps.
template <typename Math>
GRPO_HD typename Math::Value mismatch_weight(const PolicyPlan& plan, const typename Math::Value& gap,
                                             const TermNumbers<typename Math::Scalar>& n) {
  using V = typename Math::Value;
  const V ratio = Math::exp(gap);
  if (plan.correction == Correction::kTokenTruncate || plan.correction == Correction::kSequenceTruncate) {
    return clamp_to<Math>(ratio, n.correction_min, n.correction_max);
  }
  const auto outside = (ratio < Math::all(n.correction_min)) | (ratio > Math::all(n.correction_max));
  return Math::select(outside, Math::all(0), ratio);
}

}  // namespace grpo_kernels
