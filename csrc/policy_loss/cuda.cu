#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "policy_loss/cuda.h"

// Three steps: count tokens and rows, where the aggregation needs that; write the gradient and a record of sums for
// each task, which is 1,024 tokens of a row for a warp or, where terms depend on their row, a row for a block; reduce
// the records to the metrics. Sums are added in a fixed order, so that results repeat bit by bit.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTaskThreads = 128;  // of blocks whose warps are independent

// The batch, with the values that only the device knows.
template <typename T>
__device__ PolicyBatch<T> batch_of(const PolicyArrays<T>& arrays) {
  PolicyBatch<T> batch = arrays.batch;
  if (arrays.entropy_floor != nullptr) batch.entropy_floor = arrays.entropy_floor[0];
  if (arrays.normalizers != nullptr) {
    const double tokens = arrays.normalizers[0], rows = arrays.normalizers[1], segments = arrays.normalizers[2];
    if (!isnan(tokens)) batch.normalizers.tokens = tokens;
    if (!isnan(rows)) batch.normalizers.rows = rows;
    if (!isnan(segments)) batch.normalizers.segments = segments;
  }
  return batch;
}

// The first valid token behind t in its row, row_end if there is none.
template <typename T>
__device__ int64_t next_valid(const PolicyBatch<T>& in, int64_t t, int64_t row_end) {
  int64_t next = t + 1;
  while (next < row_end && !in.is_valid(next)) ++next;
  return next;
}

// Whether token t is the last of its segment; `next` is its next_valid.
template <typename T>
__device__ bool ends_segment(const PolicyBatch<T>& in, int64_t t, int64_t next, int64_t row_end) {
  return next == row_end || in.segments[next] != in.segments[t];
}

// Counts over tokens first, first + stride, ... below last.
template <typename T>
__device__ Counts count_tokens(const PolicyBatch<T>& in, int64_t first, int64_t last, int64_t stride, int64_t row_end) {
  Counts counts;
  for (int64_t t = first; t < last; t += stride) {
    if (!in.is_valid(t)) continue;
    counts.tokens += 1;
    counts.kept_tokens += in.is_kept(t) ? 1 : 0;
    if (in.plan.by_segment()) {
      counts.terms += ends_segment(in, t, next_valid(in, t, row_end), row_end) ? 1 : 0;
    }
  }
  return counts;
}

// Counts over a whole row, for every thread of the team.
template <typename T>
__device__ Counts count_row(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared) {
  const int64_t first = in.start(row), last = first + in.length(row);
  Counts counts = count_tokens(in, first + team.rank, last, team.size, last);
  counts.tokens = team_sum(team, counts.tokens, shared);
  counts.kept_tokens = team_sum(team, counts.kept_tokens, shared);
  counts.terms = team_sum(team, counts.terms, shared);
  if (in.plan.loss == Loss::kGeoMean) {
    counts.terms = counts.kept_tokens > 0 ? 1 : 0;
  } else if (!in.plan.by_segment()) {
    counts.terms = counts.tokens;
  }
  counts.rows = 1;
  counts.active_rows = counts.tokens > 0 ? 1 : 0;
  return counts;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ PolicyArrays<T> arrays) {
  const PolicyBatch<T> in = batch_of(arrays);
  const int64_t warps = blockDim.x / kWarp;
  for (int64_t base = blockIdx.x * warps; base < in.rows; base += gridDim.x * warps) {
    // a warp without a row counts the last one, as all lanes must take part, and stores nothing
    const int64_t row = base + threadIdx.x / kWarp;
    const bool has_row = row < in.rows;
    const Counts counts = count_row(in, has_row ? row : in.rows - 1, warp_team(), nullptr);
    if (has_row && threadIdx.x % kWarp == 0) arrays.row_counts[row] = counts;
  }
}

__device__ Counts team_counts(Counts counts, const Team& team, double* shared) {
  counts.rows = team_sum(team, counts.rows, shared);
  counts.active_rows = team_sum(team, counts.active_rows, shared);
  counts.tokens = team_sum(team, counts.tokens, shared);
  counts.kept_tokens = team_sum(team, counts.kept_tokens, shared);
  counts.terms = team_sum(team, counts.terms, shared);
  return counts;
}

