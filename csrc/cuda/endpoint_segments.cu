#include <math.h>
#include <stdint.h>

#include "endpoint_segments.h"
#include "launch.h"
#include "team.cuh"

// A warp walks each row: from its end for what tokens are worth, then from its start to cut it and from its end again
// for what segments are worth. Five launches: advantages of tokens, their scale, the segments, the moments that
// normalise these (not without a norm), the results; without values two go before them, returns of rows and their means
// over groups. Whatever rows share is added up in a fixed order.
namespace grpo_kernels {
namespace {

constexpr int kRowThreads = 128;  // of blocks whose warps have nothing to do with each other
constexpr int kBatchThreads = 512, kResultThreads = 256;
constexpr int64_t kMostChunks = 64;  // blocks that write the results of one row
// One block on a processor is enough to promise: with more, registers would be spilled to make room for them.
#define GRPO_BOUNDS(threads) __launch_bounds__(threads, 1)

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ Team warp_team() { return {lane(), kWarp, false}; }
__device__ __forceinline__ Team block_team() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), true};
}
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

// x -> factor * x + shift
struct Map {
  double factor, shift;
};

// Every lane's map after those of the lanes before it, as one.
__device__ __forceinline__ Map scan_maps(Map own) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Map before{__shfl_up_sync(kAllLanes, own.factor, offset), __shfl_up_sync(kAllLanes, own.shift, offset)};
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

// visit(token, its return, its value) for the tokens that count, from the last. Each hands to the one before it, which
// takes it times gamma into its own return, its value and its return blended by lam; returns what the first hands on.
template <typename T, typename Lam, typename Visit>
__device__ double walk_back(const SegmentRow<T>& row, double gamma, Lam lam_at, Visit visit) {
  double carry = 0;
  // windows count from the row's first token, so that padding behind it changes no sum
  for (int64_t window = (row.length - 1) / kWarp; window >= 0; --window) {
    const int64_t t = window * kWarp + kWarp - 1 - lane();
    const bool counts = t < row.length && row.mask[t];
    const double reward = counts ? static_cast<double>(row.rewards[t]) : 0, value = counts ? row.value(t) : 0;
    const double lam = counts ? lam_at(t) : 0;
    const Map to_carry = scan_maps(counts ? Map{lam * gamma, (1 - lam) * value + lam * reward} : Map{1, 0});
    const double handed_on = to_carry.factor * carry + to_carry.shift;
    const double before = __shfl_up_sync(kAllLanes, handed_on, 1);
    if (counts) visit(t, reward + gamma * (lane() == 0 ? carry : before), value);
    carry = __shfl_sync(kAllLanes, handed_on, kWarp - 1);
  }
  return carry;
}

template <typename T>
__global__ void GRPO_BOUNDS(kRowThreads) returns_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = row_of_warp();
  if (row >= in.rows) return;  // a whole warp
  bool has_tokens = false;
  const SegmentRow<T> tokens{in.rewards + row_begin(in, row), nullptr, 0, in.mask + row_begin(in, row),
                             row_begin(in, row + 1) - row_begin(in, row)};
  const double found = walk_back(
      tokens, in.settings.gamma, [](int64_t) { return 1.0; }, [&](int64_t, double, double) { has_tokens = true; });
  has_tokens = __ballot_sync(kAllLanes, has_tokens) != 0;
  if (lane() == 0) in.records[row].own_return = has_tokens && isfinite(found) ? found : NAN;
}

// Visits the block's group: f(row) by one of the threads for each of its rows. Without groups all rows are one.
template <typename T, typename F>
__device__ void for_each_row(const SegmentArrays<T>& in, bool by_group, F f) {
  const int64_t first = by_group ? in.starts[blockIdx.x] : 0, last = by_group ? in.starts[blockIdx.x + 1] : in.rows;
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) f(by_group ? in.order[i] : i);
}

template <typename T>
__global__ void GRPO_BOUNDS(kWarp) baselines_kernel(const __grid_constant__ SegmentArrays<T> in) {
  double sum = 0, known = 0;
  for_each_row(in, true, [&](int64_t row) {
    const double value = in.records[row].own_return;
    if (isnan(value)) return;
    sum += value;
    known += 1;
  });
  sum = team_sum(warp_team(), sum, nullptr);
  known = team_sum(warp_team(), known, nullptr);
  for_each_row(in, true, [&](int64_t row) { in.records[row].baseline = known > 0 ? sum / known : 0; });
}

