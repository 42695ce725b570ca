#pragma once

#include "grpo_kernels/policy_plan.h"

// One token of a policy loss: its term, its KL estimate and their derivatives. Written once for CUDA's threads (Math
// over float or double) and for the CPU's lanes (Math over vectors): Math has Value, Flag, Scalar, and exp, expm1, log,
// select, select_flag, negate, all, none; lower and higher, which of a NaN and another give the second.
namespace grpo_kernels {

// The plan's numbers in the arithmetic's own type.
template <typename Scalar>
struct TermNumbers {
  Scalar low, high, dual_clip, cap, sapo_pos, sapo_neg, dro_beta, clamp_low, clamp_high, kl_clamp_in, kl_clamp_out;
  Scalar correction_min, correction_max;
  Scalar log_limit;  // an infinite ratio would make NaN of terms that are clipped or have no advantage
  // Whether there are bounds at all: what needs none costs nothing.
  bool clamps_ratio, clamps_kl, has_cap, has_dual;

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
        log_limit(sizeof(Scalar) == 4 ? 88 : 709),
        clamps_ratio(plan.clamp_low > -INFINITY || plan.clamp_high < INFINITY),
        clamps_kl(plan.kl_clamp_in < INFINITY || plan.kl_clamp_out < INFINITY),
        has_cap(plan.cap < INFINITY),
        has_dual(plan.dual_clip < INFINITY) {}
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
  GRPO_HD static T lower(T a, T b) { return a < b ? a : b; }
  GRPO_HD static T higher(T a, T b) { return a > b ? a : b; }
  GRPO_HD static bool select_flag(bool flag, bool yes, bool no) { return flag ? yes : no; }
  GRPO_HD static T exp(T x) { return sizeof(T) == 4 ? expf(x) : ::exp(x); }
  GRPO_HD static T expm1(T x) { return sizeof(T) == 4 ? expm1f(x) : ::expm1(x); }
  GRPO_HD static T log(T x) { return sizeof(T) == 4 ? logf(x) : ::log(x); }
  GRPO_HD static void count(T& counter, bool flag) { counter += flag ? T{1} : T{0}; }
  GRPO_HD static T load(const T* from, int64_t) { return *from; }
  GRPO_HD static void store(T* to, int64_t, T value) { *to = value; }
  GRPO_HD static bool load_flags(const bool* from, int64_t) { return from == nullptr || *from; }
  GRPO_HD static bool not_negative(const int32_t* from, int64_t) { return *from >= 0; }
};

// NaN stays NaN.
template <typename Math>
GRPO_HD typename Math::Value clamp_to(const typename Math::Value& x, typename Math::Scalar low,
                                      typename Math::Scalar high) {
  return Math::lower(Math::all(high), Math::higher(Math::all(low), x));
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
  term.log_ratio = in.log_ratio;
  term.inside = Math::negate(Math::none());
  if (n.clamps_ratio) {
    term.log_ratio = clamp_to<Math>(in.log_ratio, n.clamp_low, n.clamp_high);
    term.inside = (in.log_ratio >= Math::all(n.clamp_low)) & (in.log_ratio <= Math::all(n.clamp_high));
  }
  const typename Math::Value limit = Math::all(n.log_limit);
  term.ratio = Math::exp(Math::lower(limit, term.log_ratio));
}

template <typename Math>
GRPO_HD void clip_term(const TermInput<Math>& in, const TermNumbers<typename Math::Scalar>& n, Term<Math>& term) {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  const V zero = Math::all(0), low = Math::all(n.low), high = Math::all(n.high);
  const V ratio = term.ratio, loss = -in.advantage;
  const Flag below = ratio<low, above = ratio> high;
  const Flag negative = in.advantage<zero, positive = in.advantage> zero;
  V plain = loss * ratio;
  const V clipped = loss * clamp_to<Math>(ratio, n.low, n.high);
  term.by_ratio = plain;
  term.low = below & negative;
  term.high = above & positive;
  Flag flat = below | above;
  if (n.has_cap) {
    const V cap = Math::all(n.cap);
    const Flag capped = ratio > cap;
    const V limited = Math::select(capped, cap, ratio);
    plain = loss * limited;
    term.low = (limited < low) & negative;
    term.high = (limited > high) & positive;
    flat = Math::select_flag(plain >= clipped, capped, flat);
  } else {
    flat = flat & Math::negate(plain >= clipped);
  }
  term.value = Math::select(plain >= clipped, plain, clipped);
  if (n.has_dual) {
    const V ceiling = loss * Math::all(n.dual_clip);
    term.dual = negative & (term.value > ceiling);
    term.value = Math::select(term.dual, ceiling, term.value);
    flat = flat | term.dual;
  }
  term.by_ratio = Math::select(flat | Math::negate(term.inside), zero, term.by_ratio);
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
GRPO_HD typename Math::Flag trusted(Loss loss, const TermInput<Math>& in, const TermNumbers<typename Math::Scalar>& n) {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
  const V one = Math::all(1), tiny = Math::all(static_cast<typename Math::Scalar>(1e-8));
  const V now = Math::exp(in.lp), before = Math::exp(in.old);
  const Flag upward = in.advantage > Math::all(0);
  if (loss == Loss::kDppoTv) {
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
GRPO_HD void score_term(Loss loss, const TermInput<Math>& in, const TermNumbers<typename Math::Scalar>& n,
                        Term<Math>& term) {
  using V = typename Math::Value;
  const V zero = Math::all(0);
  V weight = Math::all(1);
  if (loss == Loss::kCispo) {
    weight = clamp_to<Math>(term.ratio, n.low, n.high);
    const auto below = term.ratio<Math::all(n.low), above = term.ratio> Math::all(n.high);
    term.low = below & (in.advantage < zero);
    term.high = above & (in.advantage > zero);
    term.clipped = below | above;
  }
  if (loss == Loss::kDppoTv || loss == Loss::kDppoKl) {
    const auto within = trusted<Math>(loss, in, n), capped = term.ratio > Math::all(n.cap);
    weight = Math::select(within, Math::select(capped, Math::all(n.cap), term.ratio), zero);
    term.clipped = Math::negate(within);
    term.dual = within & capped;
  }
  if (loss == Loss::kVespo) weight = Math::select(in.advantage >= zero, in.phi_positive, in.phi_other);
  term.weight = weight;
  term.by_score = -weight * in.advantage;
  term.value = term.by_score * in.score;
}

template <typename Math>
GRPO_HD Term<Math> policy_term(Loss loss, const TermInput<Math>& in, const TermNumbers<typename Math::Scalar>& n) {
  Term<Math> term;
  term.by_score = term.by_ratio = term.weight = Math::all(0);
  term.low = term.high = term.clipped = term.dual = Math::none();
  take_ratio<Math>(in, n, term);
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
      const auto distance = in.lp - in.old;
      const auto pull = Math::all(n.dro_beta) * distance;
      term.value = Math::all(static_cast<typename Math::Scalar>(0.5)) * pull * distance - in.lp * in.advantage;
      term.by_score = pull - in.advantage;
      break;
    }
    default:
      score_term<Math>(loss, in, n, term);
  }
  return term;
}

template <typename Math>
struct KlTerm {
  typename Math::Value value, slope;
};

// Of the log ratio to the reference policy, before kl_straight and kl_unbiased.
template <typename Math>
GRPO_HD KlTerm<Math> kl_term(Kl kind, const typename Math::Value& distance,
                             const TermNumbers<typename Math::Scalar>& n) {
  using V = typename Math::Value;
  const V zero = Math::all(0), one = Math::all(1);
  const V d = n.clamps_kl ? clamp_to<Math>(distance, -n.kl_clamp_in, n.kl_clamp_in) : distance;
  KlTerm<Math> kl{d, one};
  if (kind == Kl::kK2) kl = {Math::all(static_cast<typename Math::Scalar>(0.5)) * d * d, d};
  if (kind == Kl::kK3) {
    const V rest = Math::expm1(-d);
    kl = {rest + d, -rest};
  }
  if (kind == Kl::kAbs) {
    const V sign = Math::select(d < zero, -one, Math::select(d > zero, one, zero));
    kl = {sign * d, sign};
  }
  if (n.clamps_kl) {
    const V bound = Math::all(n.kl_clamp_in), top = Math::all(n.kl_clamp_out);
    const auto inside = (distance >= -bound) & (distance <= bound) & (kl.value >= -top) & (kl.value <= top);
    kl.value = clamp_to<Math>(kl.value, -n.kl_clamp_out, n.kl_clamp_out);
    kl.slope = Math::select(inside, kl.slope, zero);
  }
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
