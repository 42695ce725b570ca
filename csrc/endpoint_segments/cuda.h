#pragma once

#include "endpoint_segments/scan.h"

namespace grpo_kernels {

// A block works on a row, tile by tile, and a thread on neighbouring tokens of a tile.
constexpr int kRowItems = 8;                                 // tokens of a thread
constexpr int kShortRowThreads = 32, kLongRowThreads = 256;  // of the block that works on a row
constexpr int64_t kLongRow = 512;                            // mean length from which rows get the larger blocks

// The state of a row between launches. For a row with an input that is not finite, own_return and sums.squares are NaN
// and the moments are empty.
struct SegmentRecord {
  double own_return;  // of rows without values; NaN: none
  double baseline;    // of rows without values: the mean return of the group
  TokenSums sums;
  RangedMoments own;
  EndpointNorm norm;  // by the moments of all rows that the row is normalised with
};

// Summary of a tile: the tokens of a row that its block works on at a time.
struct SegmentTile {
  double factor, shift;  // the map of the carry of the advantages of segments
  int64_t first_segment;
};

// The advantage of a segment: factor * carry + shift, with the carry that the last token of its tile gets; in the end,
// shift alone.
struct alignas(16) SegmentCreditMap {
  double factor, shift;
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
  bool has_critic;  // of no tokens, `values` can be null
  SegmentSettings settings;
  SegmentRecord* records;     // [rows]
  double* carries;            // of tokens, what each thread's last token gets
  SegmentTile* tiles;         // of the rows' tiles
  double* scale;              // [1]
  SegmentCreditMap* credits;  // [total]; those of a row from its first token on
  T *advantages, *returns;
  bool* endpoint_mask;
  int32_t *segment_ids, *num_segments;

  bool has_long_rows() const { return total >= kLongRow * rows; }
  // An upper bound on the pieces of so many tokens that the rows have, the last of a row often smaller.
  int64_t count_pieces(int64_t tokens) const { return total / tokens + rows; }
  int64_t tile_tokens() const { return kRowItems * (has_long_rows() ? kLongRowThreads : kShortRowThreads); }
};

template <typename T>
void launch_endpoint_segments(const SegmentArrays<T>& arrays, void* stream);

}  // namespace grpo_kernels
