#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/pieces.cuh"
#include "common/cuda/team.cuh"
#include "common/cuda/to_float.cuh"
#include "token_logprobs/cuda.h"

// One block per row. A warp takes kBatch pieces of 16 bytes per lane at a time, and single logits before the first and
// behind the last piece of the row. Both directions are bound by instructions before they are bound by memory, so a
// logit costs few of them: differences are taken before any scaling, where they are exact for equal logits, and one
// product with `factor` serves both the scaling and the exponential to base 2.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kSmallThreads = 64;
constexpr int64_t kSmallColumns = 1024;
constexpr int64_t kMaxBlocks = 1 << 14;  // further rows take turns
constexpr int kBatch = 4, kBackwardBatch = 2;
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// A logit before its scaling, z / map.outer, and its derivative with respect to the input without constant factors.
struct Unscaled {
  float value, slope;
};

// The first piece of a lane where a warp takes kCount pieces per lane at a time, lane by lane.
template <int kCount>
__device__ __forceinline__ int64_t first_of_lane() {
  return threadIdx.x / kWarp * kCount * kWarp + threadIdx.x % kWarp;
}

struct Math {
  static __device__ __forceinline__ float exp(float x) { return exp2_approx(x); }
};

// tanh and its derivative from one exponential. Near 0, where 1 - decay cancels, tanh is a polynomial.
__device__ __forceinline__ Unscaled tanh_and_slope(float x) {
  const float size = fabsf(x);
  const float decay = exp2_approx(size * static_cast<float>(-2 * kLog2E)), inverse = divide_approx(1, 1 + decay);
  const float square = x * x;
  float series = -0.00661575f;
  series = fmaf(series, square, 0.02131274f);
  series = fmaf(series, square, -0.05391007f);
  series = fmaf(series, square, 0.13333118f);
  series = fmaf(series, square, -0.33333332f);
  const float near = fmaf(x * square, series, x), far = copysignf((1 - decay) * inverse, x);
  return {size < 0.55f ? near : far, 4 * decay * inverse * inverse};
}

// Infinite logits stay infinite: -inf masks, and +inf is an overflow that should show.
template <bool kCapped>
__device__ __forceinline__ Unscaled unscaled(const LogitMap<float>& map, float x) {
  if constexpr (!kCapped) return {x, 1};
  const Unscaled capped = tanh_and_slope(x * map.inner);
  return {fabsf(x) == INFINITY ? x : capped.value, capped.slope};
}

// The map of a row, and the scales of its results.
struct RowMap {
  LogitMap<float> map;
  double outer;
  float factor;  // from differences of unscaled logits to exponents of 2

  template <typename T>
  __device__ RowMap(const LogitArrays<T>& in, int64_t row) {
    const double temperature = in.temperatures == nullptr ? in.scaling.temperature : in.temperatures[row];
    const LogitMap<double> exact = make_logit_map<double>(temperature, in.scaling.softcap, in.scaling.logit_scale);
    map = {static_cast<float>(exact.inner), static_cast<float>(exact.outer), exact.capped};
    outer = exact.outer;
    factor = static_cast<float>(exact.outer * kLog2E);
  }
};

template <bool kCapped, bool kSpread, bool kTies, int kCount>
__device__ __forceinline__ void add_terms(RowSoftmax<float>& sums, const float (&x)[kCount], const RowMap& row) {
  float spread = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float value = unscaled<kCapped>(row.map, x[k]).value, exponent = (value - sums.top) * row.factor;
    const bool is_tie = kTies && value == sums.top;
    const float term = is_tie ? 0 : exp2_approx(exponent);
    if constexpr (kTies) sums.ties += is_tie ? 1 : 0;
    sums.below += term;
    if constexpr (kSpread) spread = fmaf(term, fmaxf(exponent, static_cast<float>(kNoExponent)), spread);
  }
  if constexpr (kSpread) sums.spread -= spread;
}

