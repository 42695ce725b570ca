#pragma once

#include "grpo_kernels/policy_terms.h"

// The arrays of a policy loss, what its kernels are told of one row, and what they find out about it first.
namespace grpo_kernels {

// What is compiled for itself: the loss that nearly everybody uses, and that loss over tokens of which nothing is known
// but log-probs, advantages, a mask and for a k3 KL those of the reference.
enum class WalkKind { kAny, kClip, kPlainClip };

// An array that was not given is null.
template <typename T>
struct PolicyBatch {
  const T *logprobs, *old, *ref, *sampling, *is_weights, *entropy, *weights, *advantages;
  bool advantages_by_row, is_by_row;
  const bool* mask;
  const int32_t* segments;
  const int64_t* cu_seqlens;  // null: rows of `width`
  int64_t rows, width, tokens;
  T entropy_floor;
  Normalizers known;
  PolicyPlan plan;

  GRPO_HD int64_t start(int64_t row) const { return cu_seqlens == nullptr ? row * width : cu_seqlens[row]; }
  GRPO_HD int64_t length(int64_t row) const {
    return cu_seqlens == nullptr ? width : cu_seqlens[row + 1] - cu_seqlens[row];
  }
  GRPO_HD bool valid(int64_t t) const {
    return (mask == nullptr || mask[t]) && (segments == nullptr || segments[t] >= 0);
  }
  GRPO_HD bool kept(int64_t t) const { return valid(t) && (entropy == nullptr || entropy[t] >= entropy_floor); }
  GRPO_HD double log_ratio(int64_t t) const {
    return old == nullptr ? 0 : static_cast<double>(logprobs[t]) - static_cast<double>(old[t]);
  }
  GRPO_HD double advantage(int64_t row, int64_t t) const {
    return static_cast<double>(advantages_by_row ? advantages[row] : advantages[t]);
  }
  // Whether a row has to be looked at as a whole before its tokens.
  GRPO_HD bool by_row() const { return plan.needs_row() || segments != nullptr; }

  GRPO_HD WalkKind kind() const {
    if (plan.loss != Loss::kClip) return WalkKind::kAny;
    const bool of_rows = by_row() || plan.ratio != Ratio::kToken;
    const bool more = sampling != nullptr || is_weights != nullptr || entropy != nullptr || weights != nullptr;
    const bool other_kl = plan.kl != Kl::kNone && (plan.kl != Kl::kK3 || plan.kl_straight || plan.kl_unbiased);
    return of_rows || more || other_kl || old == nullptr ? WalkKind::kClip : WalkKind::kPlainClip;
  }

  // The shares of tokens that have no weights of their own.
  GRPO_HD Shares shares(const Counts& batch, const Counts& row) const {
    Shares found = shares_of(plan, known, batch, row);
    if (weights == nullptr) return found;
    found.policy = found.kl = 1;
    if (plan.entropy_aggregation != Aggregation::kLocalTokenMean) found.entropy = 1;
    return found;
  }

  GRPO_HD T entropy_gradient(int64_t t, const Shares& shares) const {
    const bool local = plan.entropy_aggregation == Aggregation::kLocalTokenMean;
    const T share = static_cast<T>(-plan.entropy_coef * shares.entropy);
    if (!(local ? kept(t) : valid(t))) return 0;
    return weights == nullptr || local ? share : share * weights[t];
  }
};

// Neighbouring tokens of one row, and what they need to know of it.
template <typename T>
struct PolicyTokens {
  const T *logprobs, *old, *ref, *sampling, *is_weights, *entropy, *weights, *advantages;
  const bool* mask;         // null: all
  const int32_t* segments;  // null: none; negative: takes no part
  const bool* terms;        // where the policy has its terms; null: at every token
  const T* log_ratios;      // of segments, at their ends; null: of the tokens, or of the row
  const T* scores;
  T row_log_ratio;  // where the ratio is the row's
  T row_advantage, row_is;
  T phi_positive, phi_other;
  bool row_is_far;  // no policy terms where the advantage is negative
  T entropy_floor;  // of tokens with a policy term
  Shares shares;
  T* gradient;
  T* term_gradient;  // of the terms, where it is spread over other tokens later; null: added to gradient
};

template <typename T>
GRPO_HD const T* at_or_null(const T* array, int64_t offset) {
  return array == nullptr ? nullptr : array + offset;
}

// The tokens from `first` on, which are of this row.
template <typename T>
GRPO_HD PolicyTokens<T> tokens_of(const PolicyBatch<T>& batch, int64_t row, int64_t first, const Shares& shares,
                                  T* gradient) {
  PolicyTokens<T> tokens{};
  tokens.logprobs = batch.logprobs + first;
  tokens.old = at_or_null(batch.old, first);
  tokens.ref = batch.plan.kl == Kl::kNone ? nullptr : at_or_null(batch.ref, first);
  tokens.sampling = at_or_null(batch.sampling, first);
  tokens.entropy = at_or_null(batch.entropy, first);
  tokens.weights = at_or_null(batch.weights, first);
  tokens.mask = at_or_null(batch.mask, first);
  tokens.segments = at_or_null(batch.segments, first);
  tokens.gradient = gradient + first;
  tokens.shares = shares;
  tokens.entropy_floor = batch.entropy_floor;
  tokens.row_is = batch.is_by_row ? batch.is_weights[row] : T{1};
  tokens.is_weights = batch.is_by_row ? nullptr : at_or_null(batch.is_weights, first);
  tokens.row_advantage = batch.advantages_by_row ? batch.advantages[row] : T{0};
  tokens.advantages = batch.advantages_by_row ? nullptr : at_or_null(batch.advantages, first);
  return tokens;
}

// Sums over a row's tokens that have to be known before its terms.
template <typename T>
struct RowFacts {
  double log_ratio = 0;  // of the tokens
  double clamped = 0;    // for VESPO
  double geometric = 0;  // for GMPO
  double advantage = 0;
  double drift = 0;     // from the sampler to the policy
  double mismatch = 0;  // from the sampler to the old policy
  double log_is = 0;    // logs of the tokens' mismatch weights, as VESPO or GMPO takes them

