#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "policy_loss/count.cuh"
#include "policy_loss/cuda.h"
#include "policy_loss/quads.cuh"
#include "policy_loss/reduce.cuh"
#include "policy_loss/rows.cuh"
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

// Four blocks of 64 registers a thread hide the latency of memory; the other kinds would spill.
template <typename T, WalkKind kKind>
__global__ void __launch_bounds__(kThreads, kIsBare<kKind> ? 4 : 1)
    tokens_kernel(const __grid_constant__ PolicyArrays<T> arrays) {
  __shared__ double shared[kMaxWarps];
  clear_behind_rows(arrays);
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
  // the number of tasks is an upper bound: those behind the end of a packed row are empty
  if (left > 0 || offset == 0) {
    const int64_t first = in.start(row) + offset, count = left < kTokensPerTask ? left : kTokensPerTask;
    const Shares shares = in.shares(batch, arrays.row_counts == nullptr ? Counts{} : arrays.row_counts[row]);
    const PolicyTokens<T> tokens = tokens_of(in, row, first, shares, arrays.gradient);
    if constexpr (kIsBare<kKind>) {
      part.sums = walk_quads<kKind>(tokens, arrays, static_cast<int>(count), part.counts.tokens);
      part.counts.kept_tokens = part.counts.tokens;
    } else {
      part.counts = count_tokens(in, first + team.rank, first + count, team.size, first + count);
      part.counts.tokens = team_sum(team, part.counts.tokens, nullptr);
      part.counts.kept_tokens = team_sum(team, part.counts.kept_tokens, nullptr);
      part.sums = team_sums(walk_tokens<T, kKind>(tokens, in.plan, count, team), team, nullptr);
    }
    part.counts.terms = part.counts.tokens;
    if (!kIsBare<kKind> && arrays.entropy_gradient != nullptr) {
      for (int64_t k = team.rank; k < count; k += team.size) {
        arrays.entropy_gradient[first + k] = in.entropy_gradient(first + k, shares);
      }
    }
  }
  if (team.rank == 0) arrays.parts[task] = part;
}

unsigned blocks_for(int64_t items, int64_t per_block, int64_t max_blocks) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks < max_blocks ? blocks : max_blocks));
}

}  // namespace

template <typename T>
void launch_policy_loss(PolicyArrays<T> arrays, void* stream) {
  const PolicyBatch<T>& batch = arrays.batch;
  const bool has_whole_rows = batch.needs_whole_rows();
  const int64_t mean_length = batch.cu_seqlens == nullptr ? batch.width : batch.tokens / (batch.rows + 1) + 1;
  if (arrays.row_counts != nullptr) {
    const bool has_long_rows = mean_length > 4096;
    const dim3 grid(blocks_for(batch.rows, has_long_rows ? 1 : kThreads / kWarp, kCountBlocks));
    arrays.count_blocks = static_cast<int>(grid.x);
    launch(count_kernel<T>, grid, dim3(kThreads), 0, stream, arrays, has_long_rows);
  }
  const WalkKind kind = batch.walk_kind();
  if (has_whole_rows) {
    // enough tokens for every thread
    int threads = kWarp;
    while (threads < kThreads && threads * 8 < mean_length) threads *= 2;
    const auto kernel = kind == WalkKind::kAny ? rows_kernel<T, WalkKind::kAny> : rows_kernel<T, WalkKind::kClip>;
    launch(kernel, dim3(blocks_for(batch.rows, 1, 1 << 20)), dim3(threads), 0, stream, arrays);
  } else {
    auto* kernel = tokens_kernel<T, WalkKind::kAny>;
    if (kind == WalkKind::kClip) kernel = tokens_kernel<T, WalkKind::kClip>;
    if (kind == WalkKind::kPlainClip) kernel = tokens_kernel<T, WalkKind::kPlainClip>;
    if constexpr (sizeof(T) == 4) {
      const bool is_bare = kind == WalkKind::kPlainClip && !arrays.coefficients.has_limits();
      const bool has_kl = batch.plan.kl != Kl::kNone && batch.ref_logprobs != nullptr;
      if (is_bare) kernel = has_kl ? tokens_kernel<T, WalkKind::kBareClipK3> : tokens_kernel<T, WalkKind::kBareClip>;
    }
    const unsigned blocks = blocks_for(arrays.tasks, kThreads / kWarp, INT32_MAX);
    launch(kernel, dim3(blocks), dim3(kThreads), 0, stream, arrays);
  }
  const int64_t parts = has_whole_rows ? batch.rows : arrays.tasks;
  const int width = parts > 4 * batch.rows ? kWarp : 1;
  const unsigned blocks = blocks_for(parts, kPartsPerBlock, kTotalBlocks);
  launch(reduce_kernel<T>, dim3(blocks), dim3(kReduceThreads), 0, stream, arrays, has_whole_rows, width);
}

template void launch_policy_loss<float>(PolicyArrays<float>, void*);
template void launch_policy_loss<double>(PolicyArrays<double>, void*);

}  // namespace grpo_kernels