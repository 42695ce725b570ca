// The vector functions of csrc/sampled_support/simd.cpp for one instruction set, called by
// tests/ops/sampled_support/test_cpu.py.
#include "sampled_support/simd.cpp"

namespace {

// sum: a in the wider type; it receives sum + 0.7 * b, b receives b + that sum, and result[0] the product of a and b
template <typename T>
void run(const T* a, T* b, void* sum, int64_t count, double* result) {
  using namespace grpo_kernels;
  Wide<T>* const total = static_cast<Wide<T>*>(sum);
  *result = static_cast<double>(GRPO_SIMD::dot(a, b, count));
  GRPO_SIMD::add_scaled(total, b, Wide<T>(0.7), count);
  GRPO_SIMD::add_rounded(b, total, count);
}

}  // namespace

#define GRPO_RUN(name, T)                                                                        \
  extern "C" void run_##name(const void* a, void* b, void* sum, int64_t count, double* result) { \
    run(static_cast<const T*>(a), static_cast<T*>(b), sum, count, result);                       \
  }
GRPO_RUN(float32, float)
GRPO_RUN(float64, double)
GRPO_RUN(float16, grpo_kernels::Half)
GRPO_RUN(bfloat16, grpo_kernels::BFloat16)