// Advantages of tokens, where those of segments will be.
template <typename T>
__global__ void GRPO_BOUNDS(kRowThreads) tokens_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = row_of_warp();
  if (row >= in.rows) return;
  const int64_t begin = row_begin(in, row);
  const SegmentRow<T> tokens = row_at(in, row);
  double squares = 0, number = 0;
  walk_back(
      tokens, in.settings.gamma, [&](int64_t) { return in.settings.lam; },
      [&](int64_t t, double following, double value) {
        const double advantage = following - value;
        in.credits[begin + t] = advantage;
        in.returns[begin + t] = static_cast<T>(following);
        const bool is_whole = isfinite(in.logprobs[begin + t]) && isfinite(in.old[begin + t]);
        squares += is_whole ? advantage * advantage : NAN;
        number += 1;
      });
  squares = team_sum(warp_team(), squares, nullptr);
  number = team_sum(warp_team(), number, nullptr);
  if (lane() == 0) in.records[row].sums = {static_cast<int64_t>(number), squares};
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
  if (threadIdx.x == 0) *in.scale = fmax(tokens > 0 ? sqrt(squares / tokens) : 0, in.settings.epsilon);
}

// A stand-in for the length of the token's score gradient: the ratio times how far from certain the token is.
__device__ double token_weight(double logprob, double old) {
  const double log_ratio = fmin(fmax(logprob - old, -kMostLogRatio), kMostLogRatio);
  return exp(log_ratio) * -expm1(fmin(logprob, 0.0));
}

// Numbers the row's segments; how many there are. Tokens are looked at a warp's at a time, and again from the next one
// on each time a segment ends among them.
template <typename T>
__device__ int32_t cut_row(const SegmentArrays<T>& in, int64_t begin, int64_t row_length) {
  const bool is_bounded = in.settings.rule == kBounded, is_coherent = in.settings.proxy == kCoherent;
  const double per_scale = 1 / *in.scale, tau = *in.threshold, epsilon = in.settings.epsilon;
  CutTerms open{0, 0};  // P and Q of the open segment, which has
  int64_t length = 0;   // so many tokens
  int32_t number = 0;
  for (int64_t window = 0; window < row_length; window += kWarp) {
    const int64_t t = window + lane();
    const bool counts = t < row_length && in.mask[begin + t];
    const unsigned counting = __ballot_sync(kAllLanes, counts);
    double advantage = 0;
    CutTerms own{0, 0};
    if (counts) {
      advantage = in.credits[begin + t] * per_scale;
      const double now = static_cast<double>(in.logprobs[begin + t]), old = static_cast<double>(in.old[begin + t]);
      own = cut_terms(is_coherent, advantage, token_weight(now, old));
    }
    int32_t id = -1;
    for (int first = 0; first < kWarp;) {
      if (length == 0) {
        const unsigned left = counting & kAllLanes << first;
        if (left == 0) break;
        first = __ffs(static_cast<int>(left)) - 1;
      }
      const bool here = lane() >= first;
      const CutTerms sums{open.moved + scan_sum(here ? own.moved : 0), open.seen + scan_sum(here ? own.seen : 0)};
      const CutVariances variances = cut_variances(is_coherent, sums, advantage);
      const int64_t n = length + lane() - first + 1;
      // at a token the segment ends before it, or with it
      const bool before = n > 1 && (!counts || (is_bounded && variances.opens_next(tau, epsilon)));
      const bool reached = !is_bounded && n >= 2 && variances.reached_by(n, tau, epsilon);
      const bool with_it = counts && (reached || n == in.settings.most);
      const unsigned stops = __ballot_sync(kAllLanes, here && (before || with_it));
      const int stop = stops == 0 ? kWarp : __ffs(static_cast<int>(stops)) - 1;
      const unsigned stops_before = __ballot_sync(kAllLanes, before);
      const int behind = stop + (stops != 0 && (stops_before >> stop & 1) == 0 ? 1 : 0);
      if (here && lane() < behind) id = number;
      open = {__shfl_sync(kAllLanes, sums.moved, kWarp - 1), __shfl_sync(kAllLanes, sums.seen, kWarp - 1)};
      length += kWarp - first;
      if (stops != 0) {
        ++number;
        open = {0, 0};
        length = 0;
      }
      first = behind;
    }
    if (t < row_length) in.ids[begin + t] = id;
  }
  return number + (length > 0 ? 1 : 0);
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

// The advantages of the row's segments in order, from where its tokens begin: those of tokens are not needed any more.
template <typename T>
__device__ EndpointMoments credit_row(const SegmentArrays<T>& in, int64_t begin, const SegmentRow<T>& row) {
  const int32_t* const ids = in.ids + begin;
  EndpointMoments moments;
  walk_back(
      row, in.settings.gamma,
      // inside a segment only rewards are added up; values come in where one ends
      [&](int64_t t) { return t > 0 && ids[t - 1] == ids[t] ? 1 : in.settings.lam; },
      [&](int64_t t, double following, double value) {
        if (t > 0 && ids[t - 1] == ids[t]) return;
        in.credits[begin + ids[t]] = following - value;
        moments.add(following - value);
      });
  return merge_lanes(moments);
}

template <typename T>
__global__ void GRPO_BOUNDS(kRowThreads) segments_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = row_of_warp();
  if (row >= in.rows) return;
  const SegmentRow<T> tokens = row_at(in, row);
  const int32_t number = cut_row(in, row_begin(in, row), tokens.length);
  __syncwarp();  // all ids are written, all advantages of tokens read
  const EndpointMoments moments = credit_row(in, row_begin(in, row), tokens);
  if (lane() != 0) return;
  in.numbers[row] = number;
  in.records[row].own = isfinite(in.records[row].sums.squares) ? moments : EndpointMoments{};
}

