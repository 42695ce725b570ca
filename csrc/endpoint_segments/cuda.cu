#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "endpoint_segments/cuda.h"

// A warp walks each row three times: backwards for the advantages of tokens, forwards to cut it, and backwards for the
// advantages of segments. Launches: without values, the returns of rows and their means over groups; the advantages of
// tokens; their scale; the segments; with a norm, its moments; the results. Sums over rows are added in a fixed order.
namespace grpo_kernels {
namespace {

constexpr int kRowThreads = 128;  // of blocks whose warps are independent
constexpr int kBatchThreads = 512, kResultThreads = 256;
constexpr int64_t kMaxChunks = 64;  // blocks that write the results of one row

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int64_t row_of_warp() {
  return blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp;
}

template <typename T>
__device__ int64_t row_begin(const SegmentArrays<T>& in, int64_t row) {
  return in.bounds == nullptr ? row * in.width : in.bounds[row];
}

template <typename T>
__device__ SegmentRow<T> row_at(const SegmentArrays<T>& in, int64_t row) {
  const int64_t begin = row_begin(in, row);
  return {in.rewards + begin, in.values == nullptr ? nullptr : in.values + begin,
          in.values == nullptr ? in.records[row].baseline : 0, in.mask + begin, row_begin(in, row + 1) - begin};
}

// The map x -> factor * x + shift.
struct AffineMap {
  double factor, shift;
};

// Composes every lane's map with those of the lanes before it.
__device__ __forceinline__ AffineMap scan_maps(AffineMap own) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const AffineMap before{__shfl_up_sync(kAllLanes, own.factor, offset), __shfl_up_sync(kAllLanes, own.shift, offset)};
    if (lane() >= offset) own = {own.factor * before.factor, own.factor * before.shift + own.shift};
  }
  return own;
}

__device__ __forceinline__ double scan_sum(double value) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const double before = __shfl_up_sync(kAllLanes, value, offset);
    if (lane() >= offset) value += before;
  }
  return value;
}

// Calls visit(token, return, value) for the valid tokens, from the last to the first. Each token passes a carry to the
// one before it, (1 - lam) * value + lam * return, which enters that token's return times gamma. Returns the carry of
// the first token.
template <typename T, typename Lam, typename Visit>
__device__ double walk_back(const SegmentRow<T>& row, double gamma, Lam lam_at, Visit visit) {
  double carry = 0;
  // windows start at the row's first token, so that padding behind the row changes no sum
  for (int64_t window = (row.length - 1) / kWarp; window >= 0; --window) {
    const int64_t t = window * kWarp + kWarp - 1 - lane();
    const bool is_valid = t < row.length && row.mask[t];
    const double reward = is_valid ? static_cast<double>(row.rewards[t]) : 0, value = is_valid ? row.value(t) : 0;
    const double lam = is_valid ? lam_at(t) : 0;
    const AffineMap step{lam * gamma, (1 - lam) * value + lam * reward};
    const AffineMap to_carry = scan_maps(is_valid ? step : AffineMap{1, 0});
    const double own_carry = to_carry.factor * carry + to_carry.shift;
    const double previous = __shfl_up_sync(kAllLanes, own_carry, 1);
    if (is_valid) visit(t, reward + gamma * (lane() == 0 ? carry : previous), value);
    carry = __shfl_sync(kAllLanes, own_carry, kWarp - 1);
  }
  return carry;
}

template <typename T>
__global__ void GRPO_BOUNDS(kRowThreads) returns_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = row_of_warp();
  if (row >= in.rows) return;  // all lanes of the warp
  bool has_tokens = false;
  const SegmentRow<T> tokens{in.rewards + row_begin(in, row), nullptr, 0, in.mask + row_begin(in, row),
                             row_begin(in, row + 1) - row_begin(in, row)};
  const double row_return = walk_back(
      tokens, in.settings.gamma, [](int64_t) { return 1.0; }, [&](int64_t, double, double) { has_tokens = true; });
  has_tokens = __ballot_sync(kAllLanes, has_tokens) != 0;
  if (lane() == 0) in.records[row].own_return = has_tokens && isfinite(row_return) ? row_return : NAN;
}

