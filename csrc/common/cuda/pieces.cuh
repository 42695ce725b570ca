#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common/cuda/launch.h"
#include "common/cuda/to_float.cuh"

#ifndef GRPO_KERNELS_EMULATE
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Arrays in pieces of 16 bytes, the widest load there is.
namespace grpo_kernels {

template <typename T>
struct __align__(16) Piece {
  static constexpr int kItems = 16 / sizeof(T);
  uint32_t words[4];
};

// Number of items that `address` lies after a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ int misalignment(const T* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16 / sizeof(T));
}

// Splits `count` items into `head` single ones, aligned pieces, and single ones from `tail` on.
template <typename T>
struct Split {
  int64_t head, pieces, tail;

  __device__ Split(const T* items, int64_t count) {
    const int offset = misalignment(items);
    head = offset == 0 ? 0 : Piece<T>::kItems - offset;
    if (head > count) head = count;
    pieces = (count - head) / Piece<T>::kItems;
    tail = head + pieces * Piece<T>::kItems;
  }
};

template <typename T>
constexpr uint32_t kMinusInfinity = 0;
template <>
constexpr uint32_t kMinusInfinity<float> = 0xff800000;
template <>
constexpr uint32_t kMinusInfinity<Half> = 0xfc00fc00;
template <>
constexpr uint32_t kMinusInfinity<BFloat16> = 0xff80ff80;

template <typename T>
__device__ __forceinline__ Piece<T> piece_of_minus_infinity() {
  constexpr uint32_t kWord = kMinusInfinity<T>;
  return {{kWord, kWord, kWord, kWord}};
}

__device__ __forceinline__ float largest_of(Piece<float> piece) {
  float items[4];
  memcpy(items, &piece, 16);
  return fmaxf(fmaxf(items[0], items[1]), fmaxf(items[2], items[3]));
}
__device__ __forceinline__ void unpack(Piece<float> piece, float* items) { memcpy(items, &piece, 16); }

#ifdef GRPO_KERNELS_EMULATE

template <typename T>
void unpack(Piece<T> piece, float* items) {
  T narrow[Piece<T>::kItems];
  memcpy(narrow, &piece, 16);
  for (const T& item : narrow) *items++ = to_float(item);
}
template <typename T>
float largest_of(Piece<T> piece) {
  float items[Piece<T>::kItems], largest = -INFINITY;
  unpack(piece, items);
  for (float item : items) largest = fmaxf(largest, item);
  return largest;
}
template <typename T>
Piece<T> packed(const float* items) {
  T narrow[Piece<T>::kItems];
  for (T& item : narrow) from_float(*items++, item);
  Piece<T> piece;
  memcpy(&piece, narrow, 16);
  return piece;
}

template <typename T>
uint32_t pair_of(float first, float second, T) {
  T pair[2];
  from_float(first, pair[0]), from_float(second, pair[1]);
  uint32_t word;
  memcpy(&word, pair, 4);
  return word;
}

inline float exp2_approx(float x) { return exp2f(x); }
inline float divide_approx(float x, float y) { return x / y; }

#else

// Two numbers per instruction, where there is one for pairs.
__device__ __forceinline__ float largest_of(Piece<Half> piece) {
  __half2 pairs[4];
  memcpy(pairs, &piece, 16);
  const __half2 largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__low2float(largest), __high2float(largest));
}
__device__ __forceinline__ float largest_of(Piece<BFloat16> piece) {
  __nv_bfloat162 pairs[4];
  memcpy(pairs, &piece, 16);
  const __nv_bfloat162 largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__low2float(largest), __high2float(largest));
}
__device__ __forceinline__ void unpack(Piece<Half> piece, float* items) {
  __half2 pairs[4];
  memcpy(pairs, &piece, 16);
#pragma unroll
  for (int k = 0; k < 4; ++k) items[2 * k] = __low2float(pairs[k]), items[2 * k + 1] = __high2float(pairs[k]);
}
__device__ __forceinline__ void unpack(Piece<BFloat16> piece, float* items) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    items[2 * k] = __uint_as_float(piece.words[k] << 16);
    items[2 * k + 1] = __uint_as_float(piece.words[k] & 0xffff0000u);
  }
}
// Two numbers in a word, the first in the low half.
__device__ __forceinline__ uint32_t pair_of(float first, float second, Half) {
  const __half2 pair = __floats2half2_rn(first, second);
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}
__device__ __forceinline__ uint32_t pair_of(float first, float second, BFloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}
template <typename T>
__device__ __forceinline__ Piece<T> packed(const float* items) {
  Piece<T> piece;
  if constexpr (sizeof(T) == 4) {
    memcpy(&piece, items, 16);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) piece.words[k] = pair_of(items[2 * k], items[2 * k + 1], T{});
  }
  return piece;
}

// One instruction, with a relative error below 2^-22; exact at 0. Results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// For |y| < 2^126; relative error below 2^-22.
__device__ __forceinline__ float divide_approx(float x, float y) { return __fdividef(x, y); }

#endif

}  // namespace grpo_kernels
