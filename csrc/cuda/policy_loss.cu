#include <math.h>
#include <stdint.h>

#include "launch.h"
#include "policy_loss.h"
#include "team.cuh"

// What has to be known of the batch first is counted; then one kernel writes the gradient and a record of sums for
// every task, a task being 1,024 tokens of a row for a warp, or where terms depend on their row, a row for a block;
// then the records become the metrics. Everything is added up in a fixed order.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTaskThreads = 128;  // of blocks whose warps have nothing to do with each other
// One block on a processor is enough to promise: with more, registers would be spilled to make room for them.
#define GRPO_BOUNDS(threads) __launch_bounds__(threads, 1)

// The batch, with what only the device knows.
template <typename T>
__device__ PolicyBatch<T> batch_of(const PolicyArrays<T>& arrays) {
  PolicyBatch<T> batch = arrays.batch;
  if (arrays.entropy_floor != nullptr) batch.entropy_floor = arrays.entropy_floor[0];
  if (arrays.normalizers != nullptr) {
    const double* given = arrays.normalizers;
    if (!isnan(given[0])) batch.known.tokens = given[0];
    if (!isnan(given[1])) batch.known.rows = given[1];
    if (!isnan(given[2])) batch.known.segments = given[2];
  }
  return batch;
}

// Whether a token is the last of its segment.
template <typename T>
__device__ bool ends_segment(const PolicyBatch<T>& in, int64_t t, int64_t row_end) {
  for (int64_t next = t + 1; next < row_end; ++next) {
    if (in.valid(next)) return in.segments[next] != in.segments[t];
  }
  return true;
}

// The counts of tokens first, first + stride, ... of a row.
template <typename T>
__device__ Counts count_tokens(const PolicyBatch<T>& in, int64_t first, int64_t last, int64_t stride, int64_t row_end) {
  Counts counts;
  for (int64_t t = first; t < last; t += stride) {
    if (!in.valid(t)) continue;
    counts.tokens += 1;
    counts.kept += in.kept(t) ? 1 : 0;
    if (in.plan.by_segment()) counts.terms += ends_segment(in, t, row_end) ? 1 : 0;
  }
  return counts;
}

// Of a whole row; every thread of the team gets them.
template <typename T>
__device__ Counts count_row(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared) {
  const int64_t first = in.start(row), last = first + in.length(row);
  Counts counts = count_tokens(in, first + team.rank, last, team.size, last);
  counts.tokens = team_sum(team, counts.tokens, shared);
  counts.kept = team_sum(team, counts.kept, shared);
  counts.terms = team_sum(team, counts.terms, shared);
  if (in.plan.loss == Loss::kGeoMean) {
    counts.terms = counts.kept > 0 ? 1 : 0;
  } else if (!in.plan.by_segment()) {
    counts.terms = counts.tokens;
  }
  counts.rows = 1;
  counts.active = counts.tokens > 0 ? 1 : 0;
  return counts;
}

__device__ __forceinline__ Team warp_team() { return {static_cast<int>(threadIdx.x) % kWarp, kWarp, false}; }
__device__ __forceinline__ Team block_team() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), true};
}

template <typename T>
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ PolicyArrays<T> arrays) {
  const PolicyBatch<T> in = batch_of(arrays);
  const int64_t warps = blockDim.x / kWarp;
  for (int64_t base = blockIdx.x * warps; base < in.rows; base += gridDim.x * warps) {
    // all threads stay together: a warp without a row counts the last one and says nothing
    const int64_t row = base + threadIdx.x / kWarp;
    const bool is_row = row < in.rows;
    const Counts counts = count_row(in, is_row ? row : in.rows - 1, warp_team(), nullptr);
    if (is_row && threadIdx.x % kWarp == 0) arrays.row_counts[row] = counts;
  }
}

__device__ Counts team_counts(Counts counts, const Team& team, double* shared) {
  counts.rows = team_sum(team, counts.rows, shared);
  counts.active = team_sum(team, counts.active, shared);
  counts.tokens = team_sum(team, counts.tokens, shared);
  counts.kept = team_sum(team, counts.kept, shared);
  counts.terms = team_sum(team, counts.terms, shared);
  return counts;
}

__global__ void __launch_bounds__(1024) total_kernel(const Counts* rows, int64_t count, Counts* total) {
  __shared__ double shared[kMaxWarps];
  Counts own;
  for (int64_t row = threadIdx.x; row < count; row += blockDim.x) own.add(rows[row]);
  own = team_counts(own, block_team(), shared);
  if (threadIdx.x == 0) total[0] = own;
}

