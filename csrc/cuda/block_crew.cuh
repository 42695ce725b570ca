#pragma once

#include "grpo_kernels/silhouette.h"
#include "launch.h"
#include "team.cuh"

// The threads of a block as the crew of linkage.h and silhouette.h, one item at a time.
namespace grpo_kernels {

struct BlockCrew {
  using Vector = double;
  static constexpr int kPack = 1;

  Smallest* exchange;  // shared, kMaxWarps of them

  template <typename F>
  __device__ __forceinline__ void for_each(int n, F f) const {
    for (int i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }
  template <typename F>
  __device__ __forceinline__ void for_each_pack(int n, F f) const {
    for_each(n, f);
  }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ bool is_first() const { return threadIdx.x == 0; }

  __device__ __forceinline__ Smallest scan_minimum(const double* values, int begin, int n) const {
    Smallest found{INFINITY, 0};
    for (int i = begin; i < n; ++i) {
      if (values[i] < found.value) found = {values[i], i};
    }
    return found;
  }

  __device__ __forceinline__ Smallest first_minimum(const double* values, int begin, int n) const {
    Smallest found{INFINITY, 0};
    for (int i = begin + static_cast<int>(threadIdx.x); i < n; i += blockDim.x) {
      if (values[i] < found.value) found = {values[i], i};
    }
    found = warp_first(found);
    const int warps = blockDim.x / kWarp;
    if (warps == 1) return found;
    if (threadIdx.x % kWarp == 0) exchange[threadIdx.x / kWarp] = found;
    __syncthreads();
    for (int w = 0; w < warps; ++w) {
      const Smallest other = exchange[w];
      if (comes_before(other, found)) found = other;
    }
    __syncthreads();
    return found;
  }

  __device__ __forceinline__ double sum(const double* values, int n) const {
    double part = 0;
    if (threadIdx.x < kWarp) {
      for (int i = threadIdx.x; i < n; i += kWarp) part += values[i];
      for (int half = kWarp / 2; half > 0; half /= 2) part += __shfl_down_sync(kAllLanes, part, half);
      if (threadIdx.x == 0) exchange[0].value = part;
    }
    __syncthreads();
    const double total = exchange[0].value;
    __syncthreads();
    return total;
  }

  __device__ static __forceinline__ double load(const double* from) { return *from; }
  __device__ static __forceinline__ void store(double* to, double value) { *to = value; }
  __device__ static __forceinline__ double every(double value) { return value; }
  __device__ static __forceinline__ double select(bool condition, double yes, double no) {
    return condition ? yes : no;
  }
  __device__ static __forceinline__ double smaller(double a, double b) { return a < b ? a : b; }
  __device__ static __forceinline__ double larger(double a, double b) { return a > b ? a : b; }

 private:
  __device__ static __forceinline__ Smallest warp_first(Smallest found) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const Smallest other{__shfl_xor_sync(kAllLanes, found.value, offset),
                           __shfl_xor_sync(kAllLanes, found.place, offset)};
      if (comes_before(other, found)) found = other;
    }
    return found;
  }
};

}  // namespace grpo_kernels