// Adds the logits of all lanes of a warp, which share their top; `largest` is the largest of the lane's. Ties with the
// top are told apart only where it rises, as any later tie makes the sum at least 2.
template <bool kCapped, bool kSpread, int kCount>
__device__ __forceinline__ void add_logits(RowSoftmax<float>& sums, const float (&x)[kCount], float largest,
                                           const RowMap& row) {
  float top = unscaled<kCapped>(row.map, largest).value;
  if (!__any_sync(kAllLanes, top > sums.top)) {
    add_terms<kCapped, kSpread, false>(sums, x, row);
    return;
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
  sums.raise<Math>(top, row.factor);
  add_terms<kCapped, kSpread, true>(sums, x, row);
}

template <bool kCapped, bool kSpread, typename T, int kCount>
__device__ __forceinline__ void add_pieces(RowSoftmax<float>& sums, const Piece<T> (&batch)[kCount],
                                           const RowMap& map) {
  constexpr int kItems = Piece<T>::kItems;
  float x[kCount * kItems], largest = -INFINITY;
#pragma unroll
  for (int p = 0; p < kCount; ++p) {
    largest = fmaxf(largest, largest_of(batch[p]));
    unpack(batch[p], x + p * kItems);
  }
  add_logits<kCapped, kSpread>(sums, x, largest, map);
}

// Sums over the warp's part of a row, spread over its lanes.
template <bool kCapped, bool kSpread, typename T>
__device__ RowSoftmax<float> lane_sums(const T* row, int64_t columns, const RowMap& map) {
  const Split<T> split(row, columns);
  const Piece<T>* const pieces = reinterpret_cast<const Piece<T>*>(row + split.head);
  const int64_t whole_batches = split.pieces / (kBatch * kWarp) * (kBatch * kWarp);
  RowSoftmax<float> sums;
  for (int64_t index = first_of_lane<kBatch>(); index < whole_batches; index += kBatch * blockDim.x) {
    Piece<T> batch[kBatch];
#pragma unroll
    for (int p = 0; p < kBatch; ++p) batch[p] = pieces[index + p * kWarp];
    add_pieces<kCapped, kSpread>(sums, batch, map);
  }
  // the same number of turns for all lanes
  for (int64_t first = whole_batches; first < split.pieces; first += blockDim.x) {
    const int64_t index = first + threadIdx.x;
    const Piece<T> piece[1] = {index < split.pieces ? pieces[index] : piece_of_minus_infinity<T>()};
    add_pieces<kCapped, kSpread>(sums, piece, map);
  }
  const int64_t single = threadIdx.x < split.head ? threadIdx.x : split.tail + threadIdx.x - split.head;
  const float x[1] = {single < columns ? to_float(row[single]) : -INFINITY};
  add_logits<kCapped, kSpread>(sums, x, x[0], map);
  return sums;
}

__device__ __forceinline__ RowSoftmax<float> warp_sum(RowSoftmax<float> sums) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sums.ties += __shfl_xor_sync(kAllLanes, sums.ties, offset);
    sums.below += __shfl_xor_sync(kAllLanes, sums.below, offset);
    sums.spread += __shfl_xor_sync(kAllLanes, sums.spread, offset);
  }
  return sums;
}

// The first warp gets the sums of the whole block; all threads must call it.
__device__ __forceinline__ RowSoftmax<float> block_merge(RowSoftmax<float> sums, float factor,
                                                         RowSoftmax<float>* shared) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  sums = warp_sum(sums);
  if (lane == 0) shared[warp] = sums;
  __syncthreads();
  if (warp == 0) {
    sums = lane < warps ? shared[lane] : RowSoftmax<float>();
    float top = sums.top;
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
    sums.raise<Math>(top, factor);
    sums = warp_sum(sums);
  }
  __syncthreads();  // `shared` may be reused
  return sums;
}

template <bool kCapped, typename T>
__device__ RowResult result_of(const RowSoftmax<float>& sums, const T* row, int64_t columns, int64_t target,
                               const RowMap& map) {
  if (target < 0 || target >= columns) return {NAN, NAN, NAN};
  RowSoftmax<double> scaled;
  scaled.top = sums.top * map.outer;
  scaled.ties = sums.ties;
  scaled.below = sums.below;
  scaled.spread = sums.spread * kLn2;
  return finish_row(scaled, unscaled<kCapped>(map.map, to_float(row[target])).value * map.outer);
}

template <typename T, bool kCapped, bool kSpread>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ LogitArrays<T> in, const __grid_constant__ LogprobArrays out) {
  __shared__ __align__(16) unsigned char shared[kMaxWarps * sizeof(RowSoftmax<float>)];
  for (int64_t row = blockIdx.x; row < in.layout.rows; row += gridDim.x) {
    const int64_t target = in.targets[row];
    RowResult result{0, 0, 0};
    if (target != kIgnoredTarget) {
      const T* logits = in.logits + in.layout.offset(row);
      const RowMap map(in, row);
      const RowSoftmax<float> sums = block_merge(lane_sums<kCapped, kSpread>(logits, in.layout.columns, map),
                                                 map.factor, reinterpret_cast<RowSoftmax<float>*>(shared));
      if (threadIdx.x == 0) result = result_of<kCapped>(sums, logits, in.layout.columns, target, map);
    }
    if (threadIdx.x == 0) {
      out.logprobs[row] = static_cast<float>(result.logprob);
      out.normalizer[row] = result.normalizer;
      if constexpr (kSpread) out.entropy[row] = static_cast<float>(result.entropy);
    }
  }
}

