#include <math.h>
#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/team.cuh"
#include "common/cuda/to_float.cuh"
#include "token_logprobs/cuda.h"

// One block per row. Every thread sums its part of the row, eight logits at a time, relative to the largest logit so
// far; the parts are then merged in a fixed order. Rows are read in aligned pieces of 16 bytes, and one logit at a time
// before the first and behind the last of these.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kSmallThreads = 64;
constexpr int64_t kSmallColumns = 1024;
constexpr int64_t kMaxBlocks = 1 << 14;  // further rows take turns
constexpr int kChunk = 8;

using Math = ScalarMath<float>;

template <typename T>
struct __align__(16) Piece {
  static constexpr int kItems = 16 / sizeof(T);
  T items[kItems];
};

template <typename T>
__device__ __forceinline__ int64_t misalignment(const T* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % 16 / sizeof(T));
}

// Splits a row into `head` single logits, pieces of 16 bytes, and single logits from `tail` on.
template <typename T>
struct Split {
  int64_t head, pieces, tail;

  __device__ Split(const T* row, int64_t columns) {
    const int64_t offset = misalignment(row);
    head = offset == 0 ? 0 : Piece<T>::kItems - offset;
    if (head > columns) head = columns;
    pieces = (columns - head) / Piece<T>::kItems;
    tail = head + pieces * Piece<T>::kItems;
  }
};

template <typename T>
__device__ __forceinline__ LogitMap<float> row_map(const LogitArrays<T>& in, int64_t row) {
  const double temperature = in.temperatures == nullptr ? in.scaling.temperature : in.temperatures[row];
  return make_logit_map<float>(temperature, in.scaling.softcap, in.scaling.logit_scale);
}

template <bool kCapped, bool kSpread, int kCount>
__device__ __forceinline__ void add_logits(RowSoftmax<float>& sums, const float (&x)[kCount],
                                           const LogitMap<float>& map) {
  float z[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) z[k] = map_logit<Math, kCapped>(map, x[k]).z;
  float top = z[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) top = fmaxf(top, z[k]);
  sums.raise<Math>(top);
  float ties = 0, below = 0, spread = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const SoftmaxTerms<float> terms = softmax_terms<Math, kSpread>(z[k], sums.top);
    ties += terms.tie;
    below += terms.below;
    if constexpr (kSpread) spread -= terms.spread;
  }
  sums.ties += ties;
  sums.below += below;
  sums.spread += spread;
}

// Sums over the thread's part of a row.
template <bool kCapped, bool kSpread, typename T>
__device__ RowSoftmax<float> thread_sums(const T* row, int64_t columns, const LogitMap<float>& map) {
  constexpr int kPieces = kChunk / Piece<T>::kItems;
  RowSoftmax<float> sums;
  const Split<T> split(row, columns);
  const Piece<T>* pieces = reinterpret_cast<const Piece<T>*>(row + split.head);
  int64_t first = threadIdx.x;
  for (; first + (kPieces - 1) * blockDim.x < split.pieces; first += kPieces * blockDim.x) {
    float x[kChunk];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const Piece<T> piece = pieces[first + p * blockDim.x];
#pragma unroll
      for (int k = 0; k < Piece<T>::kItems; ++k) x[p * Piece<T>::kItems + k] = to_float(piece.items[k]);
    }
    add_logits<kCapped, kSpread>(sums, x, map);
  }
  for (; first < split.pieces; first += blockDim.x) {
    float x[Piece<T>::kItems];
    const Piece<T> piece = pieces[first];
#pragma unroll
    for (int k = 0; k < Piece<T>::kItems; ++k) x[k] = to_float(piece.items[k]);
    add_logits<kCapped, kSpread>(sums, x, map);
  }
  const int64_t single = threadIdx.x < split.head ? threadIdx.x : split.tail + threadIdx.x - split.head;
  if (single < columns) {
    const float x[1] = {to_float(row[single])};
    add_logits<kCapped, kSpread>(sums, x, map);
  }
  return sums;
}

__device__ __forceinline__ RowSoftmax<float> warp_merge(RowSoftmax<float> sums) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    RowSoftmax<float> other;
    other.top = __shfl_xor_sync(kAllLanes, sums.top, offset);
    other.ties = __shfl_xor_sync(kAllLanes, sums.ties, offset);
    other.below = __shfl_xor_sync(kAllLanes, sums.below, offset);
    other.spread = __shfl_xor_sync(kAllLanes, sums.spread, offset);
    sums.merge<Math>(other);
  }
  return sums;
}

