#pragma once

#include "grpo_kernels/policy_walk.h"

namespace grpo_kernels {

constexpr int64_t kTokensPerTask = 1024;  // of a warp, where tokens can be worked on one by one

// The rows' results on their way to the metrics.
struct PolicyPart {
  Counts counts;
  PolicySums sums;
};
struct PolicyTotal {
  Counts counts;
  PolicySums sums;
  RowExtremes extremes;

  GRPO_HD void merge(const PolicyTotal& other) {
    counts.add(other.counts);
    sums.merge(other.sums);
    extremes.merge(other.extremes);
  }
};

// Raw device pointers; null where an argument was not given.
template <typename T>
struct PolicyArrays {
  PolicyBatch<T> batch;          // its floor and its normalizers are read from these, if given
  const T* entropy_floor;        // [1]
  const double* normalizers;     // [3]: tokens, rows, segments
  int64_t tasks_per_row, tasks;  // the former of padded rows
  T *gradient, *by_entropy;      // [tokens]
  Counts *row_counts, *totals;   // [rows], [1]; null where nothing depends on them
  PolicyPart* parts;             // [tasks]
  PolicyTotal* blocks;           // [kTotalBlocks]
  bool* terms;                   // [tokens], as are the next: of segments and of GMPO
  T *log_ratios, *scores, *term_gradient;
  double* metrics;
  T* loss;
};

constexpr int kTotalBlocks = 64;

// The first task of a row. Packed rows get one task for each multiple of kTokensPerTask that they hold and one more,
// which may be empty: enough for any row, and known from where the row starts.
template <typename T>
GRPO_HD int64_t first_task(const PolicyArrays<T>& arrays, int64_t row) {
  const PolicyBatch<T>& batch = arrays.batch;
  return batch.cu_seqlens == nullptr ? row * arrays.tasks_per_row : batch.cu_seqlens[row] / kTokensPerTask + row;
}

// How many tasks there are at most, from what the host knows: packed rows end at the number of tokens or before.
template <typename T>
int64_t count_tasks(const PolicyArrays<T>& arrays) {
  const PolicyBatch<T>& batch = arrays.batch;
  if (batch.cu_seqlens == nullptr || batch.rows == 0) return batch.rows * arrays.tasks_per_row;
  return batch.tokens / kTokensPerTask + batch.rows;
}

// Whether something has to be counted over the batch, or over rows longer than a task, before the first gradient can
// be written.
template <typename T>
bool counts_first(const PolicyBatch<T>& batch) {
  const PolicyPlan& plan = batch.plan;
  const auto needs = [&](Aggregation aggregation, bool policy) {
    if (aggregation == Aggregation::kLocalTokenMean) return true;
    if (batch.weights != nullptr || aggregation == Aggregation::kTokenSum) return false;
    if (aggregation == Aggregation::kTokenMean) {
      return isnan(policy && plan.by_segment() ? batch.known.segments : batch.known.tokens);
    }
    // a block with a row to itself counts its tokens on its way
    return isnan(batch.known.rows) || (aggregation == Aggregation::kRowTokenMean && !batch.by_row());
  };
  return needs(plan.aggregation, true) || (batch.ref != nullptr && needs(plan.kl_aggregation, false)) ||
         (batch.entropy != nullptr && needs(plan.entropy_aggregation, false));
}

template <typename T>
void launch_policy_loss(const PolicyArrays<T>& arrays, void* stream);

}  // namespace grpo_kernels
