#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/check.h"
#include "common/tensors.h"
#include "group_advantages/batch.h"

namespace grpo_kernels {

// advantages, mean, std, size, degenerate
using AdvantageTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// The arguments of the op group_advantages that both compiled backends receive; they get the groups in different forms.
struct AdvantageInputs {
  static constexpr const char* kOp = "group_advantages";

  Tensor rewards;
  std::optional<Tensor> subgroups, valid, lengths, baselines;
  std::vector<double> weights;  // [columns]
  bool has_weights;
  AdvantagePlan plan;
  int64_t rows, columns;

  bool is_double() const { return rewards.scalar_type() == ScalarType::Double; }

  template <typename T>
  AdvantageBatch<T> batch() const {
    return {static_cast<const T*>(rewards.const_data_ptr()),
            rows,
            static_cast<int>(columns),
            optional_data<int64_t>(subgroups),
            optional_data<bool>(valid),
            optional_data<double>(lengths),
            optional_data<T>(baselines),
            plan};
  }
};

inline AdvantageInputs advantage_inputs(Tensor rewards, std::optional<Tensor> subgroups, std::optional<Tensor> valid,
                                        std::optional<Tensor> lengths, std::optional<Tensor> baselines,
                                        const std::vector<double>& weights, const std::vector<double>& numbers) {
  const char* const op = AdvantageInputs::kOp;
  const int64_t rows = rewards.size(0), columns = rewards.dim() == 1 ? 1 : rewards.size(1);
  const ScalarType dtype = rewards.scalar_type();
  check_float_or_double(op, "rewards", rewards);
  check_array(op, "rewards", rewards, rows * columns, dtype);
  check_array(op, "subgroups", subgroups, rows, ScalarType::Long);
  check_array(op, "valid", valid, rows, ScalarType::Bool);
  check_array(op, "lengths", lengths, rows, ScalarType::Double);
  check_array(op, "baselines", baselines, rows, dtype);
  GRPO_CHECK(weights.empty() || static_cast<int64_t>(weights.size()) == columns, op, ": weights must have ", columns,
             " elements, got ", weights.size());
  const std::vector<double> all_weights = weights.empty() ? std::vector<double>(columns, 1.0) : weights;
  const AdvantagePlan plan = check_settings<AdvantagePlan>(op, numbers);
  return {rewards, subgroups, valid, lengths, baselines, all_weights, !weights.empty(), plan, rows, columns};
}

inline void check_group_size(int64_t group_size, int64_t rows) {
  GRPO_CHECK(group_size > 0 && rows % group_size == 0, AdvantageInputs::kOp, ": group_size must divide ", rows,
             ", got ", group_size);
}

// The results of the op, not initialised.
struct AdvantageResults {
  Tensor advantages, mean, std, size, degenerate;

  explicit AdvantageResults(const AdvantageInputs& in)
      : advantages(empty_vector(in.rewards, in.rows, dtype_of(in.rewards))),
        mean(empty_vector(in.rewards, in.rows, dtype_of(in.rewards))),
        std(empty_vector(in.rewards, in.rows, dtype_of(in.rewards))),
        size(empty_vector(in.rewards, in.rows, aoti_torch_dtype_int32())),
        degenerate(empty_vector(in.rewards, in.rows, aoti_torch_dtype_bool())) {}

  template <typename T>
  AdvantageOutputs<T> outputs() const {
    return {data_of<T>(advantages), data_of<T>(mean), data_of<T>(std), data_of<int32_t>(size),
            data_of<bool>(degenerate)};
  }
  AdvantageTensors tensors() const { return {advantages, mean, std, size, degenerate}; }
};

}  // namespace grpo_kernels
