#pragma once

#include <stdint.h>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/mma.cuh"
#include "common/cuda/pieces.cuh"

// Inner products of bands of 16 rows on tensor cores, one chunk of depth after another.
namespace grpo_kernels {

constexpr int kBand = 16;
constexpr int kLinePieces = 8;  // pieces of a row in a chunk, 128 bytes

template <typename T>
constexpr int kChunk = kLinePieces * Piece<T>::kItems;

// Index of a row's piece in the shared memory of a chunk. Pieces change places within their row, so that the eight
// lanes that a load serves at a time read from all banks, be it one piece of eight rows or four pieces of two.
__device__ __forceinline__ int place(int row, int piece) {
  return row * kLinePieces + (piece ^ (row % 2 * 4 + row / 2 % 4));
}

// One lane's part of half a chunk of a band: 16-bit numbers, in fragments of 16 columns.
template <typename T>
struct HalfChunk {
  Fragment fragments[2];
};

// float32 numbers are split into three parts of bfloat16, x = high + middle + low exactly unless a part is subnormal.
template <>
struct HalfChunk<float> {
  Fragment high, middle, low;
};

enum class Side { kLeft, kRight };  // of a product

// A right operand is loaded as pairs of words, because mma.sync takes neighbouring registers, and moves would cost as
// much as the products.
template <Side kSide, typename T>
__device__ __forceinline__ HalfChunk<T> load_half(const Piece<T>* chunk, int band, int half) {
  constexpr bool kIsLeft = kSide == Side::kLeft;
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  const int below = kIsLeft ? matrix % 2 : matrix / 2, further = kIsLeft ? matrix / 2 : matrix % 2;
  HalfChunk<T> result;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t words[4];
    load_matrices(chunk + place(band * kBand + below * 8 + lane % 8, half * 4 + i * 2 + further), words);
    result.fragments[i] = kIsLeft ? Fragment{{words[0], words[1], words[2], words[3]}}
                                  : Fragment{{words[0], words[2], words[1], words[3]}};
  }
  return result;
}

// Rounds two numbers to bfloat16 and leaves what is cut off.
__device__ __forceinline__ uint32_t take_part(float& first, float& second) {
  const uint32_t pair = pair_of(first, second, BFloat16{});
  first -= __uint_as_float(pair << 16);
  second -= __uint_as_float(pair & 0xffff0000u);
  return pair;
}

// Each lane takes one piece of row g and one of row g + 8, which gives it other columns than Fragment says, but the
// same ones for every row: products are sums over columns in any order.
template <Side kSide>
__device__ __forceinline__ HalfChunk<float> load_half(const Piece<float>* chunk, int band, int half) {
  const int lane = threadIdx.x % 32, row = band * kBand + lane / 4, piece = half * 4 + lane % 4;
  HalfChunk<float> result;
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    float items[4];
    unpack(chunk[place(row + below * 8, piece)], items);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float &first = items[2 * i], &second = items[2 * i + 1];
      result.high.words[2 * i + below] = take_part(first, second);
      result.middle.words[2 * i + below] = take_part(first, second);
      result.low.words[2 * i + below] = take_part(first, second);
    }
  }
  return result;
}

// Products of a band with 8 rows of another over one chunk. The sums of a pair of rows do not depend on which of the
// two comes first: what a swap exchanges is summed apart, and added last.
template <typename T>
struct ChunkProducts {
  Sums sums = {};

  __device__ __forceinline__ void add(const HalfChunk<T>& a, const HalfChunk<T>& b, int half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) add_products(sums, a.fragments[i], b.fragments[i], half, T{});
  }
  __device__ __forceinline__ float total(int i) const { return sums[i]; }
};

// The parts that are left out are products below 2^-24 of the whole.
template <>
struct ChunkProducts<float> {
  Sums equal = {}, above = {}, below = {};

  __device__ __forceinline__ void add(const HalfChunk<float>& a, const HalfChunk<float>& b, int half) {
    constexpr BFloat16 kType{};
    add_products(equal, a.high, b.high, half, kType);
    add_products(above, a.high, b.middle, half, kType);
    add_products(below, a.middle, b.high, half, kType);
    add_products(equal, a.middle, b.middle, half, kType);
    add_products(above, a.high, b.low, half, kType);
    add_products(below, a.low, b.high, half, kType);
  }
  __device__ __forceinline__ float total(int i) const { return equal[i] + (above[i] + below[i]); }
};

// Kahan's sum of float32 numbers: its error is that of one rounding, for any number of chunks.
struct CompensatedSum {
  float sum = 0, excess = 0;

  __device__ __forceinline__ void add(float value) {
    const float corrected = value - excess, next = sum + corrected;
    excess = (next - sum) - corrected;
    sum = next;
  }
  __device__ __forceinline__ double value() const { return static_cast<double>(sum) - static_cast<double>(excess); }
};

}  // namespace grpo_kernels
