// Compiled once per instruction set. Only C headers and project headers whose functions are always inlined may
// be used here: an inline function of the standard library could be merged with a copy built for another
// instruction set.
#include "simd/endpoint_segments.h"

#include "simd/vector_math.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

// NaN where either is not finite, whatever the limits made of it.
template <typename V>
GRPO_HD V weight_of(const V& now, const V& old) {
  const V most = every<V>(kMostLogRatio), none = now - now;
  const V log_ratio = now - old;
  const V limited = smaller(most, larger(-most, log_ratio));
  return exp(limited) * -expm1(smaller(every<V>(0), now)) + (log_ratio - log_ratio) + none;
}

template <typename V, typename T>
GRPO_HD void weigh(const T* now, const T* old, int64_t count, T* weights) {
  constexpr int kCount = LaneMath<V>::kCount;
  int64_t i = 0;
  for (; i + kCount <= count; i += kCount) {
    V some_now, some_old;
    __builtin_memcpy(&some_now, now + i, sizeof(V));
    __builtin_memcpy(&some_old, old + i, sizeof(V));
    const V some = weight_of(some_now, some_old);
    __builtin_memcpy(weights + i, &some, sizeof(V));
  }
  if (i == count) return;
  V some_now = {}, some_old = {};
  for (int l = 0; i + l < count; ++l) some_now[l] = now[i + l], some_old[l] = old[i + l];
  const V some = weight_of(some_now, some_old);
  for (int l = 0; i + l < count; ++l) weights[i + l] = some[l];
}

}  // namespace

void segment_weights(const float* now, const float* old, int64_t count, float* weights) {
  weigh<Floats>(now, old, count, weights);
}
void segment_weights(const double* now, const double* old, int64_t count, double* weights) {
  weigh<Quad>(now, old, count, weights);
}

}  // namespace grpo_kernels::GRPO_SIMD
