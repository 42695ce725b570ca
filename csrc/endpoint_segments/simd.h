#pragma once

#include <stdint.h>

#include "endpoint_segments/scan.h"

// segment_weights    ratio * (1 - probability) of each token, in the type of the log-probs: a stand-in for the norm of
//                    the token's score gradient; the log ratio is clamped to +-kMaxLogRatio
#define GRPO_DECLARE(level)                                                                                 \
  namespace grpo_kernels::level {                                                                           \
  void segment_weights(const float* logprobs, const float* old_logprobs, int64_t count, float* weights);    \
  void segment_weights(const double* logprobs, const double* old_logprobs, int64_t count, double* weights); \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
