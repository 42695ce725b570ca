#pragma once

#include "policy_loss/terms.h"

// The arrays of a policy loss, the view of them that a kernel gets for neighbouring tokens of one row, and the
// statistics of a row that its terms depend on.
namespace grpo_kernels {

// The kernels are specialised for PPO's clipped loss, and again for its common case: token ratios, and no inputs beyond
// old log-probs, advantages, a mask and the reference log-probs of a k3 KL. CUDA has bare kinds for the same inputs and
// no limits on ratios and KL estimates beyond the clipping itself: PPO's loss, CISPO, and PPO's loss with the ratios of
// sequences (GSPO), each without and with a KL. CPUs have plain kinds of other losses, of PPO's loss with values of the
// row (RowClip), the sampler's log-probs (SampledClip) or weights of tokens (WeightedClip), and of losses on tokens of
// several kinds.
enum class WalkKind {
  kAny,
  kClip,
  kPlainClip,
  kBareClip,
  kBareClipK3,
  kBareCispo,
  kBareCispoK3,
  kBareSequence,
  kBareSequenceK3,
  kPlainCispo,
  kPlainIpo,
  kPlainIcepop,
  kPlainTopr,
  kPlainReinforce,
  kRowClip,
  kSampledClip,
  kWeightedClip,
  kKindsClip,
  kKindsClipCov,
  kKindsKlCov
};
GRPO_HD constexpr bool is_bare(WalkKind kind) {
  return kind >= WalkKind::kBareClip && kind <= WalkKind::kBareSequenceK3;
}
GRPO_HD constexpr bool is_bare_cispo(WalkKind kind) {
  return kind == WalkKind::kBareCispo || kind == WalkKind::kBareCispoK3;
}
GRPO_HD constexpr bool is_bare_sequence(WalkKind kind) {
  return kind == WalkKind::kBareSequence || kind == WalkKind::kBareSequenceK3;
}
GRPO_HD constexpr bool is_bare_k3(WalkKind kind) {
  return kind == WalkKind::kBareClipK3 || kind == WalkKind::kBareCispoK3 || kind == WalkKind::kBareSequenceK3;
}
GRPO_HD constexpr bool is_of_kinds(WalkKind kind) { return kind >= WalkKind::kKindsClip; }
// The loss of a kind other than kAny.
GRPO_HD constexpr Loss loss_of(WalkKind kind) {
  switch (kind) {
    case WalkKind::kBareCispo:
    case WalkKind::kBareCispoK3:
    case WalkKind::kPlainCispo:
      return Loss::kCispo;
    case WalkKind::kPlainIpo:
      return Loss::kIpo;
    case WalkKind::kPlainIcepop:
      return Loss::kIcepop;
    case WalkKind::kPlainTopr:
      return Loss::kTopr;
    case WalkKind::kPlainReinforce:  // which losses of rows become
      return Loss::kReinforce;
    case WalkKind::kKindsClipCov:
      return Loss::kClipCov;
    case WalkKind::kKindsKlCov:
      return Loss::kKlCov;
    default:
      return Loss::kClip;
  }
}

// Arrays of optional arguments that are not given are null.
template <typename T>
struct PolicyBatch {
  const T *logprobs, *old_logprobs, *ref_logprobs, *sampling_logprobs, *is_weights, *entropy, *weights, *advantages;
  bool advantages_by_row, is_weights_by_row;
  const bool* mask;
  const int32_t* segments;
  const int8_t* kinds;
  const int64_t* cu_seqlens;  // null: padded rows of `width`
  int64_t rows, width, tokens;
  T entropy_floor;
  Normalizers normalizers;
  PolicyPlan plan;

  GRPO_HD int64_t start(int64_t row) const { return cu_seqlens == nullptr ? row * width : cu_seqlens[row]; }
  GRPO_HD int64_t length(int64_t row) const {
    return cu_seqlens == nullptr ? width : cu_seqlens[row + 1] - cu_seqlens[row];
  }
  GRPO_HD bool is_valid(int64_t t) const {
    return (mask == nullptr || mask[t]) && (segments == nullptr || segments[t] >= 0);
  }
  GRPO_HD bool is_valid_of(uint32_t set, int64_t t) const {
    return is_valid(t) && (kinds == nullptr || is_kind_of(set, kinds[t]));
  }
  GRPO_HD bool has_policy_term(int64_t t) const { return is_valid_of(kPolicyKinds, t); }
  // Whether the policy term acts on the token: top_entropy_quantile keeps tokens of high entropy only.
  GRPO_HD bool is_kept(int64_t t) const {
    return has_policy_term(t) && (entropy == nullptr || entropy[t] >= entropy_floor);
  }
  GRPO_HD double log_ratio(int64_t t) const {
    return old_logprobs == nullptr ? 0 : static_cast<double>(logprobs[t]) - static_cast<double>(old_logprobs[t]);
  }
  GRPO_HD double advantage(int64_t row, int64_t t) const {
    return static_cast<double>(advantages_by_row ? advantages[row] : advantages[t]);
  }
  // Whether a row must be read as a whole before its first term.
  GRPO_HD bool needs_whole_rows() const { return plan.couples_tokens() || segments != nullptr; }

