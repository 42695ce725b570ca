#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "common/cuda/to_float.cuh"
#include "similarity_groups/cuda.h"
#include "similarity_groups/row_products.cuh"

// One block per tile of a prompt's inner products, for tiles on and above the diagonal; one warp for each band of 16
// rows of a tile, which it multiplies with other bands.
//
// Equal rows have distance 0, and no distance depends on other rows or on where rows are: every sum adds the same
// products in the same order, whatever the tile, the warp and the lane, and norms are such sums, too, of a row with
// itself. That relies on mma.sync to compute all elements of its result alike and from their own row and column only,
// which is unverified on hardware.
namespace grpo_kernels {
namespace {

constexpr float kAbsent = INFINITY;
constexpr int64_t kNoRow = -1;

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

// Shape of the blocks: tiles of `kBands` bands a side. If no prompt is larger than that, all tiles are on the diagonal.
template <int kBands_, bool kIsOneTile_>
struct Shape {
  static constexpr int kBands = kBands_;
  static constexpr bool kIsOneTile = kIsOneTile_;
  static constexpr int kSide = kBands * kBand, kThreads = kBands * kWarp;
  static constexpr int kRows = kIsOneTile ? kSide : 2 * kSide;  // in shared memory: those of the tile, then its columns
  static constexpr int kStages = 4;                             // chunks in shared memory
  static constexpr int kSharedBytes = kStages * kRows * kLinePieces * 16;
  // Bands that a warp multiplies its own with. On the diagonal it is followed by half of the others, cyclically, so
  // that each pair of bands is one warp's and the warps share them evenly.
  static constexpr int kLeastPairs = kBands == 1 ? 1 : kBands / 2;
  static constexpr int kMostPairs = !kIsOneTile ? kBands : kBands == 1 ? 1 : kBands / 2 + 1;

  static __device__ __forceinline__ int pairs(int warp, bool is_diagonal) {
    if (!is_diagonal) return kBands;
    return kBands == 1 ? 1 : kBands / 2 + (warp < kBands / 2);
  }
};

template <typename T>
__device__ __forceinline__ void write_status(const EmbeddingArrays<T>& in, int64_t prompt, int position,
                                             RowStatus status) {
  if (position >= in.prompts.rows(prompt)) return;
  in.status[in.prompts.row(in.prompts.begin(prompt) + position)] = static_cast<uint8_t>(status);
}

// Begin of a prompt's row in the embeddings; kNoRow if it is masked or does not exist.
template <typename T>
__device__ __forceinline__ int64_t find_row(const EmbeddingArrays<T>& in, int64_t prompt, int position) {
  if (position >= in.prompts.rows(prompt)) return kNoRow;
  const int64_t row = in.prompts.row(in.prompts.begin(prompt) + position);
  return in.valid == nullptr || in.valid[row] ? row * in.depth : kNoRow;
}

// NaN for rows that have no distances.
__device__ __forceinline__ double inverse_if_used(int64_t row, double norm) {
  return row == kNoRow || status_of(norm) == RowStatus::kNotFinite ? NAN : inverse_length(norm);
}

// Starts to load a chunk of `count` rows; zeros where there is nothing.
template <typename T, int kThreads>
__device__ __forceinline__ void load_chunk(const EmbeddingArrays<T>& in, const int64_t* rows, int count, int chunk,
                                           bool is_aligned, Piece<T>* to) {
  const int piece = threadIdx.x % kLinePieces;
  const int64_t first = static_cast<int64_t>(chunk) * kChunk<T> + piece * Piece<T>::kItems;
  for (int i = threadIdx.x / kLinePieces; i < count; i += kThreads / kLinePieces) {
    const bool has_row = rows[i] != kNoRow;
    const T* const from = in.embeddings + (has_row ? rows[i] + first : 0);
    if (is_aligned) {
      copy_async(to + place(i, piece), from, has_row && first < in.depth);
      continue;
    }
    T items[Piece<T>::kItems];
#pragma unroll
    for (int k = 0; k < Piece<T>::kItems; ++k) items[k] = has_row && first + k < in.depth ? from[k] : T{};
    memcpy(&to[place(i, piece)], items, 16);
  }
}

// Which places this lane has on the diagonal of a band's products with itself: at most one in row g, in the first 8
// columns, and one in row g + 8, in the last 8; of the two neighbours there, the first or the second.
struct DiagonalPlaces {
  bool has_any, are_second;

