#pragma once

#include "grpo_kernels/segment_stats.h"

namespace grpo_kernels {

constexpr int kMaxColumns = 64;            // weights travel as kernel arguments
constexpr int64_t kPartialMoments = 1024;  // room that the caller provides for partial results

// Raw device pointers; null where an argument was not given. See grpo_kernels/segments.py for order, starts,
// parent.
template <typename T>
struct AdvantageArrays {
  const T* rewards;  // [rows, columns]
  int64_t rows;
  int columns;
  const int64_t *order, *starts, *parent, *parent_starts;
  int64_t group_size, segments;
  SegmentStats* parent_stats;  // [1 or 1 + columns, segments]
  const int64_t* subgroups;
  const bool* valid;
  const double* lengths;
  const T* baselines;
  AdvantagePlan plan;
  T *advantages, *mean, *std;
  int32_t* size;
  bool* degenerate;
  double weights[kMaxColumns];
};

template <typename T>
void launch_group_advantages(const AdvantageArrays<T>& arrays, Moments* partials, void* stream);

}  // namespace grpo_kernels
