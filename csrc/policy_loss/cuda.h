#pragma once

#include "policy_loss/walk.h"

namespace grpo_kernels {

constexpr int64_t kTokensPerTask = 1024;  // of a warp, where terms do not depend on other tokens

// Results of a task, which is a row or a part of one.
struct PolicyPart {
  Counts counts;
  PolicySums sums;
  double misplaced_segments = 0;  // tokens whose segment id does not ascend from 0 along the row
};
// Results of many rows.
struct PolicyTotal {
  PolicyPart part;
  RowMetrics rows;
};

// The last token of a segment, counted from the start of its row, and the divisor of the segment's ratio.
struct SegmentEnd {
  int64_t token, divisor;
};

// The number of blocks that have written their total.
struct alignas(8) DoneCounter {
  unsigned blocks;
};

// Raw device pointers; null where an argument was not given.
template <typename T>
struct PolicyArrays {
  PolicyBatch<T> batch;
  TermCoefficients<T> coefficients;        // converted once, as threads would do it again for every token
  const double* normalizers;               // those of the batch that are infinite there
  int64_t tasks_per_row, tasks;            // tasks_per_row: of padded rows
  T *gradient, *entropy_gradient;          // [tokens]
  Counts *row_counts, *block_counts;       // [rows], [kCountBlocks]; null if no share depends on them
  int count_blocks;                        // how many of the latter are in use
  PolicyPart* parts;                       // [tasks]
  PolicyTotal* blocks;                     // [kTotalBlocks]
  DoneCounter* done;                       // [1]
  bool is_aligned;                         // whether all arrays of tokens begin at a multiple of 16 bytes
  bool* terms;                             // [tokens], for segments and GMPO
  T *log_ratios, *scores, *term_gradient;  // [tokens], for segments
  SegmentEnd* segment_ends;                // [tokens]: those of a row from its first token on, by segment id
  double* metrics;
  T* loss;
  bool* segments_ascend;  // [1]; null if nobody asks
};

constexpr int kCountBlocks = 256, kTotalBlocks = 64;

// The first task of a row. A packed row gets one task for each multiple of kTokensPerTask within its tokens, plus one,
// which may be empty: enough for any row, and computable from the start of the row alone.
template <typename T>
GRPO_HD int64_t first_task(const PolicyArrays<T>& arrays, int64_t row) {
  const PolicyBatch<T>& batch = arrays.batch;
  return batch.cu_seqlens == nullptr ? row * arrays.tasks_per_row : batch.cu_seqlens[row] / kTokensPerTask + row;
}

// Upper bound on the number of tasks, from sizes that the host knows.
template <typename T>
int64_t count_tasks(const PolicyArrays<T>& arrays) {
  const PolicyBatch<T>& batch = arrays.batch;
  if (batch.cu_seqlens == nullptr || batch.rows == 0) return batch.rows * arrays.tasks_per_row;
  return batch.tokens / kTokensPerTask + batch.rows;
}

// Whether tokens or rows must be counted over the batch, or over rows longer than a task, before the first gradient.
template <typename T>
bool needs_counts(const PolicyBatch<T>& batch) {
  const PolicyPlan& plan = batch.plan;
  const auto needs = [&](Aggregation aggregation, bool is_policy) {
    if (aggregation == Aggregation::kLocalTokenMean) return true;
    if (batch.weights != nullptr || aggregation == Aggregation::kTokenSum) return false;
    if (aggregation == Aggregation::kTokenMean) {
      return isnan(is_policy && plan.by_segment() ? batch.normalizers.segments : batch.normalizers.tokens);
    }
    // a block that processes a whole row counts its tokens itself
    const bool needs_length = aggregation == Aggregation::kSeqMeanTokenMean && !batch.needs_whole_rows();
    return isnan(batch.normalizers.rows) || needs_length;
  };
  return needs(plan.aggregation, true) || (batch.ref_logprobs != nullptr && needs(plan.kl_aggregation, false)) ||
         (batch.entropy != nullptr && needs(plan.entropy_aggregation, false));
}

// Whether the arrays of a token's values can be read four tokens at a time.
template <typename T>
bool is_aligned(const PolicyBatch<T>& batch, const T* gradient) {
  const auto is_multiple = [](const void* array, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(array) % bytes == 0;
  };
  return is_multiple(gradient, 16) && is_multiple(batch.mask, 4) && is_multiple(batch.logprobs, 16) &&
         is_multiple(batch.old_logprobs, 16) && is_multiple(batch.ref_logprobs, 16) &&
         (batch.advantages_by_row || is_multiple(batch.advantages, 16));
}

template <typename T>
void launch_policy_loss(PolicyArrays<T> arrays, void* stream);

// Multiplies `count` numbers by *upstream.
template <typename T, typename Upstream>
void launch_scale(T* gradient, int64_t count, const Upstream* upstream, void* stream);

}  // namespace grpo_kernels
