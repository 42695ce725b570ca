#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/pieces.cuh"
#include "common/cuda/team.cuh"
#include "policy_loss/cuda.h"

// Three launches: count tokens and rows, where the aggregation needs that; write the gradient and a record of sums for
// each task, which is 1,024 tokens of a row for a warp or, where terms depend on their row, a row for a block; reduce
// the records to the metrics. Sums are added in a fixed order, so that results repeat bit by bit.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kReduceThreads = 512, kPartsPerBlock = 64;

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

// Any byte other than 0 is true.
__device__ __forceinline__ int count_true(const Piece<unsigned char>& piece) {
  int count = 0;
#pragma unroll
  for (uint32_t word : piece.words) count += __popc((((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) & 0x80808080);
  return count;
}

// Valid tokens of the thread's part of a row that has a mask alone, 16 at a time with four loads in flight.
__device__ double count_mask(const bool* mask, int64_t count, const Team& team) {
  constexpr int kBatch = 4;
  const Split<unsigned char> split(reinterpret_cast<const unsigned char*>(mask), count);
  const Piece<unsigned char>* const pieces = reinterpret_cast<const Piece<unsigned char>*>(mask + split.head);
  int tokens = 0;
  int64_t p = team.rank;
  for (; p + (kBatch - 1) * team.size < split.pieces; p += kBatch * team.size) {
    Piece<unsigned char> batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) batch[k] = pieces[p + k * team.size];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) tokens += count_true(batch[k]);
  }
  for (; p < split.pieces; p += team.size) tokens += count_true(pieces[p]);
  for (int64_t t = team.rank; t < split.head; t += team.size) tokens += mask[t] ? 1 : 0;
  for (int64_t t = split.tail + team.rank; t < count; t += team.size) tokens += mask[t] ? 1 : 0;
  return tokens;
}

// Counts over a whole row, for every thread of the team.
template <typename T>
__device__ Counts count_row(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared) {
  const int64_t first = in.start(row), count = in.length(row);
  Counts counts;
  if (in.segments != nullptr || in.entropy != nullptr) {
    counts = count_tokens(in, first + team.rank, first + count, team.size, first + count);
    counts.kept_tokens = team_sum(team, counts.kept_tokens, shared);
    counts.terms = team_sum(team, counts.terms, shared);
    counts.tokens = team_sum(team, counts.tokens, shared);
  } else {
    counts.tokens = count;
    if (in.mask != nullptr) counts.tokens = team_sum(team, count_mask(in.mask + first, count, team), shared);
    counts.kept_tokens = counts.tokens;
  }
  if (in.plan.loss == Loss::kGeoMean) {
    counts.terms = counts.kept_tokens > 0 ? 1 : 0;
  } else if (!in.plan.by_segment()) {
    counts.terms = counts.tokens;
  }
  counts.rows = 1;
  counts.active_rows = counts.tokens > 0 ? 1 : 0;
  return counts;
}

__device__ Counts team_counts(Counts counts, const Team& team, double* shared) {
  counts.rows = team_sum(team, counts.rows, shared);
  counts.active_rows = team_sum(team, counts.active_rows, shared);
  counts.tokens = team_sum(team, counts.tokens, shared);
  counts.kept_tokens = team_sum(team, counts.kept_tokens, shared);
  counts.terms = team_sum(team, counts.terms, shared);
  return counts;
}

