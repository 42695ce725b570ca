#pragma once

#include "policy_loss/terms.h"

// The arrays of a policy loss, the view of them that a kernel gets for neighbouring tokens of one row, and the
// statistics of a row that its terms depend on.
namespace grpo_kernels {

// The kernels are specialised for PPO's clipped loss, and again for its common case: token ratios, and no inputs beyond
// old log-probs, advantages, a mask and the reference log-probs of a k3 KL. CUDA has bare kinds for the same inputs and
// no limits on ratios and KL estimates beyond the clipping itself: PPO's loss, CISPO, and PPO's loss with the ratios of
// sequences (GSPO), each without and with a KL. A CPU has the common case of REINFORCE, which losses of rows become,
// and that of PPO's loss with importance weights of tokens.
enum class WalkKind {
  kAny,
  kClip,
  kPlainClip,
  kPlainReinforce,
  kWeightedClip,
  kBareClip,
  kBareClipK3,
  kBareCispo,
  kBareCispoK3,
  kBareSequence,
  kBareSequenceK3
};
GRPO_HD constexpr bool is_bare(WalkKind kind) { return kind >= WalkKind::kBareClip; }
GRPO_HD constexpr bool is_bare_cispo(WalkKind kind) {
  return kind == WalkKind::kBareCispo || kind == WalkKind::kBareCispoK3;
}
GRPO_HD constexpr bool is_bare_sequence(WalkKind kind) { return kind >= WalkKind::kBareSequence; }
GRPO_HD constexpr bool is_bare_k3(WalkKind kind) {
  return kind == WalkKind::kBareClipK3 || kind == WalkKind::kBareCispoK3 || kind == WalkKind::kBareSequenceK3;
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

  GRPO_HD bool has_plain_inputs() const {
    const bool has_other_input = sampling_logprobs != nullptr || is_weights != nullptr || entropy != nullptr ||
                                 weights != nullptr || segments != nullptr || kinds != nullptr;
    const bool has_other_kl = plan.kl != Kl::kNone && (plan.kl != Kl::kK3 || plan.kl_straight || plan.kl_unbiased);
    return !has_other_input && !has_other_kl && old_logprobs != nullptr;
  }

  GRPO_HD WalkKind walk_kind() const {
    if (plan.loss != Loss::kClip || kinds != nullptr) return WalkKind::kAny;
    const bool has_token_ratio = !needs_whole_rows() && plan.ratio == Ratio::kToken;
    return has_token_ratio && has_plain_inputs() ? WalkKind::kPlainClip : WalkKind::kClip;
  }

  // The kind on a CPU.
  WalkKind host_kind() const {
    if (plan.ratio == Ratio::kToken && !needs_whole_rows()) {
      PolicyBatch unweighted = *this;
      unweighted.is_weights = nullptr;
      const bool is_weighted = is_weights != nullptr && !is_weights_by_row;
      if (plan.loss == Loss::kReinforce && has_plain_inputs()) return WalkKind::kPlainReinforce;
      if (plan.loss == Loss::kClip && is_weighted && unweighted.has_plain_inputs()) return WalkKind::kWeightedClip;
    }
    return walk_kind();
  }

  // The bare kind without a KL; kAny if there is none.
  WalkKind bare_kind(const TermCoefficients<T>& coefficients) const {
    if (coefficients.has_limits() || !has_plain_inputs()) return WalkKind::kAny;
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

// Sums over a row's tokens with a policy term that its terms depend on.
template <typename T>
struct RowStatistics {
  double log_ratio = 0;
  double vespo_log_ratio = 0;  // each token's clamped to [-20, 20]
  double gmpo_log_ratio = 0;   // each token's as gmpo_clip leaves it
  double advantage = 0;
  double sampling_to_policy = 0;  // log ratio of the sampler to the policy, for off_policy_threshold
  double old_to_sampling = 0;     // log ratio of the old policy to the sampler, for sequence corrections
  double log_is_weights = 0;      // logs of the tokens' importance weights, for VESPO and GMPO

  // GMPO clamps a token's log ratio only where that lowers the objective.
  GRPO_HD static double gmpo_clip(const PolicyPlan& plan, double log_ratio, double advantage) {
    if (advantage == 0) return 0;
    if (advantage < 0) return log_ratio < -plan.low ? -plan.low : log_ratio;
    return log_ratio > plan.high ? plan.high : log_ratio;
  }

  GRPO_HD static double clamp(double value, double low, double high) {
    return value < low ? low : (value > high ? high : value);
  }

  // A token that the sampler could not score (NaN) counts as ratio 1.
  GRPO_HD static double known_log_ratio(double numerator, double denominator) {
    const double difference = numerator - denominator;
    return isnan(difference) ? 0 : difference;
  }

  GRPO_HD void add(const PolicyBatch<T>& in, int64_t row, int64_t t) {
    if (!in.has_policy_term(t)) return;
    const PolicyPlan& plan = in.plan;
    const double token_log_ratio = in.log_ratio(t), token_advantage = in.advantage(row, t);
    log_ratio += token_log_ratio;
    vespo_log_ratio += clamp(token_log_ratio, -20, 20);
    advantage += token_advantage;
    if (plan.loss == Loss::kGeoMean && in.is_kept(t)) {
      gmpo_log_ratio += gmpo_clip(plan, token_log_ratio, token_advantage);
    }
    const double logprob = static_cast<double>(in.logprobs[t]);
    const double old = in.old_logprobs == nullptr ? logprob : static_cast<double>(in.old_logprobs[t]);
    const double sampling = in.sampling_logprobs == nullptr ? old : static_cast<double>(in.sampling_logprobs[t]);
    if (plan.off_policy_threshold < INFINITY) sampling_to_policy += known_log_ratio(sampling, logprob);
    if (plan.correction != Correction::kNone) old_to_sampling += known_log_ratio(old, sampling);
    if (plan.loss != Loss::kVespo && plan.loss != Loss::kGeoMean) return;
    double weight = 1;
    if (in.is_weights != nullptr && !in.is_weights_by_row) {
      weight = static_cast<double>(in.is_weights[t]);
    } else if (plan.correction != Correction::kNone && !plan.corrects_sequences()) {
      weight = correction_weight<ScalarTermMath<double>>(plan, known_log_ratio(old, sampling),
                                                         TermCoefficients<double>(plan));
    } else {
      return;
    }
    log_is_weights += plan.loss == Loss::kVespo ? clamp(log(weight), log(1e-8), 20) : log(weight + 1e-10);
  }

  // Sets the values of the row in `tokens`, and adds the row's importance weight, if it has one, to the sums.
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
      const double log_weight = clamp(vespo_log_ratio + log_is_weights, log(1e-8), 20);
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

// The gradient of a token through its row's log ratio: `share`, or 0 where GMPO has clamped the token.
template <typename T>
GRPO_HD T row_ratio_gradient(const PolicyBatch<T>& in, int64_t row, int64_t t, T share) {
  if (in.plan.loss != Loss::kGeoMean) return in.has_policy_term(t) ? share : T{0};
  const double log_ratio = in.log_ratio(t), advantage = in.advantage(row, t);
  const bool has_gradient = in.is_kept(t) && advantage != 0;
  const bool is_clamped = RowStatistics<T>::gmpo_clip(in.plan, log_ratio, advantage) != log_ratio;
  return has_gradient && !is_clamped ? share : T{0};
}

}  // namespace grpo_kernels