  __device__ DiagonalPlaces() {
    const int lane = threadIdx.x % kWarp;
    has_any = lane % 4 == lane / 8;
    are_second = lane / 4 % 2 == 1;
  }
  __device__ __forceinline__ float choose(float first, float second) const { return are_second ? second : first; }
  __device__ __forceinline__ CompensatedSum choose(CompensatedSum first, CompensatedSum second) const {
    return {choose(first.sum, second.sum), choose(first.excess, second.excess)};
  }
};

// Adds a chunk's part of the squared norms of rows g and g + 8, from the products of a band with itself.
template <typename T>
__device__ __forceinline__ void add_norms(const ChunkProducts<T> (&sums)[2], const DiagonalPlaces& places,
                                          CompensatedSum (&norms)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) norms[n].add(places.choose(sums[n].total(2 * n), sums[n].total(2 * n + 1)));
}

template <typename T, typename Shape>
__global__ void GRPO_BOUNDS(Shape::kThreads)
    cosine_kernel(const __grid_constant__ EmbeddingArrays<T> in, int tiles, bool is_aligned) {
  GRPO_DYNAMIC_SHARED(Piece<T>, chunks);
  __shared__ int64_t rows[Shape::kRows];
  const Tile tile(blockIdx.x, tiles, Shape::kSide);
  const bool is_diagonal = Shape::kIsOneTile || tile.up == tile.across;
  const int count = is_diagonal ? Shape::kSide : Shape::kRows;
  for (int i = threadIdx.x; i < count; i += Shape::kThreads) {
    rows[i] = find_row(in, tile.prompt, i < Shape::kSide ? tile.up + i : tile.across + i - Shape::kSide);
  }
  __syncthreads();

  const int warp = threadIdx.x / kWarp, pairs = Shape::pairs(warp, is_diagonal);
  const int first_band = is_diagonal ? 0 : Shape::kBands;
  const DiagonalPlaces places;
  CompensatedSum products[Shape::kMostPairs][2][4], up_norms[2], across_norms[2];
  const int chunk_count = static_cast<int>((in.depth + kChunk<T> - 1) / kChunk<T>);
  const auto load = [&](int chunk) {
    if (chunk < chunk_count) {
      Piece<T>* const to = chunks + chunk % Shape::kStages * Shape::kRows * kLinePieces;
      load_chunk<T, Shape::kThreads>(in, rows, count, chunk, is_aligned, to);
    }
    commit_copies();
  };
  for (int stage = 0; stage < Shape::kStages - 1; ++stage) load(stage);
  for (int chunk = 0; chunk < chunk_count; ++chunk) {
    wait_for_copies<Shape::kStages - 2>();
    __syncthreads();  // all copies of this chunk have arrived, and the one before is no longer read
    load(chunk + Shape::kStages - 1);
    const Piece<T>* const from = chunks + chunk % Shape::kStages * Shape::kRows * kLinePieces;
    const HalfChunk<T> a[2] = {load_half<Side::kLeft>(from, warp, 0), load_half<Side::kLeft>(from, warp, 1)};
    if (!is_diagonal) {
      ChunkProducts<T> up[2], across[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HalfChunk<T> b = load_half<Side::kLeft>(from, Shape::kBands + warp, half);
#pragma unroll
        for (int n = 0; n < 2; ++n) up[n].add(a[half], a[half], n), across[n].add(b, b, n);
      }
      add_norms(up, places, up_norms);
      add_norms(across, places, across_norms);
    }
#pragma unroll
    for (int j = 0; j < Shape::kMostPairs; ++j) {
      if (j >= Shape::kLeastPairs && j >= pairs) continue;
      const int band = first_band + (warp + j) % Shape::kBands;
      ChunkProducts<T> sums[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const HalfChunk<T> b = load_half<Side::kRight>(from, band, half);
#pragma unroll
        for (int n = 0; n < 2; ++n) sums[n].add(a[half], b, n);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) products[j][i / 4][i % 4].add(sums[i / 4].total(i % 4));
    }
  }
  __syncthreads();

  // in the memory of the chunks, which is no longer read
  const auto inverses = reinterpret_cast<double*>(chunks);
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  if (places.has_any) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int row = warp * kBand + n * 8 + g, column = Shape::kSide + row;
      if (is_diagonal) {
        const double norm = places.choose(products[0][n][2 * n], products[0][n][2 * n + 1]).value();
        inverses[row] = inverse_if_used(rows[row], norm);
        write_status(in, tile.prompt, tile.up + row, rows[row] == kNoRow ? RowStatus::kMasked : status_of(norm));
      } else {
        inverses[row] = inverse_if_used(rows[row], up_norms[n].value());
        inverses[column] = inverse_if_used(rows[column], across_norms[n].value());
      }
    }
  }
  __syncthreads();
  const int size = static_cast<int>(in.prompts.size);
  float* const to = in.distances + tile.prompt * size * size;
