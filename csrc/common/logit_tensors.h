#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "allocate.h"
#include "checks.h"
#include "grpo_kernels/half_bits.h"
#include "grpo_kernels/row_softmax.h"

// What the CPU and the CUDA side of token_logprobs both ask of their tensors.
namespace grpo_kernels {

using torch::headeronly::ScalarType;

constexpr const char* kLogprobsOp = "token_logprobs";

inline ScalarType wide_dtype(ScalarType dtype) { return dtype == ScalarType::Double ? dtype : ScalarType::Float; }

inline LogitLayout check_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 3 && logits.size(2) > 0, kLogprobsOp, ": logits must have shape [A, B, V], V > 0");
  STD_TORCH_CHECK(logits.stride(2) == 1 || logits.size(2) == 1, kLogprobsOp, ": logits must have neighbouring columns");
  return {logits.size(0) * logits.size(1), logits.size(2), logits.size(1), logits.stride(0), logits.stride(1)};
}

inline void check_optional(const char* name, const std::optional<Tensor>& tensor, int64_t length, ScalarType dtype) {
  if (tensor) check_array(kLogprobsOp, name, *tensor, length, dtype);
}

// Everything that belongs to rows; what is not given is null.
struct RowTensors {
  const Tensor& targets;
  const std::optional<Tensor>& row_temperature;
  LogitScaling scaling;
};

inline LogitLayout check_rows(const Tensor& logits, const RowTensors& rows) {
  const LogitLayout layout = check_logits(logits);
  check_array(kLogprobsOp, "targets", rows.targets, layout.rows, ScalarType::Long);
  check_optional("row_temperature", rows.row_temperature, layout.rows, wide_dtype(logits.scalar_type()));
  return layout;
}

// What the backward gets: upstream gradients, and what the forward kept.
struct UpstreamTensors {
  const std::optional<Tensor>&grad_logprobs, &grad_entropy;
  const Tensor& normalizer;
  const std::optional<Tensor>& entropy;
};

inline void check_upstream(const LogitLayout& layout, ScalarType wide, const UpstreamTensors& upstream) {
  check_array(kLogprobsOp, "normalizer", upstream.normalizer, layout.rows, ScalarType::Double);
  check_optional("grad_logprobs", upstream.grad_logprobs, layout.rows, wide);
  check_optional("grad_entropy", upstream.grad_entropy, layout.rows, wide);
  check_optional("entropy", upstream.entropy, layout.rows, wide);
  STD_TORCH_CHECK(!upstream.grad_entropy || upstream.entropy, kLogprobsOp, ": entropy must be given with grad_entropy");
}

// Log-probabilities, entropies (none unless wanted), normalizers; [A, B], not initialised.
using LogprobTensors = std::tuple<Tensor, Tensor, Tensor>;

inline LogprobTensors empty_results(const Tensor& logits, bool want_entropy) {
  const LogitLayout layout = check_logits(logits);
  const int64_t shape[2] = {logits.size(0), layout.inner}, nothing = 0;
  const bool is_double = logits.scalar_type() == ScalarType::Double;
  const int32_t wide = is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  return {empty_tensor(logits, shape, 2, wide),
          want_entropy ? empty_tensor(logits, shape, 2, wide) : empty_tensor(logits, &nothing, 1, wide),
          empty_tensor(logits, shape, 2, aoti_torch_dtype_float64())};
}

template <typename T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// run(a null pointer of the type of the logits)
template <bool kDouble, typename Run>
void for_logit_dtype(const Tensor& logits, Run run) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return run(static_cast<float*>(nullptr));
    case ScalarType::Half:
      return run(static_cast<Half*>(nullptr));
    case ScalarType::BFloat16:
      return run(static_cast<BFloat16*>(nullptr));
    default:
      break;
  }
  if constexpr (kDouble) {
    if (logits.scalar_type() == ScalarType::Double) return run(static_cast<double*>(nullptr));
  }
  STD_TORCH_CHECK(false, kLogprobsOp, ": logits must be float16, bfloat16",
                  kDouble ? ", float32 or float64" : " or float32", ", got ",
                  torch::headeronly::toString(logits.scalar_type()));
}

}  // namespace grpo_kernels
