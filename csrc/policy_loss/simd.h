#pragma once

#include "policy_loss/batch.h"

// policy_tokens    writes the gradient of the tokens and adds their sums; the caller spreads sums.ratio_gradient over
// the
//                  row. `kind` is the batch's
#define GRPO_DECLARE(level)                                                                                    \
  namespace grpo_kernels::level {                                                                              \
  void policy_tokens(const PolicyTokens<float>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count,  \
                     PolicySums& sums);                                                                        \
  void policy_tokens(const PolicyTokens<double>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, \
                     PolicySums& sums);                                                                        \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
