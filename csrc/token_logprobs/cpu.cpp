#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "common/allocate.h"
#include "common/op_namespace.h"
#include "common/scratch.h"
#include "common/tensors.h"
#include "token_logprobs/rows.h"

namespace grpo_kernels {
namespace {

constexpr std::size_t kHugeGradient = std::size_t{32} << 20;

ScalarType wide_dtype(ScalarType dtype) { return dtype == ScalarType::Double ? dtype : ScalarType::Float; }

LogitLayout check_logits(const Tensor& logits) {
  GRPO_CHECK(logits.dim() == 3 && logits.size(2) > 0, kLogprobsOp, ": logits must have shape [A, B, V] with V > 0");
  GRPO_CHECK(logits.stride(2) == 1 || logits.size(2) == 1, kLogprobsOp,
             ": logits must have stride 1 over columns, got ", logits.stride(2));
  return {logits.size(0) * logits.size(1), logits.size(2), logits.size(1), logits.stride(0), logits.stride(1)};
}

// Arguments other than the logits.
struct RowTensors {
  const Tensor& targets;
  const std::optional<Tensor>& row_temperature;
  LogitScaling scaling;
};

LogitLayout check_rows(const Tensor& logits, const RowTensors& rows) {
  const LogitLayout layout = check_logits(logits);
  check_array(kLogprobsOp, "targets", rows.targets, layout.rows, ScalarType::Long);
  check_array(kLogprobsOp, "row_temperature", rows.row_temperature, layout.rows, wide_dtype(logits.scalar_type()));
  return layout;
}

// Upstream gradients, and the results that the forward pass saved.
struct UpstreamTensors {
  const std::optional<Tensor>&grad_logprobs, &grad_entropy;
  const Tensor& normalizer;
  const std::optional<Tensor>& entropy;
};

void check_upstream(const LogitLayout& layout, ScalarType wide, const UpstreamTensors& upstream) {
  check_array(kLogprobsOp, "normalizer", upstream.normalizer, layout.rows, ScalarType::Double);
  check_array(kLogprobsOp, "grad_logprobs", upstream.grad_logprobs, layout.rows, wide);
  check_array(kLogprobsOp, "grad_entropy", upstream.grad_entropy, layout.rows, wide);
  check_array(kLogprobsOp, "entropy", upstream.entropy, layout.rows, wide);
  GRPO_CHECK(!upstream.grad_entropy || upstream.entropy, kLogprobsOp,
             ": entropy must be given with grad_entropy, got none");
}

// logprobs, entropy ([0] unless wanted) and normalizer, [A, B] each, not initialised
using LogprobTensors = std::tuple<Tensor, Tensor, Tensor>;

LogprobTensors empty_results(const Tensor& logits, bool want_entropy) {
  const LogitLayout layout = check_logits(logits);
  const int64_t shape[2] = {logits.size(0), layout.inner}, none = 0;
  const bool is_double = logits.scalar_type() == ScalarType::Double;
  const int32_t wide = is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  return {empty_tensor(logits, shape, 2, wide),
          want_entropy ? empty_tensor(logits, shape, 2, wide) : empty_tensor(logits, &none, 1, wide),
          empty_tensor(logits, shape, 2, aoti_torch_dtype_float64())};
}

template <typename T>
LogitRows<T> rows_of(const Tensor& logits, const RowTensors& rows) {
  return {static_cast<const T*>(logits.const_data_ptr()), check_rows(logits, rows),
          static_cast<const int64_t*>(rows.targets.const_data_ptr()), optional_data<Wide<T>>(rows.row_temperature),
          rows.scaling};
}

void backward_into(const Tensor& gradient, const Tensor& logits, const RowTensors& rows,
                   const UpstreamTensors& tensors) {
  for_float_dtype<true>(kLogprobsOp, "logits", logits, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const LogitRows<T> in = rows_of<T>(logits, rows);
    const LogitLayout layout = check_logits(gradient);
    const bool is_half = std::is_same_v<T, float> && gradient.scalar_type() == ScalarType::BFloat16;
    GRPO_CHECK(is_half || gradient.scalar_type() == logits.scalar_type(), kLogprobsOp,
               ": gradient must have the dtype of logits, or be bfloat16 for float32");
    GRPO_CHECK(layout.rows == in.layout.rows && layout.columns == in.layout.columns && layout.inner == in.layout.inner,
               kLogprobsOp, ": gradient must have the shape of the logits");
    check_upstream(in.layout, wide_dtype(logits.scalar_type()), tensors);
    if (in.layout.rows == 0) return;
    const Upstream<T> upstream{optional_data<Wide<T>>(tensors.grad_logprobs),
                               optional_data<Wide<T>>(tensors.grad_entropy), optional_data<Wide<T>>(tensors.entropy),
                               static_cast<const double*>(tensors.normalizer.const_data_ptr())};
    if constexpr (std::is_same_v<T, float>) {
      if (is_half) return backward_rows(in, upstream, data_of<BFloat16>(gradient), layout);
    }
    backward_rows(in, upstream, data_of<T>(gradient), layout);
  });
}

std::size_t bytes_of(const Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()) * tensor.element_size(); }

}  // namespace

