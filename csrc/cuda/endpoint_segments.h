#pragma once

#include "grpo_kernels/endpoint_scan.h"

namespace grpo_kernels {

// What the device keeps of a row between launches. A row that has a number that is not finite has no return of its own,
// squares that are NaN, and no moments.
struct SegmentRecord {
  double own_return;  // without values; NaN: none
  double baseline;    // without values; the mean of the group's returns
  TokenSums sums;
  EndpointMoments own, shared;  // of the row, and of all that it is normalised with
};

// Raw device pointers; null where an argument was not given. See grpo_kernels/segments.py for order and starts; bounds
// ascend within the tokens.
template <typename T>
struct SegmentArrays {
  const T *rewards, *logprobs, *old, *values;
  const bool* mask;
  int64_t rows, width, total;
  const int64_t *bounds, *order, *starts;
  const double* threshold;
  bool needs_baselines;
  SegmentSettings settings;
  SegmentRecord* records;   // [rows]
  double *scale, *credits;  // [1], [total]
  T *advantages, *returns;
  bool* ends;
  int32_t *ids, *numbers;
};

template <typename T>
void launch_endpoint_segments(const SegmentArrays<T>& arrays, void* stream);

}  // namespace grpo_kernels
