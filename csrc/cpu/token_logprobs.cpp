#include "simd/token_logprobs.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "allocate.h"
#include "cpu_ops.h"
#include "logit_tensors.h"
#include "scratch.h"
#include "simd/levels.h"

namespace grpo_kernels {
namespace {

constexpr int64_t kLogitsPerTask = 16384;  // below this a second thread costs more than it saves
constexpr std::size_t kHugeGradient = std::size_t{64} << 20;

template <typename T>
struct LogitRows {
  const T* logits;
  LogitLayout layout;
  const int64_t* targets;
  const Wide<T>* temperatures;  // null: one for all
  LogitScaling scaling;

  LogitMap<Wide<T>> map(int64_t row) const {
    const double temperature = temperatures == nullptr ? scaling.temperature : temperatures[row];
    return make_logit_map<Wide<T>>(temperature, scaling.softcap, scaling.logit_scale);
  }
  bool ignored(int64_t row) const { return targets[row] == kIgnoredTarget; }
  bool has_target(int64_t row) const { return targets[row] >= 0 && targets[row] < layout.columns; }
};

template <typename Visit>
void for_each_row(const LogitLayout& layout, Visit visit) {
  torch::stable::parallel_for(0, layout.rows, std::max<int64_t>(1, kLogitsPerTask / layout.columns),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t row = begin; row < end; ++row) visit(row);
                              });
}

template <typename T>
void forward_rows(const LogitRows<T>& in, Wide<T>* logprobs, Wide<T>* entropy, double* normalizer) {
  std::atomic<int64_t> wrong{in.layout.rows};  // the first row whose target is no column
  for_each_row(in.layout, [&](int64_t row) {
    RowResult result{0, 0, 0};
    if (in.has_target(row)) {
      const RowSums sums = GRPO_SIMD_CALL(row_sums, in.logits + in.layout.offset(row), in.layout.columns,
                                          in.targets[row], in.map(row), entropy != nullptr);
      result = finish_row(sums.softmax, sums.target_z);
    } else if (!in.ignored(row)) {
      int64_t first = wrong.load();
      while (row < first && !wrong.compare_exchange_weak(first, row)) {
      }
    }
    logprobs[row] = static_cast<Wide<T>>(result.logprob);
    if (entropy != nullptr) entropy[row] = static_cast<Wide<T>>(result.entropy);
    normalizer[row] = result.normalizer;
  });
  const int64_t row = wrong.load();
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
  for_each_row(in.layout, [&](int64_t row) {
    T* const to = gradient + layout.offset(row);
    const RowGradient<Wide<T>> needs = upstream.row(row);
    if (!in.has_target(row) || needs.idle()) {
      std::fill_n(to, layout.columns, T{});
      return;
    }
    GRPO_SIMD_CALL(row_gradient, in.logits + in.layout.offset(row), to, layout.columns, in.targets[row], in.map(row),
                   needs);
  });
}

// run(a pointer of the type of the logits)
template <typename Run>
void for_dtype(const Tensor& logits, Run run) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return run(static_cast<float*>(nullptr));
    case ScalarType::Double:
      return run(static_cast<double*>(nullptr));
    case ScalarType::Half:
      return run(static_cast<Half*>(nullptr));
    case ScalarType::BFloat16:
      return run(static_cast<BFloat16*>(nullptr));
    default:
      STD_TORCH_CHECK(false, kLogprobsOp, ": logits must be float16, bfloat16, float32 or float64");
  }
}

template <typename T>
LogitRows<T> rows_of(const Tensor& logits, const Tensor& targets, const std::optional<Tensor>& row_temperature,
                     const LogitScaling& scaling) {
  const LogitLayout layout = check_logits(logits);
  check_array(kLogprobsOp, "targets", targets, layout.rows, ScalarType::Long);
  check_optional("row_temperature", row_temperature, layout.rows, wide_dtype(logits.scalar_type()));
  return {static_cast<const T*>(logits.const_data_ptr()), layout, static_cast<const int64_t*>(targets.const_data_ptr()),
          optional_data<Wide<T>>(row_temperature), scaling};
}