// From a row's logits to their gradient. With `center` near the normalizer, both unscaled, a logit other than the
// target gets 2^exponent (at_center + exponent per_exponent) for exponent = (value - center) factor: what the rounding
// of the center moves is in the coefficients.
template <bool kCapped, bool kEntropy>
struct LogitGradient {
  RowMap row;
  RowGradient<double> upstream;
  float center, at_center, per_exponent;

  __device__ LogitGradient(const RowMap& map, double normalizer, const RowGradient<double>& row_upstream)
      : row(map), upstream(row_upstream) {
    center = static_cast<float>(normalizer / map.outer);
    const double off_center = center * map.outer - normalizer;
    const double scale = -expf(static_cast<float>(off_center)) * map.outer * (kCapped ? map.map.inner : 1);
    const double entropy = kEntropy ? (off_center + upstream.entropy) * upstream.for_entropy : 0;
    at_center = static_cast<float>(scale * (upstream.for_logprob + entropy));
    per_exponent = static_cast<float>(scale * kLn2 * upstream.for_entropy);
  }

  __device__ __forceinline__ float operator()(float logit) const {
    const Unscaled mapped = unscaled<kCapped>(row.map, logit);
    const float exponent = (mapped.value - center) * row.factor;
    float by_z = at_center;
    if constexpr (kEntropy) by_z = fmaf(fmaxf(exponent, static_cast<float>(kNoExponent)), per_exponent, by_z);
    const float gradient = exp2_approx(exponent) * by_z;
    return kCapped ? gradient * mapped.slope : gradient;
  }

  template <typename T>
  __device__ __forceinline__ Piece<T> operator()(Piece<T> logits) const {
    float items[Piece<T>::kItems];
    unpack(logits, items);
#pragma unroll
    for (float& item : items) item = (*this)(item);
    return packed<T>(items);
  }

  __device__ float of_target(float logit) const {
    const Unscaled mapped = unscaled<kCapped>(row.map, logit);
    const double slope = row.outer * (kCapped ? row.map.inner : 1) * mapped.slope;
    return static_cast<float>(target_gradient(upstream, mapped.value * row.outer) * slope);
  }
};

// The 16 bytes that begin `bytes` behind the begin of `low`, which `high` follows.
template <typename T>
__device__ __forceinline__ Piece<T> straddling_piece(Piece<T> low, Piece<T> high, unsigned bytes) {
  uint32_t words[8];
  memcpy(words, &low, 16);
  memcpy(words + 4, &high, 16);
#pragma unroll
  for (int k = 0; k < 6; ++k) words[k] = bytes & 8 ? words[k + 2] : words[k];
#pragma unroll
  for (int k = 0; k < 5; ++k) words[k] = bytes & 4 ? words[k + 1] : words[k];
  Piece<T> piece;
#pragma unroll
  for (int k = 0; k < 4; ++k) piece.words[k] = __funnelshift_r(words[k], words[k + 1], bytes % 4 * 8);
  return piece;
}

// Writes single logits from `first` on.
template <typename T, typename Gradient>
__device__ void write_singles(const T* row, T* to, int64_t first, int64_t end, const Gradient& gradient) {
  for (int64_t column = first + threadIdx.x; column < end; column += blockDim.x) {
    from_float(gradient(to_float(row[column])), to[column]);
  }
}

// For logits that are aligned differently from their gradient: two aligned pieces are read for one written. The first
// and the last piece would reach out of the row, and are written one logit at a time.
template <typename T, typename Gradient>
__device__ void write_straddling_row(const T* row, T* to, int64_t columns, const Gradient& gradient) {
  constexpr int kItems = Piece<T>::kItems;
  const Split<T> split(to, columns);
  const int64_t head = min(columns, split.head + kItems), tail = max(head, split.tail - kItems);
  const int shift = misalignment(row + head);
  const Piece<T>* const pieces = reinterpret_cast<const Piece<T>*>(row + head - shift);
  for (int64_t p = threadIdx.x; p < (tail - head) / kItems; p += blockDim.x) {
    reinterpret_cast<Piece<T>*>(to + head)[p] =
        gradient(straddling_piece(pieces[p], pieces[p + 1], shift * static_cast<unsigned>(sizeof(T))));
  }
  write_singles(row, to, 0, head, gradient);
  write_singles(row, to, tail, columns, gradient);
}

