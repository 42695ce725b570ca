#pragma once

#include "token_logprobs/simd.h"

// dot          the sum of products, the same on every instruction set
// add_scaled   sum += factor * x
// add_rounded  to += sum, rounded once to the type of `to`
#define GRPO_DECLARE_FOR(T)                                                 \
  Wide<T> dot(const T* a, const T* b, int64_t count);                       \
  void add_scaled(Wide<T>* sum, const T* x, Wide<T> factor, int64_t count); \
  void add_rounded(T* to, const Wide<T>* sum, int64_t count);
#define GRPO_DECLARE(level)       \
  namespace grpo_kernels::level { \
  GRPO_DECLARE_FOR(float)         \
  GRPO_DECLARE_FOR(double)        \
  GRPO_DECLARE_FOR(Half)          \
  GRPO_DECLARE_FOR(BFloat16)      \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
#undef GRPO_DECLARE_FOR
