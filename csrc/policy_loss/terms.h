#pragma once

#include "common/term_math.h"
#include "policy_loss/plan.h"

// One token of a policy loss: its term, its KL estimate and their derivatives. Shared by CUDA threads (Math over float
// or double) and CPU lanes (Math over vectors); common/term_math.h says what a Math has.
namespace grpo_kernels {

// The coefficients of the plan in the type that terms are computed in.
// clang-format off
#define GRPO_TERM_COEFFICIENTS(COEFFICIENT)                                                        \
  COEFFICIENT(low) COEFFICIENT(high) COEFFICIENT(dual_clip) COEFFICIENT(cap) COEFFICIENT(sapo_pos) \
  COEFFICIENT(sapo_neg) COEFFICIENT(dro_beta) COEFFICIENT(clamp_low) COEFFICIENT(clamp_high)       \
  COEFFICIENT(kl_clamp_in) COEFFICIENT(kl_clamp_out)
// clang-format on
template <typename Scalar>
struct TermCoefficients {
#define GRPO_COEFFICIENT(name) Scalar name;
  GRPO_TERM_COEFFICIENTS(GRPO_COEFFICIENT)
#undef GRPO_COEFFICIENT
  // An infinite ratio would turn terms that are clipped or have no advantage into NaN. Thousands at the limit have a
  // finite sum.
  Scalar log_limit;
  // Without a bound its clamp is skipped.
  bool clamps_ratio, clamps_kl, has_cap, has_dual;
  bool has_kl;  // a KL that is only measured may overflow

  TermCoefficients() = default;
  GRPO_HD explicit TermCoefficients(const PolicyPlan& plan)
      : log_limit(sizeof(Scalar) == 4 ? 80 : 701),
        clamps_ratio(plan.clamp_low > -INFINITY || plan.clamp_high < INFINITY),
        clamps_kl(plan.kl_clamp_in < INFINITY || plan.kl_clamp_out < INFINITY),
        has_cap(plan.cap < INFINITY),
        has_dual(plan.dual_clip < INFINITY),
        has_kl(plan.kl_coef != 0) {
#define GRPO_COEFFICIENT(name) name = static_cast<Scalar>(plan.name);
    GRPO_TERM_COEFFICIENTS(GRPO_COEFFICIENT)
#undef GRPO_COEFFICIENT
  }

