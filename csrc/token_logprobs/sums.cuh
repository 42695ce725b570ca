#pragma once

#include <math.h>
#include <stdint.h>

#include "common/cuda/pieces.cuh"
#include "common/cuda/team.cuh"
#include "common/cuda/to_float.cuh"
#include "token_logprobs/cuda.h"

// The sums of a row over the threads of a block. A warp takes kBatch pieces of 16 bytes per lane at a time, and single
// logits before the first and after the last piece of the row. Differences are taken before any scaling, where they
// are exact for equal logits, and one product with `factor` serves both the scaling and the exponential to base 2.
namespace grpo_kernels {
namespace {

constexpr int kBatch = 4;
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

struct Forget {
  template <typename T>
  __device__ __forceinline__ void operator()(int64_t, const Piece<T>&) const {}
};

// Sums over the warp's part of a row, spread over its lanes. Calls keep(index, piece) for every aligned piece.
template <bool kCapped, bool kSpread, typename T, typename Keep = Forget>
__device__ RowSoftmax<float> lane_sums(const T* row, int64_t columns, const RowMap& map, const Keep& keep = {}) {
  const Split<T> split(row, columns);
  const Piece<T>* const pieces = reinterpret_cast<const Piece<T>*>(row + split.head);
  const int64_t whole_batches = split.pieces / (kBatch * kWarp) * (kBatch * kWarp);
  RowSoftmax<float> sums;
  for (int64_t index = first_of_lane<kBatch>(); index < whole_batches; index += kBatch * blockDim.x) {
    Piece<T> batch[kBatch];
#pragma unroll
    for (int p = 0; p < kBatch; ++p) batch[p] = pieces[index + p * kWarp];
#pragma unroll
    for (int p = 0; p < kBatch; ++p) keep(index + p * kWarp, batch[p]);
    add_pieces<kCapped, kSpread>(sums, batch, map);
  }
  // the same number of turns for all lanes
  for (int64_t first = whole_batches; first < split.pieces; first += blockDim.x) {
    const int64_t index = first + threadIdx.x;
    const Piece<T> piece[1] = {index < split.pieces ? pieces[index] : piece_of_minus_infinity<T>()};
    if (index < split.pieces) keep(index, piece[0]);
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

}  // namespace
}  // namespace grpo_kernels