// Counts of the rows of a block, each counted by a warp or by the whole block.
template <typename T>
__global__ void GRPO_BOUNDS(kThreads) count_kernel(const __grid_constant__ PolicyArrays<T> arrays, bool has_long_rows) {
  __shared__ double shared[kMaxWarps];
  const PolicyBatch<T> in = batch_of(arrays);
  const Team team = has_long_rows ? block_team() : warp_team();
  const int64_t teams = blockDim.x / team.size;
  Counts own;
  for (int64_t base = blockIdx.x * teams; base < in.rows; base += gridDim.x * teams) {
    // a team without a row counts the last one, as all threads must take part, and stores nothing
    const int64_t row = base + threadIdx.x / team.size;
    const bool has_row = row < in.rows;
    const Counts counts = count_row(in, has_row ? row : in.rows - 1, team, shared);
    if (!has_row || team.rank != 0) continue;
    arrays.row_counts[row] = counts;
    own.add(counts);
  }
  own = team_counts(own, block_team(), shared);
  if (threadIdx.x == 0) arrays.block_counts[blockIdx.x] = own;
}

// The counts of the batch, for every thread of the block.
template <typename T>
__device__ Counts batch_counts(const PolicyArrays<T>& arrays, double* shared) {
  Counts own;
  if (arrays.block_counts == nullptr) return own;
  for (int block = threadIdx.x; block < arrays.count_blocks; block += blockDim.x) own.add(arrays.block_counts[block]);
  return team_counts(own, block_team(), shared);
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

__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Four neighbouring tokens of a lane.
struct TokenQuad {
  float logprobs[4], old_logprobs[4], ref_logprobs[4], advantages[4], gradient[4];
  bool is_valid[4];

  // Calls copy(array in memory, array here) for the values that the loss reads.
  template <typename Copy>
  __device__ __forceinline__ void for_each_array(const PolicyTokens<float>& tokens, const Copy& copy) {
    copy(tokens.logprobs, logprobs);
    copy(tokens.old_logprobs, old_logprobs);
    if (tokens.ref_logprobs != nullptr) copy(tokens.ref_logprobs, ref_logprobs);
    if (tokens.advantages != nullptr) copy(tokens.advantages, advantages);
  }

  // All four tokens are aligned, belong to the task and are valid.
  __device__ __forceinline__ void load_whole(const PolicyTokens<float>& tokens, int k) {
    for_each_array(tokens, [&](const float* from, float (&to)[4]) {
      const float4 values = *reinterpret_cast<const float4*>(from + k);
      to[0] = values.x, to[1] = values.y, to[2] = values.z, to[3] = values.w;
    });
  }
  __device__ __forceinline__ void store_whole(float* to, int k) const {
    // a plain store would be merged with those of store_valid, into four narrow ones
    __stcg(reinterpret_cast<float4*>(to + k), make_float4(gradient[0], gradient[1], gradient[2], gradient[3]));
  }

  // Some may be none of these; is_valid tells which to read.
  __device__ __forceinline__ void load_valid(const PolicyTokens<float>& tokens, int k) {
    for_each_array(tokens, [&](const float* from, float (&to)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[j] = is_valid[j] ? from[k + j] : 0;
    });
  }
  __device__ __forceinline__ void store_valid(float* to, int k, int count) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (k + j >= 0 && k + j < count) to[k + j] = gradient[j];
    }
  }

  // Returns the number of valid tokens.
  __device__ __forceinline__ int load_mask(const bool* mask, int k, int count, bool is_whole) {
    if (mask != nullptr && is_whole) {
      const uint32_t flags = *reinterpret_cast<const uint32_t*>(mask + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) is_valid[j] = (flags >> (8 * j) & 0xff) != 0;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) is_valid[j] = k + j >= 0 && k + j < count && (mask == nullptr || mask[k + j]);
    }
    return is_valid[0] + is_valid[1] + is_valid[2] + is_valid[3];
  }
};

