#pragma once

#include "policy_loss/batch.h"

// policy_tokens   writes the gradient of the tokens and adds their sums; the caller spreads sums.ratio_gradient over
//                 the row. `kind` is the batch's
// row_statistics  sums over the tokens of a row
// add_row_share   adds the gradient through the row's log ratio to that of its tokens
#define GRPO_DECLARE_FOR(T)                                                                               \
  void policy_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, \
                     PolicySums& sums);                                                                   \
  RowStatistics row_statistics(const PolicyBatch<T>& in, int64_t row);                                    \
  void add_row_share(const PolicyBatch<T>& in, int64_t row, T share, T* gradient);
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