__device__ PolicySums team_sums(PolicySums sums, const Team& team, double* shared) {
  double* const added[] = {&sums.policy,        &sums.kl,       &sums.entropy,      &sums.through,   &sums.low,
                           &sums.high,          &sums.clipped,  &sums.dual,         &sums.log_ratio, &sums.plain_kl,
                           &sums.plain_entropy, &sums.ratio,    &sums.ratio_spread, &sums.phi,       &sums.is,
                           &sums.is_square,     &sums.is_count, &sums.gap,          &sums.gap_count, &sums.off_policy};
#pragma unroll
  for (double* value : added) *value = team_sum(team, *value, shared);
  sums.ratio_min = -team_max(team, -sums.ratio_min, shared);
  sums.ratio_max = team_max(team, sums.ratio_max, shared);
  sums.is_min = -team_max(team, -sums.is_min, shared);
  sums.is_max = team_max(team, sums.is_max, shared);
  sums.gap_max = team_max(team, sums.gap_max, shared);
  return sums;
}

// What a thread has added up, in double.
template <typename T>
__device__ PolicySums widened(const StepSums<ScalarTermMath<T>>& s, const StepExtremes<ScalarTermMath<T>>& e) {
  PolicySums sums;
  sums.policy = s.policy;
  sums.kl = s.kl;
  sums.entropy = s.entropy;
  sums.through = s.through;
  sums.low = s.low;
  sums.high = s.high;
  sums.clipped = s.clipped;
  sums.dual = s.dual;
  sums.log_ratio = s.log_ratio;
  sums.plain_kl = s.plain_kl;
  sums.plain_entropy = s.plain_entropy;
  sums.ratio = s.ratio;
  sums.ratio_spread = s.ratio_spread;
  sums.phi = s.phi;
  sums.is = s.is;
  sums.is_square = s.is_square;
  sums.is_count = s.is_count;
  sums.gap = s.gap;
  sums.gap_count = s.gap_count;
  sums.off_policy = s.off_policy;
  sums.ratio_min = e.ratio_min;
  sums.ratio_max = e.ratio_max;
  sums.is_min = e.is_min;
  sums.is_max = e.is_max;
  sums.gap_max = e.gap_max;
  return sums;
}

// Tokens rank, rank + size, ... of `count`; few enough for a thread that float sums lose nothing that matters.
template <typename T, WalkKind kKind>
__device__ PolicySums walk_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count,
                                  const Team& team) {
  PolicyWalk<ScalarTermMath<T>, kKind> walk(tokens, plan);
  for (int64_t k = team.rank; k < count; k += team.size) walk.step(k, 1);
  walk.settle();
  PolicySums sums = widened(walk.sums, walk.extremes);
  sums.weigh(tokens.shares);
  return sums;
}