// The first warp gets the sums of the whole block; all threads must call it.
__device__ __forceinline__ RowSoftmax<float> block_merge(RowSoftmax<float> sums, RowSoftmax<float>* shared) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  sums = warp_merge(sums);
  if (lane == 0) shared[warp] = sums;
  __syncthreads();
  if (warp == 0) sums = warp_merge(lane < warps ? shared[lane] : RowSoftmax<float>());
  __syncthreads();  // `shared` may be reused
  return sums;
}

template <bool kCapped, typename T>
__device__ RowResult result_of(const RowSoftmax<float>& sums, const T* row, int64_t columns, int64_t target,
                               const LogitMap<float>& map) {
  if (target < 0 || target >= columns) return {NAN, NAN, NAN};
  RowSoftmax<double> wide;
  wide.top = sums.top;
  wide.ties = sums.ties;
  wide.below = sums.below;
  wide.spread = sums.spread;
  return finish_row(wide, map_logit<Math, kCapped>(map, to_float(row[target])).z);
}

template <typename T, bool kCapped, bool kSpread>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ LogitArrays<T> in, const __grid_constant__ LogprobArrays out) {
  __shared__ __align__(16) unsigned char shared[kMaxWarps * sizeof(RowSoftmax<float>)];
  for (int64_t row = blockIdx.x; row < in.layout.rows; row += gridDim.x) {
    const int64_t target = in.targets[row];
    RowResult result{0, 0, 0};
    if (target != kIgnoredTarget) {
      const T* logits = in.logits + in.layout.offset(row);
      const LogitMap<float> map = row_map(in, row);
      const RowSoftmax<float> sums = block_merge(thread_sums<kCapped, kSpread>(logits, in.layout.columns, map),
                                                 reinterpret_cast<RowSoftmax<float>*>(shared));
      if (threadIdx.x == 0) result = result_of<kCapped>(sums, logits, in.layout.columns, target, map);
    }
    if (threadIdx.x == 0) {
      out.logprobs[row] = static_cast<float>(result.logprob);
      out.normalizer[row] = result.normalizer;
      if constexpr (kSpread) out.entropy[row] = static_cast<float>(result.entropy);
    }
  }
}

// The gradient of the target logit, NaN for a target out of range.
template <bool kCapped, typename T>
__device__ float target_logit_gradient(const T* row, int64_t columns, int64_t target, const LogitMap<float>& map,
                                       const RowGradient<float>& row_upstream) {
  if (target < 0 || target >= columns) return NAN;
  const MappedLogit<float> mapped = map_logit<Math, kCapped>(map, to_float(row[target]));
  return static_cast<float>(target_gradient(row_upstream, mapped.z)) * mapped.slope;
}

template <bool kCapped, bool kEntropy, typename T>
__device__ __forceinline__ void write_one(T logit, T& to, bool is_target, float own, const LogitMap<float>& map,
                                          const RowGradient<float>& row_upstream) {
  const MappedLogit<float> mapped = map_logit<Math, kCapped>(map, to_float(logit));
  const float other = other_gradient<Math, kEntropy>(row_upstream, mapped.z) * mapped.slope;
  from_float(is_target ? own : other, to);
}

template <typename T, bool kCapped, bool kEntropy>
__device__ void write_row(const T* row, T* to, int64_t columns, int64_t target, float own, const LogitMap<float>& map,
                          const RowGradient<float>& row_upstream) {
  Split<T> split(row, columns);
  if (misalignment(row) != misalignment(to)) split.head = columns, split.pieces = 0, split.tail = columns;
  const Piece<T>* pieces = reinterpret_cast<const Piece<T>*>(row + split.head);
  Piece<T>* written = reinterpret_cast<Piece<T>*>(to + split.head);
  for (int64_t p = threadIdx.x; p < split.pieces; p += blockDim.x) {
    Piece<T> piece = pieces[p];
    const int64_t column = split.head + p * Piece<T>::kItems;
#pragma unroll
    for (int k = 0; k < Piece<T>::kItems; ++k) {
      write_one<kCapped, kEntropy>(piece.items[k], piece.items[k], column + k == target, own, map, row_upstream);
    }
    written[p] = piece;
  }
  for (int64_t column = threadIdx.x; column < split.head; column += blockDim.x) {
    write_one<kCapped, kEntropy>(row[column], to[column], column == target, own, map, row_upstream);
  }
  for (int64_t column = split.tail + threadIdx.x; column < columns; column += blockDim.x) {
    write_one<kCapped, kEntropy>(row[column], to[column], column == target, own, map, row_upstream);
  }
}

