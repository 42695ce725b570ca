#include <torch/csrc/stable/library.h>

#include "common/allocate.h"
#include "common/op_namespace.h"
#include "common/scratch.h"
#include "sampled_support/simd.h"
#include "sampled_support/tensors.h"
#include "token_logprobs/rows.h"

namespace grpo_kernels {
namespace {

constexpr double kProductNanoseconds = 0.15;  // of a number of a row of the weight, read from memory
constexpr int64_t kKeptScratch = 1 << 16;     // numbers of working memory that a thread keeps

// Entries in the order of their rows, each with its row (-1: it takes no part) and its row of the weight.
struct EntryArrays {
  const int64_t *token_ids, *rows;
  int64_t count;
};

EntryArrays check_entries(const Tensor& token_ids, const Tensor& rows, int64_t row_count, int64_t columns) {
  const int64_t count = token_ids.numel();
  check_array(kSupportOp, "token_ids", token_ids, count, ScalarType::Long);
  check_array(kSupportOp, "rows", rows, count, ScalarType::Long);
  const EntryArrays entries{int64_data(token_ids), int64_data(rows), count};
  for (int64_t e = 0; e < count; ++e) {
    const int64_t id = entries.token_ids[e], row = entries.rows[e];
    GRPO_CHECK(id >= 0 && id < columns, kSupportOp, ": token_ids must be in [0, ", columns, "), got ", id, " at ", e);
    GRPO_CHECK(row >= -1 && row < row_count, kSupportOp, ": rows must be in [-1, ", row_count, "), got ", row, " at ",
               e);
  }
  return entries;
}

const int64_t* check_bounds(const Tensor& bounds, int64_t rows, int64_t count) {
  check_array(kSupportOp, "bounds", bounds, rows + 1, ScalarType::Long);
  const int64_t* const data = int64_data(bounds);
  for (int64_t row = 0; row <= rows; ++row) {
    const int64_t low = row == 0 ? 0 : data[row - 1], high = row == 0 ? 0 : count;
    GRPO_CHECK(data[row] >= low && data[row] <= high, kSupportOp, ": bounds must ascend from 0 to at most ", count,
               ", got ", data[row], " at ", row);
  }
  return data;
}

template <typename T>
void logits_of(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
               const EntryArrays& entries, Wide<T>* logits) {
  const int64_t width = hidden.size(1), hidden_stride = hidden.stride(0), weight_stride = weight.stride(0);
  const T* const states = static_cast<const T*>(hidden.const_data_ptr());
  const T* const table = static_cast<const T*>(weight.const_data_ptr());
  const T* const offsets = optional_data<T>(bias);
  parallel_for(entries.count, kProductNanoseconds * static_cast<double>(width), [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      const int64_t id = entries.token_ids[e], row = entries.rows[e];
      logits[e] = 0;
      if (row < 0) continue;
      logits[e] = GRPO_SIMD_CALL(dot, states + row * hidden_stride, table + id * weight_stride, width);
      if (offsets != nullptr) GRPO_SIMD_CALL(add_scaled, &logits[e], offsets + id, Wide<T>(1), 1);
    }
  });
}

template <typename T>
void to_hidden(const Wide<T>* by_logits, const Tensor& weight, const int64_t* token_ids, const int64_t* bounds,
               int64_t rows, T* result) {
  const int64_t width = weight.size(1), stride = weight.stride(0);
  const T* const table = static_cast<const T*>(weight.const_data_ptr());
  const double mean = static_cast<double>(bounds[rows]) / static_cast<double>(rows) + 1;
  parallel_for(rows, kProductNanoseconds * mean * static_cast<double>(width), [&](int64_t begin, int64_t end) {
    static thread_local Scratch<Wide<T>> scratch;
    Wide<T>* const sum = scratch.get(width);
    for (int64_t row = begin; row < end; ++row) {
      std::fill_n(sum, width, Wide<T>(0));
      for (int64_t e = bounds[row]; e < bounds[row + 1]; ++e) {
        if (by_logits[e] != 0) GRPO_SIMD_CALL(add_scaled, sum, table + token_ids[e] * stride, by_logits[e], width);
      }
      std::fill_n(result + row * width, width, T{});
      GRPO_SIMD_CALL(add_rounded, result + row * width, sum, width);
    }
    scratch.keep_at_most(kKeptScratch);
  });
}

// Adds the gradients of the rows of the weight that entries have. Entries are sorted by token id, and a thread sums
// all entries of an id, in order, so that the result does not depend on the number of threads.
template <typename T, typename Total>
void add_weight(const Wide<T>* by_logits, const Tensor& hidden, const EntryArrays& entries, const int64_t* order,
                Total* weight, Total* bias) {
  const int64_t width = hidden.size(1), stride = hidden.stride(0), count = entries.count;
  const T* const states = static_cast<const T*>(hidden.const_data_ptr());
  const auto id_at = [&](int64_t place) { return entries.token_ids[order[place]]; };
  parallel_for(count, kProductNanoseconds * static_cast<double>(width), [&](int64_t begin, int64_t end) {
    static thread_local Scratch<Wide<T>> scratch;
    Wide<T>* const sum = scratch.get(width + 1);  // the last is for the bias
    while (begin > 0 && begin < end && id_at(begin) == id_at(begin - 1)) ++begin;
    for (int64_t place = begin; place < end;) {
      const int64_t id = id_at(place);
      std::fill_n(sum, width + 1, Wide<T>(0));
      bool is_zero = true;
      for (; place < count && id_at(place) == id; ++place) {
        const int64_t e = order[place], row = entries.rows[e];
        if (row < 0 || by_logits[e] == 0) continue;
        is_zero = false;
        sum[width] += by_logits[e];
        if (weight != nullptr) GRPO_SIMD_CALL(add_scaled, sum, states + row * stride, by_logits[e], width);
      }
      if (is_zero) continue;
      if (weight != nullptr) GRPO_SIMD_CALL(add_rounded, weight + id * width, sum, width);
      if (bias != nullptr) GRPO_SIMD_CALL(add_rounded, bias + id, sum + width, 1);
    }
    scratch.keep_at_most(kKeptScratch);
  });
}

}  // namespace

