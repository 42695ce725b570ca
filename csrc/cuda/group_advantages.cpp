#include "group_advantages.h"

#include <torch/csrc/stable/tensor.h>

#include "allocate.h"
#include "checks.h"
#include "cuda_ops.h"
#include "torch_stream.h"

namespace grpo_kernels {
namespace {

constexpr const char* kOp = "group_advantages";
constexpr int64_t kDoublesPerStats = sizeof(SegmentStats) / sizeof(double);
constexpr int64_t kDoublesPerMoments = sizeof(Moments) / sizeof(double);

}  // namespace

AdvantageTensors group_advantages_cuda(Tensor rewards, std::optional<Tensor> order, std::optional<Tensor> starts,
                                       std::optional<Tensor> parent, std::optional<Tensor> parent_starts,
                                       int64_t group_size, std::optional<Tensor> subgroups, std::optional<Tensor> valid,
                                       std::optional<Tensor> lengths, std::optional<Tensor> baselines,
                                       std::vector<double> weights, std::vector<int64_t> modes,
                                       std::vector<double> coefficients) {
  using torch::headeronly::ScalarType;
  const int64_t rows = rewards.size(0);
  const int64_t columns = rewards.dim() == 1 ? 1 : rewards.size(1);
  const ScalarType dtype = rewards.scalar_type();
  check_array(kOp, "rewards", rewards, rows * columns, dtype);
  if (order) check_array(kOp, "order", *order, rows, ScalarType::Long);
  if (starts) check_array(kOp, "starts", *starts, rows + 1, ScalarType::Long);
  if (parent) check_array(kOp, "parent", *parent, rows, ScalarType::Long);
  if (parent_starts) check_array(kOp, "parent_starts", *parent_starts, rows + 1, ScalarType::Long);
  if (subgroups) check_array(kOp, "subgroups", *subgroups, rows, ScalarType::Long);
  if (valid) check_array(kOp, "valid", *valid, rows, ScalarType::Bool);
  if (lengths) check_array(kOp, "lengths", *lengths, rows, ScalarType::Double);
  if (baselines) check_array(kOp, "baselines", *baselines, rows, dtype);
  STD_TORCH_CHECK(modes.size() == kModes && coefficients.size() == kCoefficients, kOp, ": wrong number of settings");
  STD_TORCH_CHECK(columns <= kMaxColumns, kOp, ": rewards must have at most ", kMaxColumns,
                  " columns on backend 'cuda', got ", columns, "; use backend='triton' or 'reference'");
  STD_TORCH_CHECK(starts || (group_size > 0 && rows % group_size == 0), kOp, ": group_size must divide ", rows,
                  ", got ", group_size);

  const int32_t float_code = dtype_of(rewards);
  const Tensor advantages = empty_vector(rewards, rows, float_code);
  const Tensor mean = empty_vector(rewards, rows, float_code);
  const Tensor std = empty_vector(rewards, rows, float_code);
  const Tensor size = empty_vector(rewards, rows, aoti_torch_dtype_int32());
  const Tensor degenerate = empty_vector(rewards, rows, aoti_torch_dtype_bool());
  if (rows == 0) return {advantages, mean, std, size, degenerate};

  const AdvantagePlan plan = make_plan(modes.data(), coefficients.data());
  const int64_t segments = starts ? rows : rows / group_size;
  const bool by_column = plan.combine == Combine::kNormalizeThenSum;
  std::optional<Tensor> parent_stats, partials;
  if (parent && plan.needs_parent()) {
    const int64_t kinds = by_column ? 1 + columns : 1;
    parent_stats = empty_vector(rewards, kinds * segments * kDoublesPerStats, aoti_torch_dtype_float64());
  }
  if (plan.needs_batch()) {
    partials = empty_vector(rewards, kPartialMoments * kDoublesPerMoments, aoti_torch_dtype_float64());
  }

  const DeviceGuard guard(rewards.get_device_index());
  void* stream = current_stream(rewards.get_device_index());
  auto run = [&](auto zero) {
    using T = decltype(zero);
    AdvantageArrays<T> arrays{};
    arrays.rewards = static_cast<const T*>(rewards.const_data_ptr());
    arrays.rows = rows;
    arrays.columns = static_cast<int>(columns);
    arrays.order = optional_data<int64_t>(order);
    arrays.starts = optional_data<int64_t>(starts);
    arrays.parent = optional_data<int64_t>(parent);
    arrays.parent_starts = optional_data<int64_t>(parent_starts);
    arrays.group_size = group_size;
    arrays.segments = segments;
    arrays.parent_stats = parent_stats ? static_cast<SegmentStats*>(parent_stats->mutable_data_ptr()) : nullptr;
    arrays.subgroups = optional_data<int64_t>(subgroups);
    arrays.valid = optional_data<bool>(valid);
    arrays.lengths = optional_data<double>(lengths);
    arrays.baselines = optional_data<T>(baselines);
    arrays.plan = plan;
    arrays.advantages = static_cast<T*>(advantages.mutable_data_ptr());
    arrays.mean = static_cast<T*>(mean.mutable_data_ptr());
    arrays.std = static_cast<T*>(std.mutable_data_ptr());
    arrays.size = static_cast<int32_t*>(size.mutable_data_ptr());
    arrays.degenerate = static_cast<bool*>(degenerate.mutable_data_ptr());
    for (int64_t c = 0; c < columns; ++c) arrays.weights[c] = weights.empty() ? 1 : weights[c];
    launch_group_advantages(arrays, partials ? static_cast<Moments*>(partials->mutable_data_ptr()) : nullptr, stream);
  };
  STD_TORCH_CHECK(dtype == ScalarType::Double || dtype == ScalarType::Float, kOp,
                  ": rewards must be float32 or float64");
  dtype == ScalarType::Double ? run(double{}) : run(float{});
  return {advantages, mean, std, size, degenerate};
}

}  // namespace grpo_kernels
