#include <math.h>
#include <stdint.h>

#include <type_traits>

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
// Negative, and a multiple of 16 bytes: the copy of a piece that is not read must have an aligned address, too.
constexpr int64_t kNoRow = -16;

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
  static constexpr int kStages = kBands < 8 ? 4 : 3;  // chunks in shared memory; four of the widest are 128 KB
  static constexpr bool kIsAligned = kBands == 8;     // never launched for rows that are not
  static constexpr int kSharedBytes = kStages * kRows * kLinePieces * 16;
};

// The bands that a warp multiplies in a tile on the diagonal: its own by half of those that follow, cyclically, so that
// each pair of bands is one warp's and the warps share them evenly.
template <typename Shape>
struct Triangle {
  static constexpr bool kIsDiagonal = true;
  static constexpr int kRows = Shape::kSide, kFirstColumn = 0;
  static constexpr int kUp = 1, kAcross = Shape::kBands == 1 ? 1 : Shape::kBands / 2 + 1;
  const int warp = threadIdx.x / kWarp;

  __device__ __forceinline__ bool has(int j) const { return j < kAcross - 1 || j == 0 || warp < Shape::kBands / 2; }
  __device__ __forceinline__ int up(int) const { return warp; }
  __device__ __forceinline__ int across(int j) const { return (warp + j) % Shape::kBands; }
};

// The same in a tile above the diagonal, where the warps share the bands in rectangles. The larger these are, the fewer
// fragments are loaded for each product; four by four bands would take more than the 255 registers of a thread.
template <typename Shape>
struct Rectangle {
  static constexpr bool kIsDiagonal = false;
  static constexpr int kRows = 2 * Shape::kSide, kFirstColumn = Shape::kSide;
  static constexpr int kUp = Shape::kBands < 4 ? 1 : 2, kAcross = Shape::kBands / kUp;
  const int warp = threadIdx.x / kWarp;

