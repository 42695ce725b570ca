#pragma once

#include "group_advantages/batch.h"

namespace grpo_kernels {

constexpr int64_t kMaxColumns = 64;     // weights are kernel arguments
constexpr int64_t kMaxPartials = 1024;  // of moments, one per block

// Raw device pointers; null where an argument was not given. order, starts, parent and parent_starts are those of
// SortedRows in grpo_kernels/groups.py.
template <typename T>
struct AdvantageArrays {
  AdvantageBatch<T> batch;
  const int64_t *order, *starts, *parent, *parent_starts;
  int64_t group_size, groups;
  GroupStatistics* parent_stats;  // [1 or 1 + columns, groups]
  AdvantageOutputs<T> out;
  Moments* partials;  // [kMaxPartials], for estimators that normalise over the batch
  double weights[kMaxColumns];
};

template <typename T>
void launch_group_advantages(const AdvantageArrays<T>& arrays, void* stream);

}  // namespace grpo_kernels
