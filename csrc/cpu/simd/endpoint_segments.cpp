// Compiled once per instruction set. Only C headers and project headers whose functions are always inlined may
// be used here: an inline function of the standard library could be merged with a copy built for another
// instruction set.
#include "simd/endpoint_segments.h"

#include "simd/vector_math.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

GRPO_HD Quad weight_of(const Quad& now, const Quad& old) {
  const Quad most = broadcast(kMostLogRatio);
  const Quad log_ratio = smaller(most, larger(broadcast(-kMostLogRatio), Quad(now - old)));
  return exp(log_ratio) * -expm1(smaller(broadcast(0), now));
}

template <typename T>
GRPO_HD void weigh(const T* now, const T* old, int64_t count, double* weights) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) store_quad(weights + i, weight_of(load_quad(now + i), load_quad(old + i)));
  if (i == count) return;
  T some_now[4] = {}, some_old[4] = {};
  for (int l = 0; i + l < count; ++l) some_now[l] = now[i + l], some_old[l] = old[i + l];
  double some[4];
  store_quad(some, weight_of(load_quad(some_now), load_quad(some_old)));
  for (int l = 0; i + l < count; ++l) weights[i + l] = some[l];
}

}  // namespace

void segment_weights(const float* now, const float* old, int64_t count, double* weights) {
  weigh(now, old, count, weights);
}
void segment_weights(const double* now, const double* old, int64_t count, double* weights) {
  weigh(now, old, count, weights);
}

}  // namespace grpo_kernels::GRPO_SIMD
