// The functions of csrc/cpu/simd/vector_math.h applied to arrays, for test_vector_math.py.
#include "simd/vector_math.h"

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

}  // namespace

extern "C" {
void apply_float(int function, const float* from, float* to, int64_t count) {
  apply<Floats>(function, from, to, count);
}
void apply_double(int function, const double* from, double* to, int64_t count) {
  apply<Quad>(function, from, to, count);
}
}