  GRPO_HD bool has_limits() const { return clamps_ratio || clamps_kl || has_cap; }
  GRPO_HD TermCoefficients without_limits() const {
    TermCoefficients others = *this;
    others.clamps_ratio = others.clamps_kl = others.has_cap = false;
    return others;
  }
};

template <typename Math>
struct TermInput {
  using V = typename Math::Value;
  V logprob, old_logprob, advantage;
  V log_ratio;                // of the token, the row or the segment
  V score;                    // log-prob of the token or segment
  V phi_positive, phi_other;  // VESPO's weight of the row, for advantages >= 0 and < 0
};

template <typename Math>
struct Term {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  V value;
  V by_score;  // derivative with respect to the score
  V by_ratio;  // derivative with respect to the log ratio
  V ratio, log_ratio;
  V weight;                        // VESPO's
  Flag is_unclamped;               // log_ratio_clamp leaves the log ratio as it is
  Flag low_clipped, high_clipped;  // below the lower bound with advantage < 0, above the upper one with > 0
  Flag clipped;                    // in the terms of the loss
  Flag dual_clipped;               // limited by dual_clip, or by the ratio cap of dppo
};

// Clamps the log ratio and exponentiates it.
template <typename Math>
GRPO_HD void set_ratio(const TermInput<Math>& in, const TermCoefficients<typename Math::Scalar>& n, Term<Math>& term) {
  term.log_ratio = in.log_ratio;
  term.is_unclamped = Math::negate(Math::none());
  if (n.clamps_ratio) {
    term.log_ratio = clamp_to<Math>(in.log_ratio, n.clamp_low, n.clamp_high);
    term.is_unclamped = (in.log_ratio >= Math::all(n.clamp_low)) & (in.log_ratio <= Math::all(n.clamp_high));
  }
  const typename Math::Value limit = Math::all(n.log_limit);
  term.ratio = Math::exp(Math::at_most(limit, term.log_ratio));
}

template <typename Math>
GRPO_HD void clip_term(const TermInput<Math>& in, const TermCoefficients<typename Math::Scalar>& n, Term<Math>& term) {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  const V zero = Math::all(0), low = Math::all(n.low), high = Math::all(n.high);
  const V ratio = term.ratio, slope = -in.advantage;
  const Flag below = ratio<low, above = ratio> high;
  const Flag negative = in.advantage<zero, positive = in.advantage> zero;
  V plain = slope * ratio;
  const V clipped = slope * clamp_to<Math>(ratio, n.low, n.high);
  term.by_ratio = plain;
  term.low_clipped = below & negative;
  term.high_clipped = above & positive;
  Flag is_flat = below | above;
  if (n.has_cap) {
    const V cap = Math::all(n.cap);
    const Flag capped = ratio > cap;
    const V limited = Math::select(capped, cap, ratio);
    plain = slope * limited;
    term.low_clipped = (limited < low) & negative;
    term.high_clipped = (limited > high) & positive;
    is_flat = Math::select_flag(plain >= clipped, capped, is_flat);
  } else {
    is_flat = is_flat & Math::negate(plain >= clipped);
  }
  term.clipped = term.low_clipped | term.high_clipped;
  term.value = Math::select(plain >= clipped, plain, clipped);
  if (n.has_dual) {
    const V ceiling = slope * Math::all(n.dual_clip);
    term.dual_clipped = negative & (term.value > ceiling);
    term.value = Math::select(term.dual_clipped, ceiling, term.value);
    is_flat = is_flat | term.dual_clipped;
  }
  term.by_ratio = Math::select(is_flat | Math::negate(term.is_unclamped), zero, term.by_ratio);
}

template <typename Math>
GRPO_HD void sapo_term(const TermInput<Math>& in, const TermCoefficients<typename Math::Scalar>& n, Term<Math>& term) {
  using V = typename Math::Value;
  const V zero = Math::all(0), one = Math::all(1), four = Math::all(4);
  const V tau = Math::select(in.advantage > zero, Math::all(n.sapo_pos), Math::all(n.sapo_neg));
  const V decay = Math::exp(tau * (one - term.ratio));
  const V gate = one / (one + decay);
  term.value = -in.advantage * gate * (four / tau);
  // decay <= e^tau; where it is 0, the ratio may be infinite and 0 * infinity would be NaN
  const V slope = Math::select(decay > zero, four * gate * (decay * gate) * term.ratio, zero);
  term.by_ratio = Math::select(term.is_unclamped, -in.advantage * slope, zero);
}

// Terms that count inside of a trust region only, whatever the sign of the advantage: IPO bounds the change of the
// token's probability, IcePop the ratio. NaN is not outside, so that it shows.
template <typename Math>
GRPO_HD void masked_term(Loss loss, const TermInput<Math>& in, const TermCoefficients<typename Math::Scalar>& n,
                         Term<Math>& term) {
  using V = typename Math::Value;
  const V zero = Math::all(0);
  V position = term.ratio;
  typename Math::Scalar low = n.low;
  if (loss == Loss::kIpo) {
    position = Math::exp(in.logprob) - Math::exp(in.old_logprob);
    low = -low;
  }
  term.low_clipped = position < Math::all(low);
  term.high_clipped = position > Math::all(n.high);
  term.clipped = term.low_clipped | term.high_clipped;
  term.value = Math::select(term.clipped, zero, -in.advantage * term.ratio);
  term.by_ratio = Math::select(term.is_unclamped, term.value, zero);
}

// DPPO: whether the divergence is within its bound, or the probability moved against the advantage. The divergence is
// that of the two outcomes "this token" and "any other".
template <typename Math>
GRPO_HD typename Math::Flag in_trust_region(Loss loss, const TermInput<Math>& in,
                                            const TermCoefficients<typename Math::Scalar>& n) {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  const V one = Math::all(1), tiny = Math::all(static_cast<typename Math::Scalar>(1e-8));
  const V p = Math::exp(in.logprob), old_p = Math::exp(in.old_logprob);
  const Flag is_upward = in.advantage > Math::all(0);
  if (loss == Loss::kDppoTv) {
    const V change = p - old_p;
    return (is_upward & (change <= Math::all(n.high))) | (Math::negate(is_upward) & (change >= Math::all(-n.low)));
  }
  const V other_tokens = (one - old_p) * Math::log((one - old_p + tiny) / (one - p + tiny));
  const V divergence = old_p * (in.old_logprob - in.logprob) + other_tokens;
  return (is_upward & ((divergence <= Math::all(n.high)) | (p <= old_p))) |
         (Math::negate(is_upward) & ((divergence <= Math::all(n.low)) | (p >= old_p)));
}

// Losses of the form -weight * advantage * score, where the weight is detached.
template <typename Math>
GRPO_HD void score_term(Loss loss, const TermInput<Math>& in, const TermCoefficients<typename Math::Scalar>& n,
                        Term<Math>& term) {
  using V = typename Math::Value;
  const V zero = Math::all(0);
  V weight = Math::all(1);
  if (loss == Loss::kCispo) {
    weight = clamp_to<Math>(term.ratio, n.low, n.high);
    const auto below = term.ratio<Math::all(n.low), above = term.ratio> Math::all(n.high);
    term.low_clipped = below & (in.advantage < zero);
    term.high_clipped = above & (in.advantage > zero);
    term.clipped = below | above;
  }
  if (loss == Loss::kDppoTv || loss == Loss::kDppoKl) {
    const auto is_inside = in_trust_region<Math>(loss, in, n), capped = term.ratio > Math::all(n.cap);
    weight = Math::select(is_inside, Math::select(capped, Math::all(n.cap), term.ratio), zero);
    term.clipped = Math::negate(is_inside);
    term.dual_clipped = is_inside & capped;
  }
  if (loss == Loss::kTopr) {
    term.clipped = Math::negate(in.advantage > zero) & (term.ratio > Math::all(n.cap));
    weight = Math::select(in.advantage > zero, weight, Math::at_most(Math::all(n.cap), term.ratio));
  }
  if (loss == Loss::kVespo) weight = Math::select(in.advantage >= zero, in.phi_positive, in.phi_other);
  term.weight = weight;
  term.by_score = -weight * in.advantage;
  term.value = term.by_score * in.score;
}

template <typename Math>
GRPO_HD Term<Math> policy_term(Loss loss, const TermInput<Math>& in, const TermCoefficients<typename Math::Scalar>& n) {
  Term<Math> term;
  term.by_score = term.by_ratio = term.weight = Math::all(0);
  term.low_clipped = term.high_clipped = term.clipped = term.dual_clipped = Math::none();
  set_ratio<Math>(in, n, term);
  switch (loss) {
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
      const auto log_ratio = in.logprob - in.old_logprob;
      const auto pull = Math::all(n.dro_beta) * log_ratio;
      term.value = Math::all(static_cast<typename Math::Scalar>(0.5)) * pull * log_ratio - in.logprob * in.advantage;
      term.by_score = pull - in.advantage;
      break;
    }
    case Loss::kIpo:
    case Loss::kIcepop:
      masked_term<Math>(loss, in, n, term);
      break;
    default:
      score_term<Math>(loss, in, n, term);
  }
  return term;
}

