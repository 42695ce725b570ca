// The row kernels of csrc/token_logprobs/simd.cpp for one instruction set, called by
// tests/ops/token_logprobs/test_cpu.py.
#include "token_logprobs/simd.cpp"

namespace {

// results: top, ties, below, spread, and z of the target
template <typename T>
void run(const T* logits, T* gradient, int64_t columns, int64_t target, double softcap, double* results) {
  using namespace grpo_kernels;
  const LogitMap<Wide<T>> map = make_logit_map<Wide<T>>(0.7, softcap, 1.1);
  const RowSums sums = GRPO_SIMD::row_sums(logits, columns, target, map, true);
  const double all[] = {sums.softmax.top, sums.softmax.ties, sums.softmax.below, sums.softmax.spread, sums.target_z};
  memcpy(results, all, sizeof all);
  const double normalizer = sums.softmax.top + log1p(sums.softmax.ties - 1 + sums.softmax.below);
  GRPO_SIMD::row_gradient(logits, gradient, columns, target, map, RowGradient<Wide<T>>(normalizer, 0.3, -0.2, 4.0));
}

}  // namespace

#define GRPO_RUN(name, T)                                                                                         \
  extern "C" void run_##name(const void* logits, void* gradient, int64_t columns, int64_t target, double softcap, \
                             double* results) {                                                                   \
    run(static_cast<const T*>(logits), static_cast<T*>(gradient), columns, target, softcap, results);             \
  }
GRPO_RUN(float32, float)
GRPO_RUN(float64, double)
GRPO_RUN(float16, grpo_kernels::Half)
GRPO_RUN(bfloat16, grpo_kernels::BFloat16)
