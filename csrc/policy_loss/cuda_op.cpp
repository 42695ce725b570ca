#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/allocate.h"
#include "common/cuda/torch_stream.h"
#include "common/op_namespace.h"
#include "policy_loss/cuda.h"
#include "policy_loss/tensors.h"

namespace grpo_kernels {

// loss, metrics, gradient, entropy_gradient, and whether segment ids ascend: [1] for ratios of segments, else [0]
using PolicyLossTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

PolicyLossTensors policy_loss_cuda(GRPO_POLICY_PARAMETERS) {
  const PolicyInputs inputs(GRPO_POLICY_ARGUMENTS);
  const int64_t rows = inputs.rows, tokens = inputs.tokens;
  const bool by_segment = inputs.plan.by_segment();
  const PolicyResults results(inputs);
  const Tensor segments_ascend = empty_vector(logprobs, by_segment ? 1 : 0, aoti_torch_dtype_bool());

  const DeviceGuard guard(logprobs.get_device_index());
  void* stream = current_stream(logprobs.get_device_index());
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    PolicyArrays<T> arrays{};
    arrays.batch = inputs.batch<T>();
    arrays.coefficients = TermCoefficients<T>(inputs.plan);
    arrays.normalizers = optional_data<double>(normalizers);
    arrays.tasks_per_row = std::max<int64_t>(1, (arrays.batch.width + kTokensPerTask - 1) / kTokensPerTask);
    arrays.tasks = count_tasks(arrays);
    arrays.gradient = data_of<T>(results.gradient);
    if (needs_entropy_gradient) arrays.entropy_gradient = data_of<T>(results.entropy_gradient);
    arrays.metrics = data_of<double>(results.metrics);
    arrays.loss = data_of<T>(results.loss);
    arrays.is_aligned = is_aligned(arrays.batch, arrays.gradient);
    std::optional<Tensor> row_counts, block_counts, parts, blocks, done, terms, values;
    if (needs_counts(arrays.batch)) {
      arrays.row_counts = allocate_records<Counts>(row_counts, logprobs, rows);
      arrays.block_counts = allocate_records<Counts>(block_counts, logprobs, kCountBlocks);
    }
    const int64_t num_parts = arrays.batch.needs_whole_rows() ? rows : arrays.tasks;
    arrays.parts = allocate_records<PolicyPart>(parts, logprobs, num_parts);
    arrays.blocks = allocate_records<PolicyTotal>(blocks, logprobs, kTotalBlocks);
    arrays.done = allocate_records<DoneCounter>(done, logprobs, 1);
    if (by_segment || inputs.plan.loss == Loss::kGeoMean) {
      terms = empty_vector(logprobs, tokens, aoti_torch_dtype_bool());
      arrays.terms = data_of<bool>(*terms);
    }
    if (by_segment) {
      arrays.segments_ascend = data_of<bool>(segments_ascend);
      values = empty_vector(logprobs, 3 * tokens, dtype_of(logprobs));
      arrays.log_ratios = data_of<T>(*values);
      arrays.scores = arrays.log_ratios + tokens;
      arrays.term_gradient = arrays.scores + tokens;
    }
    launch_policy_loss(arrays, stream);
  };
  inputs.is_double() ? run(double{}) : run(float{});
  return {results.loss, results.metrics, results.gradient, results.entropy_gradient, segments_ascend};
}

void scale_gradient_cuda(Tensor gradient, Tensor upstream) {
  const DeviceGuard guard(gradient.get_device_index());
  for_float_dtype<true>("policy_loss", "gradient", gradient, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using Upstream = std::conditional_t<std::is_same_v<T, double>, double, float>;
    check_array("policy_loss", "gradient", gradient, gradient.numel(), gradient.scalar_type());
    check_array("policy_loss", "upstream gradient", upstream, 1,
                std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float);
    if (gradient.numel() == 0) return;
    launch_scale(data_of<T>(gradient), gradient.numel(), static_cast<const Upstream*>(upstream.const_data_ptr()),
                 current_stream(gradient.get_device_index()));
  });
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, GRPO_CUDA_DEVICE, library) {
  library.impl("_policy_loss_cuda", TORCH_BOX(&grpo_kernels::policy_loss_cuda));
  library.impl("_scale_gradient_cuda", TORCH_BOX(&grpo_kernels::scale_gradient_cuda));
}
