#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/check.h"
#include "common/tensors.h"
#include "policy_loss/batch.h"

namespace grpo_kernels {

// The parameters of the op, and their names, in the order of its schema.
#define GRPO_POLICY_PARAMETER(name) std::optional<Tensor> name,
#define GRPO_POLICY_PARAMETERS                                                                                   \
  Tensor logprobs,                                                                                               \
      GRPO_POLICY_TOKENS(GRPO_POLICY_PARAMETER, GRPO_POLICY_PARAMETER, GRPO_POLICY_PARAMETER) Tensor advantages, \
      std::optional<Tensor> is_weights, std::optional<Tensor> cu_seqlens, std::optional<Tensor> normalizers,     \
      std::vector<double> counts, std::vector<double> numbers, bool needs_entropy_gradient, bool checks_values
#define GRPO_POLICY_NAME(name) name,
#define GRPO_POLICY_ARGUMENTS                                                                                \
  logprobs, GRPO_POLICY_TOKENS(GRPO_POLICY_NAME, GRPO_POLICY_NAME, GRPO_POLICY_NAME) advantages, is_weights, \
      cu_seqlens, normalizers, counts, numbers, needs_entropy_gradient, checks_values

// The arguments, checked.
struct PolicyInputs {
  static constexpr const char* kOp = "policy_loss";

  Tensor logprobs;
#define GRPO_TENSOR(name) std::optional<Tensor> name;
  GRPO_POLICY_TOKENS(GRPO_TENSOR, GRPO_TENSOR, GRPO_TENSOR)
#undef GRPO_TENSOR
  Tensor advantages;
  std::optional<Tensor> is_weights, cu_seqlens, normalizers;
  std::vector<double> counts;  // tokens, rows, segments; NaN: to be counted, infinite: the next of normalizers
  PolicyPlan plan;
  bool needs_entropy_gradient, checks_values;
  int64_t rows, tokens;

  explicit PolicyInputs(GRPO_POLICY_PARAMETERS);

  // Whether the tensor has one value per row rather than per token.
  bool is_by_row(const Tensor& values) const { return values.dim() != logprobs.dim() || values.numel() != tokens; }
  bool is_double() const { return logprobs.scalar_type() == torch::headeronly::ScalarType::Double; }

  // normalizers are left to the backend, which reads them where they are.
  template <typename T>
  PolicyBatch<T> batch() const {
    PolicyBatch<T> result{};
    result.logprobs = static_cast<const T*>(logprobs.const_data_ptr());
#define GRPO_NUMBERS(name) result.name = optional_data<T>(name);
#define GRPO_FLAGS(name) result.name = optional_data<bool>(name);
#define GRPO_IDS(name) result.name = optional_data<int32_t>(name);
    GRPO_POLICY_TOKENS(GRPO_NUMBERS, GRPO_FLAGS, GRPO_IDS)
#undef GRPO_NUMBERS
#undef GRPO_FLAGS
#undef GRPO_IDS
    result.advantages = static_cast<const T*>(advantages.const_data_ptr());
    result.advantages_by_row = is_by_row(advantages);
    result.is_weights = optional_data<T>(is_weights);
    result.is_weights_by_row = is_weights && is_by_row(*is_weights);
    result.cu_seqlens = optional_data<int64_t>(cu_seqlens);
    result.rows = rows;
    result.width = cu_seqlens ? 0 : logprobs.size(1);
    result.tokens = tokens;
    result.normalizers = {counts[0], counts[1], counts[2]};
    result.plan = plan;
    return result;
  }