// Calls visit(row) in one of the block's threads for every row of the block's group, or for all rows.
template <typename T, typename Visit>
__device__ void for_each_row(const SegmentArrays<T>& in, bool by_group, Visit visit) {
  const int64_t first = by_group ? in.starts[blockIdx.x] : 0, last = by_group ? in.starts[blockIdx.x + 1] : in.rows;
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) visit(by_group ? in.order[i] : i);
}

template <typename T>
__global__ void GRPO_BOUNDS(kWarp) baselines_kernel(const __grid_constant__ SegmentArrays<T> in) {
  double sum = 0, count = 0;
  for_each_row(in, true, [&](int64_t row) {
    const double value = in.records[row].own_return;
    if (isnan(value)) return;
    sum += value;
    count += 1;
  });
  sum = team_sum(warp_team(), sum, nullptr);
  count = team_sum(warp_team(), count, nullptr);
  for_each_row(in, true, [&](int64_t row) { in.records[row].baseline = count > 0 ? sum / count : 0; });
}

// Writes the advantages of tokens to `credits`.
template <typename T>
__global__ void GRPO_BOUNDS(kRowThreads) tokens_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = row_of_warp();
  if (row >= in.rows) return;
  const int64_t begin = row_begin(in, row);
  const SegmentRow<T> tokens = row_at(in, row);
  double squares = 0, count = 0;
  walk_back(
      tokens, in.settings.gamma, [&](int64_t) { return in.settings.lam; },
      [&](int64_t t, double token_return, double value) {
        const double advantage = token_return - value;
        in.credits[begin + t] = advantage;
        in.returns[begin + t] = static_cast<T>(token_return);
        const bool has_ratio = isfinite(in.logprobs[begin + t]) && isfinite(in.old_logprobs[begin + t]);
        squares += has_ratio ? advantage * advantage : NAN;
        count += 1;
      });
  squares = team_sum(warp_team(), squares, nullptr);
  count = team_sum(warp_team(), count, nullptr);
  if (lane() == 0) in.records[row].sums = {static_cast<int64_t>(count), squares};
}

template <typename T>
__global__ void GRPO_BOUNDS(kBatchThreads) scale_kernel(const __grid_constant__ SegmentArrays<T> in) {
  __shared__ double shared[kMaxWarps];
  double squares = 0, tokens = 0;
  for_each_row(in, false, [&](int64_t row) {
    const TokenSums sums = in.records[row].sums;
    if (!isfinite(sums.squares)) return;
    squares += sums.squares;
    tokens += static_cast<double>(sums.tokens);
  });
  squares = team_sum(block_team(), squares, shared);
  tokens = team_sum(block_team(), tokens, shared);
  if (threadIdx.x == 0) *in.scale = fmax(tokens > 0 ? sqrt(squares / tokens) : 0, in.settings.group_epsilon);
}

// ratio * (1 - probability), a stand-in for the norm of the token's score gradient.
__device__ double token_weight(double logprob, double old_logprob) {
  const double log_ratio = fmin(fmax(logprob - old_logprob, -kMaxLogRatio), kMaxLogRatio);
  return exp(log_ratio) * -expm1(fmin(logprob, 0.0));
}