template <typename Math>
struct KlTerm {
  typename Math::Value value, slope;
};

// The KL estimate from the log ratio to the reference policy, before kl_straight and kl_unbiased.
template <typename Math>
GRPO_HD KlTerm<Math> kl_term(Kl kind, const typename Math::Value& log_ratio,
                             const TermCoefficients<typename Math::Scalar>& n) {
  using V = typename Math::Value;
  const V zero = Math::all(0), one = Math::all(1);
  const V d = n.clamps_kl ? clamp_to<Math>(log_ratio, -n.kl_clamp_in, n.kl_clamp_in) : log_ratio;
  KlTerm<Math> kl{d, one};
  if (kind == Kl::kK2) kl = {Math::all(static_cast<typename Math::Scalar>(0.5)) * d * d, d};
  if (kind == Kl::kK3) {
    const V ratio_minus_one = Math::expm1(-d);
    kl = {ratio_minus_one + d, -ratio_minus_one};
  }
  if (kind == Kl::kAbs) {
    const V sign = Math::select(d < zero, -one, Math::select(d > zero, one, zero));
    kl = {sign * d, sign};
  }
  if (n.clamps_kl) {
    const V bound = Math::all(n.kl_clamp_in), top = Math::all(n.kl_clamp_out);
    const auto inside = (log_ratio >= -bound) & (log_ratio <= bound) & (kl.value >= -top) & (kl.value <= top);
    kl.value = clamp_to<Math>(kl.value, -n.kl_clamp_out, n.kl_clamp_out);
    kl.slope = Math::select(inside, kl.slope, zero);
  }
  return kl;
}

}  // namespace grpo_kernels
