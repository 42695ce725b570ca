#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstddef>
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

// Arrays of working memory one after the other, each at a multiple of 16 bytes; null before the memory is there.
class WorkingMemory {
 public:
  explicit WorkingMemory(std::byte* data) : data_(data) {}

  template <typename Item>
  Item* take(int64_t count) {
    Item* const items = data_ == nullptr ? nullptr : reinterpret_cast<Item*>(data_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(Item)) + 15) / 16 * 16;
    return items;
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  int64_t bytes_ = 0;
};

// Gives the arrays their parts of the working memory, and returns the bytes that all of them take.
template <typename T>
int64_t place(PolicyArrays<T>& arrays, std::byte* data) {
  const PolicyBatch<T>& batch = arrays.batch;
  const bool by_segment = batch.plan.by_segment();
  WorkingMemory memory(data);
  if (needs_counts(batch)) {
    arrays.row_counts = memory.take<Counts>(batch.rows);
    arrays.block_counts = memory.take<Counts>(kCountBlocks);
  }
  arrays.parts = memory.take<PolicyPart>(batch.needs_whole_rows() ? batch.rows : arrays.tasks);
  arrays.blocks = memory.take<PolicyTotal>(kTotalBlocks);
  arrays.done = memory.take<DoneCounter>(1);
  if (by_segment || batch.plan.loss == Loss::kGeoMean) arrays.terms = memory.take<bool>(batch.tokens);
  if (by_segment) {
    arrays.log_ratios = memory.take<T>(batch.tokens);
    arrays.scores = memory.take<T>(batch.tokens);
    arrays.term_gradient = memory.take<T>(batch.tokens);
    arrays.segment_ends = memory.take<SegmentEnd>(batch.tokens);
  }
  return memory.bytes();
}

using PolicyLossTensors = std::tuple<Tensor, Tensor, Tensor>;  // loss, metrics, gradients

// segments_ascend [1], where given, gets whether segment ids ascend from 0 along each row.
PolicyLossTensors policy_loss_cuda(GRPO_POLICY_PARAMETERS, std::optional<Tensor> segments_ascend) {
  const PolicyInputs inputs(GRPO_POLICY_ARGUMENTS);
  const PolicyResults results(inputs);
  check_array(PolicyInputs::kOp, "segments_ascend", segments_ascend, 1, ScalarType::Bool);

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
    arrays.gradient = results.gradient<T>();
    arrays.entropy_gradient = results.entropy_gradient<T>(inputs);
    arrays.metrics = data_of<double>(results.metrics);
    arrays.loss = data_of<T>(results.loss);
    if (segments_ascend) arrays.segments_ascend = data_of<bool>(*segments_ascend);
    arrays.is_aligned = is_aligned(arrays.batch, arrays.gradient);
    const Tensor memory = empty_vector(logprobs, place(arrays, nullptr), aoti_torch_dtype_uint8());
    place(arrays, static_cast<std::byte*>(memory.mutable_data_ptr()));
    launch_policy_loss(arrays, stream);
  };
  inputs.is_double() ? run(double{}) : run(float{});
  return {results.loss, results.metrics, results.gradients};
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
