#include "policy_loss.h"

#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "allocate.h"
#include "cuda_ops.h"
#include "policy_inputs.h"
#include "torch_stream.h"

namespace grpo_kernels {
namespace {

// Room for `count` of these, as a tensor of doubles.
template <typename Record>
Record* room_for(std::optional<Tensor>& memory, const Tensor& like, int64_t count) {
  static_assert(sizeof(Record) % sizeof(double) == 0);
  const int64_t doubles = count * static_cast<int64_t>(sizeof(Record) / sizeof(double));
  memory = empty_vector(like, doubles, aoti_torch_dtype_float64());
  return static_cast<Record*>(memory->mutable_data_ptr());
}

}  // namespace

PolicyLossTensors policy_loss_cuda(Tensor logprobs, std::optional<Tensor> old, Tensor advantages,
                                   std::optional<Tensor> mask, std::optional<Tensor> cu_seqlens,
                                   std::optional<Tensor> segments, std::optional<Tensor> ref,
                                   std::optional<Tensor> sampling, std::optional<Tensor> is_weights,
                                   std::optional<Tensor> entropy, std::optional<Tensor> entropy_floor,
                                   std::optional<Tensor> weights, std::optional<Tensor> normalizers,
                                   std::vector<double> counts, std::vector<int64_t> modes,
                                   std::vector<double> coefficients, bool needs_entropy_gradient) {
  const PolicyInputs inputs =
      policy_inputs(logprobs, old, advantages, mask, cu_seqlens, segments, ref, sampling, is_weights, entropy,
                    entropy_floor, weights, normalizers, counts, modes, coefficients);
  const int64_t rows = inputs.rows, tokens = inputs.tokens;

  const int32_t float_code = dtype_of(logprobs);
  const Tensor loss = empty_tensor(logprobs, nullptr, 0, float_code);
  const Tensor metrics = empty_vector(logprobs, kPolicyMetrics, aoti_torch_dtype_float64());
  const Tensor gradient = empty_vector(logprobs, tokens, float_code);
  const Tensor by_entropy = empty_vector(logprobs, needs_entropy_gradient ? tokens : 0, float_code);

  const DeviceGuard guard(logprobs.get_device_index());
  void* stream = current_stream(logprobs.get_device_index());
  auto run = [&](auto zero) {
    using T = decltype(zero);
    PolicyArrays<T> arrays{};
    arrays.batch = inputs.batch<T>();
    arrays.entropy_floor = optional_data<T>(entropy_floor);
    arrays.normalizers = optional_data<double>(normalizers);
    arrays.tasks_per_row = std::max<int64_t>(1, (arrays.batch.width + kTokensPerTask - 1) / kTokensPerTask);
    arrays.tasks = count_tasks(arrays);
    arrays.gradient = static_cast<T*>(gradient.mutable_data_ptr());
    if (needs_entropy_gradient) arrays.by_entropy = static_cast<T*>(by_entropy.mutable_data_ptr());
    arrays.metrics = static_cast<double*>(metrics.mutable_data_ptr());
    arrays.loss = static_cast<T*>(loss.mutable_data_ptr());
    std::optional<Tensor> row_counts, totals, parts, blocks, terms, values;
    if (counts_first(arrays.batch)) {
      arrays.row_counts = room_for<Counts>(row_counts, logprobs, rows);
      arrays.totals = room_for<Counts>(totals, logprobs, 1);
    }
    arrays.parts = room_for<PolicyPart>(parts, logprobs, arrays.batch.by_row() ? rows : arrays.tasks);
    arrays.blocks = room_for<PolicyTotal>(blocks, logprobs, kTotalBlocks);
    const bool by_segment = inputs.plan.by_segment();
    if (by_segment || inputs.plan.loss == Loss::kGeoMean) {
      terms = empty_vector(logprobs, tokens, aoti_torch_dtype_bool());
      arrays.terms = static_cast<bool*>(terms->mutable_data_ptr());
    }
    if (by_segment) {
      values = empty_vector(logprobs, 3 * tokens, float_code);
      arrays.log_ratios = static_cast<T*>(values->mutable_data_ptr());
      arrays.scores = arrays.log_ratios + tokens;
      arrays.term_gradient = arrays.scores + tokens;
    }
    launch_policy_loss(arrays, stream);
  };
  inputs.is_double() ? run(double{}) : run(float{});
  return {loss, metrics, gradient, by_entropy};
}

}  // namespace grpo_kernels
