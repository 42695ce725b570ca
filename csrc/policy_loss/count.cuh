#pragma once

#include "common/cuda/launch.h"
#include "common/cuda/pieces.cuh"
#include "common/cuda/team.cuh"
#include "policy_loss/cuda.h"
#include "policy_loss/segments.cuh"

// The first launch: tokens and rows, where the aggregation needs their number.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256;

// The batch, with the values that only the device knows.
template <typename T>
__device__ PolicyBatch<T> batch_of(const PolicyArrays<T>& arrays) {
  PolicyBatch<T> batch = arrays.batch;
  if (arrays.normalizers != nullptr) batch.normalizers.read(arrays.normalizers);
  return batch;
}

// Valid tokens among first, first + stride, ... below last.
template <typename T>
__device__ double count_valid(const PolicyBatch<T>& in, int64_t first, int64_t last, int64_t stride) {
  double tokens = 0;
  for (int64_t t = first; t < last; t += stride) tokens += in.is_valid(t) ? 1 : 0;
  return tokens;
}

// Any byte other than 0 is true.
__device__ __forceinline__ int count_true(const Piece<unsigned char>& piece) {
  int count = 0;
#pragma unroll
  for (uint32_t word : piece.words) count += __popc((((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) & 0x80808080);
  return count;
}

// Valid tokens of the thread's part of a row that has a mask alone, 16 at a time with four loads in flight.
__device__ double count_mask(const bool* mask, int64_t count, const Team& team) {
  constexpr int kBatch = 4;
  const Split<unsigned char> split(reinterpret_cast<const unsigned char*>(mask), count);
  const Piece<unsigned char>* const pieces = reinterpret_cast<const Piece<unsigned char>*>(mask + split.head);
  int tokens = 0;
  int64_t p = team.rank;
  for (; p + (kBatch - 1) * team.size < split.pieces; p += kBatch * team.size) {
    Piece<unsigned char> batch[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) batch[k] = pieces[p + k * team.size];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) tokens += count_true(batch[k]);
  }
  for (; p < split.pieces; p += team.size) tokens += count_true(pieces[p]);
  for (int64_t t = team.rank; t < split.head; t += team.size) tokens += mask[t] ? 1 : 0;
  for (int64_t t = split.tail + team.rank; t < count; t += team.size) tokens += mask[t] ? 1 : 0;
  return tokens;
}

// Counts over a whole row, for every thread of the team.
template <typename T>
__device__ Counts count_row(const PolicyBatch<T>& in, int64_t row, const Team& team, double* shared) {
  if (in.plan.by_segment()) return count_segments(in, row, team, shared);
  const int64_t first = in.start(row), count = in.length(row);
  double tokens = static_cast<double>(count);
  if (in.segments != nullptr) {
    tokens = team_sum(team, count_valid(in, first + team.rank, first + count, team.size), shared);
  } else if (in.mask != nullptr) {
    tokens = team_sum(team, count_mask(in.mask + first, count, team), shared);
  }
  const bool has_term = tokens > 0;
  return counts_of_row(tokens, in.plan.loss == Loss::kGeoMean ? has_term : tokens);
}

__device__ Counts team_counts(Counts counts, const Team& team, double* shared) {
  counts.rows = team_sum(team, counts.rows, shared);
  counts.active_rows = team_sum(team, counts.active_rows, shared);
  counts.tokens = team_sum(team, counts.tokens, shared);
  counts.terms = team_sum(team, counts.terms, shared);
  return counts;
}

// Counts of the rows of a block, each counted by a warp or by the whole block.
template <typename T>
__global__ void GRPO_BOUNDS(kThreads) count_kernel(const __grid_constant__ PolicyArrays<T> arrays, bool has_long_rows) {
  __shared__ double shared[kMaxWarps];
  const PolicyBatch<T> in = batch_of(arrays);
  const Team team = has_long_rows ? block_team() : warp_team();
  const int64_t teams = blockDim.x / team.size;
  Counts own;
  for (int64_t base = blockIdx.x * teams; base < in.rows; base += gridDim.x * teams) {
    // a team without a row counts the last one, as all threads must take part, and stores nothing
    const int64_t row = base + threadIdx.x / team.size;
    const bool has_row = row < in.rows;
    const Counts counts = count_row(in, has_row ? row : in.rows - 1, team, shared);
    if (!has_row || team.rank != 0) continue;
    arrays.row_counts[row] = counts;
    own.add(counts);
  }
  own = team_counts(own, block_team(), shared);
  if (threadIdx.x == 0) arrays.block_counts[blockIdx.x] = own;
}

unsigned blocks_for(int64_t items, int64_t per_block, int64_t max_blocks) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks < max_blocks ? blocks : max_blocks));
}

// Mean length of the rows, in tokens; a guess for packed ones, whose bounds the host does not know.
template <typename T>
int64_t mean_length(const PolicyBatch<T>& batch) {
  return batch.cu_seqlens == nullptr ? batch.width : batch.tokens / (batch.rows + 1) + 1;
}

// Fills arrays.row_counts and arrays.block_counts, where they are needed.
template <typename T>
void launch_counts(PolicyArrays<T>& arrays, void* stream) {
  if (arrays.row_counts == nullptr) return;
  const bool has_long_rows = mean_length(arrays.batch) > 4096;
  const dim3 grid(blocks_for(arrays.batch.rows, has_long_rows ? 1 : kThreads / kWarp, kCountBlocks));
  arrays.count_blocks = static_cast<int>(grid.x);
  launch(count_kernel<T>, grid, dim3(kThreads), 0, stream, arrays, has_long_rows);
}

// The counts of the batch, for every thread of the block.
template <typename T>
__device__ Counts batch_counts(const PolicyArrays<T>& arrays, double* shared) {
  Counts own;
  if (arrays.block_counts == nullptr) return own;
  for (int block = threadIdx.x; block < arrays.count_blocks; block += blockDim.x) own.add(arrays.block_counts[block]);
  return team_counts(own, block_team(), shared);
}

}  // namespace
}  // namespace grpo_kernels