  // Besides the sampler's log-probs and importance weights.
  GRPO_HD bool has_usual_inputs() const {
    const bool has_other_input = entropy != nullptr || weights != nullptr || segments != nullptr;
    const bool has_other_kl = plan.kl != Kl::kNone && (plan.kl != Kl::kK3 || plan.kl_straight || plan.kl_unbiased);
    return !has_other_input && !has_other_kl && old_logprobs != nullptr;
  }
  GRPO_HD bool has_plain_inputs() const {
    return has_usual_inputs() && sampling_logprobs == nullptr && is_weights == nullptr;
  }

  GRPO_HD WalkKind walk_kind() const {
    if (plan.loss != Loss::kClip || kinds != nullptr) return WalkKind::kAny;
    const bool has_token_ratio = !needs_whole_rows() && plan.ratio == Ratio::kToken;
    return has_token_ratio && has_plain_inputs() ? WalkKind::kPlainClip : WalkKind::kClip;
  }

  // The kind for CPUs, which have more of them.
  WalkKind lane_kind() const {
    const WalkKind kind = walk_kind();
    if (kind == WalkKind::kPlainClip || !has_usual_inputs()) return kind;
    const bool is_of_tokens = !needs_whole_rows() && plan.ratio == Ratio::kToken;
    if (is_weights != nullptr) {
      const bool is_weighted = is_of_tokens && !is_weights_by_row && sampling_logprobs == nullptr;
      return kind == WalkKind::kClip && is_weighted ? WalkKind::kWeightedClip : kind;
    }
    if (kind == WalkKind::kClip) return sampling_logprobs == nullptr ? WalkKind::kRowClip : WalkKind::kSampledClip;
    if (sampling_logprobs != nullptr || !is_of_tokens) return kind;
    if (kinds != nullptr && plan.kl_aggregation == Aggregation::kLocalTokenMean) return kind;
    for (int i = static_cast<int>(WalkKind::kPlainCispo); i <= static_cast<int>(WalkKind::kKindsKlCov); ++i) {
      const auto other = static_cast<WalkKind>(i);
      const bool is_candidate = other <= WalkKind::kPlainReinforce || is_of_kinds(other);
      if (is_candidate && is_of_kinds(other) == (kinds != nullptr) && loss_of(other) == plan.loss) return other;
    }
    return kind;
  }

  // The bare kind without a KL; kAny if there is none.
  WalkKind bare_kind(const TermCoefficients<T>& coefficients) const {
    if (coefficients.has_limits() || !has_plain_inputs() || kinds != nullptr) return WalkKind::kAny;
    if (plan.ratio == Ratio::kToken && !plan.couples_tokens()) {
      if (plan.loss == Loss::kClip) return WalkKind::kBareClip;
      if (plan.loss == Loss::kCispo) return WalkKind::kBareCispo;
    }
    const bool has_other_coupling = plan.corrects_sequences() || plan.off_policy_threshold < INFINITY;
    const bool is_sequence = plan.ratio == Ratio::kSequence && plan.loss == Loss::kClip && advantages_by_row;
    return is_sequence && !has_other_coupling ? WalkKind::kBareSequence : WalkKind::kAny;
  }

  // A token's own weight replaces its share.
  GRPO_HD Shares shares(const Counts& batch, const Counts& row) const {
    Shares shares = shares_of(plan, normalizers, batch, row);
    if (weights == nullptr) return shares;
    shares.policy = 1;
    if (plan.kl_aggregation != Aggregation::kLocalTokenMean) shares.kl = 1;
    if (isnan(normalizers.cross_entropy)) shares.cross_entropy = 1;
    if (plan.entropy_aggregation != Aggregation::kLocalTokenMean) shares.entropy = 1;
    return shares;
  }

