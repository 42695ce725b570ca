#pragma once

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "similarity_groups/silhouette.h"

// The threads of a block as the Crew of linkage.h and silhouette.h, one item each.
namespace grpo_kernels {

struct BlockCrew {
  using Vector = double;
  static constexpr int kPack = 1;

  Smallest* warp_results;  // [kMaxWarps], in shared memory

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
    Smallest smallest{INFINITY, 0};
    for (int i = begin; i < n; ++i) {
      if (values[i] < smallest.value) smallest = {values[i], i};
    }
    return smallest;
  }

  __device__ __forceinline__ Smallest first_minimum(const double* values, int begin, int n) const {
    Smallest smallest{INFINITY, 0};
    for (int i = begin + static_cast<int>(threadIdx.x); i < n; i += blockDim.x) {
      if (values[i] < smallest.value) smallest = {values[i], i};
    }
    smallest = warp_minimum(smallest);
    const int warps = blockDim.x / kWarp;
    if (warps == 1) return smallest;
    if (threadIdx.x % kWarp == 0) warp_results[threadIdx.x / kWarp] = smallest;
    __syncthreads();
    for (int w = 0; w < warps; ++w) {
      const Smallest other = warp_results[w];
      if (comes_before(other, smallest)) smallest = other;
    }
    __syncthreads();
    return smallest;
  }

  __device__ __forceinline__ double sum(const double* values, int n) const {
    double part = 0;
    if (threadIdx.x < kWarp) {
      for (int i = threadIdx.x; i < n; i += kWarp) part += values[i];
      for (int half = kWarp / 2; half > 0; half /= 2) part += __shfl_down_sync(kAllLanes, part, half);
      if (threadIdx.x == 0) warp_results[0].value = part;
    }
    __syncthreads();
    const double total = warp_results[0].value;
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
  __device__ static __forceinline__ Smallest warp_minimum(Smallest smallest) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const Smallest other{__shfl_xor_sync(kAllLanes, smallest.value, offset),
                           __shfl_xor_sync(kAllLanes, smallest.index, offset)};
      if (comes_before(other, smallest)) smallest = other;
    }
    return smallest;
  }
};

}  // namespace grpo_kernels