__global__ void __launch_bounds__(1024) total_kernel(const Counts* rows, int64_t count, Counts* batch) {
  __shared__ double shared[kMaxWarps];
  Counts own;
  for (int64_t row = threadIdx.x; row < count; row += blockDim.x) own.add(rows[row]);
  own = team_counts(own, block_team(), shared);
  if (threadIdx.x == 0) batch[0] = own;
}

__device__ PolicySums team_sums(PolicySums sums, const Team& team, double* shared) {
#define GRPO_SUM(name) sums.name = team_sum(team, sums.name, shared);
#define GRPO_MINIMUM(name) sums.name = -team_max(team, -sums.name, shared);
#define GRPO_MAXIMUM(name) sums.name = team_max(team, sums.name, shared);
  GRPO_POLICY_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_POLICY_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
#undef GRPO_SUM
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
  return sums;
}

__device__ RowMetrics team_metrics(RowMetrics metrics, const Team& team, double* shared) {
  metrics.low_clipped_rows = team_sum(team, metrics.low_clipped_rows, shared);
  metrics.high_clipped_rows = team_sum(team, metrics.high_clipped_rows, shared);
  metrics.phi_rows = team_sum(team, metrics.phi_rows, shared);
  metrics.low_clipped_min = -team_max(team, -metrics.low_clipped_min, shared);
  metrics.high_clipped_max = team_max(team, metrics.high_clipped_max, shared);
  return metrics;
}

// Converts the sums of a thread to double.
template <typename T>
__device__ PolicySums widen(const StepSums<ScalarTermMath<T>>& step_sums,
                            const StepExtremes<ScalarTermMath<T>>& step_extremes) {
  PolicySums sums;
#define GRPO_SUM(name) sums.name = step_sums.name;
#define GRPO_EXTREME(name) sums.name = step_extremes.name;
  GRPO_POLICY_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_POLICY_EXTREMES(GRPO_EXTREME, GRPO_EXTREME)
#undef GRPO_SUM
#undef GRPO_EXTREME
  return sums;
}

// Each thread takes tokens rank, rank + size, ... below count: few enough for sums in the type of the terms.
template <typename T, WalkKind kKind>
__device__ PolicySums walk_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count,
                                  const Team& team) {
  PolicyWalk<ScalarTermMath<T>, kKind> walk(tokens, plan);
  for (int64_t k = team.rank; k < count; k += team.size) walk.step(k, 1);
  walk.complete_sums();
  PolicySums sums = widen(walk.sums, walk.extremes);
  sums.apply_shares(tokens.shares);
  return sums;
}

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

// Zeroes the gradients of tokens behind the last packed row.
template <typename T>
__device__ void clear_behind_rows(const PolicyArrays<T>& arrays) {
  const PolicyBatch<T>& in = arrays.batch;
  if (in.cu_seqlens == nullptr) return;
  const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  for (int64_t t = in.cu_seqlens[in.rows] + thread; t < in.tokens; t += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    arrays.gradient[t] = 0;
    if (arrays.entropy_gradient != nullptr) arrays.entropy_gradient[t] = 0;
  }
}

template <typename T, WalkKind kKind>
__global__ void GRPO_BOUNDS(kTaskThreads) tokens_kernel(const __grid_constant__ PolicyArrays<T> arrays) {
  clear_behind_rows(arrays);
  const PolicyBatch<T> in = batch_of(arrays);
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
    part.counts = count_tokens(in, first + team.rank, first + count, team.size, first + count);
    part.counts.tokens = team_sum(team, part.counts.tokens, nullptr);
    part.counts.kept_tokens = team_sum(team, part.counts.kept_tokens, nullptr);
    part.counts.terms = part.counts.tokens;
    const Counts row_counts = arrays.row_counts == nullptr ? Counts{} : arrays.row_counts[row];
    const Shares shares = in.shares(arrays.batch_counts == nullptr ? Counts{} : arrays.batch_counts[0], row_counts);
    const PolicyTokens<T> tokens = tokens_of(in, row, first, shares, arrays.gradient);
    part.sums = team_sums(walk_tokens<T, kKind>(tokens, in.plan, count, team), team, nullptr);
    if (arrays.entropy_gradient != nullptr) {
      for (int64_t k = team.rank; k < count; k += team.size) {
        arrays.entropy_gradient[first + k] = in.entropy_gradient(first + k, shares);
      }
    }
  }
  if (team.rank == 0) arrays.parts[task] = part;
}