template <typename T>
__device__ void clear_row(T* to, int64_t columns) {
  const Split<T> split(to, columns);
  Piece<T>* written = reinterpret_cast<Piece<T>*>(to + split.head);
  for (int64_t p = threadIdx.x; p < split.pieces; p += blockDim.x) written[p] = Piece<T>{};
  if (threadIdx.x < split.head) to[threadIdx.x] = T{};
  if (split.tail + threadIdx.x < columns) to[split.tail + threadIdx.x] = T{};
}

template <typename T, bool kCapped, bool kEntropy>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ LogitArrays<T> in, const __grid_constant__ GradientArrays<T> out) {
  __shared__ float shared_own;
  const int64_t columns = in.layout.columns;
  for (int64_t row = blockIdx.x; row < in.layout.rows; row += gridDim.x) {
    const int64_t target = in.targets[row];
    T* const to = out.gradient + out.layout.offset(row);
    const double grad_logprob = out.grad_logprobs == nullptr ? 0.0 : out.grad_logprobs[row];
    const double grad_entropy = kEntropy ? out.grad_entropy[row] : 0.0;
    const RowGradient<float> row_upstream(out.normalizer[row], grad_logprob, grad_entropy,
                                          kEntropy ? out.entropy[row] : 0.0);
    if (target == kIgnoredTarget || row_upstream.is_zero()) {
      clear_row(to, columns);
      continue;
    }
    const T* logits = in.logits + in.layout.offset(row);
    const LogitMap<float> map = row_map(in, row);
    if (threadIdx.x == 0) shared_own = target_logit_gradient<kCapped>(logits, columns, target, map, row_upstream);
    __syncthreads();  // the target is read before the gradient may overwrite it
    write_row<T, kCapped, kEntropy>(logits, to, columns, target, shared_own, map, row_upstream);
    __syncthreads();  // shared_own may be reused
  }
}

struct Shape {
  dim3 grid, block;

  explicit Shape(const LogitLayout& layout)
      : grid(static_cast<unsigned>(layout.rows < kMaxBlocks ? layout.rows : kMaxBlocks)),
        block(layout.columns <= kSmallColumns ? kSmallThreads : kThreads) {}
};

}  // namespace

template <typename T>
void launch_token_logprobs(const LogitArrays<T>& in, const LogprobArrays& out, void* stream) {
  const Shape shape(in.layout);
  const bool capped = in.scaling.softcap > 0, spread = out.entropy != nullptr;
  const auto kernel = capped ? (spread ? forward_kernel<T, true, true> : forward_kernel<T, true, false>)
                             : (spread ? forward_kernel<T, false, true> : forward_kernel<T, false, false>);
  launch(kernel, shape.grid, shape.block, 0, stream, in, out);
}

template <typename T>
void launch_token_logprobs_backward(const LogitArrays<T>& in, const GradientArrays<T>& out, void* stream) {
  const Shape shape(in.layout);
  const bool capped = in.scaling.softcap > 0, entropy = out.grad_entropy != nullptr;
  const auto kernel = capped ? (entropy ? backward_kernel<T, true, true> : backward_kernel<T, true, false>)
                             : (entropy ? backward_kernel<T, false, true> : backward_kernel<T, false, false>);
  launch(kernel, shape.grid, shape.block, 0, stream, in, out);
}

#define GRPO_INSTANTIATE(T)                                                                          \
  template void launch_token_logprobs<T>(const LogitArrays<T>&, const LogprobArrays&, void* stream); \
  template void launch_token_logprobs_backward<T>(const LogitArrays<T>&, const GradientArrays<T>&, void* stream);
GRPO_INSTANTIATE(float)
GRPO_INSTANTIATE(Half)
GRPO_INSTANTIATE(BFloat16)
#undef GRPO_INSTANTIATE

}  // namespace grpo_kernels
