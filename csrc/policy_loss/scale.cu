#include <stdint.h>
#include <string.h>

#include "common/cuda/launch.h"
#include "common/cuda/pieces.cuh"
#include "common/cuda/to_float.cuh"
#include "policy_loss/cuda.h"

// Multiplies a gradient by the upstream gradient of the loss. Most trainers call loss.backward(), whose upstream
// gradient is 1; only the device knows that without waiting, and then leaves the gradient as it is.
namespace grpo_kernels {
namespace {

constexpr int kThreads = 256, kMaxBlocks = 2048;

__device__ __forceinline__ void multiply(double& item, double factor) { item *= factor; }
template <typename T>
__device__ __forceinline__ void multiply(T& item, float factor) {
  from_float(to_float(item) * factor, item);
}

template <typename T, typename Upstream>
__global__ void __launch_bounds__(kThreads) scale_kernel(T* gradient, int64_t count, const Upstream* upstream) {
  const Upstream factor = *upstream;
  if (factor == 1) return;
  const Split<T> split(gradient, count);
  Piece<T>* const pieces = reinterpret_cast<Piece<T>*>(gradient + split.head);
  const int64_t first = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t step = gridDim.x * static_cast<int64_t>(kThreads);
  for (int64_t p = first; p < split.pieces; p += step) {
    T items[Piece<T>::kItems];
    Piece<T> piece = pieces[p];
    memcpy(items, &piece, sizeof(piece));
#pragma unroll
    for (T& item : items) multiply(item, factor);
    memcpy(&piece, items, sizeof(piece));
    pieces[p] = piece;
  }
  if (first < split.head) multiply(gradient[first], factor);
  if (split.tail + first < count) multiply(gradient[split.tail + first], factor);
}

}  // namespace

template <typename T, typename Upstream>
void launch_scale(T* gradient, int64_t count, const Upstream* upstream, void* stream) {
  constexpr int64_t kBlockItems = kThreads * Piece<T>::kItems;
  const int64_t blocks = (count + kBlockItems - 1) / kBlockItems;
  const dim3 grid(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks));
  launch(scale_kernel<T, Upstream>, grid, dim3(kThreads), 0, stream, gradient, count, upstream);
}

template void launch_scale<double, double>(double*, int64_t, const double*, void*);
template void launch_scale<float, float>(float*, int64_t, const float*, void*);
template void launch_scale<Half, float>(Half*, int64_t, const float*, void*);
template void launch_scale<BFloat16, float>(BFloat16*, int64_t, const float*, void*);

}  // namespace grpo_kernels
