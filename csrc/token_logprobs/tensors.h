#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "common/allocate.h"
#include "common/tensors.h"
#include "token_logprobs/softmax.h"

// The tensors of token_logprobs, checked alike for the CPU and the CUDA op.
namespace grpo_kernels {

constexpr const char* kLogprobsOp = "token_logprobs";

inline ScalarType wide_dtype(ScalarType dtype) { return dtype == ScalarType::Double ? dtype : ScalarType::Float; }

inline LogitLayout check_logits(const Tensor& logits) {
  GRPO_CHECK(logits.dim() == 3 && logits.size(2) > 0, kLogprobsOp, ": logits must have shape [A, B, V] with V > 0");
  GRPO_CHECK(logits.stride(2) == 1 || logits.size(2) == 1, kLogprobsOp,
             ": logits must have stride 1 over columns, got ", logits.stride(2));
  return {logits.size(0) * logits.size(1), logits.size(2), logits.size(1), logits.stride(0), logits.stride(1)};
}

// Arguments other than the logits.
struct RowTensors {
  const Tensor& targets;
  const std::optional<Tensor>& row_temperature;
  LogitScaling scaling;
};

inline LogitLayout check_rows(const Tensor& logits, const RowTensors& rows) {
  const LogitLayout layout = check_logits(logits);
  check_array(kLogprobsOp, "targets", rows.targets, layout.rows, ScalarType::Long);
  check_array(kLogprobsOp, "row_temperature", rows.row_temperature, layout.rows, wide_dtype(logits.scalar_type()));
  return layout;
}

// Upstream gradients, and the results that the forward pass saved.
struct UpstreamTensors {
  const std::optional<Tensor>&grad_logprobs, &grad_entropy;
  const Tensor& normalizer;
  const std::optional<Tensor>& entropy;
};

inline void check_upstream(const LogitLayout& layout, ScalarType wide, const UpstreamTensors& upstream) {
  check_array(kLogprobsOp, "normalizer", upstream.normalizer, layout.rows, ScalarType::Double);
  check_array(kLogprobsOp, "grad_logprobs", upstream.grad_logprobs, layout.rows, wide);
  check_array(kLogprobsOp, "grad_entropy", upstream.grad_entropy, layout.rows, wide);
  check_array(kLogprobsOp, "entropy", upstream.entropy, layout.rows, wide);
  GRPO_CHECK(!upstream.grad_entropy || upstream.entropy, kLogprobsOp,
             ": entropy must be given with grad_entropy, got none");
}

// logprobs, entropy ([0] unless wanted) and normalizer, [A, B] each, not initialised
using LogprobTensors = std::tuple<Tensor, Tensor, Tensor>;

inline LogprobTensors empty_results(const Tensor& logits, bool want_entropy) {
  const LogitLayout layout = check_logits(logits);
  const int64_t shape[2] = {logits.size(0), layout.inner}, none = 0;
  const bool is_double = logits.scalar_type() == ScalarType::Double;
  const int32_t wide = is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  return {empty_tensor(logits, shape, 2, wide),
          want_entropy ? empty_tensor(logits, shape, 2, wide) : empty_tensor(logits, &none, 1, wide),
          empty_tensor(logits, shape, 2, aoti_torch_dtype_float64())};
}

}  // namespace grpo_kernels