template <typename T>
__device__ RowStatistics<T> row_statistics(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared) {
  const int64_t first = in.start(row), last = first + in.length(row);
  RowStatistics<T> statistics;
  for (int64_t t = first + team.rank; t < last; t += team.size) statistics.add(in, row, t);
  statistics.log_ratio = team_sum(team, statistics.log_ratio, shared);
  statistics.vespo_log_ratio = team_sum(team, statistics.vespo_log_ratio, shared);
  statistics.gmpo_log_ratio = team_sum(team, statistics.gmpo_log_ratio, shared);
  statistics.advantage = team_sum(team, statistics.advantage, shared);
  statistics.sampling_to_policy = team_sum(team, statistics.sampling_to_policy, shared);
  statistics.old_to_sampling = team_sum(team, statistics.old_to_sampling, shared);
  statistics.log_is_weights = team_sum(team, statistics.log_is_weights, shared);
  return statistics;
}

// Calls visit(token) for the tokens of the segment that ends at `last`, from there back; returns their number where the
// ratio is a mean, else 1.
template <typename T, typename Visit>
__device__ int64_t walk_back(const PolicyBatch<T>& in, int64_t last, int64_t row_start, Visit visit) {
  int64_t size = 0;
  for (int64_t t = last; t >= row_start; --t) {
    if (!in.is_valid(t)) continue;
    if (in.segments[t] != in.segments[last]) break;
    visit(t);
    ++size;
  }
  return in.plan.ratio == Ratio::kSegmentMean ? size : 1;
}

// Writes the joint log ratio and log-prob of every segment at its last token; returns how many of the thread's tokens
// have a segment id that does not ascend from 0 along the row.
template <typename T>
__device__ double gather_segments(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row,
                                  const Team& team) {
  const int64_t first = in.start(row), last = first + in.length(row);
  double misplaced = 0;
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    arrays.terms[t] = false;
    if (!in.is_valid(t)) continue;
    const int64_t next = next_valid(in, t, last);
    const bool descends = next < last && in.segments[next] < in.segments[t];
    if (descends || in.segments[t] >= last - first) misplaced += 1;
    if (!ends_segment(in, t, next, last)) continue;
    arrays.terms[t] = true;
    double log_ratio = 0, score = 0;
    const int64_t divisor = walk_back(in, t, first, [&](int64_t member) {
      log_ratio += in.log_ratio(member);
      score += static_cast<double>(in.logprobs[member]);
    });
    arrays.log_ratios[t] = static_cast<T>(log_ratio / static_cast<double>(divisor));
    arrays.scores[t] = static_cast<T>(score / static_cast<double>(divisor));
  }
  return misplaced;
}

// Adds the gradient of a segment's term, computed at its last token, to all of its tokens.
template <typename T>
__device__ void spread_over_segments(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row,
                                     const Team& team) {
  const int64_t first = in.start(row), last = first + in.length(row);
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    if (!arrays.terms[t]) continue;
    const int64_t divisor = walk_back(in, t, first, [](int64_t) {});
    const T share = arrays.term_gradient[t] / static_cast<T>(divisor);
    walk_back(in, t, first, [&](int64_t member) { arrays.gradient[member] += share; });
  }
}

// GMPO has one term per row, held by the last kept token.
template <typename T>
__device__ void mark_last_kept_token(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row,
                                     const Team& team, double* shared) {
  const int64_t first = in.start(row), last = first + in.length(row);
  double last_kept = -1;
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    if (in.is_kept(t)) last_kept = static_cast<double>(t);
  }
  last_kept = team_max(team, last_kept, shared);
  for (int64_t t = first + team.rank; t < last; t += team.size) arrays.terms[t] = static_cast<double>(t) == last_kept;
}

