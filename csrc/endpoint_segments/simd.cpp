// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "endpoint_segments/simd.h"

#include "common/simd/vector_math.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

// NaN where either log-prob is not finite, which the clamps would hide.
template <typename V>
GRPO_HD V token_weight(const V& logprob, const V& old_logprob) {
  const V bound = every<V>(kMaxLogRatio), nan_or_zero = logprob - logprob;
  const V log_ratio = logprob - old_logprob;
  const V clamped = smaller(bound, larger(-bound, log_ratio));
  return exp(clamped) * -expm1(smaller(every<V>(0), logprob)) + (log_ratio - log_ratio) + nan_or_zero;
}

template <typename V, typename T>
GRPO_HD void write_weights(const T* logprobs, const T* old_logprobs, int64_t count, T* weights) {
  constexpr int kCount = LaneMath<V>::kCount;
  int64_t i = 0;
  for (; i + kCount <= count; i += kCount) {
    V logprob, old_logprob;
    __builtin_memcpy(&logprob, logprobs + i, sizeof(V));
    __builtin_memcpy(&old_logprob, old_logprobs + i, sizeof(V));
    const V weight = token_weight(logprob, old_logprob);
    __builtin_memcpy(weights + i, &weight, sizeof(V));
  }
  if (i == count) return;
  V logprob = {}, old_logprob = {};
  for (int l = 0; i + l < count; ++l) logprob[l] = logprobs[i + l], old_logprob[l] = old_logprobs[i + l];
  const V weight = token_weight(logprob, old_logprob);
  for (int l = 0; i + l < count; ++l) weights[i + l] = weight[l];
}

}  // namespace

void segment_weights(const float* logprobs, const float* old_logprobs, int64_t count, float* weights) {
  write_weights<Floats>(logprobs, old_logprobs, count, weights);
}
void segment_weights(const double* logprobs, const double* old_logprobs, int64_t count, double* weights) {
  write_weights<Quad>(logprobs, old_logprobs, count, weights);
}

}  // namespace grpo_kernels::GRPO_SIMD