template <typename T>
__global__ void GRPO_BOUNDS(kBatchThreads) moments_kernel(const __grid_constant__ SegmentArrays<T> in) {
  __shared__ double room[kMaxWarps * sizeof(EndpointMoments) / sizeof(double)];
  EndpointMoments* const of_warps = reinterpret_cast<EndpointMoments*>(room);
  const bool by_group = in.settings.norm == kPromptNorm;
  EndpointMoments together;
  for_each_row(in, by_group, [&](int64_t row) { together.merge(in.records[row].own); });
  together = merge_lanes(together);
  if (lane() == 0) of_warps[threadIdx.x / kWarp] = together;
  __syncthreads();
  together = of_warps[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) together.merge(of_warps[warp]);
  for_each_row(in, by_group, [&](int64_t row) { in.records[row].shared = together; });
}

// The last row also writes what lies behind it.
template <typename T>
__global__ void GRPO_BOUNDS(kResultThreads) results_kernel(const __grid_constant__ SegmentArrays<T> in) {
  const int64_t row = blockIdx.x, begin = row_begin(in, row), end = row_begin(in, row + 1);
  const int64_t last = row == in.rows - 1 ? in.total : end;
  const SegmentRecord& record = in.records[row];
  const bool is_whole = isfinite(record.sums.squares);
  const int64_t step = gridDim.y * static_cast<int64_t>(blockDim.x);
  for (int64_t t = begin + blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x; t < last; t += step) {
    const bool is_inside = t < end, counts = is_inside && in.mask[t];
    const int32_t id = counts ? in.ids[t] : -1;
    const bool is_end = counts && (t + 1 == end || in.ids[t + 1] != id);
    double credit = 0;
    if (is_whole && (is_end || (counts && in.settings.credit == kBroadcast))) {
      credit = in.credits[begin + id];
      if (in.settings.norm != kNoNorm) credit = record.shared.normalized(credit, in.settings.epsilon);
    }
    in.advantages[t] = static_cast<T>(counts && !is_whole ? NAN : credit);
    in.ends[t] = is_end;
    if (!counts) in.returns[t] = 0;
    if (counts && !is_whole) in.returns[t] = static_cast<T>(NAN);
    if (!is_inside) in.ids[t] = -1;
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
  if (arrays.settings.norm == kBatchNorm) {
    launch(moments_kernel<T>, dim3(1), dim3(kBatchThreads), 0, stream, arrays);
  } else if (arrays.settings.norm == kPromptNorm) {
    launch(moments_kernel<T>, dim3(rows), dim3(kWarp), 0, stream, arrays);
  }
  const int64_t wanted = arrays.total / arrays.rows / kResultThreads + 1;
  const unsigned chunks = static_cast<unsigned>(wanted < kMostChunks ? wanted : kMostChunks);
  launch(results_kernel<T>, dim3(rows, chunks), dim3(kResultThreads), 0, stream, arrays);
}

template void launch_endpoint_segments<float>(const SegmentArrays<float>&, void*);
template void launch_endpoint_segments<double>(const SegmentArrays<double>&, void*);

}  // namespace grpo_kernels