template <typename T, WalkKind kKind>
__global__ void GRPO_BOUNDS(kThreads) rows_kernel(const __grid_constant__ PolicyArrays<T> arrays) {
  __shared__ double shared[kMaxWarps];
  clear_behind_rows(arrays);
  const PolicyBatch<T> in = batch_of(arrays);
  const Team team = block_team();
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const int64_t first = in.start(row), count = in.length(row);
    PolicyPart part;
    part.counts = count_row(in, row, team, shared);
    const Shares shares = in.shares(arrays.batch_counts == nullptr ? Counts{} : arrays.batch_counts[0], part.counts);
    PolicyTokens<T> tokens = tokens_of(in, row, first, shares, arrays.gradient);
    row_statistics(in, row, team, shared).finish(in, row, part.counts, tokens, part.sums);
    if (in.plan.by_segment() || in.plan.loss == Loss::kGeoMean) tokens.terms = arrays.terms + first;
    if (in.plan.loss == Loss::kGeoMean) mark_last_kept_token(arrays, in, row, team, shared);
    if (in.plan.by_segment()) {
      part.misplaced_segments = team_sum(team, gather_segments(arrays, in, row, team), shared);
      tokens.log_ratios = arrays.log_ratios + first;
      tokens.scores = arrays.scores + first;
      tokens.term_gradient = arrays.term_gradient + first;
    }
    __syncthreads();
    const PolicySums sums = team_sums(walk_tokens<T, kKind>(tokens, in.plan, count, team), team, shared);
    __syncthreads();
    if (in.plan.by_segment()) spread_over_segments(arrays, in, row, team);
    if (in.plan.spreads_over_row()) {
      const double members = in.plan.loss == Loss::kGeoMean ? part.counts.kept_tokens : part.counts.tokens;
      const T share = static_cast<T>(sums.ratio_gradient / (members > 1 ? members : 1));
      for (int64_t k = team.rank; k < count; k += team.size) {
        arrays.gradient[first + k] += row_ratio_gradient(in, row, first + k, share);
      }
    }
    if (arrays.entropy_gradient != nullptr) {
      for (int64_t k = team.rank; k < count; k += team.size) {
        arrays.entropy_gradient[first + k] = in.entropy_gradient(first + k, shares);
      }
    }
    part.sums.merge(sums);
    if (team.rank == 0) arrays.parts[row] = part;
    __syncthreads();
  }
}

template <typename T>
__device__ void write_results(const PolicyArrays<T>& arrays, const PolicyTotal& total) {
  write_metrics(arrays.batch.plan, total.counts, total.sums, total.row_metrics, arrays.metrics);
  arrays.loss[0] = static_cast<T>(arrays.metrics[0]);
  if (arrays.segments_ascend != nullptr) arrays.segments_ascend[0] = total.misplaced_segments == 0;
}

