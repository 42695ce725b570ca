#pragma once

#include "endpoint_segments/scan.h"

namespace grpo_kernels {

// The state of a row between launches. For a row with an input that is not finite, own_return and sums.squares are NaN
// and the moments are empty.
struct SegmentRecord {
  double own_return;  // of rows without values; NaN: none
  double baseline;    // of rows without values: the mean return of the group
  TokenSums sums;
  EndpointMoments own, merged;  // of the row, and of all rows it is normalised with
};

// Raw device pointers; null where an argument was not given. order and starts are those of SortedRows in
// grpo_kernels/groups.py; bounds (cu_seqlens) ascend within the tokens.
template <typename T>
struct SegmentArrays {
  const T *rewards, *logprobs, *old_logprobs, *values;
  const bool* mask;
  int64_t rows, width, total;
  const int64_t *bounds, *order, *starts;
  const double* threshold;
  bool needs_baselines;
  SegmentSettings settings;
  SegmentRecord* records;   // [rows]
  double *scale, *credits;  // [1], [total]
  T *advantages, *returns;
  bool* endpoint_mask;
  int32_t *segment_ids, *num_segments;
};

template <typename T>
void launch_endpoint_segments(const SegmentArrays<T>& arrays, void* stream);

}  // namespace grpo_kernels