 private:
  void check() const;
};

inline void PolicyInputs::check() const {
  const ScalarType dtype = logprobs.scalar_type();
  check_array(kOp, "logprobs", logprobs, tokens, dtype);
#define GRPO_NUMBERS(name) check_array(kOp, #name, name, tokens, dtype);
#define GRPO_FLAGS(name) check_array(kOp, #name, name, tokens, ScalarType::Bool);
#define GRPO_IDS(name) check_array(kOp, #name, name, tokens, ScalarType::Int);
  GRPO_POLICY_TOKENS(GRPO_NUMBERS, GRPO_FLAGS, GRPO_IDS)
#undef GRPO_NUMBERS
#undef GRPO_FLAGS
#undef GRPO_IDS
  check_array(kOp, "advantages", advantages, is_by_row(advantages) ? rows : tokens, dtype);
  check_array(kOp, "is_weights", is_weights, is_weights && is_by_row(*is_weights) ? rows : tokens, dtype);
  check_array(kOp, "cu_seqlens", cu_seqlens, rows + 1, ScalarType::Long);
  const auto is_infinite = [](double count) { return std::isinf(count); };
  const int64_t read = std::count_if(counts.begin(), counts.end(), is_infinite);
  GRPO_CHECK(normalizers || read == 0, kOp, ": normalizers must have ", read, " elements, got none");
  check_array(kOp, "normalizers", normalizers, read, ScalarType::Double);
  GRPO_CHECK(segments || !plan.by_segment(), kOp, ": segments must be given for this ratio, got none");
  GRPO_CHECK(!policy_mask || plan.loss != Loss::kGeoMean, kOp,
             ": policy_mask must be left out where terms are rows, got a tensor");
}

inline PolicyPlan checked_plan(const Tensor& logprobs, const std::optional<Tensor>& cu_seqlens,
                               const std::vector<double>& counts, const std::vector<double>& numbers) {
  const char* const op = PolicyInputs::kOp;
  GRPO_CHECK(logprobs.dim() == (cu_seqlens ? 1 : 2), op,
             ": logprobs must have shape [B, T], or [M] with cu_seqlens, got ", logprobs.dim(), " dimensions");
  GRPO_CHECK(counts.size() == 3, op, ": counts must have 3 numbers, got ", counts.size());
  check_float_or_double(op, "logprobs", logprobs);
  return check_settings<PolicyPlan>(op, numbers);
}

#define GRPO_SAME(name) name(name),
inline PolicyInputs::PolicyInputs(GRPO_POLICY_PARAMETERS)
    : logprobs(logprobs),
      GRPO_POLICY_TOKENS(GRPO_SAME, GRPO_SAME, GRPO_SAME) advantages(advantages),
      is_weights(is_weights),
      cu_seqlens(cu_seqlens),
      normalizers(normalizers),
      counts(counts),
      plan(checked_plan(logprobs, cu_seqlens, counts, numbers)),
      needs_entropy_gradient(needs_entropy_gradient),
      checks_values(checks_values),
      rows(cu_seqlens ? cu_seqlens->numel() - 1 : logprobs.size(0)),
      tokens(logprobs.numel()) {
  check();
}
#undef GRPO_SAME

// The results of the op, not initialised. `gradients` is that by the log-probs, in their shape, or with that by the
// entropies [2, ...].
struct PolicyResults {
  Tensor loss, metrics, gradients;

  explicit PolicyResults(const PolicyInputs& in)
      : loss(empty_tensor(in.logprobs, nullptr, 0, dtype_of(in.logprobs))),
        metrics(empty_vector(in.logprobs, kPolicyMetrics, aoti_torch_dtype_float64())),
        gradients(empty_gradients(in)) {}

  template <typename T>
  T* gradient() const {
    return data_of<T>(gradients);
  }
  template <typename T>
  T* entropy_gradient(const PolicyInputs& in) const {
    return in.needs_entropy_gradient ? gradient<T>() + in.tokens : nullptr;
  }

 private:
  static Tensor empty_gradients(const PolicyInputs& in) {
    std::array<int64_t, 3> sizes{2};
    const auto shape = in.logprobs.sizes();
    std::copy(shape.begin(), shape.end(), sizes.begin() + 1);
    const int64_t first = in.needs_entropy_gradient ? 0 : 1;
    const int64_t dimensions = static_cast<int64_t>(shape.size()) + 1 - first;
    return empty_tensor(in.logprobs, sizes.data() + first, dimensions, dtype_of(in.logprobs));
  }
};

}  // namespace grpo_kernels