Tensor sampled_support_logits_cpu(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor token_ids,
                                  Tensor rows, Tensor /*bounds*/, Tensor /*order*/) {
  const MatrixLayout states = check_matrix("hidden", hidden), table = check_matrix("weight", weight);
  GRPO_CHECK(states.columns == table.columns, kSupportOp, ": weight must have ", states.columns, " columns, got ",
             table.columns);
  check_same_dtype("weight", weight, hidden);
  check_array(kSupportOp, "bias", bias, table.rows, hidden.scalar_type());
  const EntryArrays entries = check_entries(token_ids, rows, states.rows, table.rows);
  const bool is_double = hidden.scalar_type() == ScalarType::Double;
  const Tensor logits =
      empty_tensor(hidden, &entries.count, 1, is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32());
  for_float_dtype<true>(kSupportOp, "hidden", hidden, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    logits_of<T>(hidden, weight, bias, entries, data_of<Wide<T>>(logits));
  });
  return logits;
}

Tensor sampled_support_to_hidden_cpu(Tensor by_logits, Tensor weight, Tensor token_ids, Tensor bounds) {
  const MatrixLayout table = check_matrix("weight", weight);
  const int64_t count = token_ids.numel(), rows = bounds.numel() - 1;
  check_array(kSupportOp, "by_logits", by_logits, count, wide_dtype(weight.scalar_type()));
  const int64_t* const starts = check_bounds(bounds, rows, count);
  check_entries(token_ids, token_ids, table.rows, table.rows);
  const int64_t shape[2] = {rows, table.columns};
  const Tensor result = empty_tensor(weight, shape, 2, dtype_of(weight));
  if (rows == 0) return result;
  for_float_dtype<true>(kSupportOp, "weight", weight, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    to_hidden<T>(static_cast<const Wide<T>*>(by_logits.const_data_ptr()), weight, int64_data(token_ids), starts, rows,
                 data_of<T>(result));
  });
  return result;
}

