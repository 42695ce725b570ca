#pragma once

#include "policy_loss/batch.h"
#include "policy_loss/future_kl.h"

// difference_sum   the sum of logprobs - base over the tokens of a row whose mask is set, or null: over all
// future_kl        writes FIPO's weights of the tokens of a row
// policy_tokens    writes the gradient of the tokens and adds their sums; the caller spreads sums.ratio_gradient over
// the
//                  row. `kind` is the batch's
#define GRPO_DECLARE(level)                                                                                    \
  namespace grpo_kernels::level {                                                                              \
  void policy_tokens(const PolicyTokens<float>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count,  \
                     PolicySums& sums);                                                                        \
  void policy_tokens(const PolicyTokens<double>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, \
                     PolicySums& sums);                                                                        \
  double difference_sum(const float* logprobs, const float* base, const bool* mask, int64_t count);            \
  double difference_sum(const double* logprobs, const double* base, const bool* mask, int64_t count);          \
  void future_kl(const FutureKl<float>& row, int64_t count, float* weights);                                   \
  void future_kl(const FutureKl<double>& row, int64_t count, double* weights);                                 \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