// Which row a task is of: where the first tasks of rows pass it.
template <typename T>
__device__ int64_t row_of_task(const PolicyArrays<T>& arrays, int64_t task) {
  if (arrays.batch.cu_seqlens == nullptr) return task / arrays.tasks_per_row;
  int64_t low = 0, high = arrays.batch.rows;  // first_task(low) <= task, and task < first_task(high) or high is rows
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

template <typename T>
__device__ void clear_behind_rows(const PolicyArrays<T>& arrays) {
  const PolicyBatch<T>& in = arrays.batch;
  if (in.cu_seqlens == nullptr) return;
  const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  for (int64_t t = in.cu_seqlens[in.rows] + thread; t < in.tokens; t += gridDim.x * static_cast<int64_t>(blockDim.x)) {
    arrays.gradient[t] = 0;
    if (arrays.by_entropy != nullptr) arrays.by_entropy[t] = 0;
  }
}

template <typename T, WalkKind kKind>
__global__ void GRPO_BOUNDS(kTaskThreads) tokens_kernel(const __grid_constant__ PolicyArrays<T> arrays) {
  clear_behind_rows(arrays);
  const PolicyBatch<T> in = batch_of(arrays);
  const Team team = warp_team();
  const int64_t task = blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (task >= arrays.tasks) return;  // a whole warp
  const int64_t row = row_of_task(arrays, task);
  const int64_t offset = (task - first_task(arrays, row)) * kTokensPerTask;
  const int64_t left = in.length(row) - offset;
  PolicyPart part;
  // packed rows have fewer tasks than there is room for, which is all that is known before they are read
  if (left > 0 || offset == 0) {
    const int64_t first = in.start(row) + offset, count = left < kTokensPerTask ? left : kTokensPerTask;
    part.counts = count_tokens(in, first + team.rank, first + count, team.size, first + count);
    part.counts.tokens = team_sum(team, part.counts.tokens, nullptr);
    part.counts.kept = team_sum(team, part.counts.kept, nullptr);
    part.counts.terms = part.counts.tokens;
    const Counts row_counts = arrays.row_counts == nullptr ? Counts{} : arrays.row_counts[row];
    const Shares shares = in.shares(arrays.totals == nullptr ? Counts{} : arrays.totals[0], row_counts);
    const PolicyTokens<T> tokens = tokens_of(in, row, first, shares, arrays.gradient);
    part.sums = team_sums(walk_tokens<T, kKind>(tokens, in.plan, count, team), team, nullptr);
    if (arrays.by_entropy != nullptr) {
      for (int64_t k = team.rank; k < count; k += team.size) {
        arrays.by_entropy[first + k] = in.entropy_gradient(first + k, shares);
      }
    }
  }
  if (team.rank == 0) arrays.parts[task] = part;
}

template <typename T>
__device__ RowFacts<T> row_facts(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared) {
  const int64_t first = in.start(row), last = first + in.length(row);
  RowFacts<T> facts;
  for (int64_t t = first + team.rank; t < last; t += team.size) facts.add(in, row, t);
  facts.log_ratio = team_sum(team, facts.log_ratio, shared);
  facts.clamped = team_sum(team, facts.clamped, shared);
  facts.geometric = team_sum(team, facts.geometric, shared);
  facts.advantage = team_sum(team, facts.advantage, shared);
  facts.drift = team_sum(team, facts.drift, shared);
  facts.mismatch = team_sum(team, facts.mismatch, shared);
  facts.log_is = team_sum(team, facts.log_is, shared);
  return facts;
}

// visit(token) for the tokens of the segment that ends at `last`, from there back; returns how many there are.
template <typename T, typename Visit>
__device__ int64_t walk_back(const PolicyBatch<T>& in, int64_t last, int64_t row_start, Visit visit) {
  int64_t size = 0;
  for (int64_t t = last; t >= row_start; --t) {
    if (!in.valid(t)) continue;
    if (in.segments[t] != in.segments[last]) break;
    visit(t);
    ++size;
  }
  return in.plan.ratio == Ratio::kSegmentMean ? size : 1;
}

// The joint log ratio and log-prob of every segment, at its last token, by the thread that finds it.
template <typename T>
__device__ void open_segments(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row, const Team& team) {
  const int64_t first = in.start(row), last = first + in.length(row);
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    const bool ends = in.valid(t) && ends_segment(in, t, last);
    arrays.terms[t] = ends;
    if (!ends) continue;
    double ratio = 0, score = 0;
    const int64_t size = walk_back(in, t, first, [&](int64_t member) {
      ratio += in.log_ratio(member);
      score += static_cast<double>(in.logprobs[member]);
    });
    arrays.log_ratios[t] = static_cast<T>(ratio / static_cast<double>(size));
    arrays.scores[t] = static_cast<T>(score / static_cast<double>(size));
  }
}

// What came out at a segment's last token belongs to all of its tokens.
template <typename T>
__device__ void close_segments(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row, const Team& team) {
  const int64_t first = in.start(row), last = first + in.length(row);
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    if (!arrays.terms[t]) continue;
    const int64_t size = walk_back(in, t, first, [](int64_t) {});
    const T each = arrays.term_gradient[t] / static_cast<T>(size);
    walk_back(in, t, first, [&](int64_t member) { arrays.gradient[member] += each; });
  }
}

// GMPO has one term a row, which stands at the last token of those kept.
template <typename T>
__device__ void mark_end(const PolicyArrays<T>& arrays, const PolicyBatch<T>& in, int64_t row, const Team& team,
                         double* shared) {
  const int64_t first = in.start(row), last = first + in.length(row);
  double end = -1;
  for (int64_t t = first + team.rank; t < last; t += team.size) {
    if (in.kept(t)) end = static_cast<double>(t);
  }
  end = team_max(team, end, shared);
  for (int64_t t = first + team.rank; t < last; t += team.size) arrays.terms[t] = static_cast<double>(t) == end;
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
    const Shares shares = in.shares(arrays.totals == nullptr ? Counts{} : arrays.totals[0], part.counts);
    PolicyTokens<T> tokens = tokens_of(in, row, first, shares, arrays.gradient);
    row_facts(in, row, team, shared).tell(in, row, part.counts, tokens, part.sums);
    if (in.plan.by_segment() || in.plan.loss == Loss::kGeoMean) tokens.terms = arrays.terms + first;
    if (in.plan.loss == Loss::kGeoMean) mark_end(arrays, in, row, team, shared);
    if (in.plan.by_segment()) {
      open_segments(arrays, in, row, team);
      tokens.log_ratios = arrays.log_ratios + first;
      tokens.scores = arrays.scores + first;
      tokens.term_gradient = arrays.term_gradient + first;
    }
    __syncthreads();
    const PolicySums sums = team_sums(walk_tokens<T, kKind>(tokens, in.plan, count, team), team, shared);
    __syncthreads();
    if (in.plan.by_segment()) close_segments(arrays, in, row, team);
    if (in.plan.spreads_over_row()) {
      const double members = in.plan.loss == Loss::kGeoMean ? part.counts.kept : part.counts.tokens;
      const T each = static_cast<T>(sums.through / (members > 1 ? members : 1));
      for (int64_t k = team.rank; k < count; k += team.size) {
        arrays.gradient[first + k] += from_row(in, row, first + k, each);
      }
    }
    if (arrays.by_entropy != nullptr) {
      for (int64_t k = team.rank; k < count; k += team.size) {
        arrays.by_entropy[first + k] = in.entropy_gradient(first + k, shares);
      }
    }
    part.sums.merge(sums);
    if (team.rank == 0) arrays.parts[row] = part;
    __syncthreads();
  }
}

