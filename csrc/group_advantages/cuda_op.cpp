#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/cuda/torch_stream.h"
#include "common/op_namespace.h"
#include "group_advantages/cuda.h"
#include "group_advantages/tensors.h"

namespace grpo_kernels {

AdvantageTensors group_advantages_cuda(Tensor rewards, std::optional<Tensor> order, std::optional<Tensor> starts,
                                       std::optional<Tensor> parent, std::optional<Tensor> parent_starts,
                                       int64_t group_size, std::optional<Tensor> subgroups, std::optional<Tensor> valid,
                                       std::optional<Tensor> lengths, std::optional<Tensor> baselines,
                                       std::vector<double> weights, std::vector<double> numbers) {
  const char* const op = AdvantageInputs::kOp;
  const AdvantageInputs in = advantage_inputs(rewards, subgroups, valid, lengths, baselines, weights, numbers);
  check_array(op, "order", order, in.rows, ScalarType::Long);
  check_array(op, "starts", starts, in.rows + 1, ScalarType::Long);
  check_array(op, "parent", parent, in.rows, ScalarType::Long);
  check_array(op, "parent_starts", parent_starts, in.rows + 1, ScalarType::Long);
  if (!starts) check_group_size(group_size, in.rows);
  GRPO_CHECK(in.columns <= kMaxColumns, op, ": rewards must have at most ", kMaxColumns,
             " columns in the CUDA kernel, got ", in.columns, "; use backend='reference'");
  const AdvantageResults results(in);
  if (in.rows == 0) return results.tensors();

  const DeviceGuard guard(rewards.get_device_index());
  void* stream = current_stream(rewards.get_device_index());
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    AdvantageArrays<T> arrays{};
    arrays.batch = in.batch<T>();
    arrays.order = optional_data<int64_t>(order);
    arrays.starts = optional_data<int64_t>(starts);
    arrays.parent = optional_data<int64_t>(parent);
    arrays.parent_starts = optional_data<int64_t>(parent_starts);
    arrays.group_size = group_size;
    arrays.groups = starts ? in.rows : in.rows / group_size;
    arrays.out = results.outputs<T>();
    std::copy(in.weights.begin(), in.weights.end(), arrays.weights);
    std::optional<Tensor> parent_stats, partials;
    if (parent && in.plan.needs_parent()) {
      const int64_t kinds = in.plan.combine == Combine::kNormalizeThenSum ? 1 + in.columns : 1;
      arrays.parent_stats = allocate_records<GroupStatistics>(parent_stats, rewards, kinds * arrays.groups);
    }
    if (in.plan.needs_batch()) arrays.partials = allocate_records<Moments>(partials, rewards, kMaxPartials);
    launch_group_advantages(arrays, stream);
  };
  in.is_double() ? run(double{}) : run(float{});
  return results.tensors();
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, GRPO_CUDA_DEVICE, library) {
  library.impl("_group_advantages_cuda", TORCH_BOX(&grpo_kernels::group_advantages_cuda));
}