  GRPO_HD T entropy_gradient(int64_t t, const Shares& shares) const {
    const bool is_local = plan.entropy_aggregation == Aggregation::kLocalTokenMean;
    const T share = static_cast<T>(-plan.entropy_coef * shares.entropy);
    if (!(is_local ? is_kept(t) : is_valid_of(kRegularizedKinds, t))) return 0;
    return weights == nullptr || is_local ? share : share * weights[t];
  }
};

// Neighbouring tokens of one row, with the values of the row that their terms depend on.
template <typename T>
struct PolicyTokens {
  const T *logprobs, *old_logprobs, *ref_logprobs, *sampling_logprobs, *is_weights, *entropy, *weights, *advantages;
  const bool* mask;         // null: all tokens are valid
  const int32_t* segments;  // null: none; a token with a negative one is not valid
  const int8_t* kinds;      // null: all tokens have a policy term
  const bool* terms;        // marks the tokens that hold a policy term; null: every token
  const T* log_ratios;      // of segments, at their last tokens; null: the token's or the row's ratio is used
  const T* scores;          // the log-probs that belong to log_ratios
  T row_log_ratio;          // used where the ratio is the row's
  T row_advantage;          // used where `advantages` is null
  T row_is_weight;          // used where the importance weight is the row's
  T phi_positive, phi_other;
  bool row_is_off_policy;  // drops policy terms of negative advantage
  T entropy_floor;         // tokens below it have no policy term
  Shares shares;
  T* gradient;
  T* term_gradient;  // of the terms alone, to be spread over segments later; null: added to `gradient`
};

// The tokens of `row` from token `first` of the batch on.
template <typename T>
GRPO_HD PolicyTokens<T> tokens_of(const PolicyBatch<T>& batch, int64_t row, int64_t first, const Shares& shares,
                                  T* gradient) {
  PolicyTokens<T> tokens{};
  tokens.logprobs = batch.logprobs + first;
  tokens.old_logprobs = offset_or_null(batch.old_logprobs, first);
  tokens.ref_logprobs = batch.plan.kl == Kl::kNone ? nullptr : offset_or_null(batch.ref_logprobs, first);
  tokens.sampling_logprobs = offset_or_null(batch.sampling_logprobs, first);
  tokens.entropy = offset_or_null(batch.entropy, first);
  tokens.weights = offset_or_null(batch.weights, first);
  tokens.mask = offset_or_null(batch.mask, first);
  tokens.segments = offset_or_null(batch.segments, first);
  tokens.kinds = offset_or_null(batch.kinds, first);
  tokens.gradient = gradient + first;
  tokens.shares = shares;
  tokens.entropy_floor = batch.entropy_floor;
  tokens.row_is_weight = batch.is_weights_by_row ? batch.is_weights[row] : T{1};
  tokens.is_weights = batch.is_weights_by_row ? nullptr : offset_or_null(batch.is_weights, first);
  tokens.row_advantage = batch.advantages_by_row ? batch.advantages[row] : T{0};
  tokens.advantages = batch.advantages_by_row ? nullptr : offset_or_null(batch.advantages, first);
  return tokens;
}

// Sums over a row's tokens with a policy term that its terms depend on: of log ratios, as they are, each clamped to
// [-20, 20] for VESPO, and each as gmpo_clip leaves it; of the advantages, for GMPO; of the log ratio of the sampler to
// the policy, for off_policy_threshold, and of the old policy to the sampler, for sequence corrections; and of the logs
// of the tokens' importance weights, for VESPO and GMPO.
// clang-format off: it would nest the entries
#define GRPO_ROW_STATISTICS(SUM)                                                                 \
  SUM(log_ratio) SUM(vespo_log_ratio) SUM(gmpo_log_ratio) SUM(advantage) SUM(sampling_to_policy) \
  SUM(old_to_sampling) SUM(log_is_weights)
// clang-format on

GRPO_HD double limited(double value, double low, double high) {
  return value < low ? low : (value > high ? high : value);
}

// GMPO clamps a token's log ratio only where that lowers the objective.
template <typename Math>
GRPO_HD typename Math::Value gmpo_clip(const PolicyPlan& plan, const typename Math::Value& log_ratio,
                                       const typename Math::Value& advantage) {
  const auto zero = Math::all(0);
  const auto above = Math::at_most(Math::all(plan.high), log_ratio);
  const auto below = Math::at_least(Math::all(-plan.low), log_ratio);
  return Math::select(advantage == zero, zero, Math::select(advantage < zero, below, above));
}

// 0 where it is NaN: a token that the sampler could not score counts as ratio 1.
template <typename Math>
GRPO_HD typename Math::Value known(const typename Math::Value& log_ratio) {
  return Math::select(log_ratio == log_ratio, log_ratio, Math::all(0));
}

// The sums over the steps of a walk. A step is one token for a CUDA thread and eight for a CPU core; Math is over
// doubles, so that a sum of many log ratios may be exponentiated.
template <typename Math>
struct RowStatisticsWalk {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
#define GRPO_SUM(name) V name{};
  GRPO_ROW_STATISTICS(GRPO_SUM)
#undef GRPO_SUM

