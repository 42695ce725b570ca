#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "checks.h"
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

}  // namespace grpo_kernels
