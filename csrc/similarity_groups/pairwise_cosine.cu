#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "common/cuda/to_float.cuh"
#include "similarity_groups/cuda.h"

// One block per tile of a prompt's inner products, for tiles on and above the diagonal. The order of additions does not
// depend on the position of the rows: chunks of kChunk products in float32, and the chunks in float64. Hence equal rows
// have bitwise equal products, with themselves and with each other, and distance 0.
namespace grpo_kernels {
namespace {

constexpr int kSide = 16;  // a block has kSide x kSide threads
constexpr int kThreads = kSide * kSide;
constexpr int kChunk = 32;
constexpr float kAbsent = INFINITY;

struct TileRow {
  int64_t row;  // -1: none, or masked
  RowStatus status;
  double norm;
};

// The tile of a block: its prompt, and the positions of its first row and first column there.
struct Tile {
  int64_t prompt;
  int up, across;

  __device__ Tile(int64_t block, int tiles, int side) {
    const int pairs = tiles * (tiles + 1) / 2;
    prompt = block / pairs;
    int pair = static_cast<int>(block % pairs);
    int first = 0;
    while (pair >= tiles - first) pair -= tiles - first++;
    up = first * side;
    across = (first + pair) * side;
  }
};

template <typename T, int kTile>
__device__ void load_chunk(const EmbeddingArrays<T>& in, const TileRow* rows, int64_t depth, float (*to)[kChunk + 1]) {
  for (int i = threadIdx.x / kChunk; i < kTile; i += kThreads / kChunk) {
    const int64_t d = depth + threadIdx.x % kChunk;
    const bool is_inside = rows[i].row >= 0 && d < in.depth;
    to[i][threadIdx.x % kChunk] = is_inside ? to_float(in.embeddings[rows[i].row * in.depth + d]) : 0;
  }
}

template <typename T, int kTile>
__device__ void find_rows(const EmbeddingArrays<T>& in, int64_t prompt, int first, TileRow* rows) {
  if (threadIdx.x >= kTile) return;
  const int position = first + static_cast<int>(threadIdx.x);
  TileRow tile_row{-1, RowStatus::kMasked, 0};
  if (position < in.prompts.rows(prompt)) {
    const int64_t row = in.prompts.row(in.prompts.begin(prompt) + position);
    if (in.valid == nullptr || in.valid[row]) tile_row = {row, RowStatus::kInUse, 0};
  }
  rows[threadIdx.x] = tile_row;
}

__device__ __forceinline__ bool is_used(const TileRow& row) {
  return row.row >= 0 && row.status != RowStatus::kNotFinite;
}

template <typename T>
__device__ void write_status(const EmbeddingArrays<T>& in, const Tile& tile, const TileRow* rows, int side) {
  const int position = tile.up + static_cast<int>(threadIdx.x);
  if (tile.up != tile.across || threadIdx.x >= side || position >= in.prompts.rows(tile.prompt)) return;
  const int64_t row = in.prompts.row(in.prompts.begin(tile.prompt) + position);
  in.status[row] = static_cast<uint8_t>(rows[threadIdx.x].status);
}

template <typename T, int kTile>
__global__ void __launch_bounds__(kThreads, 2) cosine_kernel(const __grid_constant__ EmbeddingArrays<T> in, int tiles) {
  constexpr int kEach = kTile / kSide;
  __shared__ float up[kTile][kChunk + 1], across[kTile][kChunk + 1];
  __shared__ TileRow up_rows[kTile], across_rows[kTile];
  const Tile tile(blockIdx.x, tiles, kTile);
  find_rows<T, kTile>(in, tile.prompt, tile.up, up_rows);
  find_rows<T, kTile>(in, tile.prompt, tile.across, across_rows);
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
  // one thread per row computes its squared norm, in the same order as an inner product
  const bool sums_norm = threadIdx.x < 2 * kTile, is_across = threadIdx.x >= kTile;
  const int own = threadIdx.x % kTile;
  double products[kEach][kEach] = {}, norm = 0;
  for (int64_t depth = 0; depth < in.depth; depth += kChunk) {
    __syncthreads();
    load_chunk<T, kTile>(in, up_rows, depth, up);
    load_chunk<T, kTile>(in, across_rows, depth, across);
    __syncthreads();
    float sums[kEach][kEach] = {}, chunk_norm = 0;
#pragma unroll
    for (int d = 0; d < kChunk; ++d) {
      float a[kEach], b[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) a[e] = up[y + e * kSide][d], b[e] = across[x + e * kSide][d];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
      if (sums_norm) {
        const float value = is_across ? across[own][d] : up[own][d];
        chunk_norm = fmaf(value, value, chunk_norm);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) products[i][j] += sums[i][j];
    }
    norm += chunk_norm;
  }
  if (sums_norm) {
    TileRow& row = is_across ? across_rows[own] : up_rows[own];
    row.norm = norm;
    if (row.row >= 0) row.status = status_of(norm);
  }
  __syncthreads();
  write_status(in, tile, up_rows, kTile);
  const int size = static_cast<int>(in.prompts.size);
  float* const to = in.distances + tile.prompt * size * size;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int tile_y = y + i * kSide, tile_x = x + j * kSide;
      const int first = tile.up + tile_y, second = tile.across + tile_x;
      // pairs below the diagonal belong to another thread, with the same bits
      if (first > second || second >= size) continue;
      const TileRow &a = up_rows[tile_y], &b = across_rows[tile_x];
      const bool has_distance = is_used(a) && is_used(b);
      const float distance = first == second ? 0 : cosine_distance(products[i][j], a.norm, b.norm);
      to[static_cast<int64_t>(first) * size + second] = has_distance ? distance : kAbsent;
      to[static_cast<int64_t>(second) * size + first] = has_distance ? distance : kAbsent;
    }
  }
}

template <typename T, int kTile>
void launch_tiles(const EmbeddingArrays<T>& arrays, void* stream) {
  const int tiles = static_cast<int>((arrays.prompts.size + kTile - 1) / kTile);
  const int64_t blocks = arrays.prompts.count * tiles * (tiles + 1) / 2;
  launch(cosine_kernel<T, kTile>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, arrays, tiles);
}

}  // namespace

template <typename T>
void launch_pairwise_cosine(const EmbeddingArrays<T>& arrays, void* stream) {
  const int64_t size = arrays.prompts.size;
  if (size <= 16) return launch_tiles<T, 16>(arrays, stream);
  if (size <= 32) return launch_tiles<T, 32>(arrays, stream);
  launch_tiles<T, 64>(arrays, stream);
}

template void launch_pairwise_cosine<float>(const EmbeddingArrays<float>&, void* stream);
template void launch_pairwise_cosine<Half>(const EmbeddingArrays<Half>&, void* stream);
template void launch_pairwise_cosine<BFloat16>(const EmbeddingArrays<BFloat16>&, void* stream);

}  // namespace grpo_kernels