  // Those of the step's tokens that have a policy term, and those of them that are kept for their entropy.
  template <typename T>
  GRPO_HD static Flag policy_flags(const PolicyBatch<T>& in, int64_t t, int64_t left) {
    Flag flags = Math::load_flags(offset_or_null(in.mask, t), left);
    if (in.segments != nullptr) flags = flags & Math::not_negative(in.segments + t, left);
    if (in.kinds != nullptr) flags = flags & Math::of_kinds(kPolicyKinds, in.kinds + t, left);
    return flags;
  }
  template <typename T>
  GRPO_HD static Flag kept_flags(const PolicyBatch<T>& in, const Flag& has_policy, int64_t t, int64_t left) {
    if (in.entropy == nullptr) return has_policy;
    return has_policy & (Math::load(in.entropy + t, left) >= Math::all(in.entropy_floor));
  }

  // 0 where the flag is not set, whatever is there.
  template <typename T>
  GRPO_HD static V load(const T* from, int64_t left, const Flag& flag) {
    return Math::select(flag, Math::load(from, left), Math::all(0));
  }
  template <typename T>
  GRPO_HD static V advantage_of(const PolicyBatch<T>& in, int64_t row, int64_t t, int64_t left, const Flag& flag) {
    if (in.advantages_by_row) return Math::select(flag, Math::all(in.advantages[row]), Math::all(0));
    return load(in.advantages + t, left, flag);
  }
  template <typename T>
  GRPO_HD static V log_ratio_of(const PolicyBatch<T>& in, int64_t t, int64_t left, const Flag& flag) {
    if (in.old_logprobs == nullptr) return Math::all(0);
    return load(in.logprobs + t, left, flag) - load(in.old_logprobs + t, left, flag);
  }

  template <typename T>
  GRPO_HD void add(const PolicyBatch<T>& in, int64_t row, int64_t t, int64_t left) {
    const PolicyPlan& plan = in.plan;
    const Flag has_policy = policy_flags(in, t, left);
    const V token_log_ratio = log_ratio_of(in, t, left, has_policy);
    log_ratio += token_log_ratio;
    if (plan.loss == Loss::kVespo) vespo_log_ratio += clamp_to<Math>(token_log_ratio, -20, 20);
    if (plan.loss == Loss::kGeoMean) {
      const V token_advantage = advantage_of(in, row, t, left, has_policy);
      advantage += token_advantage;
      const V clipped = gmpo_clip<Math>(plan, token_log_ratio, token_advantage);
      gmpo_log_ratio += Math::select(kept_flags(in, has_policy, t, left), clipped, Math::all(0));
    }
    if (in.sampling_logprobs != nullptr || plan.off_policy_threshold < INFINITY) add_sampling(in, t, left, has_policy);
    if (in.is_weights != nullptr && !in.is_weights_by_row) {
      add_weight(plan, load(in.is_weights + t, left, has_policy), has_policy);
    }
  }

 private:
  template <typename T>
  GRPO_HD void add_sampling(const PolicyBatch<T>& in, int64_t t, int64_t left, const Flag& has_policy) {
    const PolicyPlan& plan = in.plan;
    const V logprob = load(in.logprobs + t, left, has_policy);
    const V old = in.old_logprobs == nullptr ? logprob : load(in.old_logprobs + t, left, has_policy);
    const V sampling = in.sampling_logprobs == nullptr ? old : load(in.sampling_logprobs + t, left, has_policy);
    if (plan.off_policy_threshold < INFINITY) sampling_to_policy += known<Math>(sampling - logprob);
    if (plan.correction == Correction::kNone) return;
    const V gap = known<Math>(old - sampling);
    old_to_sampling += gap;
    if (plan.corrects_sequences() || (plan.loss != Loss::kVespo && plan.loss != Loss::kGeoMean)) return;
    add_weight(plan, correction_weight<Math>(plan, gap, TermCoefficients<double>(plan)), has_policy);
  }

