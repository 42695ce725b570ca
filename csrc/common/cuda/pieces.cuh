#pragma once

#include <stdint.h>
#include <string.h>

#include "common/cuda/launch.h"
#include "common/cuda/to_float.cuh"

#ifndef GRPO_KERNELS_EMULATE
#include <cuda_bf16.h>
#endif

// Arrays in pieces of 16 bytes, the widest load there is.
namespace grpo_kernels {

template <typename T>
struct __align__(16) Piece {
  static constexpr int kItems = 16 / sizeof(T);
  uint32_t words[4];
};

// Splits `count` items into `head` single ones, aligned pieces, and single ones from `tail` on.
template <typename T>
struct Split {
  int64_t head, pieces, tail;

  __device__ Split(const T* items, int64_t count) {
    const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(items) % 16 / sizeof(T));
    head = offset == 0 ? 0 : Piece<T>::kItems - offset;
    if (head > count) head = count;
    pieces = (count - head) / Piece<T>::kItems;
    tail = head + pieces * Piece<T>::kItems;
  }
};

__device__ __forceinline__ void unpack(Piece<float> piece, float* items) { memcpy(items, &piece, 16); }

#ifdef GRPO_KERNELS_EMULATE

inline uint32_t pair_of(float first, float second, BFloat16) {
  BFloat16 pair[2];
  from_float(first, pair[0]), from_float(second, pair[1]);
  uint32_t word;
  memcpy(&word, pair, 4);
  return word;
}

#else

// Two numbers in a word, the first in the low half.
__device__ __forceinline__ uint32_t pair_of(float first, float second, BFloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

#endif

}  // namespace grpo_kernels