// Writes the segment ids of a row and returns its number of segments. A warp tests 32 tokens at once as ends of the
// open segment, and tests the rest of them again each time a segment ends.
template <typename T>
__device__ int32_t cut_row(const SegmentArrays<T>& in, int64_t begin, int64_t row_length) {
  const bool is_bounded = in.settings.rule == SegmentRule::kBounded;
  const bool is_coherent = in.settings.proxy == SegmentProxy::kCoherent;
  const double inverse_scale = 1 / *in.scale, tau = *in.threshold, epsilon = in.settings.group_epsilon;
  // of the open segment
  VarianceTerms open{0, 0};
  int64_t length = 0;
  int32_t id = 0;
  for (int64_t window = 0; window < row_length; window += kWarp) {
    const int64_t t = window + lane();
    const bool is_valid = t < row_length && in.mask[begin + t];
    const unsigned valid = __ballot_sync(kAllLanes, is_valid);
    double advantage = 0;
    VarianceTerms own{0, 0};
    if (is_valid) {
      advantage = in.credits[begin + t] * inverse_scale;
      const double logprob = static_cast<double>(in.logprobs[begin + t]);
      const double old_logprob = static_cast<double>(in.old_logprobs[begin + t]);
      own = variance_terms(is_coherent, advantage, token_weight(logprob, old_logprob));
    }
    int32_t own_id = -1;
    for (int first = 0; first < kWarp;) {
      if (length == 0) {
        const unsigned left = valid & kAllLanes << first;
        if (left == 0) break;
        first = __ffs(static_cast<int>(left)) - 1;
      }
      const bool is_open = lane() >= first;  // not yet part of a closed segment
      const VarianceTerms sums{open.p + scan_sum(is_open ? own.p : 0), open.q + scan_sum(is_open ? own.q : 0)};
      const SegmentVariances variances = segment_variances(is_coherent, sums, advantage);
      const int64_t n = length + lane() - first + 1;
      const bool ends_before = n > 1 && (!is_valid || (is_bounded && variances.opens_next(tau, epsilon)));
      const bool is_reached = !is_bounded && n >= 2 && variances.is_reached(n, tau, epsilon);
      const bool ends_with = is_valid && (is_reached || n == in.settings.max_size);
      const unsigned ends = __ballot_sync(kAllLanes, is_open && (ends_before || ends_with));
      const int end = ends == 0 ? kWarp : __ffs(static_cast<int>(ends)) - 1;
      const unsigned all_ends_before = __ballot_sync(kAllLanes, ends_before);
      const int next = end + (ends != 0 && (all_ends_before >> end & 1) == 0 ? 1 : 0);
      if (is_open && lane() < next) own_id = id;
      open = {__shfl_sync(kAllLanes, sums.p, kWarp - 1), __shfl_sync(kAllLanes, sums.q, kWarp - 1)};
      length += kWarp - first;
      if (ends != 0) {
        ++id;
        open = {0, 0};
        length = 0;
      }
      first = next;
    }
    if (t < row_length) in.segment_ids[begin + t] = own_id;
  }
  return id + (length > 0 ? 1 : 0);
}

// Lane 0 gets the moments of all lanes, merged in their order.
__device__ EndpointMoments merge_lanes(EndpointMoments own) {
#pragma unroll 1
  for (int offset = 1; offset < kWarp; offset *= 2) {
    EndpointMoments other;
    other.count = __shfl_down_sync(kAllLanes, own.count, offset);
    other.mean = __shfl_down_sync(kAllLanes, own.mean, offset);
    other.squares = __shfl_down_sync(kAllLanes, own.squares, offset);
    other.low = __shfl_down_sync(kAllLanes, own.low, offset);
    other.high = __shfl_down_sync(kAllLanes, own.high, offset);
    if (lane() % (2 * offset) == 0) own.merge(other);
  }
  return own;
}

// Writes the advantages of the row's segments to `credits` from the row's first token on, over those of its tokens.
template <typename T>
__device__ EndpointMoments credit_row(const SegmentArrays<T>& in, int64_t begin, const SegmentRow<T>& row) {
  const int32_t* const ids = in.segment_ids + begin;
  EndpointMoments moments;
  walk_back(
      row, in.settings.gamma,
      // inside a segment lam is 1, which sums its rewards; values enter where a segment ends
      [&](int64_t t) { return t > 0 && ids[t - 1] == ids[t] ? 1 : in.settings.lam; },
      [&](int64_t t, double segment_return, double value) {
        if (t > 0 && ids[t - 1] == ids[t]) return;
        in.credits[begin + ids[t]] = segment_return - value;
        moments.add(segment_return - value);
      });
  return merge_lanes(moments);
}

template <typename T>
__global__ void GRPO_BOUNDS(kRowThreads) segments_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = row_of_warp();
  if (row >= in.rows) return;
  const SegmentRow<T> tokens = row_at(in, row);
  const int32_t num_segments = cut_row(in, row_begin(in, row), tokens.length);
  __syncwarp();  // all ids are written and all advantages of tokens are read
  const EndpointMoments moments = credit_row(in, row_begin(in, row), tokens);
  if (lane() != 0) return;
  in.num_segments[row] = num_segments;
  in.records[row].own = isfinite(in.records[row].sums.squares) ? moments : EndpointMoments{};
}