  GRPO_HD void add_weight(const PolicyPlan& plan, const V& weight, const Flag& has_policy) {
    if (plan.loss != Loss::kVespo && plan.loss != Loss::kGeoMean) return;
    V log_weight;
    if (plan.loss == Loss::kVespo) {
      log_weight = clamp_to<Math>(Math::log(weight), log(1e-8), 20);
    } else {
      log_weight = Math::log(weight + Math::all(1e-10));
    }
    log_is_weights += Math::select(has_policy, log_weight, Math::all(0));
  }
};

struct RowStatistics {
#define GRPO_SUM(name) double name = 0;
  GRPO_ROW_STATISTICS(GRPO_SUM)
#undef GRPO_SUM

  // Sets the values of the row in `tokens`, and adds the row's importance weight, if it has one, to the sums.
  template <typename T>
  GRPO_HD void finish(const PolicyBatch<T>& in, int64_t row, const Counts& counts, PolicyTokens<T>& tokens,
                      PolicySums& sums) const {
    const PolicyPlan& plan = in.plan;
    const double count = counts.policy_tokens > 1 ? counts.policy_tokens : 1;
    tokens.row_is_off_policy = !(sampling_to_policy / count <= plan.off_policy_threshold);
    tokens.row_log_ratio = static_cast<T>(log_ratio / count);
    if (plan.corrects_sequences()) {
      const double gap = plan.corrects_means() ? old_to_sampling / count : old_to_sampling;
      const double weight = correction_weight<ScalarTermMath<double>>(plan, gap, TermCoefficients<double>(plan));
      tokens.row_is_weight = static_cast<T>(weight);
      sums.add_is_weight(weight);
    } else if (in.is_weights_by_row && counts.policy_tokens > 0) {
      sums.add_is_weight(static_cast<double>(in.is_weights[row]));
    }
    if (plan.loss == Loss::kVespo) {
      const double log_weight = limited(vespo_log_ratio + log_is_weights, log(1e-8), 20);
      tokens.phi_positive = static_cast<T>(phi(plan.k_pos, plan.lambda_pos, log_weight));
      tokens.phi_other = static_cast<T>(phi(plan.k_neg, plan.lambda_neg, log_weight));
    }
    if (plan.loss == Loss::kGeoMean) {
      tokens.row_log_ratio = static_cast<T>(gmpo_log_ratio / (counts.kept_tokens > 1 ? counts.kept_tokens : 1));
      if (!in.advantages_by_row) tokens.row_advantage = static_cast<T>(advantage / count);
      if (!in.is_weights_by_row && !plan.corrects_sequences()) {
        tokens.row_is_weight = static_cast<T>(exp(log_is_weights / count));
      }
    }
  }

  // VESPO's weight of a row.
  GRPO_HD static double phi(double k, double lambda, double log_weight) {
    lambda = lambda < 1e-4 ? 1e-4 : lambda;
    const double weight = exp(lambda + k * log_weight - lambda * exp(log_weight));
    return isinf(weight) ? 0 : weight;
  }
};

// Adds the gradient of a step's tokens through their row's log ratio: `share`, or 0 where GMPO has clamped the token.
template <typename Math, typename T>
GRPO_HD void add_row_gradient(const PolicyBatch<T>& in, int64_t row, int64_t t, int64_t left, T share, T* gradient) {
  using Walk = RowStatisticsWalk<Math>;
  auto has_gradient = Walk::policy_flags(in, t, left);
  if (in.plan.loss == Loss::kGeoMean) {
    has_gradient = Walk::kept_flags(in, has_gradient, t, left);
    const auto log_ratio = Walk::log_ratio_of(in, t, left, has_gradient);
    const auto advantage = Walk::advantage_of(in, row, t, left, has_gradient);
    const auto is_clamped = Math::negate(gmpo_clip<Math>(in.plan, log_ratio, advantage) == log_ratio);
    has_gradient = has_gradient & Math::negate(is_clamped | (advantage == Math::all(0)));
  }
  const auto added = Math::select(has_gradient, Math::all(share), Math::all(0));
  Math::store(gradient + t, left, Math::load(gradient + t, left) + added);
}

// Sums over a row's tokens of kind kPolicy, whose means center the covariances of Clip-Cov and KL-Cov.
struct CovarianceSums {
  double tokens = 0, advantage = 0, logprob = 0;
};

// Tokens whose covariance is between two bounds, or of those that are not bounded, above the lower one or NaN.
struct CovarianceQuery {
  double advantage, logprob;  // means
  double low, high;
  bool is_bounded;
};

struct CovarianceMatch {
  double covariance;
  int64_t token, place;  // in the batch, and among the row's tokens of kind kPolicy, from 1 on
};

}  // namespace grpo_kernels
