#pragma once

#include "group_advantages/statistics.h"

namespace grpo_kernels {

constexpr int kCombined = -1;  // as a column: the weighted sum of all columns

// Inputs of the op; arrays of optional arguments that are not given are null.
template <typename T>
struct AdvantageBatch {
  const T* rewards;  // [rows, columns]
  int64_t rows;
  int columns;
  const int64_t* subgroups;
  const bool* valid;
  const double* lengths;
  const T* baselines;
  AdvantagePlan plan;

  GRPO_HD double length(int64_t row) const { return lengths == nullptr ? 1 : lengths[row]; }
  GRPO_HD double baseline(int64_t row) const { return baselines == nullptr ? 0 : static_cast<double>(baselines[row]); }

  GRPO_HD bool takes_part(int64_t row) const {
    return (valid == nullptr || valid[row]) && (subgroups == nullptr || subgroups[row] >= 0);
  }

  // NaN for a row that is masked or not scored. `weights` has one number per column.
  GRPO_HD double reward(int64_t row, int column, const double* weights) const {
    if (!takes_part(row)) return NAN;
    const T* const row_rewards = rewards + row * columns;
    if (column != kCombined) return static_cast<double>(row_rewards[column]);
    if (columns == 1) return weights[0] * static_cast<double>(row_rewards[0]);
    double sum = 0;
    bool is_scored = false;
    for (int c = 0; c < columns; ++c) {
      const double reward = static_cast<double>(row_rewards[c]);
      if (isnan(reward)) continue;
      sum += weights[c] * reward;
      is_scored = true;
    }
    return is_scored ? sum : NAN;
  }
};

// Results of the op, one element per row.
template <typename T>
struct AdvantageOutputs {
  T *advantages, *mean, *std;
  int32_t* size;
  bool* degenerate;
};

template <typename T>
GRPO_HD void copy_outputs(const AdvantageOutputs<T>& from, int64_t index, const AdvantageOutputs<T>& to, int64_t row) {
  to.advantages[row] = from.advantages[index];
  to.mean[row] = from.mean[index];
  to.std[row] = from.std[index];
  to.size[row] = from.size[index];
  to.degenerate[row] = from.degenerate[index];
}

}  // namespace grpo_kernels