template <typename T>
__global__ void GRPO_BOUNDS(kBatchThreads) moments_kernel(const __grid_constant__ SegmentArrays<T> in) {
  // as doubles, because a shared variable cannot have a constructor
  __shared__ double shared[kMaxWarps * sizeof(EndpointMoments) / sizeof(double)];
  EndpointMoments* const warp_moments = reinterpret_cast<EndpointMoments*>(shared);
  const bool by_group = in.settings.norm == SegmentNorm::kPrompt;
  EndpointMoments merged;
  for_each_row(in, by_group, [&](int64_t row) { merged.merge(in.records[row].own); });
  merged = merge_lanes(merged);
  if (lane() == 0) warp_moments[threadIdx.x / kWarp] = merged;
  __syncthreads();
  merged = warp_moments[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) merged.merge(warp_moments[warp]);
  for_each_row(in, by_group, [&](int64_t row) { in.records[row].merged = merged; });
}

// The blocks of the last row also write the tokens behind it.
template <typename T>
__global__ void GRPO_BOUNDS(kResultThreads) results_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = blockIdx.x, begin = row_begin(in, row), end = row_begin(in, row + 1);
  const int64_t last = row == in.rows - 1 ? in.total : end;
  const SegmentRecord& record = in.records[row];
  const bool is_finite = isfinite(record.sums.squares);
  const int64_t step = gridDim.y * static_cast<int64_t>(blockDim.x);
  for (int64_t t = begin + blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x; t < last; t += step) {
    const bool is_inside = t < end, is_valid = is_inside && in.mask[t];
    const int32_t id = is_valid ? in.segment_ids[t] : -1;
    const bool is_end = is_valid && (t + 1 == end || in.segment_ids[t + 1] != id);
    double credit = 0;
    if (is_finite && (is_end || (is_valid && in.settings.credit == SegmentCredit::kBroadcast))) {
      credit = in.credits[begin + id];
      if (in.settings.norm != SegmentNorm::kNone) credit = record.merged.normalized(credit, in.settings.group_epsilon);
    }
    in.advantages[t] = static_cast<T>(is_valid && !is_finite ? NAN : credit);
    in.endpoint_mask[t] = is_end;
    if (!is_valid) in.returns[t] = 0;
    if (is_valid && !is_finite) in.returns[t] = static_cast<T>(NAN);
    if (!is_inside) in.segment_ids[t] = -1;
  }
}

}  // namespace

template <typename T>
void launch_endpoint_segments(const SegmentArrays<T>& arrays, void* stream) {
  const unsigned rows = static_cast<unsigned>(arrays.rows);
  const dim3 warps((rows + kRowThreads / kWarp - 1) / (kRowThreads / kWarp)), row_block(kRowThreads);
  if (arrays.needs_baselines) {
    launch(returns_kernel<T>, warps, row_block, 0, stream, arrays);
    launch(baselines_kernel<T>, dim3(rows), dim3(kWarp), 0, stream, arrays);
  }
  launch(tokens_kernel<T>, warps, row_block, 0, stream, arrays);
  launch(scale_kernel<T>, dim3(1), dim3(kBatchThreads), 0, stream, arrays);
  launch(segments_kernel<T>, warps, row_block, 0, stream, arrays);
  if (arrays.settings.norm == SegmentNorm::kBatch) {
    launch(moments_kernel<T>, dim3(1), dim3(kBatchThreads), 0, stream, arrays);
  } else if (arrays.settings.norm == SegmentNorm::kPrompt) {
    launch(moments_kernel<T>, dim3(rows), dim3(kWarp), 0, stream, arrays);
  }
  const int64_t wanted = arrays.total / arrays.rows / kResultThreads + 1;
  const unsigned chunks = static_cast<unsigned>(wanted < kMaxChunks ? wanted : kMaxChunks);
  launch(results_kernel<T>, dim3(rows, chunks), dim3(kResultThreads), 0, stream, arrays);
}

template void launch_endpoint_segments<float>(const SegmentArrays<float>&, void*);
template void launch_endpoint_segments<double>(const SegmentArrays<double>&, void*);

}  // namespace grpo_kernels