template <typename T, typename Gradient>
__device__ void write_row(const T* row, T* to, int64_t columns, const Gradient& gradient) {
  if (misalignment(row) != misalignment(to)) return write_straddling_row(row, to, columns, gradient);
  const Split<T> split(row, columns);
  const Piece<T>* const pieces = reinterpret_cast<const Piece<T>*>(row + split.head);
  Piece<T>* const written = reinterpret_cast<Piece<T>*>(to + split.head);
  int64_t index = first_of_lane<kBackwardBatch>();
  const int64_t whole_batches = split.pieces / (kBackwardBatch * kWarp) * (kBackwardBatch * kWarp);
  for (; index < whole_batches; index += kBackwardBatch * blockDim.x) {
    Piece<T> batch[kBackwardBatch];
#pragma unroll
    for (int p = 0; p < kBackwardBatch; ++p) batch[p] = pieces[index + p * kWarp];
#pragma unroll
    for (int p = 0; p < kBackwardBatch; ++p) written[index + p * kWarp] = gradient(batch[p]);
  }
  for (index = whole_batches + threadIdx.x; index < split.pieces; index += blockDim.x) {
    written[index] = gradient(pieces[index]);
  }
  write_singles(row, to, 0, split.head, gradient);
  write_singles(row, to, split.tail, columns, gradient);
}

template <typename T>
__device__ void clear_row(T* to, int64_t columns) {
  const Split<T> split(to, columns);
  Piece<T>* written = reinterpret_cast<Piece<T>*>(to + split.head);
  for (int64_t p = threadIdx.x; p < split.pieces; p += blockDim.x) written[p] = Piece<T>{};
  if (threadIdx.x < split.head) to[threadIdx.x] = T{};
  if (split.tail + threadIdx.x < columns) to[split.tail + threadIdx.x] = T{};
}

// Where nothing is asked for, ptxas finds the best number of registers, but for one kernel that it lets spill.
template <typename T, bool kCapped, bool kEntropy>
__global__ void __launch_bounds__(kThreads, kCapped && !kEntropy ? 4 : 0)
    backward_kernel(const __grid_constant__ LogitArrays<T> in, const __grid_constant__ GradientArrays<T> out) {
  const int64_t columns = in.layout.columns;
  for (int64_t row = blockIdx.x; row < in.layout.rows; row += gridDim.x) {
    const int64_t target = in.targets[row];
    T* const to = out.gradient + out.layout.offset(row);
    const double grad_logprob = out.grad_logprobs == nullptr ? 0.0 : out.grad_logprobs[row];
    const double grad_entropy = kEntropy ? out.grad_entropy[row] : 0.0;
    const RowGradient<double> upstream(out.normalizer[row], grad_logprob, grad_entropy,
                                       kEntropy ? out.entropy[row] : 0.0);
    if (target == kIgnoredTarget || upstream.is_zero()) {
      clear_row(to, columns);
      continue;
    }
    const T* const logits = in.logits + in.layout.offset(row);
    const bool has_target = target >= 0 && target < columns;
    const T target_logit = has_target ? logits[target] : T{};
    __syncthreads();  // the gradient may overwrite the logits
    const LogitGradient<kCapped, kEntropy> gradient(RowMap(in, row), out.normalizer[row], upstream);
    const float of_target = gradient.of_target(to_float(target_logit));
    write_row(logits, to, columns, gradient);
    __syncthreads();  // the target is written twice
    if (has_target && threadIdx.x == 0) from_float(of_target, to[target]);
  }
}

struct Shape {
  dim3 grid, block;

  explicit Shape(const LogitLayout& layout)
      : grid(static_cast<unsigned>(layout.rows < kMaxBlocks ? layout.rows : kMaxBlocks)),
        block(layout.columns <= kSmallColumns ? kSmallThreads : kThreads) {}
};

}  // namespace

template <typename T>
void launch_token_logprobs(const LogitArrays<T>& in, const LogprobArrays& out, void* stream) {
  const Shape shape(in.layout);
  const bool capped = in.scaling.softcap > 0, spread = out.entropy != nullptr;
  const auto kernel = capped ? (spread ? forward_kernel<T, true, true> : forward_kernel<T, true, false>)
                             : (spread ? forward_kernel<T, false, true> : forward_kernel<T, false, false>);
  launch(kernel, shape.grid, shape.block, 0, stream, in, out);
}

template <typename T>
void launch_token_logprobs_backward(const LogitArrays<T>& in, const GradientArrays<T>& out, void* stream) {
  const Shape shape(in.layout);
  const bool capped = in.scaling.softcap > 0, entropy = out.grad_entropy != nullptr;
  const auto kernel = capped ? (entropy ? backward_kernel<T, true, true> : backward_kernel<T, true, false>)
                             : (entropy ? backward_kernel<T, false, true> : backward_kernel<T, false, false>);
  launch(kernel, shape.grid, shape.block, 0, stream, in, out);
}

#define GRPO_INSTANTIATE(T)                                                                          \
  template void launch_token_logprobs<T>(const LogitArrays<T>&, const LogprobArrays&, void* stream); \
  template void launch_token_logprobs_backward<T>(const LogitArrays<T>&, const GradientArrays<T>&, void* stream);
GRPO_INSTANTIATE(float)
GRPO_INSTANTIATE(Half)
GRPO_INSTANTIATE(BFloat16)
#undef GRPO_INSTANTIATE

}  // namespace grpo_kernels