  // GMPO's log ratio of a token: clamped where that lowers the objective.
  GRPO_HD static double pessimistic(const PolicyPlan& plan, double log_ratio, double advantage) {
    if (advantage == 0) return 0;
    if (advantage < 0) return log_ratio < -plan.low ? -plan.low : log_ratio;
    return log_ratio > plan.high ? plan.high : log_ratio;
  }

  GRPO_HD static double clamp(double value, double low, double high) {
    return value < low ? low : (value > high ? high : value);
  }

  // 0 where the sampler could not score the token.
  GRPO_HD static double gap(double from, double sampled) {
    const double difference = from - sampled;
    return isnan(difference) ? 0 : difference;
  }

  GRPO_HD void add(const PolicyBatch<T>& in, int64_t row, int64_t t) {
    if (!in.valid(t)) return;
    const PolicyPlan& plan = in.plan;
    const double distance = in.log_ratio(t), of_token = in.advantage(row, t);
    log_ratio += distance;
    clamped += clamp(distance, -20, 20);
    advantage += of_token;
    if (plan.loss == Loss::kGeoMean && in.kept(t)) geometric += pessimistic(plan, distance, of_token);
    const double now = static_cast<double>(in.logprobs[t]);
    const double before = in.old == nullptr ? now : static_cast<double>(in.old[t]);
    const double sampled = in.sampling == nullptr ? before : static_cast<double>(in.sampling[t]);
    if (plan.off_policy_threshold < INFINITY) drift += gap(sampled, now);
    if (plan.correction != Correction::kNone) mismatch += gap(before, sampled);
    if (plan.loss != Loss::kVespo && plan.loss != Loss::kGeoMean) return;
    double weight = 1;
    if (in.is_weights != nullptr && !in.is_by_row) {
      weight = static_cast<double>(in.is_weights[t]);
    } else if (plan.correction != Correction::kNone && !plan.corrects_sequences()) {
      weight = mismatch_weight<ScalarTermMath<double>>(plan, gap(before, sampled), TermNumbers<double>(plan));
    } else {
      return;
    }
    log_is += plan.loss == Loss::kVespo ? clamp(log(weight), log(1e-8), 20) : log(weight + 1e-10);
  }

  // What the row's tokens are told. Adds a row's mismatch weight to the sums.
  GRPO_HD void tell(const PolicyBatch<T>& in, int64_t row, const Counts& counts, PolicyTokens<T>& tokens,
                    PolicySums& sums) const {
    const PolicyPlan& plan = in.plan;
    const double count = counts.tokens > 1 ? counts.tokens : 1;
    tokens.row_is_far = !(drift / count <= plan.off_policy_threshold);
    tokens.row_log_ratio = static_cast<T>(log_ratio / count);
    if (plan.corrects_sequences()) {
      const double weight = mismatch_weight<ScalarTermMath<double>>(plan, mismatch, TermNumbers<double>(plan));
      tokens.row_is = static_cast<T>(weight);
      sums.add_is(weight);
    } else if (in.is_by_row && counts.tokens > 0) {
      sums.add_is(static_cast<double>(in.is_weights[row]));
    }
    if (plan.loss == Loss::kVespo) {
      const double log_weight = clamp(clamped + log_is, log(1e-8), 20);
      tokens.phi_positive = static_cast<T>(phi(plan.k_pos, plan.lambda_pos, log_weight));
      tokens.phi_other = static_cast<T>(phi(plan.k_neg, plan.lambda_neg, log_weight));
    }
    if (plan.loss == Loss::kGeoMean) {
      tokens.row_log_ratio = static_cast<T>(geometric / (counts.kept > 1 ? counts.kept : 1));
      if (!in.advantages_by_row) tokens.row_advantage = static_cast<T>(advantage / count);
      if (!in.is_by_row && !plan.corrects_sequences()) tokens.row_is = static_cast<T>(exp(log_is / count));
    }
  }

  GRPO_HD static double phi(double k, double rate, double log_weight) {
    rate = rate < 1e-4 ? 1e-4 : rate;
    const double weight = exp(rate + k * log_weight - rate * exp(log_weight));
    return isinf(weight) ? 0 : weight;
  }
};

// The derivative that a token of the row gets from the row's log ratio: `each`, or 0 where GMPO has clamped it.
template <typename T>
GRPO_HD T from_row(const PolicyBatch<T>& in, int64_t row, int64_t t, T each) {
  if (in.plan.loss != Loss::kGeoMean) return in.valid(t) ? each : T{0};
  const double distance = in.log_ratio(t), advantage = in.advantage(row, t);
  const bool moves = in.kept(t) && advantage != 0;
  return moves && RowFacts<T>::pessimistic(in.plan, distance, advantage) == distance ? each : T{0};
}

}  // namespace grpo_kernels
