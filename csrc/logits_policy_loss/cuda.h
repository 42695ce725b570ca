#pragma once

#include "policy_loss/cuda.h"
#include "token_logprobs/cuda.h"

namespace grpo_kernels {

// Raw device pointers. `policy` has no entropy, as counting its tokens would read it before it is written; its gradient
// is working memory.
template <typename T>
struct LogitsLossArrays {
  LogitArrays<T> in;
  T* gradient;  // may be the logits
  LogitLayout gradient_layout;
  float *logprobs, *entropy;  // entropy: null unless wanted
  bool needs_entropy_gradient;
  PolicyArrays<float> policy;
};

template <typename T>
void launch_logits_policy_loss(LogitsLossArrays<T> arrays, void* stream);

}  // namespace grpo_kernels
