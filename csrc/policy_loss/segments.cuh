#pragma once

#include <stdint.h>
#include <string.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "policy_loss/cuda.h"

// Segments of a row as scans over its tokens. Ids ascend along a row, so the last segment of a run of tokens is its
// highest. A run is reduced to that segment, and a token of a higher one begins a new segment.
namespace grpo_kernels {
namespace {

// The highest segment of a run of tokens, -1 if none of them is valid.
struct SegmentId {
  int32_t id = -1;

  template <typename T>
  __device__ static SegmentId of_token(const PolicyBatch<T>& in, int64_t, int64_t t) {
    SegmentId run;
    run.id = in.segments[t];
    return run;
  }
  // The run with `next` after it.
  __device__ SegmentId then(const SegmentId& next) const { return next.id > id ? next : *this; }
};

// Sums over the tokens of a run that are in its highest segment.
struct SegmentSums {
  double log_ratio = 0, score = 0;
  int64_t last = 0;  // the last of these tokens, counted from the start of the row
  int32_t id = -1, size = 0;

  template <typename T>
  __device__ static SegmentSums of_token(const PolicyBatch<T>& in, int64_t row_start, int64_t t) {
    SegmentSums run;
    run.log_ratio = in.log_ratio(t);
    run.score = static_cast<double>(in.logprobs[t]);
    run.last = t - row_start;
    run.id = in.segments[t];
    run.size = 1;
    return run;
  }
  __device__ SegmentSums then(const SegmentSums& next) const {
    if (next.id != id) return next.id > id ? next : *this;
    SegmentSums run = next;
    run.log_ratio = log_ratio + next.log_ratio;
    run.score = score + next.score;
    run.size = size + next.size;
    return run;
  }
};

constexpr int kSumsDoubles = sizeof(SegmentSums) / sizeof(double);

// Another lane's run; lanes are counted modulo kWarp.
template <typename Run>
__device__ __forceinline__ Run run_of_lane(const Run& run, int lane) {
  uint32_t words[sizeof(Run) / 4];
  memcpy(words, &run, sizeof(Run));
#pragma unroll
  for (uint32_t& word : words) word = __shfl_sync(kAllLanes, word, lane);
  Run other;
  memcpy(&other, words, sizeof(Run));
  return other;
}

// Reduces `carry` and the runs of the threads before each thread, and appends the runs of all threads to `carry`. The
// team is a warp or the block; `shared` holds kMaxWarps runs and may be reused on return.
template <typename Run>
__device__ __forceinline__ Run run_before(const Run& own, const Team& team, Run* shared, Run& carry) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Run whole = own;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Run earlier = run_of_lane(whole, lane - offset);
    if (lane >= offset) whole = earlier.then(whole);
  }
  Run before = run_of_lane(whole, lane - 1);
  if (lane == 0) before = Run{};
  Run before_warp = carry;
  if (team.whole_block) {
    const int own_warp = static_cast<int>(threadIdx.x) / kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
    if (lane == kWarp - 1) shared[own_warp] = whole;
    __syncthreads();
    for (int warp = 0; warp < warps; ++warp) {
      if (warp == own_warp) before_warp = carry;
      carry = carry.then(shared[warp]);
    }
    __syncthreads();
  } else {
    carry = carry.then(run_of_lane(whole, kWarp - 1));
  }
  return before_warp.then(before);
}

// Calls visit(run before the token, token) for every valid token of the row; returns the run of the whole row. Threads
// take neighbouring tokens, so that one scan serves several of them.
template <typename Run, typename T, typename Visit>
__device__ Run scan_row(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared, const Visit& visit) {
  constexpr int kItems = 4;
  const int64_t first = in.start(row), last = first + in.length(row);
  Run carry;
  for (int64_t tile = first; tile < last; tile += kItems * team.size) {
    Run items[kItems], own;
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int64_t t = tile + kItems * team.rank + j;
      if (t < last && in.is_valid(t)) items[j] = Run::of_token(in, first, t);
      own = own.then(items[j]);
    }
    Run before = run_before(own, team, reinterpret_cast<Run*>(shared), carry);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      if (items[j].id >= 0) visit(before, items[j]);
      before = before.then(items[j]);
    }
  }
  return carry;
}

// The row's valid tokens and segments, for every thread of the team. `shared` holds kMaxWarps doubles.
template <typename T>
__device__ Counts count_segments(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared) {
  double tokens = 0, segments = 0;
  scan_row<SegmentId>(in, row, team, shared, [&](const SegmentId& before, const SegmentId& token) {
    tokens += 1;
    segments += token.id > before.id ? 1 : 0;
  });
  tokens = team_sum(team, tokens, shared);
  return counts_of_row(tokens, team_sum(team, segments, shared));
}

// Writes the joint log ratio and log-prob of every segment at its last token, and 0 elsewhere, where they are loaded
// and not used; returns the row's counts with those of tokens whose segment id does not ascend from 0 along the row.
// `shared` holds kMaxWarps SegmentSums.
template <typename T>
__device__ PolicyPart gather_segments(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row,
                                      const Team& team, double* shared) {
  const int64_t first = in.start(row), length = in.length(row);
  for (int64_t t = first + team.rank; t < first + length; t += team.size) {
    arrays.terms[t] = false;
    arrays.log_ratios[t] = arrays.scores[t] = 0;
  }
  const auto close = [&](const SegmentSums& segment) {
    if (segment.id < 0 || segment.id >= length) return;
    const int64_t divisor = in.plan.ratio == Ratio::kSegmentMean ? segment.size : 1;
    arrays.terms[first + segment.last] = true;
    arrays.log_ratios[first + segment.last] = static_cast<T>(segment.log_ratio / static_cast<double>(divisor));
    arrays.scores[first + segment.last] = static_cast<T>(segment.score / static_cast<double>(divisor));
    arrays.segment_ends[first + segment.id] = {segment.last, divisor};
  };
  double tokens = 0, segments = 0, misplaced = 0;
  const auto visit = [&](const SegmentSums& before, const SegmentSums& token) {
    tokens += 1;
    if (token.id < before.id || token.id >= length) misplaced += 1;
    if (token.id <= before.id) return;
    segments += 1;
    close(before);
  };
  const SegmentSums last = scan_row<SegmentSums>(in, row, team, shared, visit);
  if (team.rank == 0) close(last);
  PolicyPart part;
  tokens = team_sum(team, tokens, shared);
  part.counts = counts_of_row(tokens, team_sum(team, segments, shared));
  part.misplaced_segments = team_sum(team, misplaced, shared);
  return part;
}

// Adds the gradient of a segment's term, computed at its last token, to all of its tokens.
template <typename T>
__device__ void spread_over_segments(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row,
                                     const Team& team) {
  const int64_t first = in.start(row), last = first + in.length(row);
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    if (!in.is_valid(t)) continue;
    const SegmentEnd end = arrays.segment_ends[first + in.segments[t]];
    arrays.gradient[t] += arrays.term_gradient[first + end.token] / static_cast<T>(end.divisor);
  }
}

}  // namespace
}  // namespace grpo_kernels
