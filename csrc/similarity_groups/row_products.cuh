#pragma once

#include <stdint.h>

#include <type_traits>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/mma.cuh"
#include "common/cuda/pieces.cuh"

// Inner products of bands of 16 rows on tensor cores, one chunk of depth after another.
namespace grpo_kernels {

constexpr int kBand = 16;
constexpr int kLinePieces = 8;  // pieces of a row in a chunk, 128 bytes
constexpr int kBandPieces = kBand * kLinePieces;

template <typename T>
constexpr int kChunk = kLinePieces * Piece<T>::kItems;

// Index of a row's piece in the shared memory of a chunk. Pieces change places within their row, so that the eight
// lanes that a load serves at a time read from all banks, be it one piece of eight rows or four pieces of two.
__device__ __forceinline__ unsigned place(unsigned row, unsigned piece) {
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

// The places of a lane's pieces in a band, for both fragments of either half of a chunk.
template <Side kSide, typename T>
struct BandPlaces {
  unsigned at[2][2];

  __device__ __forceinline__ BandPlaces() {
    const unsigned lane = threadIdx.x % 32, matrix = lane / 8;
    // a float32 fragment is of one piece of row g, and one of row g + 8
    constexpr bool kIsFloat = std::is_same_v<T, float>, kIsLeft = kSide == Side::kLeft;
    const unsigned below = kIsLeft ? matrix % 2 : matrix / 2, further = kIsLeft ? matrix / 2 : matrix % 2;
#pragma unroll
    for (unsigned half = 0; half < 2; ++half) {
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) {
        at[half][i] = kIsFloat ? place(lane / 4 + i * 8, half * 4 + lane % 4)
                               : place(below * 8 + lane % 8, half * 4 + i * 2 + further);
#ifdef __CUDA_ARCH__
        asm volatile("" : "+r"(at[half][i]));  // keeps nvcc from computing it again for every chunk
#endif
      }
    }
  }
};

// A right operand is loaded as pairs of words, because mma.sync takes neighbouring registers, and moves would cost as
// much as the products.
template <Side kSide, typename T>
__device__ __forceinline__ HalfChunk<T> load_half(const Piece<T>* band, const BandPlaces<kSide, T>& places, int half) {
  HalfChunk<T> result;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t words[4];
    load_matrices(band + places.at[half][i], words);
    result.fragments[i] = kSide == Side::kLeft ? Fragment{{words[0], words[1], words[2], words[3]}}
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
__device__ __forceinline__ HalfChunk<float> load_half(const Piece<float>* band, const BandPlaces<kSide, float>& places,
                                                      int half) {
  HalfChunk<float> result;
#pragma unroll
  for (int below = 0; below < 2; ++below) {
    float items[4];
    unpack(band[places.at[half][below]], items);
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

// A float32 sum with Kahan's correction: its error is that of one rounding, for any number of chunks. Products of a
// chunk are added to `missing`, in which tensor cores accumulate, and carry() moves them to the sum.
struct CompensatedSum {
  float sum = 0, missing = 0;

  __device__ __forceinline__ void carry() {
    const float gone = (sum + missing) - sum;
#ifdef __CUDA_ARCH__
    asm("add.rn.f32 %0, %0, %1;" : "+f"(sum) : "f"(missing));  // in place: a copy of the sum above takes a move more
#else
    sum += missing;
#endif
    missing -= gone;
  }
  __device__ __forceinline__ double value() const { return static_cast<double>(sum) + static_cast<double>(missing); }
};

// Adds the products of a band with 8 rows of another, the first for n = 0, the last for n = 1, over one chunk. The sums
// of a pair of rows do not depend on which of the two comes first: what a swap exchanges is summed apart, and added
// last.
template <typename T>
__device__ __forceinline__ void add_chunk(Sums& sums, const HalfChunk<T> (&a)[2], const HalfChunk<T> (&b)[2], int n) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) add_products(sums, a[half].fragments[i], b[half].fragments[i], n, T{});
  }
}

// The parts that are left out are products below 2^-24 of the whole.
template <>
__device__ __forceinline__ void add_chunk(Sums& sums, const HalfChunk<float> (&a)[2], const HalfChunk<float> (&b)[2],
                                          int n) {
  constexpr BFloat16 kType{};
  Sums above = {}, below = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    add_products(sums, a[half].high, b[half].high, n, kType);
    add_products(above, a[half].high, b[half].middle, n, kType);
    add_products(below, a[half].middle, b[half].high, n, kType);
    add_products(sums, a[half].middle, b[half].middle, n, kType);
    add_products(above, a[half].high, b[half].low, n, kType);
    add_products(below, a[half].low, b[half].high, n, kType);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += above[i] + below[i];
}

// Sums of 16 rows by 8.
struct CompensatedSums {
  Sums sums = {}, missing = {};

  template <typename T>
  __device__ __forceinline__ void add(const HalfChunk<T> (&a)[2], const HalfChunk<T> (&b)[2], int n) {
    add_chunk(missing, a, b, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      CompensatedSum one{sums[i], missing[i]};
      one.carry();
      sums[i] = one.sum, missing[i] = one.missing;
    }
  }
  __device__ __forceinline__ CompensatedSum operator[](int i) const { return {sums[i], missing[i]}; }
};

}  // namespace grpo_kernels
