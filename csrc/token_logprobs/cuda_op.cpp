#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "common/cuda/torch_stream.h"
#include "common/op_namespace.h"
#include "token_logprobs/cuda.h"
#include "token_logprobs/tensors.h"

namespace grpo_kernels {
namespace {

template <typename T>
LogitArrays<T> arrays_of(const Tensor& logits, const RowTensors& rows) {
  return {static_cast<const T*>(logits.const_data_ptr()), check_rows(logits, rows),
          static_cast<const int64_t*>(rows.targets.const_data_ptr()), optional_data<float>(rows.row_temperature),
          rows.scaling};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> token_logprobs_cuda(Tensor logits, Tensor targets,
                                                       std::optional<Tensor> row_temperature, double temperature,
                                                       std::optional<double> softcap, double logit_scale,
                                                       bool want_entropy) {
  const DeviceGuard guard(logits.get_device_index());
  const LogprobTensors results = empty_results(logits, want_entropy);
  for_float_dtype<false>(kLogprobsOp, "logits", logits, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto in = arrays_of<T>(logits, {targets, row_temperature, {temperature, softcap.value_or(0), logit_scale}});
    if (in.layout.rows == 0) return;
    const auto& [logprobs, entropy, normalizer] = results;
    const LogprobArrays out{data_of<float>(logprobs), want_entropy ? data_of<float>(entropy) : nullptr,
                            data_of<double>(normalizer)};
    launch_token_logprobs(in, out, current_stream(logits.get_device_index()));
  });
  return results;
}

void token_logprobs_backward_cuda(Tensor gradient, std::optional<Tensor> grad_logprobs,
                                  std::optional<Tensor> grad_entropy, Tensor normalizer, std::optional<Tensor> entropy,
                                  Tensor logits, Tensor targets, std::optional<Tensor> row_temperature,
                                  double temperature, std::optional<double> softcap, double logit_scale) {
  const DeviceGuard guard(logits.get_device_index());
  const LogitLayout layout = check_logits(gradient);
  for_float_dtype<false>(kLogprobsOp, "logits", logits, [&](auto* logit_type) {
    using T = std::remove_pointer_t<decltype(logit_type)>;
    const auto in = arrays_of<T>(logits, {targets, row_temperature, {temperature, softcap.value_or(0), logit_scale}});
    check_upstream(in.layout, ScalarType::Float, {grad_logprobs, grad_entropy, normalizer, entropy});
    GRPO_CHECK(layout.rows == in.layout.rows && layout.columns == in.layout.columns && layout.inner == in.layout.inner,
               kLogprobsOp, ": gradient must have the shape of the logits");
    if (in.layout.rows == 0) return;
    for_float_dtype<false>(kLogprobsOp, "gradient", gradient, [&](auto* gradient_type) {
      using G = std::remove_pointer_t<decltype(gradient_type)>;
      if constexpr (std::is_same_v<T, G> || std::is_same_v<T, float>) {
        const GradientArrays<G> out{data_of<G>(gradient),
                                    layout,
                                    optional_data<float>(grad_logprobs),
                                    optional_data<float>(grad_entropy),
                                    optional_data<float>(entropy),
                                    static_cast<const double*>(normalizer.const_data_ptr())};
        launch_token_logprobs_backward(in, out, current_stream(logits.get_device_index()));
      } else {
        GRPO_CHECK(false, kLogprobsOp, ": gradient must have the dtype of the logits, or a half of float32 logits");
      }
    });
  });
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, GRPO_CUDA_DEVICE, library) {
  library.impl("_token_logprobs_cuda", TORCH_BOX(&grpo_kernels::token_logprobs_cuda));
  library.impl("_token_logprobs_backward_cuda", TORCH_BOX(&grpo_kernels::token_logprobs_backward_cuda));
}
