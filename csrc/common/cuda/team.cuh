#pragma once

// A team of threads that work together: `size` neighbouring lanes of a warp (a power of two), or the whole block. All
// threads of the block must reach every function here. Reductions run in a fixed order, so that results repeat bit by
// bit.
namespace grpo_kernels {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;  // 1,024 threads

struct Team {
  int rank, size;
  bool whole_block;
};

__device__ __forceinline__ Team warp_team() { return {static_cast<int>(threadIdx.x) % kWarp, kWarp, false}; }
__device__ __forceinline__ Team block_team() {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), true};
}

// Every thread gets the sum. `shared` holds kMaxWarps values and may be reused on return.
__device__ __forceinline__ double team_sum(const Team& team, double value, double* shared) {
  const int width = team.size < kWarp ? team.size : kWarp;
  for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  if (!team.whole_block) return value;
  const int warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  double total = 0;
  for (int warp = 0; warp < warps; ++warp) total += shared[warp];
  __syncthreads();
  return total;
}

__device__ __forceinline__ double team_max(const Team& team, double value, double* shared) {
  const int width = team.size < kWarp ? team.size : kWarp;
  for (int offset = width / 2; offset > 0; offset /= 2) value = fmax(value, __shfl_xor_sync(kAllLanes, value, offset));
  if (!team.whole_block) return value;
  const int warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  double top = shared[0];
  for (int warp = 1; warp < warps; ++warp) top = fmax(top, shared[warp]);
  __syncthreads();
  return top;
}

}  // namespace grpo_kernels
