#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "sampling_correction/simd.h"
#include "sampling_correction/tensors.h"

namespace grpo_kernels {
namespace {

constexpr double kTokenCost = 3;  // nanoseconds a token on one thread with AVX2

template <typename T>
void correct_rows(const CorrectionBatch<T>& batch) {
  divide(batch.rows, threads_for(kTokenCost * static_cast<double>(batch.tokens)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) GRPO_SIMD_CALL(correct_row, batch, row);
  });
}

}  // namespace

CorrectionTensors sampling_correction_cpu(Tensor old_logprobs, Tensor sampling_logprobs, std::optional<Tensor> mask,
                                          std::optional<Tensor> cu_seqlens, std::optional<Tensor> m2_ceiling,
                                          std::vector<int64_t> statistics, std::vector<double> bounds,
                                          std::vector<int64_t> modes, std::vector<double> coefficients) {
  const CorrectionCall call = correction_call(old_logprobs, sampling_logprobs, mask, cu_seqlens, m2_ceiling,
                                              correction_plan(statistics, bounds, modes, coefficients));
  const int64_t* const starts = optional_data<int64_t>(cu_seqlens);
  if (starts != nullptr) check_packed_bounds(CorrectionCall::kOp, starts, call.rows, call.tokens);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const CorrectionBatch<T> batch = call.batch<T>();
    advise_huge_pages(batch.weights, call.tokens * sizeof(T));
    // packed tensors may have tokens behind the last row
    const int64_t used = starts == nullptr ? call.tokens : starts[call.rows];
    std::fill(batch.weights + used, batch.weights + call.tokens, T{0});
    std::fill(batch.kept + used, batch.kept + call.tokens, false);
    correct_rows(batch);
  };
  call.is_double() ? run(double{}) : run(float{});
  return call.tensors();
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels, CPU, library) {
  library.impl("sampling_correction_cpu", TORCH_BOX(&grpo_kernels::sampling_correction_cpu));
}