  // In an order of its own, so that the first band up and the first across, whose norms it computes, are no other
  // warp's first.
  __device__ __forceinline__ bool has(int) const { return true; }
  __device__ __forceinline__ int up(int i) const { return warp / kUp * kUp + (warp + i) % kUp; }
  __device__ __forceinline__ int across(int j) const {
    return Shape::kBands + warp % kUp * kAcross + (warp / kUp + j) % kAcross;
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

// Starts to load a chunk of `kRows` rows; zeros where there is nothing.
template <typename T, int kRows, int kThreads>
__device__ __forceinline__ void load_chunk(const EmbeddingArrays<T>& in, const int64_t* rows, int chunk,
                                           bool is_aligned, Piece<T>* to) {
  constexpr int kRowsAtOnce = kThreads / kLinePieces, kCopies = kRows / kRowsAtOnce;
  const unsigned piece = threadIdx.x % kLinePieces, row = threadIdx.x / kLinePieces;
  const int64_t first = static_cast<int64_t>(chunk) * kChunk<T> + piece * Piece<T>::kItems;
  if (is_aligned) {
    const bool is_inside = first < in.depth;
    int64_t begins[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) begins[i] = rows[row + i * kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      // where rows come eight at a time, their pieces have the same places
      Piece<T>* const at = kRowsAtOnce % 8 == 0 ? to + place(row, piece) + i * kRowsAtOnce * kLinePieces
                                                : to + place(row + i * kRowsAtOnce, piece);
      copy_async(at, in.embeddings + begins[i] + first, begins[i] >= 0 && is_inside);
    }
    return;
  }
#pragma unroll 1
  for (unsigned i = row; i < kRows; i += kRowsAtOnce) {
    const int64_t begin = rows[i];
    T items[Piece<T>::kItems];
#pragma unroll
    for (int k = 0; k < Piece<T>::kItems; ++k) {
      items[k] = begin >= 0 && first + k < in.depth ? in.embeddings[begin + first + k] : T{};
    }
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
  __device__ __forceinline__ CompensatedSum choose(const CompensatedSum& first, const CompensatedSum& second) const {
    return {choose(first.sum, second.sum), choose(first.missing, second.missing)};
  }
};

// Adds a chunk's part of the squared norms of a band's rows g and g + 8, with the bits of the band's products with
// itself.
template <typename T>
__device__ __forceinline__ void add_norms(const HalfChunk<T> (&rows)[2], const DiagonalPlaces& places,
                                          CompensatedSum (&norms)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    Sums sums = {};
    sums[2 * n] = sums[2 * n + 1] = norms[n].missing;
    add_chunk(sums, rows, rows, n);
    norms[n].missing = places.choose(sums[2 * n], sums[2 * n + 1]);
    norms[n].carry();
  }
}

template <typename T, typename Shape, typename Part>
__device__ __forceinline__ void compute_tile(const EmbeddingArrays<T>& in, const Tile& tile, const int64_t* rows,
                                             bool is_aligned, Piece<T>* chunks) {
  const Part part;
  const DiagonalPlaces places;
  CompensatedSums products[Part::kAcross][Part::kUp][2];
  CompensatedSum up_norms[2], across_norms[2];
  constexpr int kStagePieces = Shape::kRows * kLinePieces;
  // one chunk of zeros without columns: a loop that runs at least once needs fewer registers
  const int chunk_count = max(1, static_cast<int>((in.depth + kChunk<T> - 1) / kChunk<T>));
  const BandPlaces<Side::kLeft, T> lefts;
  const BandPlaces<Side::kRight, T> rights;
  const auto load = [&](int chunk, int stage) {
    // without a branch, a chunk after the last is loaded as zeros
    if (Shape::kIsAligned || chunk < chunk_count) {
      load_chunk<T, Part::kRows, Shape::kThreads>(in, rows, chunk, Shape::kIsAligned || is_aligned,
                                                  chunks + stage * kStagePieces);
    }
    commit_copies();
  };
  for (int stage = 0; stage < Shape::kStages - 1; ++stage) load(stage, stage);
  int stage = 0;
  int chunk = 0;
#pragma unroll 1
  do {
    wait_for_copies<Shape::kStages - 2>();
    __syncthreads();  // all copies of this chunk have arrived, and the one before is no longer read
    const Piece<T>* const from = chunks + stage * kStagePieces;
    HalfChunk<T> a[Part::kUp][2];
#pragma unroll
    for (int i = 0; i < Part::kUp; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[i][half] = load_half(from + part.up(i) * kBandPieces, lefts, half);
      }
    }
    if constexpr (!Part::kIsDiagonal) add_norms(a[0], places, up_norms);
#pragma unroll
    for (int j = 0; j < Part::kAcross; ++j) {
      if (!part.has(j)) continue;
      const Piece<T>* const band = from + part.across(j) * kBandPieces;
      const HalfChunk<T> b[2] = {load_half(band, rights, 0), load_half(band, rights, 1)};
      if constexpr (!Part::kIsDiagonal) {
        if (j == 0) add_norms(b, places, across_norms);
      }
      // after the first fragments, so that the copies start while tensor cores work
      if (j == 0) load(chunk + Shape::kStages - 1, stage == 0 ? Shape::kStages - 1 : stage - 1);
#pragma unroll
      for (int i = 0; i < Part::kUp; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) products[j][i][n].add(a[i], b, n);
      }
    }
    stage = stage == Shape::kStages - 1 ? 0 : stage + 1;
  } while (++chunk < chunk_count);
  wait_for_copies<0>();
  __syncthreads();

  // in the memory of the chunks, which is no longer read
  const auto inverses = reinterpret_cast<double*>(chunks);
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  if (places.has_any) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (Part::kIsDiagonal) {
        const int row = part.warp * kBand + n * 8 + g;
        const double norm = places.choose(products[0][0][n][2 * n], products[0][0][n][2 * n + 1]).value();
        inverses[row] = inverse_if_used(rows[row], norm);
        write_status(in, tile.prompt, tile.up + row, rows[row] == kNoRow ? RowStatus::kMasked : status_of(norm));
      } else {
        const int row = part.up(0) * kBand + n * 8 + g;
        const int column = part.across(0) * kBand + n * 8 + g;
        inverses[row] = inverse_if_used(rows[row], up_norms[n].value());
        inverses[column] = inverse_if_used(rows[column], across_norms[n].value());
      }
    }
  }
  __syncthreads();
  const int size = static_cast<int>(in.prompts.size);
  float* const to = in.distances + tile.prompt * size * size;
