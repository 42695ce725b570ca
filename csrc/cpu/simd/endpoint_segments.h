#pragma once

#include <stdint.h>

#include "grpo_kernels/endpoint_scan.h"

// segment_weights  exp(now - old), the difference limited, times 1 - exp(now), of `count` tokens;
//                  as exact as they are, as it stands in for something else anyway
#define GRPO_DECLARE(level)                                                                   \
  namespace grpo_kernels::level {                                                             \
  void segment_weights(const float* now, const float* old, int64_t count, float* weights);    \
  void segment_weights(const double* now, const double* old, int64_t count, double* weights); \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
