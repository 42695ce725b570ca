#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/cuda/torch_stream.h"
#include "common/op_namespace.h"
#include "common/tensors.h"
#include "endpoint_segments/cuda.h"

namespace grpo_kernels {

// advantages, returns, endpoint_mask, segment_ids, num_segments
using SegmentTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
namespace {

constexpr const char* kOp = "endpoint_segments";

}  // namespace

SegmentTensors endpoint_segments_cuda(Tensor rewards, Tensor logprobs, Tensor old_logprobs, Tensor mask,
                                      std::optional<Tensor> values, std::optional<Tensor> bounds,
                                      std::optional<Tensor> order, std::optional<Tensor> starts, Tensor threshold,
                                      std::vector<double> numbers) {
  const SegmentSettings settings = check_settings<SegmentSettings>(kOp, numbers);
  GRPO_CHECK(rewards.dim() == (bounds ? 1 : 2), kOp, ": rewards must have shape [B, T], or [M] with cu_seqlens");
  const bool by_group = !values || settings.norm == SegmentNorm::kPrompt;
  GRPO_CHECK(order.has_value() == by_group && starts.has_value() == by_group, kOp,
             ": order and starts must be given without values or with norm='prompt', and only then");
  const int64_t total = rewards.numel(), rows = bounds ? bounds->numel() - 1 : rewards.size(0);
  const auto dtype = rewards.scalar_type();
  check_float_or_double(kOp, "rewards", rewards);
  check_array(kOp, "rewards", rewards, total, dtype);
  check_array(kOp, "logprobs", logprobs, total, dtype);
  check_array(kOp, "old_logprobs", old_logprobs, total, dtype);
  check_array(kOp, "values", values, total, dtype);
  check_array(kOp, "mask", mask, total, ScalarType::Bool);
  check_array(kOp, "threshold", threshold, 1, ScalarType::Double);
  check_array(kOp, "cu_seqlens", bounds, rows + 1, ScalarType::Long);
  check_array(kOp, "order", order, rows, ScalarType::Long);
  check_array(kOp, "starts", starts, rows + 1, ScalarType::Long);

  const int64_t shape[2] = {rewards.size(0), rewards.dim() == 2 ? rewards.size(1) : 0};
  const auto like = [&](int32_t code) { return empty_tensor(rewards, shape, rewards.dim(), code); };
  const SegmentTensors results{like(dtype_of(rewards)), like(dtype_of(rewards)), like(aoti_torch_dtype_bool()),
                               like(aoti_torch_dtype_int32()), empty_vector(rewards, rows, aoti_torch_dtype_int32())};
  if (rows == 0) return results;
  const auto& [advantages, returns, endpoint_mask, segment_ids, num_segments] = results;
  const DeviceGuard guard(rewards.get_device_index());
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    std::optional<Tensor> records, carries, tiles, scale, credits;
    SegmentArrays<T> arrays{};
    arrays.rewards = data_of<const T>(rewards);
    arrays.logprobs = data_of<const T>(logprobs);
    arrays.old_logprobs = data_of<const T>(old_logprobs);
    arrays.values = optional_data<T>(values);
    arrays.mask = data_of<const bool>(mask);
    arrays.rows = rows;
    arrays.width = shape[1];
    arrays.total = total;
    arrays.bounds = optional_data<int64_t>(bounds);
    arrays.order = optional_data<int64_t>(order);
    arrays.starts = optional_data<int64_t>(starts);
    arrays.threshold = data_of<const double>(threshold);
    arrays.has_critic = values.has_value();
    arrays.settings = settings;
    arrays.records = allocate_records<SegmentRecord>(records, rewards, rows);
    arrays.scale = allocate_records<double>(scale, rewards, 1);
    arrays.carries = allocate_records<double>(carries, rewards, arrays.count_pieces(kRowItems));
    arrays.tiles = allocate_records<SegmentTile>(tiles, rewards, arrays.count_pieces(arrays.tile_tokens()));
    arrays.credits = allocate_records<SegmentCreditMap>(credits, rewards, total);
    arrays.advantages = data_of<T>(advantages);
    arrays.returns = data_of<T>(returns);
    arrays.endpoint_mask = data_of<bool>(endpoint_mask);
    arrays.segment_ids = data_of<int32_t>(segment_ids);
    arrays.num_segments = data_of<int32_t>(num_segments);
    launch_endpoint_segments(arrays, current_stream(rewards.get_device_index()));
  };
  dtype == ScalarType::Double ? run(double{}) : run(float{});
  return results;
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, GRPO_CUDA_DEVICE, library) {
  library.impl("_endpoint_segments_cuda", TORCH_BOX(&grpo_kernels::endpoint_segments_cuda));
}