#pragma unroll
  for (int j = 0; j < Part::kAcross; ++j) {
    const int begin_column = part.across(j) * kBand, begin_second = tile.across + begin_column - Part::kFirstColumn;
    if (!part.has(j) || begin_second >= size) continue;
#pragma unroll
    for (int k = 0; k < Part::kUp * 8; ++k) {
      const int n = k / 4 % 2, i = k % 4;
      const int row = part.up(k / 8) * kBand + i / 2 * 8 + g, column = begin_column + n * 8 + 2 * t + i % 2;
      const int first = tile.up + row, second = tile.across + column - Part::kFirstColumn;
      const double inverse = inverses[row], other = inverses[column];
      float distance = first == second ? 0 : cosine_distance(products[j][k / 8][n][i].value(), inverse, other);
      if (isnan(inverse * other)) distance = kAbsent;
      // a band's products with itself hold every pair twice
      if (first >= size || second >= size || (Part::kIsDiagonal && j == 0 && row > column)) continue;
      to[first * size + second] = distance;
      to[second * size + first] = distance;
    }
  }
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
  if (is_diagonal) {
    compute_tile<T, Shape, Triangle<Shape>>(in, tile, rows, is_aligned, chunks);
  } else if constexpr (!Shape::kIsOneTile) {
    compute_tile<T, Shape, Rectangle<Shape>>(in, tile, rows, is_aligned, chunks);
  }
}

template <typename T, typename Shape>
void launch_tiles(const EmbeddingArrays<T>& arrays, bool is_aligned, void* stream) {
  const int tiles = static_cast<int>((arrays.prompts.size + Shape::kSide - 1) / Shape::kSide);
  const int64_t blocks = arrays.prompts.count * tiles * (tiles + 1) / 2;
  launch(cosine_kernel<T, Shape>, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), Shape::kSharedBytes,
         stream, arrays, tiles, is_aligned);
}

}  // namespace

template <typename T>
void launch_pairwise_cosine(const EmbeddingArrays<T>& arrays, void* stream) {
  // asynchronous copies are of aligned pieces
  const bool is_aligned =
      arrays.depth % Piece<T>::kItems == 0 && reinterpret_cast<uintptr_t>(arrays.embeddings) % 16 == 0;
  // float32 numbers split into three take registers that tiles of 128 rows do not leave
  constexpr int kWidest = std::is_same_v<T, float> ? 4 : 8;
  using Wide = Shape<kWidest, false>;
  const int64_t size = arrays.prompts.size;
  const bool has_wide =
      shared_memory_limit() >= Wide::kSharedBytes + Wide::kRows * sizeof(int64_t) && (is_aligned || !Wide::kIsAligned);
  if (size <= 16) return launch_tiles<T, Shape<1, true>>(arrays, is_aligned, stream);
  if (size <= 32) return launch_tiles<T, Shape<2, true>>(arrays, is_aligned, stream);
  if (size <= 64) return launch_tiles<T, Shape<4, true>>(arrays, is_aligned, stream);
  if (!has_wide) return launch_tiles<T, Shape<2, false>>(arrays, is_aligned, stream);
  if (size <= Wide::kSide) return launch_tiles<T, Shape<kWidest, true>>(arrays, is_aligned, stream);
  launch_tiles<T, Wide>(arrays, is_aligned, stream);
}

template void launch_pairwise_cosine<float>(const EmbeddingArrays<float>&, void* stream);
template void launch_pairwise_cosine<Half>(const EmbeddingArrays<Half>&, void* stream);
template void launch_pairwise_cosine<BFloat16>(const EmbeddingArrays<BFloat16>&, void* stream);

}  // namespace grpo_kernels