void sampled_support_add_weight_cpu(Tensor by_logits, Tensor hidden, Tensor token_ids, Tensor rows, Tensor order,
                                    std::optional<Tensor> weight, std::optional<Tensor> bias) {
  const MatrixLayout states = check_matrix("hidden", hidden);
  const int64_t count = token_ids.numel();
  if (!weight && !bias) return;
  const Tensor& total = weight ? *weight : *bias;
  const int64_t columns = total.size(0);
  check_array(kSupportOp, "by_logits", by_logits, count, wide_dtype(hidden.scalar_type()));
  check_array(kSupportOp, "weight", weight, columns * states.columns, total.scalar_type());
  check_array(kSupportOp, "bias", bias, columns, total.scalar_type());
  const EntryArrays entries = check_entries(token_ids, rows, states.rows, columns);
  check_array(kSupportOp, "order", order, count, ScalarType::Long);
  const int64_t* const places = int64_data(order);
  for (int64_t place = 0; place < count; ++place) {
    GRPO_CHECK(places[place] >= 0 && places[place] < count, kSupportOp, ": order must be in [0, ", count, "), got ",
               places[place], " at ", place);
  }
  for_float_dtype<true>(kSupportOp, "hidden", hidden, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto* const gradient = static_cast<const Wide<T>*>(by_logits.const_data_ptr());
    const auto add = [&]<typename Total>(Total* to_weight) {
      add_weight<T, Total>(gradient, hidden, entries, places, to_weight, bias ? data_of<Total>(*bias) : nullptr);
    };
    if (total.scalar_type() == wide_dtype(hidden.scalar_type())) {
      add(weight ? data_of<Wide<T>>(*weight) : nullptr);
    } else {
      check_same_dtype("weight", total, hidden);
      add(weight ? data_of<T>(*weight) : nullptr);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> sampled_support_logprobs_cpu(Tensor logits, Tensor places, Tensor bounds,
                                                                std::optional<Tensor> row_temperature,
                                                                double temperature, std::optional<double> softcap,
                                                                double logit_scale, bool want_entropy) {
  const int64_t rows = places.numel(), count = logits.numel(), none = 0;
  check_float_or_double(kSupportOp, "logits", logits);
  check_array(kSupportOp, "logits", logits, count, logits.scalar_type());
  check_array(kSupportOp, "places", places, rows, ScalarType::Long);
  check_array(kSupportOp, "row_temperature", row_temperature, rows, logits.scalar_type());
  const Tensor logprobs = empty_tensor(logits, &rows, 1, dtype_of(logits));
  const Tensor entropy = empty_tensor(logits, want_entropy ? &rows : &none, 1, dtype_of(logits));
  const Tensor normalizer = empty_tensor(logits, &rows, 1, aoti_torch_dtype_float64());
  for_float_dtype<true>(kSupportOp, "logits", logits, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<T, Wide<T>>) {
      const LogitRows<T> in{static_cast<const T*>(logits.const_data_ptr()),
                            {rows, count / std::max<int64_t>(rows, 1) + 1, 1, 0, 0},
                            int64_data(places),
                            optional_data<T>(row_temperature),
                            {temperature, softcap.value_or(0), logit_scale},
                            check_bounds(bounds, rows, count)};
      forward_rows(in, data_of<T>(logprobs), want_entropy ? data_of<T>(entropy) : nullptr, data_of<double>(normalizer));
    }
  });
  return {logprobs, entropy, normalizer};
}

Tensor sampled_support_logprobs_backward_cpu(std::optional<Tensor> grad_logprobs, std::optional<Tensor> grad_entropy,
                                             Tensor logits, Tensor places, Tensor bounds, Tensor normalizer,
                                             std::optional<Tensor> entropy, std::optional<Tensor> row_temperature,
                                             double temperature, std::optional<double> softcap, double logit_scale) {
  const int64_t rows = places.numel(), count = logits.numel();
  check_float_or_double(kSupportOp, "logits", logits);
  check_array(kSupportOp, "logits", logits, count, logits.scalar_type());
  check_array(kSupportOp, "places", places, rows, ScalarType::Long);
  check_array(kSupportOp, "row_temperature", row_temperature, rows, logits.scalar_type());
  const LogitLayout layout{rows, count / std::max<int64_t>(rows, 1) + 1, 1, 0, 0};
  check_upstream(layout, logits.scalar_type(), {grad_logprobs, grad_entropy, normalizer, entropy});
  const Tensor gradient = empty_tensor(logits, &count, 1, dtype_of(logits));
  for_float_dtype<true>(kSupportOp, "logits", logits, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<T, Wide<T>>) {
      const LogitRows<T> in{static_cast<const T*>(logits.const_data_ptr()),
                            layout,
                            int64_data(places),
                            optional_data<T>(row_temperature),
                            {temperature, softcap.value_or(0), logit_scale},
                            check_bounds(bounds, rows, count)};
      const Upstream<T> upstream{optional_data<T>(grad_logprobs), optional_data<T>(grad_entropy),
                                 optional_data<T>(entropy), static_cast<const double*>(normalizer.const_data_ptr())};
      backward_rows(in, upstream, data_of<T>(gradient), layout);
    }
  });
  return gradient;
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("sampled_support_logits_cpu", TORCH_BOX(&grpo_kernels::sampled_support_logits_cpu));
  library.impl("sampled_support_to_hidden_cpu", TORCH_BOX(&grpo_kernels::sampled_support_to_hidden_cpu));
  library.impl("sampled_support_add_weight_cpu", TORCH_BOX(&grpo_kernels::sampled_support_add_weight_cpu));
  library.impl("sampled_support_logprobs_cpu", TORCH_BOX(&grpo_kernels::sampled_support_logprobs_cpu));
  library.impl("sampled_support_logprobs_backward_cpu",
               TORCH_BOX(&grpo_kernels::sampled_support_logprobs_backward_cpu));
}
