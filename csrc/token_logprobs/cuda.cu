#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "token_logprobs/gradient.cuh"
#include "token_logprobs/sums.cuh"

// One block per row. Both directions are bound by instructions before they are bound by memory, so a logit costs few
// of them.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kSmallThreads = 64;
constexpr int64_t kSmallColumns = 1024;
constexpr int64_t kMaxBlocks = 1 << 14;  // further rows take turns

template <typename T, bool kCapped, bool kSpread>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ LogitArrays<T> in, const __grid_constant__ LogprobArrays out) {
  __shared__ __align__(16) unsigned char shared[kMaxWarps * sizeof(RowSoftmax<float>)];
  for (int64_t row = blockIdx.x; row < in.layout.rows; row += gridDim.x) {
    const int64_t target = in.targets[row];
    RowResult result{0, 0, 0};
    if (target != kIgnoredTarget) {
      const T* logits = in.logits + in.layout.offset(row);
      const RowMap map(in, row);
      const RowSoftmax<float> sums = block_merge(lane_sums<kCapped, kSpread>(logits, in.layout.columns, map),
                                                 map.factor, reinterpret_cast<RowSoftmax<float>*>(shared));
      if (threadIdx.x == 0) result = result_of<kCapped>(sums, logits, in.layout.columns, target, map);
    }
    if (threadIdx.x == 0) {
      out.logprobs[row] = static_cast<float>(result.logprob);
      out.normalizer[row] = result.normalizer;
      if constexpr (kSpread) out.entropy[row] = static_cast<float>(result.entropy);
    }
  }
}

// ptxas finds the best number of registers by itself, but for one kernel that it lets spill.
template <typename T, typename G, bool kCapped, bool kEntropy>
__global__ void __launch_bounds__(kThreads, kCapped && !kEntropy ? 4 : 0)
    backward_kernel(const __grid_constant__ LogitArrays<T> in, const __grid_constant__ GradientArrays<G> out) {
  const int64_t columns = in.layout.columns;
  for (int64_t row = blockIdx.x; row < in.layout.rows; row += gridDim.x) {
    const int64_t target = in.targets[row];
    G* const to = out.gradient + out.layout.offset(row);
    const double grad_logprob = out.grad_logprobs == nullptr ? 0.0 : out.grad_logprobs[row];
    const double grad_entropy = kEntropy ? out.grad_entropy[row] : 0.0;
    const RowGradient<double> upstream(out.normalizer[row], grad_logprob, grad_entropy,
                                       kEntropy ? out.entropy[row] : 0.0);
    if (target == kIgnoredTarget || upstream.is_zero()) {
      clear_row(to, columns);
      continue;
    }
    const T* const logits = in.logits + in.layout.offset(row);
    const bool has_target = target >= 0 && target < columns;
    const T target_logit = has_target ? logits[target] : T{};
    __syncthreads();  // the gradient may overwrite the logits
    const LogitGradient<kCapped, kEntropy> gradient(RowMap(in, row), out.normalizer[row], upstream);
    const float of_target = gradient.of_target(to_float(target_logit));
    write_row(logits, to, columns, gradient);
    __syncthreads();  // the target is written twice
    if (has_target && threadIdx.x == 0) from_float(of_target, to[target]);
  }
}

struct Shape {
  dim3 grid, block;

  explicit Shape(const LogitLayout& layout)
      : grid(static_cast<unsigned>(layout.rows < kMaxBlocks ? layout.rows : kMaxBlocks)),
        block(layout.columns <= kSmallColumns ? kSmallThreads : kThreads) {}
};

}  // namespace

template <typename T>
void launch_token_logprobs(const LogitArrays<T>& in, const LogprobArrays& out, void* stream) {
  const Shape shape(in.layout);
  const bool capped = in.scaling.softcap > 0, spread = out.entropy != nullptr;
  const auto kernel = capped ? (spread ? forward_kernel<T, true, true> : forward_kernel<T, true, false>)
                             : (spread ? forward_kernel<T, false, true> : forward_kernel<T, false, false>);
  launch(kernel, shape.grid, shape.block, 0, stream, in, out);
}

template <typename T, typename G>
void launch_token_logprobs_backward(const LogitArrays<T>& in, const GradientArrays<G>& out, void* stream) {
  const Shape shape(in.layout);
  const bool capped = in.scaling.softcap > 0, entropy = out.grad_entropy != nullptr;
  const auto kernel = capped ? (entropy ? backward_kernel<T, G, true, true> : backward_kernel<T, G, true, false>)
                             : (entropy ? backward_kernel<T, G, false, true> : backward_kernel<T, G, false, false>);
  launch(kernel, shape.grid, shape.block, 0, stream, in, out);
}

template void launch_token_logprobs<float>(const LogitArrays<float>&, const LogprobArrays&, void*);
template void launch_token_logprobs<Half>(const LogitArrays<Half>&, const LogprobArrays&, void*);
template void launch_token_logprobs<BFloat16>(const LogitArrays<BFloat16>&, const LogprobArrays&, void*);
#define GRPO_INSTANTIATE(T, G) \
  template void launch_token_logprobs_backward<T, G>(const LogitArrays<T>&, const GradientArrays<G>&, void*);
GRPO_INSTANTIATE(float, float)
GRPO_INSTANTIATE(float, Half)
GRPO_INSTANTIATE(float, BFloat16)
GRPO_INSTANTIATE(Half, Half)
GRPO_INSTANTIATE(BFloat16, BFloat16)
#undef GRPO_INSTANTIATE

}  // namespace grpo_kernels
