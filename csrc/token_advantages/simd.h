#pragma once

#include <stdint.h>

#include "token_advantages/terms.h"

// walk_tokens        of a row without turns; null values are 0. Returns whether every reward that counts is a number
// advantage_moments  of the advantages that the mask counts; those that it does not are 0
// whiten_advantages  in place, where the mask counts
#define GRPO_DECLARE_TYPE(T)                                                                                    \
  bool walk_tokens(const TokenAdvantageSettings& settings, const T* rewards, const T* values, const bool* mask, \
                   int64_t count, T* advantages, T* returns);                                                   \
  RangedMoments advantage_moments(const T* advantages, const bool* mask, int64_t count);                        \
  void whiten_advantages(const TokenNorm& norm, const bool* mask, int64_t count, T* advantages);
#define GRPO_DECLARE(level)       \
  namespace grpo_kernels::level { \
  GRPO_DECLARE_TYPE(float)        \
  GRPO_DECLARE_TYPE(double)       \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
#undef GRPO_DECLARE_TYPE