template <typename T>
__device__ void write_results(const PolicyArrays<T>& arrays, const PolicyTotal& total) {
  write_metrics(arrays.batch.plan, total.counts, total.sums, total.extremes, arrays.metrics);
  arrays.loss[0] = static_cast<T>(arrays.metrics[0]);
}

// From tasks to rows, a row for a team of `width` lanes, and from rows to the total of the block's share of them.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ PolicyArrays<T> arrays, int by_row, int width) {
  __shared__ double shared[kMaxWarps];
  const Team narrow{static_cast<int>(threadIdx.x) % width, width, false};
  const int64_t teams = blockDim.x / width;
  PolicyTotal own;
  for (int64_t base = blockIdx.x * teams; base < arrays.batch.rows; base += gridDim.x * teams) {
    const int64_t row = base + threadIdx.x / width;
    int64_t task = row, end = row + 1;
    if (row >= arrays.batch.rows) {
      end = task;
    } else if (by_row == 0) {
      task = first_task(arrays, row);
      end = first_task(arrays, row + 1);
    }
    PolicyPart sum;
    for (task += narrow.rank; task < end; task += width) {
      sum.counts.add(arrays.parts[task].counts);
      sum.sums.merge(arrays.parts[task].sums);
    }
    sum.counts = team_counts(sum.counts, narrow, nullptr);
    sum.sums = team_sums(sum.sums, narrow, nullptr);
    if (row >= arrays.batch.rows || narrow.rank != 0) continue;
    sum.counts.rows = 1;
    sum.counts.active = sum.counts.tokens > 0 ? 1 : 0;
    const PolicyBatch<T>& batch = arrays.batch;  // a block with a row to itself has counted its weight
    if (by_row == 0 && batch.is_by_row && sum.counts.tokens > 0) {
      sum.sums.add_is(static_cast<double>(batch.is_weights[row]));
    }
    own.counts.add(sum.counts);
    own.sums.merge(sum.sums);
    own.extremes.add(sum.counts, sum.sums, arrays.batch.plan);
  }
  const Team team = block_team();
  own.counts = team_counts(own.counts, team, shared);
  own.sums = team_sums(own.sums, team, shared);
  own.extremes.low_sum = team_sum(team, own.extremes.low_sum, shared);
  own.extremes.high_sum = team_sum(team, own.extremes.high_sum, shared);
  own.extremes.phi_sum = team_sum(team, own.extremes.phi_sum, shared);
  own.extremes.low_min = -team_max(team, -own.extremes.low_min, shared);
  own.extremes.high_max = team_max(team, own.extremes.high_max, shared);
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

unsigned blocks_for(int64_t items, int64_t per_block, int64_t most) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks < most ? blocks : most));
}

}  // namespace

template <typename T>
void launch_policy_loss(const PolicyArrays<T>& arrays, void* stream) {
  const PolicyBatch<T>& batch = arrays.batch;
  const int warps = kThreads / kWarp;
  if (arrays.row_counts != nullptr) {
    launch(count_kernel<T>, dim3(blocks_for(batch.rows, warps, 4096)), dim3(kThreads), 0, stream, arrays);
    launch(total_kernel, dim3(1), dim3(1024), 0, stream, arrays.row_counts, batch.rows, arrays.totals);
  }
  const WalkKind kind = batch.kind();
  if (batch.by_row()) {
    // a thread has at least a few tokens
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
  const bool many_tasks = !batch.by_row() && arrays.tasks > 4 * batch.rows;
  const int width = many_tasks ? kWarp : 1;
  const unsigned blocks = blocks_for(batch.rows * width, 4 * kThreads, kTotalBlocks);
  launch(reduce_kernel<T>, dim3(blocks), dim3(kThreads), 0, stream, arrays, batch.by_row() ? 1 : 0, width);
  if (blocks > 1) launch(finish_kernel<T>, dim3(1), dim3(1), 0, stream, arrays, static_cast<int>(blocks));
}

template void launch_policy_loss<float>(const PolicyArrays<float>&, void*);
template void launch_policy_loss<double>(const PolicyArrays<double>&, void*);

}  // namespace grpo_kernels
