#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "policy_loss/count.cuh"
#include "policy_loss/cuda.h"
#include "policy_loss/quads.cuh"
#include "policy_loss/reduce.cuh"
#include "policy_loss/rows.cuh"
#include "policy_loss/sequences.cuh"
#include "policy_loss/walk_tokens.cuh"

// Three launches: count tokens and rows, where the aggregation needs that; write the gradient and a record of sums for
// each task, which is 1,024 tokens of a row for a warp or, where terms depend on their row, a row for a block; reduce
// the records to the metrics. Sums are added in a fixed order, so that results repeat bit by bit.
namespace grpo_kernels {
namespace {

// The row of a task, by binary search over the first tasks of rows.
template <typename T>
__device__ int64_t row_of_task(const PolicyArrays<T>& arrays, int64_t task) {
  if (arrays.batch.cu_seqlens == nullptr) return task / arrays.tasks_per_row;
  int64_t low = 0, high = arrays.batch.rows;  // first_task(low) <= task, and high == rows or task < first_task(high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (first_task(arrays, middle) <= task) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The sums and counts of a warp's task.
template <typename T, bool kQuads, WalkKind kKind>
__device__ PolicyPart part_of(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, const PolicyTokens<T>& tokens,
                              const Shares& shares, int64_t first, int64_t count, const Team& team) {
  PolicyPart part;
  if constexpr (kQuads) {
    part.sums =
        walk_quads<kKind>(tokens, arrays, static_cast<int>(first), static_cast<int>(count), team, part.counts.tokens);
  } else {
    part.counts.tokens = team_sum(team, count_valid(in, first + team.rank, first + count, team.size), nullptr);
    part.sums = team_sums(walk_tokens<T, kKind>(tokens, in.plan, count, team), team, nullptr);
    for (int64_t k = team.rank; arrays.entropy_gradient != nullptr && k < count; k += team.size) {
      arrays.entropy_gradient[first + k] = in.entropy_gradient(first + k, shares);
    }
  }
  part.counts.terms = part.counts.tokens;
  return part;
}

// Four blocks of 64 registers a thread hide the latency of memory; without quads the kernel would spill.
template <typename T, bool kQuads, WalkKind kKind>
__global__ void __launch_bounds__(kThreads, kQuads ? 4 : 1)
    tokens_kernel(const __grid_constant__ PolicyArrays<T> arrays) {
  __shared__ double shared[kMaxWarps];
  clear_after_rows(arrays);
  if (blockIdx.x == 0 && threadIdx.x == 0) arrays.done->blocks = 0;
  const PolicyBatch<T> in = batch_of(arrays);
  const Counts batch = batch_counts(arrays, shared);
  const Team team = warp_team();
  const int64_t task = blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (task >= arrays.tasks) return;  // all lanes of the warp
  const int64_t row = row_of_task(arrays, task);
  const int64_t offset = (task - first_task(arrays, row)) * kTokensPerTask;
  const int64_t left = in.length(row) - offset;
  PolicyPart part;
  // the number of tasks is an upper bound: those after the end of a packed row are empty
  if (left > 0 || offset == 0) {
    const int64_t first = in.start(row) + offset, count = left < kTokensPerTask ? left : kTokensPerTask;
    const Shares shares = in.shares(batch, arrays.row_counts == nullptr ? Counts{} : arrays.row_counts[row]);
    const PolicyTokens<T> tokens = tokens_of(in, row, first, shares, arrays.gradient);
    part = part_of<T, kQuads, kKind>(arrays, in, tokens, shares, first, count, team);
  }
  if (team.rank == 0) arrays.parts[task] = part;
}

template <typename T>
using Kernel = void (*)(PolicyArrays<T>);

// Whether four tokens at a time can be taken: without other limits than the clipping itself, and with positions of 32
// bits, which may be two steps of a block after the last.
template <typename T>
bool takes_quads(const PolicyArrays<T>& arrays) {
  const bool is_short = arrays.batch.tokens < INT32_MAX - 8 * kThreads;
  return sizeof(T) == 4 && is_short && !arrays.coefficients.has_limits();
}

template <typename T>
WalkKind token_kind(const PolicyBatch<T>& batch) {
  const bool is_clip = batch.plan.loss == Loss::kClip, has_unit_weights = batch.is_weights == nullptr;
  if (is_clip && has_unit_weights && batch.plan.kl_unbiased && batch.has_usual_inputs(true)) {
    return WalkKind::kUnbiasedClip;
  }
  const WalkKind kind = batch.walk_kind();
  const bool is_cispo = kind == WalkKind::kPlain && batch.plan.loss == Loss::kCispo && has_unit_weights;
  return is_cispo ? WalkKind::kPlainCispo : kind;
}

template <typename T>
Kernel<T> tokens_kernel_of(const PolicyArrays<T>& arrays) {
  const WalkKind kind = token_kind(arrays.batch);
  if constexpr (sizeof(T) == 4) {
    if (takes_quads(arrays)) {
      if (kind == WalkKind::kPlainClip) return tokens_kernel<T, true, WalkKind::kPlainClip>;
      if (kind == WalkKind::kUnbiasedClip) return tokens_kernel<T, true, WalkKind::kUnbiasedClip>;
      if (kind == WalkKind::kPlainCispo) return tokens_kernel<T, true, WalkKind::kPlainCispo>;
    }
  }
  if (kind == WalkKind::kPlainClip) return tokens_kernel<T, false, WalkKind::kPlainClip>;
  return tokens_kernel<T, false, WalkKind::kAny>;
}

template <typename T>
Kernel<T> rows_kernel_of(const PolicyArrays<T>& arrays) {
  if constexpr (sizeof(T) == 4) {
    if (arrays.batch.walk_kind() == WalkKind::kPlainSequence && takes_quads(arrays)) return sequences_kernel;
  }
  return rows_kernel<T>;
}

}  // namespace

template <typename T>
void launch_policy_loss(PolicyArrays<T> arrays, void* stream) {
  const PolicyBatch<T>& batch = arrays.batch;
  const bool has_whole_rows = batch.needs_whole_rows();
  launch_counts(arrays, stream);
  if (has_whole_rows) {
    // enough tokens for every thread
    int threads = kWarp;
    while (threads < kThreads && threads * 8 < mean_length(batch)) threads *= 2;
    launch(rows_kernel_of(arrays), dim3(blocks_for(batch.rows, 1, INT32_MAX)), dim3(threads), 0, stream, arrays);
  } else {
    const unsigned blocks = blocks_for(arrays.tasks, kThreads / kWarp, INT32_MAX);
    launch(tokens_kernel_of(arrays), dim3(blocks), dim3(kThreads), 0, stream, arrays);
  }
  const int64_t parts = has_whole_rows ? batch.rows : arrays.tasks;
  const int width = parts > 4 * batch.rows ? kWarp : 1;
  const unsigned blocks = blocks_for(parts, kPartsPerBlock, kTotalBlocks);
  launch(reduce_kernel<T>, dim3(blocks), dim3(kReduceThreads), 0, stream, arrays, has_whole_rows, width);
}

template void launch_policy_loss<float>(PolicyArrays<float>, void*);
template void launch_policy_loss<double>(PolicyArrays<double>, void*);

}  // namespace grpo_kernels