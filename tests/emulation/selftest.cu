// Kernels that test the emulator: correct ones, and ones with a planted mistake that it must expose. nvcc compiles the
// file, too.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/launch.h"
#include "common/cuda/mma.cuh"

namespace {

using grpo_kernels::launch;

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
__constant__ int kWeights[4] = {1, 10, 100, 1000};

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

// Shared memory in a function that is not a kernel, and in a template of one.
template <typename T, bool kBarrier>
__device__ T block_sum(T value) {
  __shared__ T partial[32];
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  value = warp_sum(value);
  if (lane == 0) partial[warp] = value;
  if constexpr (kBarrier) __syncthreads();
  return warp_sum(lane < blockDim.x / 32 ? partial[lane] : T(0));
}

template <typename T, bool kBarrier>
__global__ void __launch_bounds__(1024) row_sums(const T* __restrict__ rows, T* __restrict__ sums, int columns) {
  T sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += rows[int64_t{blockIdx.x} * columns + i];
  sum = block_sum<T, kBarrier>(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <bool kSyncwarp>
__global__ void reverse_warps(int* values) {
  __shared__ int copy[256];
  copy[threadIdx.x] = values[threadIdx.x];
  if (kSyncwarp) __syncwarp();
  values[threadIdx.x] = copy[threadIdx.x ^ 31];
}

// Without the second barrier, the next round overwrites values that other threads have yet to read.
template <bool kSecondBarrier>
__global__ void rotate_rounds(int* values, int rounds) {
  GRPO_DYNAMIC_SHARED(int, copy);
  const unsigned next = (threadIdx.x + 1) % blockDim.x;
  int value = values[threadIdx.x];
  for (int round = 0; round < rounds; ++round) {
    copy[threadIdx.x] = value;
    __syncthreads();
    value = copy[next];
    if (kSecondBarrier) __syncthreads();
  }
  values[threadIdx.x] = value;
}

__global__ void reverse_dynamic(double* values, int count) {
  GRPO_DYNAMIC_SHARED(double, copy);
  for (int i = threadIdx.x; i < count; i += blockDim.x) copy[i] = values[i];
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] = copy[count - 1 - i];
}

__global__ void histogram(const int* __restrict__ bins, int count, int* counts, float* total, int* largest) {
  const int stride = blockDim.x * gridDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    const int bin = __ldg(bins + i);
    atomicAdd(&counts[bin], 1);
    atomicAdd(total, 1.0f);
    atomicMax(largest, bin);
  }
}

__global__ void record_order(unsigned* next, unsigned* threads) {
  threads[atomicAdd(next, 1u)] = blockIdx.x * blockDim.x + threadIdx.x;
}

// A thread polls for one of another warp, which some schedules would never run on their own.
__global__ void hand_over(int* flag, int* seen) {
  if (threadIdx.x == blockDim.x - 1) atomicExch(flag, 42);
  if (threadIdx.x == 0) {
    while (atomicAdd(flag, 0) == 0) __nanosleep(20);
    *seen = *flag;
  }
}

__global__ void votes(const int* values, unsigned* out) {
  const int value = values[threadIdx.x];
  unsigned* const mine = out + threadIdx.x * 12;
  mine[0] = __ballot_sync(kAllLanes, value > 3);
  mine[1] = __match_any_sync(kAllLanes, value);
  mine[2] = __reduce_add_sync(kAllLanes, static_cast<unsigned>(value));
  mine[3] = static_cast<unsigned>(__reduce_min_sync(kAllLanes, value - 4));
  mine[4] = __reduce_max_sync(kAllLanes, static_cast<unsigned>(value - 4));
  mine[5] = __reduce_or_sync(kAllLanes, 1u << value);
  mine[6] = static_cast<unsigned>(__any_sync(kAllLanes, value == 7) + 2 * __all_sync(kAllLanes, value < 8));
  mine[7] = __popc(mine[0]) + 100 * __ffs(static_cast<int>(mine[1])) + 10000 * __clz(value);
  // The halves of a warp in different branches, each a group of its own.
  if (threadIdx.x % 32 < 16) {
    mine[8] = __ballot_sync(0x0000FFFFu, value & 1);
  } else {
    mine[8] = __reduce_xor_sync(0xFFFF0000u, 1u << value);
  }
  mine[9] = static_cast<unsigned>(__syncthreads_count(value > 3));
  mine[10] = static_cast<unsigned>(__syncthreads_or(value == 7) + 2 * __syncthreads_and(value < 7));
  mine[11] = static_cast<unsigned>(kWeights[value % 4]);
}

__global__ void shuffle_segments(const double* values, double* out) {
  const double value = values[threadIdx.x];
  double* const mine = out + threadIdx.x * 4;
  mine[0] = __shfl_sync(kAllLanes, value, 3, 8);
  mine[1] = __shfl_up_sync(kAllLanes, value, 2, 8);
  mine[2] = __shfl_down_sync(kAllLanes, value, 2, 8);
  mine[3] = __shfl_xor_sync(kAllLanes, value, 5, 8);
}

// Threads that return early take no part in later barriers and warp operations.
__global__ void early_return(int* out, int count) {
  if (static_cast<int>(threadIdx.x) >= count) return;
  __syncthreads();
  out[threadIdx.x] = __popc(__ballot_sync(kAllLanes, 1));
}

// Counts the block's shared words that are not poisoned when it starts, and overwrites all of them.
template <typename T>
__device__ int unpoisoned_in_template() {
  __shared__ T words[64];
  const int is_unpoisoned = words[threadIdx.x] != T(-1);
  words[threadIdx.x] = 0;
  return is_unpoisoned;
}
__global__ void count_unpoisoned(int* count) {
  __shared__ unsigned words[64];
  GRPO_DYNAMIC_SHARED(unsigned, dynamic);
  const int mine = (words[threadIdx.x] != ~0u) + unpoisoned_in_template<unsigned>() +
                   unpoisoned_in_template<uint64_t>() + 1000 * (dynamic[threadIdx.x] != ~0u);
  words[threadIdx.x] = dynamic[threadIdx.x] = 0;
  atomicAdd(count, mine);
}

__global__ void write_global(float* values, int index) { values[index + threadIdx.x] = 1.0f; }

__global__ void write_static(float* out, int index) {
  __shared__ float values[32];
  values[index + threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

template <typename T>
__global__ void write_static_template(T* out, int index) {
  __shared__ T values[32];
  values[index + threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void write_dynamic(float* out, int index) {
  GRPO_DYNAMIC_SHARED(float, values);
  values[index + threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

// Adds the products of 16 rows of `a` with 16 rows of `b`, of 16 numbers each, to the 16 x 16 sums. The fragments of
// `a` are read word by word, and those of `b` by ldmatrix from shared memory.
template <typename T>
__global__ void multiply_rows(const T* a, const T* b, float* sums) {
  __shared__ __align__(16) T rows[16 * 16];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 8; ++i) rows[lane * 8 + i] = b[lane * 8 + i];
  __syncwarp();
  grpo_kernels::Fragment left, right;
  for (int i = 0; i < 4; ++i) memcpy(&left.words[i], a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8, 4);
  const int matrix = lane / 8;
  grpo_kernels::load_matrices(rows + (matrix % 2 * 8 + lane % 8) * 16 + matrix / 2 * 8, right.words);
  for (int half = 0; half < 2; ++half) {
    float* const to = sums + g * 16 + half * 8 + 2 * t;
    grpo_kernels::Sums mine = {to[0], to[1], to[128], to[129]};
    grpo_kernels::add_products(mine, left, right, half, T{});
    to[0] = mine[0], to[1] = mine[1], to[128] = mine[2], to[129] = mine[3];
  }
}

// Copies 64 pieces in two groups, waits until at most `kGroups` are under way, and reads the first one.
template <int kGroups>
__global__ void copy_pieces(const float* from, float* to, int count) {
  using Piece = grpo_kernels::Piece<float>;
  __shared__ Piece pieces[64];
  for (int group = 0; group < 2; ++group) {
    const int i = group * 32 + threadIdx.x;
    grpo_kernels::copy_async(pieces + i, from + i * 4, i < count);
    grpo_kernels::commit_copies();
  }
  grpo_kernels::wait_for_copies<kGroups>();
  __syncthreads();
  const Piece piece = pieces[31 - threadIdx.x];
  memcpy(to + threadIdx.x * 4, &piece, 16);
}

__global__ void misuse(int kind, int* out) {
  const unsigned lane = threadIdx.x % 32;
  int value = static_cast<int>(lane);
  switch (kind) {
    case 0:  // Half a warp waits for the other half, which waits for the block.
      if (lane < 16) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      break;
    case 1:  // Two barriers in the source for one in the program.
      if (threadIdx.y == 0) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    case 2:
      value = __shfl_sync(0x0000FFFFu, value, 0);
      break;
    case 3:
      if (lane < 16) {
        value = __shfl_sync(kAllLanes, value, 0);
      } else {
        value = static_cast<int>(__ballot_sync(kAllLanes, value));
      }
      break;
    case 4:
      if (lane < 16) value = __shfl_sync(0x0000FFFFu, value, 20);
      break;
    case 5:
      if (lane == 20) return;
      value = __shfl_sync(kAllLanes, value, 20);
      break;
    case 6:
      value = threadIdx.y == 0 ? __syncthreads_or(value) : __syncthreads_and(value);
      break;
    case 7:
      value = __shfl_sync(kAllLanes, value, 0, 5);
      break;
    case 8: {
      if (lane == 20) return;
      grpo_kernels::Sums sums = {};
      const grpo_kernels::Fragment rows = {};
      grpo_kernels::add_products(sums, rows, rows, 0, grpo_kernels::Half{});
      value = static_cast<int>(sums[0]);
      break;
    }
    case 9: {  // The copy may arrive behind the zero.
      __shared__ grpo_kernels::Piece<float> pieces[32];
      grpo_kernels::copy_async(pieces + lane, static_cast<const float*>(nullptr), false);
      grpo_kernels::commit_copies();
      pieces[lane] = {};
      break;
    }
    default:
      break;
  }
  out[threadIdx.x] = value;
}

std::string last_error;

// Host state next to the kernels' shared memory, which launches must not change.
thread_local int host_value = 7;

// For callers that cannot catch: 0, or 1 with the message in selftest_error().
template <typename Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {

const char* selftest_error() { return last_error.c_str(); }

int selftest_next_host_value() { return host_value++; }

int selftest_row_sums(const float* rows, float* sums, int count, int columns, int block, int barrier) {
  return guarded([&] {
    launch(barrier ? row_sums<float, true> : row_sums<float, false>, count, block, 0, nullptr, rows, sums, columns);
  });
}
int selftest_row_sums_double(const double* rows, double* sums, int count, int columns, int block) {
  return guarded([&] { launch(row_sums<double, true>, count, block, 0, nullptr, rows, sums, columns); });
}
int selftest_reverse_warps(int* values, int syncwarp) {
  return guarded([&] { launch(syncwarp ? reverse_warps<true> : reverse_warps<false>, 1, 256, 0, nullptr, values); });
}
int selftest_rotate_rounds(int* values, int block, int rounds, int second_barrier) {
  return guarded([&] {
    launch(second_barrier ? rotate_rounds<true> : rotate_rounds<false>, 1, block, block * sizeof(int), nullptr, values,
           rounds);
  });
}
int selftest_reverse_dynamic(double* values, int count) {
  return guarded([&] { launch(reverse_dynamic, 1, 96, count * sizeof(double), nullptr, values, count); });
}
int selftest_histogram(const int* bins, int count, int* counts, float* total, int* largest) {
  return guarded([&] { launch(histogram, 3, 64, 0, nullptr, bins, count, counts, total, largest); });
}
int selftest_record_order(unsigned* next, unsigned* threads, int grid, int block) {
  return guarded([&] { launch(record_order, grid, block, 0, nullptr, next, threads); });
}
int selftest_hand_over(int* flag, int* seen) {
  return guarded([&] { launch(hand_over, 1, 128, 0, nullptr, flag, seen); });
}
int selftest_votes(const int* values, unsigned* out) {
  return guarded([&] { launch(votes, 1, 64, 0, nullptr, values, out); });
}
int selftest_shuffle_segments(const double* values, double* out) {
  return guarded([&] { launch(shuffle_segments, 1, 32, 0, nullptr, values, out); });
}
int selftest_early_return(int* out, int count) {
  return guarded([&] { launch(early_return, 1, 128, 0, nullptr, out, count); });
}
int selftest_count_unpoisoned(int* count, int blocks) {
  return guarded([&] { launch(count_unpoisoned, blocks, 64, 64 * sizeof(unsigned), nullptr, count); });
}
int selftest_multiply_rows(const void* a, const void* b, float* sums, int is_half) {
  using grpo_kernels::BFloat16, grpo_kernels::Half;
  return guarded([&] {
    if (is_half) {
      launch(multiply_rows<Half>, 1, 32, 0, nullptr, static_cast<const Half*>(a), static_cast<const Half*>(b), sums);
    } else {
      launch(multiply_rows<BFloat16>, 1, 32, 0, nullptr, static_cast<const BFloat16*>(a),
             static_cast<const BFloat16*>(b), sums);
    }
  });
}
int selftest_copy_pieces(const float* from, float* to, int count, int groups) {
  const auto kernel = groups == 0 ? copy_pieces<0> : groups == 1 ? copy_pieces<1> : copy_pieces<2>;
  return guarded([&] { launch(kernel, 1, 32, 0, nullptr, from, to, count); });
}
int selftest_misuse(int kind, int* out) {
  return guarded([&] { launch(misuse, dim3(1, 2), dim3(32, 2), 0, nullptr, kind, out); });
}
int selftest_geometry(int grid, int block, int64_t shared_bytes) {
  return guarded([&] { launch(write_global, grid, block, shared_bytes, nullptr, nullptr, 0); });
}

// Writes 32 values per block from `index` on: 0 is correct, 1 writes one element past the end.
int selftest_write(const char* memory, int index, float* values) {
  const auto is = [memory](const char* name) { return std::strcmp(memory, name) == 0; };
  return guarded([&] {
    if (is("global")) launch(write_global, 2, 32, 0, nullptr, values, index);
    if (is("static")) launch(write_static, 2, 32, 0, nullptr, values, index);
    if (is("template")) launch(write_static_template<float>, 2, 32, 0, nullptr, values, index);
    if (is("dynamic")) launch(write_dynamic, 2, 32, 32 * sizeof(float), nullptr, values, index);
  });
}
}

#ifdef GRPO_KERNELS_EMULATE
// Arguments: MEMORY INDEX as above, one mistake per process, which AddressSanitizer ends; or "errors".
int main(int argc, char** argv) {
  float* const values = static_cast<float*>(std::calloc(32, sizeof(float)));
  int failed = 0;
  if (argc == 3) {
    failed = selftest_write(argv[1], std::atoi(argv[2]), values);
  } else {
    // an error leaves fibers within a kernel: they must be usable again, and nothing may leak
    int out[64];
    for (int kind = 0; kind < 9; ++kind) {
      failed += selftest_misuse(kind, out) == 0;
      failed += selftest_write("static", 0, values);
    }
  }
  std::free(values);
  std::puts("finished");
  return failed;
}
#endif
