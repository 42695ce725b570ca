#pragma once

#include "grpo_kernels/policy_batch.h"

// policy_tokens    gradient and sums of these tokens; the batch's sums are complete but for `through`, which the
//                  caller spreads over the row. `kind` is the batch's
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