// As walk_tokens and team_sums, for the common case and a warp, with the number of valid tokens. Sums of lanes are
// added in float32: a task has few enough tokens. The sums that are left out here are 0.
template <WalkKind kKind>
__device__ PolicySums walk_quads(const PolicyTokens<float>& tokens, const PolicyArrays<float>& arrays, int count,
                                 double& valid_tokens) {
  TokenQuad quad;
  PolicyTokens<float> own = tokens;
  own.logprobs = quad.logprobs;
  own.old_logprobs = quad.old_logprobs;
  own.ref_logprobs = quad.ref_logprobs;
  own.advantages = quad.advantages;
  own.mask = quad.is_valid;
  own.gradient = quad.gradient;
  PolicyWalk<ScalarTermMath<float>, kKind> walk(own, arrays.batch.plan, arrays.coefficients);
#pragma unroll
  for (float& advantage : quad.advantages) advantage = tokens.row_advantage;
  const bool is_aligned = arrays.is_aligned;
  const int before = is_aligned ? misalignment(tokens.logprobs) : 0;
  int valid = 0;
  for (int k = 4 * static_cast<int>(threadIdx.x % kWarp) - before; k < count; k += 4 * kWarp) {
    const bool is_whole = is_aligned && k >= 0 && k + 4 <= count;
    const int valid_of_quad = quad.load_mask(tokens.mask, k, count, is_whole);
    valid += valid_of_quad;
    if (is_whole && valid_of_quad == 4) {
      quad.load_whole(tokens, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) walk.template step<true>(j, 1);
      quad.store_whole(tokens.gradient, k);
    } else if (is_whole && valid_of_quad == 0) {
      *reinterpret_cast<float4*>(tokens.gradient + k) = make_float4(0, 0, 0, 0);
    } else {
      quad.load_valid(tokens, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) walk.step(j, 1);
      quad.store_valid(tokens.gradient, k, count);
    }
  }
  valid_tokens = __reduce_add_sync(kAllLanes, valid);
  PolicySums sums;
  sums.policy_loss = warp_sum(walk.sums.policy_loss);
  sums.kl_loss = sums.kl_sum = warp_sum(walk.sums.kl_sum);
  sums.log_ratio_sum = warp_sum(walk.sums.log_ratio_sum);
  sums.ratio_sum = warp_sum(walk.sums.ratio_sum);
  sums.ratio_spread_sum = warp_sum(walk.sums.ratio_spread_sum);
  sums.low_clipped = warp_sum(walk.sums.low_clipped);
  sums.high_clipped = warp_sum(walk.sums.high_clipped);
  sums.dual_clipped = warp_sum(walk.sums.dual_clipped);
  sums.clipped = sums.low_clipped + sums.high_clipped;
  float lowest = walk.extremes.ratio_min, highest = walk.extremes.ratio_max;
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    lowest = fminf(lowest, __shfl_xor_sync(kAllLanes, lowest, offset));
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, offset));
  }
  sums.ratio_min = lowest;
  sums.ratio_max = highest;
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

template <WalkKind kKind>
constexpr bool kIsBare = kKind == WalkKind::kBareClip || kKind == WalkKind::kBareClipK3;

template <typename T, WalkKind kKind>
__global__ void __launch_bounds__(kThreads, kIsBare<kKind> ? 3 : 1)
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
  if (blockIdx.x == 0 && threadIdx.x == 0) arrays.done->blocks = 0;
  const PolicyBatch<T> in = batch_of(arrays);
  const Counts batch = batch_counts(arrays, shared);
  const Team team = block_team();
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const int64_t first = in.start(row), count = in.length(row);
    PolicyPart part;
    part.counts = count_row(in, row, team, shared);
    const Shares shares = in.shares(batch, part.counts);
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
  write_metrics(arrays.batch.plan, total.part.counts, total.part.sums, total.rows, arrays.metrics);
  arrays.loss[0] = static_cast<T>(arrays.metrics[0]);
  if (arrays.segments_ascend != nullptr) arrays.segments_ascend[0] = total.part.misplaced_segments == 0;
}

// Records are reduced field by field, with a thread for each field of a record, so that reads are contiguous.
constexpr int kFieldThreads = 64, kGroups = kReduceThreads / kFieldThreads, kReduceWarps = kReduceThreads / kWarp;
constexpr int kPartFields = sizeof(PolicyPart) / sizeof(double), kTotalFields = sizeof(PolicyTotal) / sizeof(double);
static_assert(kTotalFields <= kFieldThreads && offsetof(PolicyTotal, part) == 0);

