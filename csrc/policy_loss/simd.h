#pragma once

#include "policy_loss/batch.h"
#include "policy_loss/future_kl.h"

// difference_sum   the sum of logprobs - base over the tokens of a row whose mask is set, or null: over all
// future_kl        writes FIPO's weights of the tokens of a row
// policy_tokens    writes the gradient of the tokens and adds their sums; the caller spreads sums.ratio_gradient over
//                  the row. `kind` is the batch's
// row_statistics   sums over the tokens of a row
// add_row_share    adds the gradient through the row's log ratio to that of its tokens
// count_policy     number of a row's tokens with a policy term, and of those that are kept for their entropy
// covariance_sums  sums over a row for the means
// find_covariances writes the matches in `count` tokens of a row, at most as many; returns their number. `place` is
//                  that of the last token before, and goes on
#define GRPO_DECLARE_FOR(T)                                                                               \
  void policy_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, \
                     PolicySums& sums);                                                                   \
  RowStatistics row_statistics(const PolicyBatch<T>& in, int64_t row);                                    \
  void add_row_share(const PolicyBatch<T>& in, int64_t row, T share, T* gradient);                        \
  void count_policy(const PolicyBatch<T>& in, int64_t row, double& tokens, double& kept);                 \
  CovarianceSums covariance_sums(const PolicyBatch<T>& in, int64_t row);                                  \
  int64_t find_covariances(const PolicyBatch<T>& in, int64_t row, int64_t first, int64_t count,           \
                           const CovarianceQuery& query, int64_t& place, CovarianceMatch* matches);       \
  double difference_sum(const T* logprobs, const T* base, const bool* mask, int64_t count);               \
  void future_kl(const FutureKl<T>& row, int64_t count, T* weights);
#define GRPO_DECLARE(level)       \
  namespace grpo_kernels::level { \
  GRPO_DECLARE_FOR(float)         \
  GRPO_DECLARE_FOR(double)        \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
#undef GRPO_DECLARE_FOR
