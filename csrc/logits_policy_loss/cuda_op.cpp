#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/cuda/torch_stream.h"
#include "common/op_namespace.h"
#include "logits_policy_loss/cuda.h"
#include "policy_loss/tensors.h"
#include "token_logprobs/tensors.h"

namespace grpo_kernels {

constexpr const char* kOp = "logits_policy_loss";

// Log-probs and entropies (empty unless wanted) of bfloat16 logits, whose gradient is written to `gradient`, which may
// be the logits. For losses whose terms depend on their own token only.
std::tuple<Tensor, Tensor> logits_policy_gradient_cuda(
    Tensor gradient, Tensor logits, Tensor targets, std::optional<Tensor> row_temperature, double temperature,
    std::optional<double> softcap, double logit_scale, std::optional<Tensor> old_logprobs, Tensor advantages,
    std::optional<Tensor> mask, std::optional<Tensor> cu_seqlens, std::optional<Tensor> segments,
    std::optional<Tensor> kinds, std::optional<Tensor> ref_logprobs, std::optional<Tensor> sampling_logprobs,
    std::optional<Tensor> is_weights, std::optional<Tensor> weights, std::optional<Tensor> normalizers,
    std::vector<double> counts, std::vector<int64_t> modes, std::vector<double> coefficients, bool want_entropy,
    bool needs_entropy_gradient) {
  const RowTensors rows{targets, row_temperature, {temperature, softcap.value_or(0), logit_scale}};
  const LogitLayout layout = check_rows(logits, rows), gradient_layout = check_logits(gradient);
  GRPO_CHECK(logits.scalar_type() == ScalarType::BFloat16 && gradient.scalar_type() == ScalarType::BFloat16, kOp,
             ": logits and gradient must be of dtype bfloat16");
  GRPO_CHECK(gradient_layout.rows == layout.rows && gradient_layout.columns == layout.columns, kOp,
             ": gradient must have the shape of the logits");
  const int64_t shape[2] = {logits.size(0), logits.size(1)}, none = 0;
  // a packed batch is one row of logits
  const int64_t* const sizes = cu_seqlens ? shape + 1 : shape;
  const int64_t dimensions = cu_seqlens ? 1 : 2;
  const Tensor logprobs = empty_tensor(logits, sizes, dimensions, aoti_torch_dtype_float32());
  const Tensor entropy = want_entropy ? empty_tensor(logits, sizes, dimensions, aoti_torch_dtype_float32())
                                      : empty_tensor(logits, &none, 1, aoti_torch_dtype_float32());
  const PolicyInputs inputs = policy_inputs(logprobs, old_logprobs, advantages, mask, cu_seqlens, segments, kinds,
                                            ref_logprobs, sampling_logprobs, is_weights, std::nullopt, std::nullopt,
                                            weights, normalizers, counts, modes, coefficients);
  if (layout.rows == 0) return {logprobs, entropy};

  const DeviceGuard guard(logits.get_device_index());
  LogitsLossArrays<BFloat16> arrays{};
  arrays.in = {static_cast<const BFloat16*>(logits.const_data_ptr()), layout,
               static_cast<const int64_t*>(targets.const_data_ptr()), optional_data<float>(row_temperature),
               rows.scaling};
  arrays.gradient = data_of<BFloat16>(gradient);
  arrays.gradient_layout = gradient_layout;
  arrays.logprobs = data_of<float>(logprobs);
  arrays.entropy = want_entropy ? data_of<float>(entropy) : nullptr;
  arrays.needs_entropy_gradient = needs_entropy_gradient;
  PolicyArrays<float>& policy = arrays.policy;
  policy.batch = inputs.batch<float>();
  GRPO_CHECK(!policy.batch.needs_whole_rows(), kOp, ": terms must not depend on other tokens of their row");
  policy.normalizers = optional_data<double>(normalizers);
  const Tensor by_logprob = empty_vector(logits, inputs.tokens, aoti_torch_dtype_float32());
  policy.gradient = data_of<float>(by_logprob);
  std::optional<Tensor> row_counts, block_counts;
  PolicyBatch<float> measured = policy.batch;
  measured.entropy = arrays.entropy;
  if (needs_counts(measured)) {
    policy.row_counts = allocate_records<Counts>(row_counts, logits, inputs.rows);
    policy.block_counts = allocate_records<Counts>(block_counts, logits, kCountBlocks);
  }
  launch_logits_policy_loss(arrays, current_stream(logits.get_device_index()));
  return {logprobs, entropy};
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, GRPO_CUDA_DEVICE, library) {
  library.impl("_logits_policy_gradient_cuda", TORCH_BOX(&grpo_kernels::logits_policy_gradient_cuda));
}
