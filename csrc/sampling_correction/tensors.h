#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/check.h"
#include "common/tensors.h"
#include "sampling_correction/batch.h"

namespace grpo_kernels {

using CorrectionTensors = std::tuple<Tensor, Tensor, Tensor>;

// The arguments and results of the op sampling_correction, as both compiled backends have them.
struct CorrectionCall {
  static constexpr const char* kOp = "sampling_correction";

  Tensor old_logprobs, sampling_logprobs;
  std::optional<Tensor> mask, cu_seqlens, m2_ceiling;
  CorrectionPlan plan;
  int64_t rows, tokens;
  Tensor weights, kept, table;

  bool is_double() const { return old_logprobs.scalar_type() == ScalarType::Double; }
  CorrectionTensors tensors() const { return {weights, kept, table}; }

  template <typename T>
  CorrectionBatch<T> batch() const {
    return {static_cast<const T*>(old_logprobs.const_data_ptr()),
            static_cast<const T*>(sampling_logprobs.const_data_ptr()),
            optional_data<bool>(mask),
            optional_data<int64_t>(cu_seqlens),
            optional_data<float>(m2_ceiling),
            rows,
            cu_seqlens ? 0 : old_logprobs.size(1),
            tokens,
            plan,
            data_of<T>(weights),
            data_of<bool>(kept),
            data_of<double>(table)};
  }
};

inline CorrectionPlan correction_plan(const std::vector<int64_t>& statistics, const std::vector<double>& bounds,
                                      const std::vector<int64_t>& modes, const std::vector<double>& coefficients) {
  const char* const op = CorrectionCall::kOp;
  const size_t count = statistics.size();
  GRPO_CHECK(count <= kMaxRejections && bounds.size() == 2 * count, op, ": statistics and bounds must have at most ",
             kMaxRejections, " and twice as many numbers, got ", count, " and ", bounds.size());
  CorrectionPlan plan{check_settings<CorrectionSettings>(op, modes, coefficients), static_cast<int>(count), {}};
  for (size_t i = 0; i < count; ++i) {
    GRPO_CHECK(statistics[i] >= 0 && statistics[i] < kMaxRejections, op, ": statistics must be below ", kMaxRejections,
               ", got ", statistics[i]);
    plan.rejections[i] = {static_cast<Level>(statistics[i] / kEstimators),
                          static_cast<Estimator>(statistics[i] % kEstimators), bounds[2 * i], bounds[2 * i + 1]};
  }
  return plan;
}

inline CorrectionCall correction_call(Tensor old_logprobs, Tensor sampling_logprobs, std::optional<Tensor> mask,
                                      std::optional<Tensor> cu_seqlens, std::optional<Tensor> m2_ceiling,
                                      const CorrectionPlan& plan) {
  const char* const op = CorrectionCall::kOp;
  GRPO_CHECK(old_logprobs.dim() == (cu_seqlens ? 1 : 2), op,
             ": old_logprobs must have shape [B, T], or [M] with cu_seqlens, got ", old_logprobs.dim(), " dimensions");
  check_float_or_double(op, "old_logprobs", old_logprobs);
  const int64_t rows = cu_seqlens ? cu_seqlens->numel() - 1 : old_logprobs.size(0), tokens = old_logprobs.numel();
  check_array(op, "old_logprobs", old_logprobs, tokens, old_logprobs.scalar_type());
  check_array(op, "sampling_logprobs", sampling_logprobs, tokens, old_logprobs.scalar_type());
  check_array(op, "mask", mask, tokens, ScalarType::Bool);
  check_array(op, "cu_seqlens", cu_seqlens, rows + 1, ScalarType::Long);
  check_array(op, "m2_ceiling", m2_ceiling, 1, ScalarType::Float);
  std::array<int64_t, 2> sizes{};
  for (int64_t d = 0; d < old_logprobs.dim(); ++d) sizes[d] = old_logprobs.size(d);
  const std::array<int64_t, 2> table{rows, table_columns(plan.count)};
  return {old_logprobs,
          sampling_logprobs,
          mask,
          cu_seqlens,
          m2_ceiling,
          plan,
          rows,
          tokens,
          empty_tensor(old_logprobs, sizes.data(), old_logprobs.dim(), dtype_of(old_logprobs)),
          empty_tensor(old_logprobs, sizes.data(), old_logprobs.dim(), aoti_torch_dtype_bool()),
          empty_tensor(old_logprobs, table.data(), 2, aoti_torch_dtype_float64())};
}

}  // namespace grpo_kernels
