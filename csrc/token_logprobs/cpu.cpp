#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>

#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "token_logprobs/simd.h"
#include "token_logprobs/tensors.h"

namespace grpo_kernels {
namespace {

constexpr std::size_t kHugeGradient = std::size_t{32} << 20;

template <typename T>
struct LogitRows {
  const T* logits;
  LogitLayout layout;
  const int64_t* targets;
  const Wide<T>* temperatures;  // null: scaling.temperature for all rows
  LogitScaling scaling;

  LogitMap<Wide<T>> map(int64_t row) const {
    const double temperature = temperatures == nullptr ? scaling.temperature : temperatures[row];
    return make_logit_map<Wide<T>>(temperature, scaling.softcap, scaling.logit_scale);
  }
  bool ignored(int64_t row) const { return targets[row] == kIgnoredTarget; }
  bool has_target(int64_t row) const { return targets[row] >= 0 && targets[row] < layout.columns; }
};

// Calls visit(row) for every row, on several threads.
template <typename T, typename Visit>
void for_each_row(const LogitRows<T>& in, Visit visit) {
  // nanoseconds a logit, forward or backward
  const double cost = (std::is_same_v<T, double> ? 1.8 : 0.3) * (in.scaling.softcap > 0 ? 3 : 1);
  parallel_for(in.layout.rows, cost * static_cast<double>(in.layout.columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) visit(row);
  });
}

template <typename T>
void forward_rows(const LogitRows<T>& in, Wide<T>* logprobs, Wide<T>* entropy, double* normalizer) {
  std::atomic<int64_t> first_wrong{in.layout.rows};  // the first row whose target is out of range
  for_each_row(in, [&](int64_t row) {
    RowResult result{0, 0, 0};
    if (in.has_target(row)) {
      const RowSums sums = GRPO_SIMD_CALL(row_sums, in.logits + in.layout.offset(row), in.layout.columns,
                                          in.targets[row], in.map(row), entropy != nullptr);
      result = finish_row(sums.softmax, sums.target_z);
    } else if (!in.ignored(row)) {
      int64_t first = first_wrong.load();
      while (row < first && !first_wrong.compare_exchange_weak(first, row)) {
      }
    }
    logprobs[row] = static_cast<Wide<T>>(result.logprob);
    if (entropy != nullptr) entropy[row] = static_cast<Wide<T>>(result.entropy);
    normalizer[row] = result.normalizer;
  });
  const int64_t row = first_wrong.load();
  STD_TORCH_CHECK(row == in.layout.rows, kLogprobsOp, ": targets must be in [0, ", in.layout.columns, ") or ",
                  kIgnoredTarget, ", got ", in.targets[row], " in row ", row);
}

template <typename T>
struct Upstream {
  const Wide<T>*grad_logprobs, *grad_entropy, *entropy;  // each may be null
  const double* normalizer;

  RowGradient<Wide<T>> row(int64_t row) const {
    return {normalizer[row], grad_logprobs == nullptr ? 0.0 : static_cast<double>(grad_logprobs[row]),
            grad_entropy == nullptr ? 0.0 : static_cast<double>(grad_entropy[row]),
            entropy == nullptr ? 0.0 : static_cast<double>(entropy[row])};
  }
};

template <typename T>
void backward_rows(const LogitRows<T>& in, const Upstream<T>& upstream, T* gradient, const LogitLayout& layout) {
  for_each_row(in, [&](int64_t row) {
    T* const to = gradient + layout.offset(row);
    const RowGradient<Wide<T>> row_upstream = upstream.row(row);
    if (!in.has_target(row) || row_upstream.is_zero()) {
      std::fill_n(to, layout.columns, T{});
      return;
    }
    GRPO_SIMD_CALL(row_gradient, in.logits + in.layout.offset(row), to, layout.columns, in.targets[row], in.map(row),
                   row_upstream);
  });
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
    check_upstream(in.layout, wide_dtype(logits.scalar_type()), tensors);
    if (in.layout.rows == 0) return;
    const Upstream<T> upstream{optional_data<Wide<T>>(tensors.grad_logprobs),
                               optional_data<Wide<T>>(tensors.grad_entropy), optional_data<Wide<T>>(tensors.entropy),
                               static_cast<const double*>(tensors.normalizer.const_data_ptr())};
    backward_rows(in, upstream, data_of<T>(gradient), check_logits(gradient));
  });
}

std::size_t bytes_of(const Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()) * tensor.element_size(); }

}  // namespace

void expect_large_tensor_cpu(Tensor tensor) { advise_huge_pages(data_of<void>(tensor), bytes_of(tensor)); }

std::tuple<Tensor, Tensor, Tensor> token_logprobs_cpu(Tensor logits, Tensor targets,
                                                      std::optional<Tensor> row_temperature, double temperature,
                                                      std::optional<double> softcap, double logit_scale,
                                                      bool want_entropy, bool /*inplace_backward*/) {
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
                                   Tensor logits, Tensor targets, Tensor normalizer, std::optional<Tensor> entropy,
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

void token_logprobs_backward_inplace_cpu(Tensor logits, std::optional<Tensor> grad_logprobs,
                                         std::optional<Tensor> grad_entropy, Tensor targets, Tensor normalizer,
                                         std::optional<Tensor> entropy, std::optional<Tensor> row_temperature,
                                         double temperature, std::optional<double> softcap, double logit_scale) {
  backward_into(logits, logits, {targets, row_temperature, {temperature, softcap.value_or(0), logit_scale}},
                {grad_logprobs, grad_entropy, normalizer, entropy});
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels, CPU, library) {
  library.impl("token_logprobs_cpu", TORCH_BOX(&grpo_kernels::token_logprobs_cpu));
  library.impl("token_logprobs_backward_cpu", TORCH_BOX(&grpo_kernels::token_logprobs_backward_cpu));
  library.impl("token_logprobs_backward_inplace_cpu", TORCH_BOX(&grpo_kernels::token_logprobs_backward_inplace_cpu));
  library.impl("_expect_large_tensor_cpu", TORCH_BOX(&grpo_kernels::expect_large_tensor_cpu));
}
