#pragma once

#include <stdint.h>

namespace grpo_kernels {

// The tokens of a row as FIPO's weights see them. Bounds that are not given are infinite.
template <typename T>
struct FutureKl {
  const T *logprobs, *old_logprobs;
  const bool* mask;     // null: all tokens count
  const T* advantages;  // null: the row's
  T row_advantage;
  double gamma;  // discount from one token to the next
  T low, high;   // bounds of a weight
  T log_cap;     // a token with a larger log ratio is left out of the sums
  T log_safety;  // above it, the weight of a token of negative advantage is in [safe_low, safe_high]
  T safe_low, safe_high;
};

}  // namespace grpo_kernels
