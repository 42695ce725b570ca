#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <mutex>

#include "common/op_namespace.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "sampling_correction/histogram.h"
#include "sampling_correction/simd.h"
#include "sampling_correction/tensors.h"

namespace grpo_kernels {
namespace {

constexpr double kTokenCost = 3;  // nanoseconds a token on one thread with AVX2
constexpr double kBitsCost = 1;   // and of a number in a histogram

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

// One pass of M2PO's search; see bits_histogram in ops/sampling_correction/m2.py.
Tensor bits_histogram_cpu(Tensor bits, Tensor prefix, int64_t level) {
  const char* const op = "bits_histogram";
  GRPO_CHECK(level >= 0 && level < static_cast<int64_t>(kBitsDigits.size()), op, ": level must be 0 to ",
             kBitsDigits.size() - 1, ", got ", level);
  const int64_t count = bits.numel();
  check_array(op, "bits", bits, count, ScalarType::Int);
  check_array(op, "prefix", prefix, 1, ScalarType::Int);
  const int64_t bins = int64_t{1} << kBitsDigits[level].width;
  const std::array<int64_t, 2> sizes{2, bins};
  const Tensor result = empty_tensor(bits, sizes.data(), 2, aoti_torch_dtype_int64());
  int64_t* const counts = data_of<int64_t>(result);
  std::fill(counts, counts + 2 * bins, 0);
  std::mutex mutex;  // sums of integers do not depend on the order of the threads
  divide(count, threads_for(kBitsCost * static_cast<double>(count)), [&](int64_t begin, int64_t end) {
    BitsHistogram histogram(static_cast<int>(level));
    histogram.add(static_cast<const int32_t*>(bits.const_data_ptr()) + begin, end - begin, *data_of<int32_t>(prefix));
    const std::lock_guard<std::mutex> lock(mutex);
    for (int64_t bin = 0; bin < bins; ++bin) {
      counts[bin] += histogram.bins()[bin].count;
      counts[bins + bin] += histogram.bins()[bin].mantissas;
    }
  });
  return result;
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("sampling_correction_cpu", TORCH_BOX(&grpo_kernels::sampling_correction_cpu));
  library.impl("bits_histogram_cpu", TORCH_BOX(&grpo_kernels::bits_histogram_cpu));
}