// How a field of PolicyTotal is reduced.
struct FieldReduction {
  bool is_minimum, is_maximum;

  __device__ explicit FieldReduction(int field) {
    const auto is = [&](size_t offset) { return field == static_cast<int>(offset / sizeof(double)); };
    is_minimum = is(offsetof(PolicyTotal, rows.low_clipped_min));
    is_maximum = is(offsetof(PolicyTotal, rows.high_clipped_max));
#define GRPO_MINIMUM(name) is_minimum = is_minimum || is(offsetof(PolicyTotal, part.sums.name));
#define GRPO_MAXIMUM(name) is_maximum = is_maximum || is(offsetof(PolicyTotal, part.sums.name));
    GRPO_POLICY_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM
  }

  __device__ double identity() const { return is_minimum ? INFINITY : (is_maximum ? -INFINITY : 0); }
  __device__ double operator()(double a, double b) const {
    if (is_minimum) return b < a ? b : a;
    if (is_maximum) return b > a ? b : a;
    return a + b;
  }
};

// Reduces records first to last - 1 of `fields` numbers; the first threads of the block get their field.
__device__ double reduce_records(const double* records, int fields, int64_t first, int64_t last,
                                 const FieldReduction& reduction, double (*groups)[kFieldThreads]) {
  constexpr int kBatch = 8;
  const int group = threadIdx.x / kFieldThreads, field = threadIdx.x % kFieldThreads;
  double value = reduction.identity();
  for (int64_t record = first + group; field < fields && record < last; record += kBatch * kGroups) {
    double batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t own = record + k * kGroups;
      // volatile, because other blocks of the same launch may have written it
      batch[k] = own < last ? static_cast<const volatile double*>(records)[own * fields + field] : reduction.identity();
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) value = reduction(value, batch[k]);
  }
  groups[group][field] = value;
  __syncthreads();
  for (int other = 0; other < kGroups; ++other) {
    if (other != group) value = reduction(value, groups[other][field]);
  }
  __syncthreads();
  return value;
}

__device__ RowMetrics warp_metrics(RowMetrics metrics) {
  const Team warp = warp_team();
  metrics.low_clipped_rows = team_sum(warp, metrics.low_clipped_rows, nullptr);
  metrics.high_clipped_rows = team_sum(warp, metrics.high_clipped_rows, nullptr);
  metrics.phi_rows = team_sum(warp, metrics.phi_rows, nullptr);
  metrics.low_clipped_min = -team_max(warp, -metrics.low_clipped_min, nullptr);
  metrics.high_clipped_max = team_max(warp, metrics.high_clipped_max, nullptr);
  return metrics;
}

