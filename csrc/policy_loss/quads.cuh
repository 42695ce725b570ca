#pragma once

#include "common/cuda/launch.h"
#include "common/cuda/pieces.cuh"
#include "common/cuda/team.cuh"
#include "policy_loss/cuda.h"

// The plain walks of PPO's loss and CISPO without limits beyond the clipping itself, four tokens a thread.
namespace grpo_kernels {
namespace {

__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Four neighbouring tokens of a lane.
struct TokenQuad {
  float logprobs[4], old_logprobs[4], ref_logprobs[4], advantages[4], gradient[4];
  bool is_valid[4];

  // Calls copy(array in memory, array here) for the values that the loss reads.
  template <typename Copy>
  __device__ __forceinline__ void for_each_array(const PolicyBatch<float>& in, float row_advantage, const Copy& copy) {
    copy(in.logprobs, logprobs);
    copy(in.old_logprobs, old_logprobs);
    if (in.ref_logprobs != nullptr) copy(in.ref_logprobs, ref_logprobs);
    if (!in.advantages_by_row) {
      copy(in.advantages, advantages);
    } else {
#pragma unroll
      for (float& advantage : advantages) advantage = row_advantage;
    }
  }

  // All four tokens are aligned, belong to the task and are valid.
  __device__ __forceinline__ void load_whole(const PolicyBatch<float>& in, float row_advantage, int k) {
    for_each_array(in, row_advantage, [&](const float* from, float (&to)[4]) {
      const float4 values = *reinterpret_cast<const float4*>(from + k);
      to[0] = values.x, to[1] = values.y, to[2] = values.z, to[3] = values.w;
    });
  }
  __device__ __forceinline__ void store_whole(float* to, int k) const {
    // a plain store would be merged with those of store_valid, into four narrow ones
    __stcg(reinterpret_cast<float4*>(to + k), make_float4(gradient[0], gradient[1], gradient[2], gradient[3]));
  }

  // Some may be none of these; is_valid tells which to read.
  __device__ __forceinline__ void load_valid(const PolicyBatch<float>& in, float row_advantage, int k) {
    for_each_array(in, row_advantage, [&](const float* from, float (&to)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[j] = is_valid[j] ? from[k + j] : 0;
    });
  }
  __device__ __forceinline__ void store_valid(float* to, int k, int first, int last) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (k + j >= first && k + j < last) to[k + j] = gradient[j];
    }
  }

  // Returns the number of valid tokens.
  __device__ __forceinline__ int load_mask(const bool* mask, int k, int first, int last, bool is_whole) {
    if (mask != nullptr && is_whole) {
      const uint32_t flags = *reinterpret_cast<const uint32_t*>(mask + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) is_valid[j] = (flags >> (8 * j) & 0xff) != 0;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) is_valid[j] = k + j >= first && k + j < last && (mask == nullptr || mask[k + j]);
    }
    return is_valid[0] + is_valid[1] + is_valid[2] + is_valid[3];
  }
};

// As walk_tokens, with the sums of each warp of the team and its number of valid tokens. Sums of lanes
// are added in float32: a thread has few enough tokens. The sums that are left out here are 0. Tokens are those from
// `first` on in the arrays of the batch, whose addresses take no registers.
template <WalkKind kKind>
__device__ PolicySums walk_quads(const PolicyTokens<float>& tokens, const PolicyArrays<float>& arrays, int first,
                                 int count, const Team& team, double& valid_tokens) {
  // out of the registers, of which the loop needs all
  __shared__ __align__(16) unsigned char shared_shares[kMaxWarps * sizeof(Shares)];
  Shares* const shares = reinterpret_cast<Shares*>(shared_shares);
  if (threadIdx.x % kWarp == 0) shares[threadIdx.x / kWarp] = tokens.shares;
  TokenQuad quad;
  PolicyTokens<float> own = tokens;
  own.logprobs = quad.logprobs;
  own.old_logprobs = quad.old_logprobs;
  own.ref_logprobs = tokens.ref_logprobs == nullptr ? nullptr : quad.ref_logprobs;
  own.advantages = quad.advantages;
  own.mask = quad.is_valid;
  own.gradient = quad.gradient;
  PolicyWalk<ScalarTermMath<float>, kKind> walk(own, arrays.batch.plan, arrays.coefficients.without_limits());
  const PolicyBatch<float>& in = arrays.batch;
  const bool is_aligned = arrays.is_aligned;
  const int last = first + count;
  float valid = 0;
  for (int k = first - (is_aligned ? first % 4 : 0) + 4 * team.rank; k < last; k += 4 * team.size) {
    const bool is_whole = is_aligned && k >= first && k + 4 <= last;
    const int valid_of_quad = quad.load_mask(in.mask, k, first, last, is_whole);
    valid += valid_of_quad;
    if (is_whole && valid_of_quad == 4) {
      quad.load_whole(in, tokens.row_advantage, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) walk.template step<true>(j, 1);
      quad.store_whole(arrays.gradient, k);
    } else if (is_whole && valid_of_quad == 0) {
      *reinterpret_cast<float4*>(arrays.gradient + k) = make_float4(0, 0, 0, 0);
    } else {
      quad.load_valid(in, tokens.row_advantage, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) walk.step(j, 1);
      quad.store_valid(arrays.gradient, k, first, last);
    }
  }
  __syncwarp();
  valid_tokens = warp_sum(valid);
  PolicySums sums;
  sums.policy_loss = warp_sum(walk.sums.policy_loss);
  sums.kl_loss = sums.kl_sum = warp_sum(walk.sums.kl_sum);
  sums.log_ratio_sum = warp_sum(walk.sums.log_ratio_sum);
  sums.ratio_sum = warp_sum(walk.sums.ratio_sum);
  sums.ratio_spread_sum = warp_sum(walk.sums.ratio_spread_sum);
  sums.low_clipped = warp_sum(walk.sums.low_clipped);
  sums.high_clipped = warp_sum(walk.sums.high_clipped);
  sums.dual_clipped = warp_sum(walk.sums.dual_clipped);
  // CISPO clips ratios outside on either side, whatever the sign of the advantage
  sums.clipped = kKind == WalkKind::kPlainCispo ? warp_sum(walk.sums.clipped) : sums.low_clipped + sums.high_clipped;
  float lowest = walk.extremes.ratio_min, highest = walk.extremes.ratio_max;
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    lowest = fminf(lowest, __shfl_xor_sync(kAllLanes, lowest, offset));
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, offset));
  }
  sums.ratio_min = lowest;
  sums.ratio_max = highest;
  sums.apply_shares(shares[threadIdx.x / kWarp]);
  return sums;
}

}  // namespace
}  // namespace grpo_kernels