// Reduces tasks to rows, each by a team of `width` lanes, and the rows of a block to a total.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ PolicyArrays<T> arrays, bool has_whole_rows, int width) {
  __shared__ double shared[kMaxWarps];
  const Team narrow{static_cast<int>(threadIdx.x) % width, width, false};
  const int64_t teams = blockDim.x / width;
  PolicyTotal own;
  for (int64_t base = blockIdx.x * teams; base < arrays.batch.rows; base += gridDim.x * teams) {
    const int64_t row = base + threadIdx.x / width;
    int64_t task = row, end = row + 1;
    if (row >= arrays.batch.rows) {
      end = task;
    } else if (!has_whole_rows) {
      task = first_task(arrays, row);
      end = first_task(arrays, row + 1);
    }
    PolicyPart part;
    for (task += narrow.rank; task < end; task += width) {
      part.counts.add(arrays.parts[task].counts);
      part.sums.merge(arrays.parts[task].sums);
      own.misplaced_segments += arrays.parts[task].misplaced_segments;
    }
    part.counts = team_counts(part.counts, narrow, nullptr);
    part.sums = team_sums(part.sums, narrow, nullptr);
    if (row >= arrays.batch.rows || narrow.rank != 0) continue;
    part.counts.rows = 1;
    part.counts.active_rows = part.counts.tokens > 0 ? 1 : 0;
    const PolicyBatch<T>& batch = arrays.batch;
    // a block that processed a whole row has added its weight itself
    if (!has_whole_rows && batch.is_weights_by_row && part.counts.tokens > 0) {
      part.sums.add_is_weight(static_cast<double>(batch.is_weights[row]));
    }
    own.counts.add(part.counts);
    own.sums.merge(part.sums);
    own.row_metrics.add(part.counts, part.sums, arrays.batch.plan);
  }
  const Team team = block_team();
  own.counts = team_counts(own.counts, team, shared);
  own.sums = team_sums(own.sums, team, shared);
  own.row_metrics = team_metrics(own.row_metrics, team, shared);
  own.misplaced_segments = team_sum(team, own.misplaced_segments, shared);
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    write_results(arrays, own);
  } else {
    arrays.blocks[blockIdx.x] = own;
  }
}

template <typename T>
__global__ void finish_kernel(const __grid_constant__ PolicyArrays<T> arrays, int blocks) {
  PolicyTotal total = arrays.blocks[0];
  for (int block = 1; block < blocks; ++block) total.merge(arrays.blocks[block]);
  write_results(arrays, total);
}

unsigned blocks_for(int64_t items, int64_t per_block, int64_t max_blocks) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks < max_blocks ? blocks : max_blocks));
}

}  // namespace

template <typename T>
void launch_policy_loss(const PolicyArrays<T>& arrays, void* stream) {
  const PolicyBatch<T>& batch = arrays.batch;
  const bool has_whole_rows = batch.needs_whole_rows();
  const int warps = kThreads / kWarp;
  if (arrays.row_counts != nullptr) {
    launch(count_kernel<T>, dim3(blocks_for(batch.rows, warps, 4096)), dim3(kThreads), 0, stream, arrays);
    launch(total_kernel, dim3(1), dim3(1024), 0, stream, arrays.row_counts, batch.rows, arrays.batch_counts);
  }
  const WalkKind kind = batch.walk_kind();
  if (has_whole_rows) {
    // enough tokens for every thread
    const int64_t mean = batch.cu_seqlens == nullptr ? batch.width : batch.tokens / (batch.rows + 1) + 1;
    int threads = kWarp;
    while (threads < kThreads && threads * 8 < mean) threads *= 2;
    const auto kernel = kind == WalkKind::kAny ? rows_kernel<T, WalkKind::kAny> : rows_kernel<T, WalkKind::kClip>;
    launch(kernel, dim3(blocks_for(batch.rows, 1, 1 << 20)), dim3(threads), 0, stream, arrays);
  } else {
    auto* kernel = tokens_kernel<T, WalkKind::kAny>;
    if (kind == WalkKind::kClip) kernel = tokens_kernel<T, WalkKind::kClip>;
    if (kind == WalkKind::kPlainClip) kernel = tokens_kernel<T, WalkKind::kPlainClip>;
    const unsigned blocks = blocks_for(arrays.tasks, kTaskThreads / kWarp, INT32_MAX);
    launch(kernel, dim3(blocks), dim3(kTaskThreads), 0, stream, arrays);
  }
  const bool many_tasks = !has_whole_rows && arrays.tasks > 4 * batch.rows;
  const int width = many_tasks ? kWarp : 1;
  const unsigned blocks = blocks_for(batch.rows * width, 4 * kThreads, kTotalBlocks);
  launch(reduce_kernel<T>, dim3(blocks), dim3(kThreads), 0, stream, arrays, has_whole_rows, width);
  if (blocks > 1) launch(finish_kernel<T>, dim3(1), dim3(1), 0, stream, arrays, static_cast<int>(blocks));
}

template void launch_policy_loss<float>(const PolicyArrays<float>&, void*);
template void launch_policy_loss<double>(const PolicyArrays<double>&, void*);

}  // namespace grpo_kernels
