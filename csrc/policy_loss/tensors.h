#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/check.h"
#include "common/tensors.h"
#include "policy_loss/batch.h"

namespace grpo_kernels {

// The arguments of the op policy_loss, as both compiled backends receive them.
struct PolicyInputs {
  static constexpr const char* kOp = "policy_loss";

  Tensor logprobs;
  std::optional<Tensor> old_logprobs;
  Tensor advantages;
  std::optional<Tensor> mask, policy_mask, cu_seqlens, segments, ref_logprobs, is_weights, entropy, weights,
      normalizers;
  std::vector<double> counts;  // normalizers known to the host: tokens, rows, segments; NaN: not known
  PolicyPlan plan;
  int64_t rows, tokens;

  // Whether the tensor has one value per row rather than per token.
  bool is_by_row(const Tensor& values) const { return values.dim() != logprobs.dim() || values.numel() != tokens; }
  bool is_double() const { return logprobs.scalar_type() == torch::headeronly::ScalarType::Double; }

  // normalizers are left to the backend, which reads them where they are.
  template <typename T>
  PolicyBatch<T> batch() const {
    return {static_cast<const T*>(logprobs.const_data_ptr()),
            optional_data<T>(old_logprobs),
            optional_data<T>(ref_logprobs),
            optional_data<T>(is_weights),
            optional_data<T>(entropy),
            optional_data<T>(weights),
            static_cast<const T*>(advantages.const_data_ptr()),
            is_by_row(advantages),
            is_weights && is_by_row(*is_weights),
            optional_data<bool>(mask),
            optional_data<bool>(policy_mask),
            optional_data<int32_t>(segments),
            optional_data<int64_t>(cu_seqlens),
            rows,
            cu_seqlens ? 0 : logprobs.size(1),
            tokens,
            {counts[0], counts[1], counts[2]},
            plan};
  }
};

inline void check_inputs(const PolicyInputs& in) {
  const char* const op = PolicyInputs::kOp;
  const ScalarType dtype = in.logprobs.scalar_type();
  const int64_t advantages = in.is_by_row(in.advantages) ? in.rows : in.tokens;
  const int64_t is_weights = in.is_weights && in.is_by_row(*in.is_weights) ? in.rows : in.tokens;
  check_array(op, "logprobs", in.logprobs, in.tokens, dtype);
  check_array(op, "old_logprobs", in.old_logprobs, in.tokens, dtype);
  check_array(op, "advantages", in.advantages, advantages, dtype);
  check_array(op, "mask", in.mask, in.tokens, ScalarType::Bool);
  check_array(op, "policy_mask", in.policy_mask, in.tokens, ScalarType::Bool);
  check_array(op, "cu_seqlens", in.cu_seqlens, in.rows + 1, ScalarType::Long);
  check_array(op, "segments", in.segments, in.tokens, ScalarType::Int);
  check_array(op, "ref_logprobs", in.ref_logprobs, in.tokens, dtype);
  check_array(op, "is_weights", in.is_weights, is_weights, dtype);
  check_array(op, "entropy", in.entropy, in.tokens, dtype);
  check_array(op, "weights", in.weights, in.tokens, dtype);
  check_array(op, "normalizers", in.normalizers, 3, ScalarType::Double);
  GRPO_CHECK(in.segments || !in.plan.by_segment(), op, ": segments must be given for this ratio, got none");
  GRPO_CHECK(!in.policy_mask || in.plan.loss != Loss::kGeoMean, op,
             ": policy_mask must be left out where terms are rows, got a tensor");
}

inline PolicyInputs policy_inputs(Tensor logprobs, std::optional<Tensor> entropy, std::optional<Tensor> old_logprobs,
                                  Tensor advantages, std::optional<Tensor> mask, std::optional<Tensor> policy_mask,
                                  std::optional<Tensor> cu_seqlens, std::optional<Tensor> segments,
                                  std::optional<Tensor> ref_logprobs, std::optional<Tensor> is_weights,
                                  std::optional<Tensor> weights, std::optional<Tensor> normalizers,
                                  std::vector<double> counts, const std::vector<int64_t>& modes,
                                  const std::vector<double>& coefficients) {
  const char* const op = PolicyInputs::kOp;
  GRPO_CHECK(logprobs.dim() == (cu_seqlens ? 1 : 2), op,
             ": logprobs must have shape [B, T], or [M] with cu_seqlens, got ", logprobs.dim(), " dimensions");
  GRPO_CHECK(counts.size() == 3, op, ": counts must have 3 numbers, got ", counts.size());
  check_float_or_double(op, "logprobs", logprobs);
  const PolicyPlan plan = check_settings<PolicyPlan>(op, modes, coefficients);
  const int64_t rows = cu_seqlens ? cu_seqlens->numel() - 1 : logprobs.size(0), tokens = logprobs.numel();
  const PolicyInputs in{logprobs, old_logprobs, advantages, mask,    policy_mask, cu_seqlens,
                        segments, ref_logprobs, is_weights, entropy, weights,     normalizers,
                        counts,   plan,         rows,       tokens};
  check_inputs(in);
  return in;
}

// The results of the op, not initialised. Without an entropy gradient that tensor is empty.
struct PolicyResults {
  Tensor loss, metrics, gradient, entropy_gradient;

  PolicyResults(const PolicyInputs& in, bool needs_entropy_gradient)
      : loss(empty_tensor(in.logprobs, nullptr, 0, dtype_of(in.logprobs))),
        metrics(empty_vector(in.logprobs, kPolicyMetrics, aoti_torch_dtype_float64())),
        gradient(empty_vector(in.logprobs, in.tokens, dtype_of(in.logprobs))),
        entropy_gradient(empty_vector(in.logprobs, needs_entropy_gradient ? in.tokens : 0, dtype_of(in.logprobs))) {}
};

}  // namespace grpo_kernels
