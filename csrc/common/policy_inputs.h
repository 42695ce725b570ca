#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>
#include <optional>
#include <vector>

#include "checks.h"
#include "grpo_kernels/policy_batch.h"

namespace grpo_kernels {

// The arguments of the op policy_loss, as both compiled backends take them.
struct PolicyInputs {
  static constexpr const char* kOp = "policy_loss";

  Tensor logprobs;
  std::optional<Tensor> old;
  Tensor advantages;
  std::optional<Tensor> mask, cu_seqlens, segments, ref, sampling, is_weights, entropy, entropy_floor, weights,
      normalizers;
  std::vector<double> counts;
  PolicyPlan plan;
  int64_t rows, tokens;

  // One value per row, rather than per token.
  bool by_row(const Tensor& values) const { return values.dim() != logprobs.dim() || values.numel() != tokens; }
  bool is_double() const { return logprobs.scalar_type() == torch::headeronly::ScalarType::Double; }

  // On the host, the floor and the normalizers are still to be read from their tensors.
  template <typename T>
  PolicyBatch<T> batch() const {
    return {static_cast<const T*>(logprobs.const_data_ptr()),
            optional_data<T>(old),
            optional_data<T>(ref),
            optional_data<T>(sampling),
            optional_data<T>(is_weights),
            optional_data<T>(entropy),
            optional_data<T>(weights),
            static_cast<const T*>(advantages.const_data_ptr()),
            by_row(advantages),
            is_weights && by_row(*is_weights),
            optional_data<bool>(mask),
            optional_data<int32_t>(segments),
            optional_data<int64_t>(cu_seqlens),
            rows,
            cu_seqlens ? 0 : logprobs.size(1),
            tokens,
            -std::numeric_limits<T>::infinity(),
            {counts[0], counts[1], counts[2]},
            plan};
  }
};

inline PolicyInputs policy_inputs(Tensor logprobs, std::optional<Tensor> old, Tensor advantages,
                                  std::optional<Tensor> mask, std::optional<Tensor> cu_seqlens,
                                  std::optional<Tensor> segments, std::optional<Tensor> ref,
                                  std::optional<Tensor> sampling, std::optional<Tensor> is_weights,
                                  std::optional<Tensor> entropy, std::optional<Tensor> entropy_floor,
                                  std::optional<Tensor> weights, std::optional<Tensor> normalizers,
                                  std::vector<double> counts, const std::vector<int64_t>& modes,
                                  const std::vector<double>& coefficients) {
  using torch::headeronly::ScalarType;
  const char* const op = PolicyInputs::kOp;
  STD_TORCH_CHECK(logprobs.dim() == (cu_seqlens ? 1 : 2), op, ": logprobs must be [B, T], or [M] with cu_seqlens");
  STD_TORCH_CHECK(modes.size() == kPolicyModes && coefficients.size() == kPolicyCoefficients && counts.size() == 3, op,
                  ": wrong number of settings");
  const ScalarType dtype = logprobs.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Double || dtype == ScalarType::Float, op,
                  ": logprobs must be float32 or float64");
  const int64_t tokens = logprobs.numel(), rows = cu_seqlens ? cu_seqlens->numel() - 1 : logprobs.size(0);
  const PolicyInputs in{
      logprobs,      old,     advantages,  mask,       cu_seqlens,
      segments,      ref,     sampling,    is_weights, entropy,
      entropy_floor, weights, normalizers, counts,     make_policy_plan(modes.data(), coefficients.data()),
      rows,          tokens};
  const auto check = [&](const char* name, const std::optional<Tensor>& tensor, int64_t length, ScalarType type) {
    if (tensor) check_array(op, name, *tensor, length, type);
  };
  check("logprobs", logprobs, tokens, dtype);
  check("old_logprobs", old, tokens, dtype);
  check("advantages", advantages, in.by_row(advantages) ? rows : tokens, dtype);
  check("mask", mask, tokens, ScalarType::Bool);
  check("cu_seqlens", cu_seqlens, rows + 1, ScalarType::Long);
  check("segments", segments, tokens, ScalarType::Int);
  check("ref_logprobs", ref, tokens, dtype);
  check("sampling_logprobs", sampling, tokens, dtype);
  check("is_weights", is_weights, is_weights && in.by_row(*is_weights) ? rows : tokens, dtype);
  check("entropy", entropy, tokens, dtype);
  check("entropy_floor", entropy_floor, 1, dtype);
  check("weights", weights, tokens, dtype);
  check("normalizers", normalizers, 3, ScalarType::Double);
  STD_TORCH_CHECK(segments || !in.plan.by_segment(), op, ": segments must be given for this ratio");
  STD_TORCH_CHECK(sampling || in.plan.correction == Correction::kNone, op, ": sampling_logprobs must be given");
  return in;
}

}  // namespace grpo_kernels