#pragma unroll
  for (int j = 0; j < Shape::kMostPairs; ++j) {
    if (j >= Shape::kLeastPairs && j >= pairs) continue;
    const int band = (warp + j) % Shape::kBands;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp * kBand + i / 2 * 8 + g, column = band * kBand + n * 8 + 2 * t + i % 2;
        const int first = tile.up + row, second = tile.across + column;
        // a band's products with itself hold every pair twice
        if (first >= size || second >= size || (is_diagonal && j == 0 && row > column)) continue;
        const double inverse = inverses[row], other = inverses[first_band * kBand + column];
        float distance = first == second ? 0 : cosine_distance(products[j][n][i].value(), inverse, other);
        if (isnan(inverse) || isnan(other)) distance = kAbsent;
        to[first * size + second] = distance;
        to[second * size + first] = distance;
      }
    }
  }
}

template <typename T, typename Shape>
void launch_tiles(const EmbeddingArrays<T>& arrays, void* stream) {
  const int tiles = static_cast<int>((arrays.prompts.size + Shape::kSide - 1) / Shape::kSide);
  const int64_t blocks = arrays.prompts.count * tiles * (tiles + 1) / 2;
  // asynchronous copies are of aligned pieces
  const bool is_aligned =
      arrays.depth % Piece<T>::kItems == 0 && reinterpret_cast<uintptr_t>(arrays.embeddings) % 16 == 0;
  launch(cosine_kernel<T, Shape>, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), Shape::kSharedBytes,
         stream, arrays, tiles, is_aligned);
}

}  // namespace

template <typename T>
void launch_pairwise_cosine(const EmbeddingArrays<T>& arrays, void* stream) {
  // tiles of 128 rows would load every row half as often, but need more than the 255 registers of a thread
  using Wide = Shape<4, false>;
  const int64_t size = arrays.prompts.size;
  if (size <= 16) return launch_tiles<T, Shape<1, true>>(arrays, stream);
  if (size <= 32) return launch_tiles<T, Shape<2, true>>(arrays, stream);
  if (size <= 64) return launch_tiles<T, Shape<4, true>>(arrays, stream);
  if (shared_memory_limit() < Wide::kSharedBytes) return launch_tiles<T, Shape<2, false>>(arrays, stream);
  launch_tiles<T, Wide>(arrays, stream);
}

template void launch_pairwise_cosine<float>(const EmbeddingArrays<float>&, void* stream);
template void launch_pairwise_cosine<Half>(const EmbeddingArrays<Half>&, void* stream);
template void launch_pairwise_cosine<BFloat16>(const EmbeddingArrays<BFloat16>&, void* stream);

}  // namespace grpo_kernels