void backward_into(const Tensor& gradient, const std::optional<Tensor>& grad_logprobs,
                   const std::optional<Tensor>& grad_entropy, const Tensor& logits, const Tensor& targets,
                   const Tensor& normalizer, const std::optional<Tensor>& entropy,
                   const std::optional<Tensor>& row_temperature, const LogitScaling& scaling) {
  const ScalarType wide = wide_dtype(logits.scalar_type());
  for_dtype(logits, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const LogitRows<T> in = rows_of<T>(logits, targets, row_temperature, scaling);
    check_array(kLogprobsOp, "normalizer", normalizer, in.layout.rows, ScalarType::Double);
    check_optional("grad_logprobs", grad_logprobs, in.layout.rows, wide);
    check_optional("grad_entropy", grad_entropy, in.layout.rows, wide);
    check_optional("entropy", entropy, in.layout.rows, wide);
    STD_TORCH_CHECK(!grad_entropy || entropy, kLogprobsOp, ": entropy must be given with grad_entropy");
    if (in.layout.rows == 0) return;
    const Upstream<T> upstream{optional_data<Wide<T>>(grad_logprobs), optional_data<Wide<T>>(grad_entropy),
                               optional_data<Wide<T>>(entropy),
                               static_cast<const double*>(normalizer.const_data_ptr())};
    backward_rows(in, upstream, static_cast<T*>(gradient.mutable_data_ptr()), check_logits(gradient));
  });
}

}  // namespace

LogprobTensors token_logprobs_cpu(Tensor logits, Tensor targets, std::optional<Tensor> row_temperature,
                                  double temperature, std::optional<double> softcap, double logit_scale,
                                  bool want_entropy, bool /*inplace_backward*/) {
  STD_TORCH_CHECK(logits.dim() == 3, kLogprobsOp, ": logits must have shape [A, B, V]");
  const int64_t shape[2] = {logits.size(0), logits.size(1)}, nothing = 0;
  const int32_t wide =
      logits.scalar_type() == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  const Tensor logprobs = empty_tensor(logits, shape, 2, wide);
  const Tensor entropy = want_entropy ? empty_tensor(logits, shape, 2, wide) : empty_tensor(logits, &nothing, 1, wide);
  const Tensor normalizer = empty_tensor(logits, shape, 2, aoti_torch_dtype_float64());
  for_dtype(logits, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const LogitRows<T> in =
        rows_of<T>(logits, targets, row_temperature, {temperature, softcap.value_or(0), logit_scale});
    if (in.layout.rows == 0) return;
    forward_rows(in, static_cast<Wide<T>*>(logprobs.mutable_data_ptr()),
                 want_entropy ? static_cast<Wide<T>*>(entropy.mutable_data_ptr()) : nullptr,
                 static_cast<double*>(normalizer.mutable_data_ptr()));
  });
  return {logprobs, entropy, normalizer};
}

Tensor token_logprobs_backward_cpu(std::optional<Tensor> grad_logprobs, std::optional<Tensor> grad_entropy,
                                   Tensor logits, Tensor targets, Tensor normalizer, std::optional<Tensor> entropy,
                                   std::optional<Tensor> row_temperature, double temperature,
                                   std::optional<double> softcap, double logit_scale) {
  STD_TORCH_CHECK(logits.dim() == 3, kLogprobsOp, ": logits must have shape [A, B, V]");
  const int64_t shape[3] = {logits.size(0), logits.size(1), logits.size(2)};
  const Tensor gradient = empty_tensor(logits, shape, 3, dtype_of(logits));
  const std::size_t bytes = static_cast<std::size_t>(gradient.numel()) * gradient.element_size();
  if (bytes >= kHugeGradient) advise_huge_pages(gradient.mutable_data_ptr(), bytes);
  backward_into(gradient, grad_logprobs, grad_entropy, logits, targets, normalizer, entropy, row_temperature,
                {temperature, softcap.value_or(0), logit_scale});
  return gradient;
}

void token_logprobs_backward_inplace_cpu(Tensor logits, std::optional<Tensor> grad_logprobs,
                                         std::optional<Tensor> grad_entropy, Tensor targets, Tensor normalizer,
                                         std::optional<Tensor> entropy, std::optional<Tensor> row_temperature,
                                         double temperature, std::optional<double> softcap, double logit_scale) {
  backward_into(logits, grad_logprobs, grad_entropy, logits, targets, normalizer, entropy, row_temperature,
                {temperature, softcap.value_or(0), logit_scale});
}

}  // namespace grpo_kernels
