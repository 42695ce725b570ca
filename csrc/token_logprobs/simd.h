#pragma once

#include "common/half_bits.h"
#include "token_logprobs/softmax.h"

namespace grpo_kernels {

// The type in which numbers of type T are computed.
template <typename T>
struct WideOf {
  using Type = float;
};
template <>
struct WideOf<double> {
  using Type = double;
};
template <typename T>
using Wide = typename WideOf<T>::Type;

struct RowSums {
  RowSoftmax softmax;
  double target_z;
};

}  // namespace grpo_kernels

// row_sums        reads a row of logits once; `spread` is summed for the entropy only
// row_gradient    writes the gradient of a row of logits, which may overwrite them
#define GRPO_DECLARE_GRADIENT(T, G)                                                                              \
  void row_gradient(const T* logits, G* gradient, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map, \
                    const RowGradient<Wide<T>>& row);
#define GRPO_DECLARE_FOR(T)                                                                                      \
  RowSums row_sums(const T* logits, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map, bool spread); \
  GRPO_DECLARE_GRADIENT(T, T)
#define GRPO_DECLARE(level)              \
  namespace grpo_kernels::level {        \
  GRPO_DECLARE_FOR(float)                \
  GRPO_DECLARE_FOR(double)               \
  GRPO_DECLARE_FOR(Half)                 \
  GRPO_DECLARE_FOR(BFloat16)             \
  GRPO_DECLARE_GRADIENT(float, BFloat16) \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
#undef GRPO_DECLARE_FOR
#undef GRPO_DECLARE_GRADIENT
