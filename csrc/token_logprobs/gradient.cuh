#pragma once

#include <string.h>

#include "token_logprobs/sums.cuh"

// The gradient of a row of logits, by all threads of a block.
namespace grpo_kernels {
namespace {

constexpr int kBackwardBatch = 2;

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

  // From one piece of logits, or from two of float32 for a gradient in half precision.
  template <typename G, typename T, int kPieces>
  __device__ __forceinline__ Piece<G> of_pieces(const Piece<T> (&logits)[kPieces]) const {
    static_assert(kPieces * Piece<T>::kItems == Piece<G>::kItems);
    float items[Piece<G>::kItems];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) unpack(logits[p], items + p * Piece<T>::kItems);
#pragma unroll
    for (float& item : items) item = (*this)(item);
    return packed<G>(items);
  }

  __device__ float of_target(float logit) const {
    const Unscaled mapped = unscaled<kCapped>(row.map, logit);
    const double slope = row.outer * (kCapped ? row.map.inner : 1) * mapped.slope;
    return static_cast<float>(target_gradient(upstream, mapped.value * row.outer) * slope);
  }
};

// The 16 bytes that begin `bytes` after the begin of `low`, which `high` follows.
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
template <typename T, typename G, typename Gradient>
__device__ void write_singles(const T* row, G* to, int64_t first, int64_t end, const Gradient& gradient) {
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
    const Piece<T> logits[1] = {straddling_piece(pieces[p], pieces[p + 1], shift * static_cast<unsigned>(sizeof(T)))};
    reinterpret_cast<Piece<T>*>(to + head)[p] = gradient.template of_pieces<T>(logits);
  }
  write_singles(row, to, 0, head, gradient);
  write_singles(row, to, tail, columns, gradient);
}

// Writes `count` pieces, which `pieces` may be.
template <typename T, typename G, typename Gradient>
__device__ __forceinline__ void write_pieces(const Piece<T>* pieces, Piece<G>* written, int64_t count,
                                             const Gradient& gradient) {
  constexpr int kRead = Piece<G>::kItems / Piece<T>::kItems;  // pieces read for one written
  int64_t index = first_of_lane<kBackwardBatch>();
  const int64_t whole_batches = count / (kBackwardBatch * kWarp) * (kBackwardBatch * kWarp);
  for (; index < whole_batches; index += kBackwardBatch * blockDim.x) {
    Piece<T> batch[kBackwardBatch][kRead];
#pragma unroll
    for (int p = 0; p < kBackwardBatch; ++p) {
#pragma unroll
      for (int k = 0; k < kRead; ++k) batch[p][k] = pieces[(index + p * kWarp) * kRead + k];
    }
#pragma unroll
    for (int p = 0; p < kBackwardBatch; ++p) written[index + p * kWarp] = gradient.template of_pieces<G>(batch[p]);
  }
  for (index = whole_batches + threadIdx.x; index < count; index += blockDim.x) {
    Piece<T> logits[kRead];
#pragma unroll
    for (int k = 0; k < kRead; ++k) logits[k] = pieces[index * kRead + k];
    written[index] = gradient.template of_pieces<G>(logits);
  }
}

template <typename T, typename G, typename Gradient>
__device__ void write_row(const T* row, G* to, int64_t columns, const Gradient& gradient) {
  const Split<G> split(to, columns);
  if (misalignment(row + split.head) != 0) {
    if constexpr (sizeof(T) == sizeof(G)) return write_straddling_row(row, to, columns, gradient);
    return write_singles(row, to, 0, columns, gradient);
  }
  write_pieces(reinterpret_cast<const Piece<T>*>(row + split.head), reinterpret_cast<Piece<G>*>(to + split.head),
               split.pieces, gradient);
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

}  // namespace
}  // namespace grpo_kernels
