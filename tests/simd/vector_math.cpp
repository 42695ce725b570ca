// Applies vector_math.h and the conversions of half_lanes.h to arrays; called by test_vector_math.py.
#include "common/simd/vector_math.h"

#include "common/simd/half_lanes.h"

using namespace grpo_kernels::GRPO_SIMD;

namespace {

template <typename V>
void apply(int function, const typename LaneMath<V>::Scalar* from, typename LaneMath<V>::Scalar* to, int64_t count) {
  for (int64_t i = 0; i + LaneMath<V>::kCount <= count; i += LaneMath<V>::kCount) {
    V x;
    memcpy(&x, from + i, sizeof x);
    const V y = function == 0   ? grpo_kernels::GRPO_SIMD::exp(x)
                : function == 1 ? grpo_kernels::GRPO_SIMD::expm1(x)
                : function == 2 ? tanh_and_slope(x).tanh
                                : tanh_and_slope(x).slope;
    memcpy(to + i, &y, sizeof y);
  }
}

template <typename T>
void widen(const T* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) store_lanes(to + i, load_lanes(from + i));
}

template <typename T>
void narrow(const float* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) store_lanes(to + i, load_lanes(from + i));
}

}  // namespace

extern "C" {
void widen_half(const grpo_kernels::Half* from, float* to, int64_t count) { widen(from, to, count); }
void widen_bfloat16(const grpo_kernels::BFloat16* from, float* to, int64_t count) { widen(from, to, count); }
void narrow_half(const float* from, grpo_kernels::Half* to, int64_t count) { narrow(from, to, count); }
void narrow_bfloat16(const float* from, grpo_kernels::BFloat16* to, int64_t count) { narrow(from, to, count); }
void apply_float(int function, const float* from, float* to, int64_t count) {
  apply<WideFloats>(function, from, to, count);
}
void apply_double(int function, const double* from, double* to, int64_t count) {
  apply<Quad>(function, from, to, count);
}
}