void expect_large_tensor_cpu(Tensor tensor) { advise_huge_pages(data_of<void>(tensor), bytes_of(tensor)); }

std::tuple<Tensor, Tensor, Tensor> token_logprobs_cpu(Tensor logits, Tensor targets,
                                                      std::optional<Tensor> row_temperature, double temperature,
                                                      std::optional<double> softcap, double logit_scale,
                                                      bool want_entropy) {
  const LogprobTensors results = empty_results(logits, want_entropy);
  for_float_dtype<true>(kLogprobsOp, "logits", logits, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const LogitRows<T> in =
        rows_of<T>(logits, {targets, row_temperature, {temperature, softcap.value_or(0), logit_scale}});
    if (in.layout.rows == 0) return;
    const auto& [logprobs, entropy, normalizer] = results;
    forward_rows(in, data_of<Wide<T>>(logprobs), want_entropy ? data_of<Wide<T>>(entropy) : nullptr,
                 data_of<double>(normalizer));
  });
  return results;
}

Tensor token_logprobs_backward_cpu(std::optional<Tensor> grad_logprobs, std::optional<Tensor> grad_entropy,
                                   Tensor normalizer, std::optional<Tensor> entropy, Tensor logits, Tensor targets,
                                   std::optional<Tensor> row_temperature, double temperature,
                                   std::optional<double> softcap, double logit_scale) {
  check_logits(logits);
  const int64_t shape[3] = {logits.size(0), logits.size(1), logits.size(2)};
  const Tensor gradient = empty_tensor(logits, shape, 3, dtype_of(logits));
  if (bytes_of(gradient) >= kHugeGradient) expect_large_tensor_cpu(gradient);
  backward_into(gradient, logits, {targets, row_temperature, {temperature, softcap.value_or(0), logit_scale}},
                {grad_logprobs, grad_entropy, normalizer, entropy});
  return gradient;
}

void token_logprobs_backward_into_cpu(Tensor gradient, std::optional<Tensor> grad_logprobs,
                                      std::optional<Tensor> grad_entropy, Tensor normalizer,
                                      std::optional<Tensor> entropy, Tensor logits, Tensor targets,
                                      std::optional<Tensor> row_temperature, double temperature,
                                      std::optional<double> softcap, double logit_scale) {
  backward_into(gradient, logits, {targets, row_temperature, {temperature, softcap.value_or(0), logit_scale}},
                {grad_logprobs, grad_entropy, normalizer, entropy});
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("token_logprobs", TORCH_BOX(&grpo_kernels::token_logprobs_cpu));
  library.impl("token_logprobs_backward", TORCH_BOX(&grpo_kernels::token_logprobs_backward_cpu));
  library.impl("token_logprobs_backward_into", TORCH_BOX(&grpo_kernels::token_logprobs_backward_into_cpu));
  library.impl("_expect_large_tensor_cpu", TORCH_BOX(&grpo_kernels::expect_large_tensor_cpu));
}