// What the parts of a row give only together, over rows first to last - 1, for lane 0 of every warp. A row is reduced
// by `width` lanes.
template <typename T>
__device__ PolicyTotal total_of_rows(const PolicyArrays<T>& arrays, bool has_whole_rows, int width, int64_t first,
                                     int64_t last) {
  const PolicyBatch<T>& batch = arrays.batch;
  const Team lanes{static_cast<int>(threadIdx.x) % width, width, false};
  const int64_t teams = kReduceThreads / width;
  PolicyTotal total;
  for (int64_t base = first; base < last; base += teams) {
    const int64_t row = base + threadIdx.x / width;
    int64_t task = row, end = row < last ? row + 1 : row;
    if (row < last && !has_whole_rows) task = first_task(arrays, row), end = first_task(arrays, row + 1);
    PolicyPart own;
    for (task += lanes.rank; task < end; task += width) {
      const PolicyPart& part = arrays.parts[task];
      own.counts.tokens += part.counts.tokens;
      own.counts.terms += part.counts.terms;
      own.sums.low_clipped += part.sums.low_clipped;
      own.sums.high_clipped += part.sums.high_clipped;
      own.sums.phi_sum += part.sums.phi_sum;
    }
    own.counts.tokens = team_sum(lanes, own.counts.tokens, nullptr);
    own.counts.terms = team_sum(lanes, own.counts.terms, nullptr);
    own.sums.low_clipped = team_sum(lanes, own.sums.low_clipped, nullptr);
    own.sums.high_clipped = team_sum(lanes, own.sums.high_clipped, nullptr);
    own.sums.phi_sum = team_sum(lanes, own.sums.phi_sum, nullptr);
    if (row >= last || lanes.rank != 0) continue;
    total.rows.add(own.counts, own.sums, batch.plan);
    if (has_whole_rows) continue;  // the rest is in the part of the row
    total.part.counts.rows += 1;
    total.part.counts.active_rows += own.counts.tokens > 0 ? 1 : 0;
    if (batch.is_weights_by_row && own.counts.tokens > 0) {
      total.part.sums.add_is_weight(static_cast<double>(batch.is_weights[row]));
    }
  }
  const Team warp = warp_team();
  total.part.counts.rows = team_sum(warp, total.part.counts.rows, nullptr);
  total.part.counts.active_rows = team_sum(warp, total.part.counts.active_rows, nullptr);
  total.rows = warp_metrics(total.rows);
  if (batch.is_weights_by_row && !has_whole_rows) {
    total.part.sums.is_sum = team_sum(warp, total.part.sums.is_sum, nullptr);
    total.part.sums.is_square_sum = team_sum(warp, total.part.sums.is_square_sum, nullptr);
    total.part.sums.is_count = team_sum(warp, total.part.sums.is_count, nullptr);
    total.part.sums.is_min = -team_max(warp, -total.part.sums.is_min, nullptr);
    total.part.sums.is_max = team_max(warp, total.part.sums.is_max, nullptr);
  }
  return total;
}

// Every block reduces its share of the tasks and rows; the last one to finish reduces the blocks.
template <typename T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const __grid_constant__ PolicyArrays<T> arrays, bool has_whole_rows, int width) {
  __shared__ double groups[kGroups][kFieldThreads];
  __shared__ __align__(16) unsigned char shared_rows[kReduceWarps * sizeof(PolicyTotal)];
  __shared__ bool is_last;
  PolicyTotal* const rows = reinterpret_cast<PolicyTotal*>(shared_rows);
  const int field = threadIdx.x % kFieldThreads;
  const FieldReduction reduction(field);
  const auto share = [&](int64_t count, int64_t index) { return count * index / gridDim.x; };
  const int64_t block = blockIdx.x, parts = has_whole_rows ? arrays.batch.rows : arrays.tasks;
  const PolicyTotal of_rows = total_of_rows(arrays, has_whole_rows, width, share(arrays.batch.rows, block),
                                            share(arrays.batch.rows, block + 1));
  if (threadIdx.x % kWarp == 0) rows[threadIdx.x / kWarp] = of_rows;
  double value = reduce_records(reinterpret_cast<const double*>(arrays.parts), kPartFields, share(parts, block),
                                share(parts, block + 1), reduction, groups);
  if (threadIdx.x < kTotalFields) {
    for (int warp = 0; warp < kReduceWarps; ++warp) {
      value = reduction(value, reinterpret_cast<const double*>(rows + warp)[field]);
    }
  }
  if (gridDim.x > 1) {
    if (threadIdx.x < kTotalFields) reinterpret_cast<double*>(arrays.blocks + block)[field] = value;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&arrays.done->blocks, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    value =
        reduce_records(reinterpret_cast<const double*>(arrays.blocks), kTotalFields, 0, gridDim.x, reduction, groups);
  }
  __syncthreads();
  if (threadIdx.x < kTotalFields) reinterpret_cast<double*>(rows)[field] = value;
  __syncthreads();
  if (threadIdx.x == 0) write_results(arrays, rows[0]);
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
