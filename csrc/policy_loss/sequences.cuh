#pragma once

#include "common/cuda/pieces.cuh"
#include "policy_loss/count.cuh"
#include "policy_loss/quads.cuh"
#include "policy_loss/reduce.cuh"
#include "policy_loss/walk_tokens.cuh"

// The second launch for ratios of sequences (GSPO) without further settings: a block for each row, which it reads
// twice, the second time from a cache.
namespace grpo_kernels {
namespace {

// Sets the row's mean log ratio; returns its number of valid tokens.
__device__ double measure_row(PolicyTokens<float>& tokens, bool is_aligned, int count, const Team& team,
                              double* shared) {
  double log_ratio = 0;
  int own_valid = 0;
  const auto add_singles = [&](int first, int last) {
    for (int t = first + team.rank; t < last; t += team.size) {
      if (tokens.mask != nullptr && !tokens.mask[t]) continue;
      log_ratio += static_cast<double>(tokens.logprobs[t]) - tokens.old_logprobs[t];
      ++own_valid;
    }
  };
  Split<float> split(tokens.logprobs, count);
  if (!is_aligned) split.pieces = 0, split.head = split.tail = count;
  const int head = static_cast<int>(split.head), quads = static_cast<int>(split.pieces);
#pragma unroll 1
  for (int quad = team.rank; quad < quads; quad += team.size) {
    const int k = head + 4 * quad;
    // not only where the mask allows, so that nothing waits for it
    const float4 own = *reinterpret_cast<const float4*>(tokens.logprobs + k);
    const float4 old = *reinterpret_cast<const float4*>(tokens.old_logprobs + k);
    const uint32_t flags = tokens.mask == nullptr ? ~0u : *reinterpret_cast<const uint32_t*>(tokens.mask + k);
    const float gaps[4] = {own.x - old.x, own.y - old.y, own.z - old.z, own.w - old.w};
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool is_valid = (flags >> (8 * j) & 0xff) != 0;
      sum += is_valid ? gaps[j] : 0;
      own_valid += is_valid ? 1 : 0;
    }
    log_ratio += sum;
  }
  add_singles(0, head);
  add_singles(static_cast<int>(split.tail), count);
  log_ratio = team_sum(team, log_ratio, shared);
  const double valid = team_sum(team, static_cast<double>(own_valid), shared);
  tokens.row_log_ratio = static_cast<float>(log_ratio / (valid > 1 ? valid : 1));
  return valid;
}

// Adds up the sums of the block's warps, a thread for each field, and writes them.
__device__ void write_sums(const PolicySums& warp_sums, PolicySums* shared, PolicySums& to) {
  constexpr int kFields = sizeof(PolicySums) / sizeof(double);
  constexpr int kFirst = offsetof(PolicyTotal, part.sums) / sizeof(double);
  static_assert(kFields <= kWarp);
  const int field = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x) / kWarp;
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = warp_sums;
  __syncthreads();
  if (field < kFields) {
    const FieldReduction reduction(kFirst + field);
    double value = reduction.identity();
    for (int warp = 0; warp < warps; ++warp) {
      value = reduction(value, reinterpret_cast<const double*>(shared + warp)[field]);
    }
    reinterpret_cast<double*>(&to)[field] = value;
  }
  __syncthreads();
}

// As many blocks as there are registers for without spills.
__global__ void __launch_bounds__(kThreads, 3) sequences_kernel(const __grid_constant__ PolicyArrays<float> arrays) {
  __shared__ double shared[kMaxWarps];
  __shared__ __align__(16) unsigned char shared_sums[kMaxWarps * sizeof(PolicySums)];
  clear_after_rows(arrays);
  if (blockIdx.x == 0 && threadIdx.x == 0) arrays.done->blocks = 0;
  const PolicyBatch<float> in = batch_of(arrays);
  const Counts batch = batch_counts(arrays, shared);
  const Team team = block_team();
  const int64_t row = blockIdx.x;
  if (row >= in.rows) return;  // of no rows there is one block
  const int first = static_cast<int>(in.start(row)), count = static_cast<int>(in.length(row));
  PolicyTokens<float> tokens = tokens_of(in, row, first, Shares{}, arrays.gradient);
  const double valid = measure_row(tokens, arrays.is_aligned, count, team, shared);
  const Counts counts = counts_of_row(valid, valid);
  tokens.shares = in.shares(batch, counts);
  if (team.rank == 0) {
    arrays.parts[row].counts = counts;
    arrays.parts[row].misplaced_segments = 0;
  }
  double valid_of_warp;
  const PolicySums sums = walk_quads<WalkKind::kPlainSequence>(tokens, arrays, first, count, team, valid_of_warp);
  write_sums(sums, reinterpret_cast<PolicySums*>(shared_sums), arrays.parts[blockIdx.x].sums);
}

}  // namespace
}  // namespace grpo_kernels
