#pragma once

#include "common/half_bits.h"
#include "token_logprobs/softmax.h"

namespace grpo_kernels {

// Raw device pointers; null where an argument was not given.
template <typename T>
struct LogitArrays {
  const T* logits;
  LogitLayout layout;
  const int64_t* targets;
  const float* temperatures;  // null: scaling.temperature for all rows
  LogitScaling scaling;
};

struct LogprobArrays {
  float *logprobs, *entropy;
  double* normalizer;
};

template <typename G>
struct GradientArrays {
  G* gradient;  // may be the logits
  LogitLayout layout;
  const float *grad_logprobs, *grad_entropy, *entropy;
  const double* normalizer;
};

template <typename T>
void launch_token_logprobs(const LogitArrays<T>& in, const LogprobArrays& out, void* stream);
// G is T, or a half where T is float.
template <typename T, typename G>
void launch_token_logprobs_backward(const LogitArrays<T>& in, const GradientArrays<G>& out, void* stream);

}  // namespace grpo_kernels
