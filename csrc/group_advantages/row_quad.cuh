#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common/cuda/pieces.cuh"
#include "group_advantages/cuda.h"

// Four rows of a thread, in accesses of 16 bytes where they are neighbours and aligned.
namespace grpo_kernels {

constexpr int kQuad = 4;

// Fails on the host as on a GPU, where a misaligned access traps.
__device__ __forceinline__ void check_aligned([[maybe_unused]] const void* address, [[maybe_unused]] int bytes) {
#ifdef GRPO_KERNELS_EMULATE
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    emulation::scheduler.fail("misaligned access", emulation::Site::current());
  }
#endif
}

// Four neighbours in one or two accesses of 16 bytes.
template <typename T>
__device__ __forceinline__ void load_wide(const T* from, T (&to)[kQuad]) {
  check_aligned(from, 16);
  Piece<T> pieces[kQuad / Piece<T>::kItems];
#pragma unroll
  for (int p = 0; p < kQuad / Piece<T>::kItems; ++p) pieces[p] = reinterpret_cast<const Piece<T>*>(from)[p];
  memcpy(to, pieces, sizeof(to));
}

template <typename T>
__device__ __forceinline__ void store_wide(T* to, const T (&from)[kQuad]) {
  check_aligned(to, 16);
  Piece<T> pieces[kQuad / Piece<T>::kItems];
  memcpy(pieces, from, sizeof(from));
#pragma unroll
  for (int p = 0; p < kQuad / Piece<T>::kItems; ++p) reinterpret_cast<Piece<T>*>(to)[p] = pieces[p];
}

// Four flags in one access of 4 bytes; a byte each. They are told apart only where they are used, so that nothing waits
// for them before.
__device__ __forceinline__ uint32_t load_flags(const bool* from) {
  check_aligned(from, 4);
  return *reinterpret_cast<const uint32_t*>(from);
}
__device__ __forceinline__ bool flag_at(uint32_t flags, int j) { return (flags >> (8 * j) & 0xff) != 0; }

__device__ __forceinline__ void load_wide(const bool* from, bool (&to)[kQuad]) {
  const uint32_t flags = load_flags(from);
#pragma unroll
  for (int j = 0; j < kQuad; ++j) to[j] = flag_at(flags, j);
}

__device__ __forceinline__ void store_wide(bool* to, const bool (&from)[kQuad]) {
  check_aligned(to, 4);
  uint32_t flags = 0;
#pragma unroll
  for (int j = 0; j < kQuad; ++j) flags |= from[j] ? 1u << (8 * j) : 0;
  *reinterpret_cast<uint32_t*>(to) = flags;
}

// Four neighbouring rows of a thread. With kWide they are rows row[0] to row[0] + 3 and aligned, or none of them is
// there. Either of kWide and kPlain promises one column and no subgroups.
template <typename T, bool kWide, bool kPlain>
struct RowQuad {
  static constexpr bool kIsWide = kWide;

  int64_t row[kQuad];
  double rewards[kQuad];  // NaN for rows that are masked, not scored or beyond the last

  // Loads positions `position` to `end` - 1, at most four, where `position` is below `end`.
  __device__ __forceinline__ void load(const AdvantageArrays<T>& arrays, const int64_t* order, int64_t position,
                                       int64_t end, int column) {
    const AdvantageBatch<T>& batch = arrays.batch;
    if constexpr (kWide) {
      T values[kQuad];
      load_wide(batch.rewards + position, values);
      const uint32_t is_valid = batch.valid == nullptr ? 0x01010101 : load_flags(batch.valid + position);
      const double weight = column == kCombined ? arrays.weights[0] : 1;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        row[j] = position + j;
        rewards[j] = flag_at(is_valid, j) ? weight * static_cast<double>(values[j]) : NAN;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        row[j] = position + j < end ? (order == nullptr ? position + j : order[position + j]) : -1;
      }
      load_rewards(arrays, column);
    }
  }

  // Loads the rewards of rows that are known; all loads before their uses.
  __device__ __forceinline__ void load_rewards(const AdvantageArrays<T>& arrays, int column) {
    const AdvantageBatch<T>& batch = arrays.batch;
    bool is_read[kQuad];
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      is_read[j] = has(j) && (batch.valid == nullptr || batch.valid[row[j]]);
      if (!kPlain && batch.subgroups != nullptr) is_read[j] = is_read[j] && batch.subgroups[row[j]] >= 0;
    }
    const auto of_column = [&](int j, int c) {
      return is_read[j] ? static_cast<double>(batch.rewards[kPlain ? row[j] : row[j] * batch.columns + c]) : NAN;
    };
    if (kPlain || column != kCombined || batch.columns == 1) {
      const double weight = column == kCombined ? arrays.weights[0] : 1;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) rewards[j] = weight * of_column(j, column == kCombined ? 0 : column);
      return;
    }
    double sums[kQuad] = {0, 0, 0, 0};
    bool is_scored[kQuad] = {false, false, false, false};
#pragma unroll 1
    for (int c = 0; c < batch.columns; ++c) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        const double reward = of_column(j, c);
        if (isnan(reward)) continue;
        sums[j] += arrays.weights[c] * reward;
        is_scored[j] = true;
      }
    }
#pragma unroll
    for (int j = 0; j < kQuad; ++j) rewards[j] = is_scored[j] ? sums[j] : NAN;
  }

  __device__ __forceinline__ bool has(int j) const { return kWide || row[j] >= 0; }
  __device__ __forceinline__ bool is_scored(int j) const { return !isnan(rewards[j]); }

  // Elements of an array [rows]; 0 for rows beyond the last.
  template <typename Item>
  __device__ __forceinline__ void gather(const Item* from, Item (&to)[kQuad]) const {
    if constexpr (kWide) {
      load_wide(from + row[0], to);
    } else {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) to[j] = has(j) ? from[row[j]] : Item(0);
    }
  }
  template <typename Item>
  __device__ __forceinline__ void scatter(Item* to, const Item (&from)[kQuad]) const {
    if constexpr (kWide) {
      store_wide(to + row[0], from);
    } else {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        if (has(j)) to[row[j]] = from[j];
      }
    }
  }
  template <typename Item>
  __device__ __forceinline__ void fill(Item* to, Item value) const {
    const Item values[kQuad] = {value, value, value, value};
    scatter(to, values);
  }
};

}  // namespace grpo_kernels
