#pragma once

#include "policy_loss/terms.h"

// The arrays of a policy loss, the view of them that a kernel gets for neighbouring tokens of one row, and the
// statistics of a row that its terms depend on.
namespace grpo_kernels {

// Cases that a walk over tokens is specialised for. "Plain" is a ratio of tokens, or of the row for kPlainSequence
// (GSPO), with no inputs beyond old log-probs, advantages, a mask and the reference log-probs of a k3 KL; kPlain is any
// loss of a token on such inputs and importance weights, for CPUs. For CUDA threads, kUnbiasedClip is kPlainClip with
// kl_unbiased (TRL's with beta), and kPlainCispo is CISPO without importance weights.
enum class WalkKind { kAny, kPlain, kPlainClip, kPlainSequence, kUnbiasedClip, kPlainCispo };

// Optional arguments with one entry per token, in the order of the op's schema (PolicyInputs and Policy in Python): of
// the dtype of the log-probs, bool and int32.
// clang-format off: it would nest the entries
#define GRPO_POLICY_TOKENS(NUMBERS, FLAGS, IDS)                                        \
  NUMBERS(entropy) NUMBERS(old_logprobs) FLAGS(mask) FLAGS(policy_mask) IDS(segments) \
  NUMBERS(ref_logprobs) NUMBERS(weights)
// clang-format on

// Arrays of optional arguments that are not given are null.
template <typename T>
struct PolicyBatch {
  const T *logprobs, *advantages, *is_weights;
  bool advantages_by_row, is_weights_by_row;
#define GRPO_NUMBERS(name) const T* name;
#define GRPO_FLAGS(name) const bool* name;
#define GRPO_IDS(name) const int32_t* name;
  GRPO_POLICY_TOKENS(GRPO_NUMBERS, GRPO_FLAGS, GRPO_IDS)
  const int64_t* cu_seqlens;  // null: padded rows of `width`
  int64_t rows, width, tokens;
  Normalizers normalizers;
  PolicyPlan plan;

  GRPO_HD int64_t start(int64_t row) const { return cu_seqlens == nullptr ? row * width : cu_seqlens[row]; }
  GRPO_HD int64_t length(int64_t row) const {
    return cu_seqlens == nullptr ? width : cu_seqlens[row + 1] - cu_seqlens[row];
  }
  GRPO_HD bool is_valid(int64_t t) const {
    return (mask == nullptr || mask[t]) && (segments == nullptr || segments[t] >= 0);
  }
  GRPO_HD double log_ratio(int64_t t) const {
    return old_logprobs == nullptr ? 0 : static_cast<double>(logprobs[t]) - static_cast<double>(old_logprobs[t]);
  }
  GRPO_HD double advantage(int64_t row, int64_t t) const {
    return static_cast<double>(advantages_by_row ? advantages[row] : advantages[t]);
  }
  // Whether a row must be read as a whole before its first term.
  GRPO_HD bool needs_whole_rows() const { return plan.couples_tokens() || segments != nullptr; }

  // Whether all inputs are plain but for importance weights and, where `unbiased`, kl_unbiased.
  GRPO_HD bool has_usual_inputs(bool unbiased) const {
    const int usual = (old_logprobs != nullptr) + (mask != nullptr) + (ref_logprobs != nullptr);
#define GRPO_GIVEN(name) +(name != nullptr)
    const bool has_other_input = 0 GRPO_POLICY_TOKENS(GRPO_GIVEN, GRPO_GIVEN, GRPO_GIVEN) > usual;
#undef GRPO_GIVEN
    const bool has_other_kl =
        plan.kl != Kl::kNone && (plan.kl != Kl::kK3 || plan.kl_straight || plan.kl_unbiased != unbiased);
    return !has_other_input && !has_other_kl && old_logprobs != nullptr;
  }

  GRPO_HD WalkKind walk_kind() const {
    if (!has_usual_inputs(false)) return WalkKind::kAny;
    const bool is_clip = plan.loss == Loss::kClip && is_weights == nullptr;
    if (!plan.couples_tokens()) return is_clip ? WalkKind::kPlainClip : WalkKind::kPlain;
    return is_clip && plan.ratio == Ratio::kSequence && advantages_by_row ? WalkKind::kPlainSequence : WalkKind::kAny;
  }

  // A token's own weight replaces its share.
  GRPO_HD Shares shares(const Counts& batch, const Counts& row) const {
    Shares shares = shares_of(plan, normalizers, batch, row);
    if (weights == nullptr) return shares;
    shares.policy = 1;
    if (plan.kl_aggregation != Aggregation::kLocalTokenMean) shares.kl = 1;
    if (plan.entropy_aggregation != Aggregation::kLocalTokenMean) shares.entropy = 1;
    return shares;
  }

