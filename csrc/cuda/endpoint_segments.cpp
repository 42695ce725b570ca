#include "endpoint_segments.h"

#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "allocate.h"
#include "cuda_ops.h"
#include "logit_tensors.h"
#include "torch_stream.h"

namespace grpo_kernels {
namespace {

constexpr const char* kOp = "endpoint_segments";
using torch::headeronly::ScalarType;

// Room for `count` doubles, or for what consists of them.
template <typename Record>
Record* room_for(std::optional<Tensor>& memory, const Tensor& like, int64_t count) {
  static_assert(sizeof(Record) % sizeof(double) == 0);
  const int64_t doubles = count * static_cast<int64_t>(sizeof(Record) / sizeof(double));
  memory = empty_vector(like, doubles, aoti_torch_dtype_float64());
  return data_of<Record>(*memory);
}

}  // namespace

SegmentTensors endpoint_segments_cuda(Tensor rewards, Tensor logprobs, Tensor old_logprobs, Tensor mask,
                                      std::optional<Tensor> values, std::optional<Tensor> bounds,
                                      std::optional<Tensor> order, std::optional<Tensor> starts, Tensor threshold,
                                      std::vector<int64_t> modes, std::vector<double> coefficients) {
  STD_TORCH_CHECK(modes.size() == kSegmentModes && coefficients.size() == kSegmentCoefficients, kOp,
                  ": config has another number of settings than the kernels");
  STD_TORCH_CHECK(rewards.dim() == (bounds ? 1 : 2), kOp, ": rewards must have shape [B, T], or [M] with cu_seqlens");
  const SegmentSettings settings = segment_settings(modes.data(), coefficients.data());
  const bool by_group = !values || settings.norm == kPromptNorm;
  STD_TORCH_CHECK(order.has_value() == by_group && starts.has_value() == by_group, kOp, ": groups must be given");
  const int64_t total = rewards.numel(), rows = bounds ? bounds->numel() - 1 : rewards.size(0);
  const auto dtype = rewards.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, kOp,
                  ": rewards must be float32 or float64");
  check_array(kOp, "rewards", rewards, total, dtype);
  check_array(kOp, "logprobs", logprobs, total, dtype);
  check_array(kOp, "old_logprobs", old_logprobs, total, dtype);
  if (values) check_array(kOp, "values", *values, total, dtype);
  check_array(kOp, "mask", mask, total, ScalarType::Bool);
  check_array(kOp, "threshold", threshold, 1, ScalarType::Double);
  if (bounds) check_array(kOp, "cu_seqlens", *bounds, rows + 1, ScalarType::Long);
  if (by_group) {
    check_array(kOp, "order", *order, rows, ScalarType::Long);
    check_array(kOp, "starts", *starts, rows + 1, ScalarType::Long);
  }

  const int64_t shape[2] = {rewards.size(0), rewards.dim() == 2 ? rewards.size(1) : 0};
  const auto like = [&](int32_t code) { return empty_tensor(rewards, shape, rewards.dim(), code); };
  const SegmentTensors results{like(dtype_of(rewards)), like(dtype_of(rewards)), like(aoti_torch_dtype_bool()),
                               like(aoti_torch_dtype_int32()), empty_vector(rewards, rows, aoti_torch_dtype_int32())};
  if (rows == 0) return results;
  const auto& [advantages, returns, ends, ids, numbers] = results;
  const DeviceGuard guard(rewards.get_device_index());
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    std::optional<Tensor> records, scale, credits;
    SegmentArrays<T> arrays{};
    arrays.rewards = data_of<const T>(rewards);
    arrays.logprobs = data_of<const T>(logprobs);
    arrays.old = data_of<const T>(old_logprobs);
    arrays.values = optional_data<T>(values);
    arrays.mask = data_of<const bool>(mask);
    arrays.rows = rows;
    arrays.width = shape[1];
    arrays.total = total;
    arrays.bounds = optional_data<int64_t>(bounds);
    arrays.order = optional_data<int64_t>(order);
    arrays.starts = optional_data<int64_t>(starts);
    arrays.threshold = data_of<const double>(threshold);
    arrays.needs_baselines = !values;
    arrays.settings = settings;
    arrays.records = room_for<SegmentRecord>(records, rewards, rows);
    arrays.scale = room_for<double>(scale, rewards, 1);
    arrays.credits = room_for<double>(credits, rewards, total);
    arrays.advantages = data_of<T>(advantages);
    arrays.returns = data_of<T>(returns);
    arrays.ends = data_of<bool>(ends);
    arrays.ids = data_of<int32_t>(ids);
    arrays.numbers = data_of<int32_t>(numbers);
    launch_endpoint_segments(arrays, current_stream(rewards.get_device_index()));
  };
  dtype == ScalarType::Double ? run(double{}) : run(float{});
  return results;
}

}  // namespace grpo_kernels