  GRPO_HD T entropy_gradient(int64_t t, const Shares& shares) const {
    const bool is_local = plan.entropy_aggregation == Aggregation::kLocalTokenMean;
    const T share = static_cast<T>(-plan.entropy_coef * shares.entropy);
    if (!is_valid(t)) return 0;
    return weights == nullptr || is_local ? share : share * weights[t];
  }
};

// Neighbouring tokens of one row, with the values of the row that their terms depend on.
template <typename T>
struct PolicyTokens {
  const T *logprobs, *advantages, *is_weights;
  // Null: all tokens are valid, with a mask; all policy terms count, with a policy mask. A token of a negative segment
  // is not valid.
  GRPO_POLICY_TOKENS(GRPO_NUMBERS, GRPO_FLAGS, GRPO_IDS)
#undef GRPO_NUMBERS
#undef GRPO_FLAGS
#undef GRPO_IDS
  const bool* terms;    // marks the tokens that hold a policy term; null: every token
  const T* log_ratios;  // of segments, at their last tokens; null: the token's or the row's ratio is used
  const T* scores;      // the log-probs that belong to log_ratios
  T row_log_ratio;      // used where the ratio is the row's
  T row_advantage;      // used where `advantages` is null
  T row_is_weight;      // used where the importance weight is the row's
  T phi_positive, phi_other;
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
#define GRPO_OFFSET(name) tokens.name = offset_or_null(batch.name, first);
  GRPO_POLICY_TOKENS(GRPO_OFFSET, GRPO_OFFSET, GRPO_OFFSET)
#undef GRPO_OFFSET
  if (batch.plan.kl == Kl::kNone) tokens.ref_logprobs = nullptr;
  tokens.gradient = gradient + first;
  tokens.shares = shares;
  tokens.row_is_weight = batch.is_weights_by_row ? batch.is_weights[row] : T{1};
  tokens.is_weights = batch.is_weights_by_row ? nullptr : offset_or_null(batch.is_weights, first);
  tokens.row_advantage = batch.advantages_by_row ? batch.advantages[row] : T{0};
  tokens.advantages = batch.advantages_by_row ? nullptr : offset_or_null(batch.advantages, first);
  return tokens;
}

// Sums over a row's tokens that its terms depend on: of log ratios, as they are, each clamped to [-20, 20] for VESPO,
// and each as gmpo_clip leaves it; of the advantages, for GMPO; and of the logs of the tokens' importance weights, for
// VESPO and GMPO.
// clang-format off: it would nest the entries
#define GRPO_ROW_STATISTICS(SUM) \
  SUM(log_ratio) SUM(vespo_log_ratio) SUM(gmpo_log_ratio) SUM(advantage) SUM(log_is_weights)
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

// The sums over the steps of a walk. A step is one token for a CUDA thread and eight for a CPU core; Math is over
// doubles, so that a sum of many log ratios may be exponentiated.
template <typename Math>
struct RowStatisticsWalk {
  using V = typename Math::Value;
  using Flag = typename Math::Flag;
#define GRPO_SUM(name) V name{};
  GRPO_ROW_STATISTICS(GRPO_SUM)
#undef GRPO_SUM

  // The step's tokens that count.
  template <typename T>
  GRPO_HD static Flag valid_flags(const PolicyBatch<T>& in, int64_t t, int64_t left) {
    Flag flags = Math::load_flags(offset_or_null(in.mask, t), left);
    if (in.segments != nullptr) flags = flags & Math::not_negative(in.segments + t, left);
    return flags;
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
    const Flag is_valid = valid_flags(in, t, left);
    const V token_log_ratio = log_ratio_of(in, t, left, is_valid);
    log_ratio += token_log_ratio;
    if (plan.loss == Loss::kVespo) vespo_log_ratio += clamp_to<Math>(token_log_ratio, -20, 20);
    if (plan.loss == Loss::kGeoMean) {
      const V token_advantage = advantage_of(in, row, t, left, is_valid);
      advantage += token_advantage;
      gmpo_log_ratio += gmpo_clip<Math>(plan, token_log_ratio, token_advantage);
    }
    if (in.is_weights != nullptr && !in.is_weights_by_row) {
      add_weight(plan, load(in.is_weights + t, left, is_valid), is_valid);
    }
  }

 private:
  GRPO_HD void add_weight(const PolicyPlan& plan, const V& weight, const Flag& is_valid) {
    if (plan.loss != Loss::kVespo && plan.loss != Loss::kGeoMean) return;
    V log_weight;
    if (plan.loss == Loss::kVespo) {
      log_weight = clamp_to<Math>(Math::log(weight), log(1e-8), 20);
    } else {
      log_weight = Math::log(weight + Math::all(1e-10));
    }
    log_is_weights += Math::select(is_valid, log_weight, Math::all(0));
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
    const double count = counts.tokens > 1 ? counts.tokens : 1;
    tokens.row_log_ratio = static_cast<T>(log_ratio / count);
    if (in.is_weights_by_row && counts.tokens > 0) {
      sums.add_is_weight(static_cast<double>(in.is_weights[row]));
    }
    if (plan.loss == Loss::kVespo) {
      const double log_weight = limited(vespo_log_ratio + log_is_weights, log(1e-8), 20);
      tokens.phi_positive = static_cast<T>(phi(plan.k_pos, plan.lambda_pos, log_weight));
      tokens.phi_other = static_cast<T>(phi(plan.k_neg, plan.lambda_neg, log_weight));
    }
    if (plan.loss == Loss::kGeoMean) {
      tokens.row_log_ratio = static_cast<T>(gmpo_log_ratio / count);
      if (!in.advantages_by_row) tokens.row_advantage = static_cast<T>(advantage / count);
      if (!in.is_weights_by_row) tokens.row_is_weight = static_cast<T>(exp(log_is_weights / count));
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
  auto has_gradient = Walk::valid_flags(in, t, left);
  if (in.plan.loss == Loss::kGeoMean) {
    const auto log_ratio = Walk::log_ratio_of(in, t, left, has_gradient);
    const auto advantage = Walk::advantage_of(in, row, t, left, has_gradient);
    const auto is_clamped = Math::negate(gmpo_clip<Math>(in.plan, log_ratio, advantage) == log_ratio);
    has_gradient = has_gradient & Math::negate(is_clamped | (advantage == Math::all(0)));
  }
  const auto added = Math::select(has_gradient, Math::all(share), Math::all(0));
  Math::store(gradient + t, left, Math::load(gradient + t, left) + added);
}

}  // namespace grpo_kernels
