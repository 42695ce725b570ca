// Kernels that test the emulator: correct ones, which check their own results, and ones with a planted mistake that it
// must expose. tests/test_emulation.py runs the program; nvcc compiles the file, too.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <latch>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/mma.cuh"
#include "common/cuda/torch_stream.h"

namespace {

using grpo_kernels::BFloat16, grpo_kernels::Half, grpo_kernels::launch;

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
// Shared memory in a function that is not a kernel.
template <bool kBarrier>
__device__ float block_sum(float value) {
  __shared__ float partial[32];
  const unsigned lane = threadIdx.x % 32;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  if (lane == 0) partial[threadIdx.x / 32] = value;
  if constexpr (kBarrier) __syncthreads();
  value = lane < blockDim.x / 32 ? partial[lane] : 0;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}
template <bool kBarrier>
__global__ void __launch_bounds__(1024) sum_rows(const float* __restrict__ rows, float expected, int* wrong) {
  float sum = 0;
  for (int i = threadIdx.x; i < 300; i += blockDim.x) sum += __ldg(rows + int64_t{blockIdx.x} * 300 + i);
  if (block_sum<kBarrier>(sum) != expected) atomicAdd(wrong, 1);
}

template <bool kSyncwarp>
__global__ void reverse_warps(int* wrong) {
  __shared__ unsigned copy[256];
  copy[threadIdx.x] = threadIdx.x;
  if (kSyncwarp) __syncwarp();
  if (copy[threadIdx.x ^ 31] != (threadIdx.x ^ 31)) atomicAdd(wrong, 1);
}

// Without the second barrier, the next round overwrites values that other threads have yet to read.
template <bool kSecondBarrier>
__global__ void rotate_rounds(int* wrong) {
  GRPO_DYNAMIC_SHARED(unsigned, copy);
  unsigned value = threadIdx.x;
  for (int round = 0; round < 5; ++round) {
    copy[threadIdx.x] = value;
    __syncthreads();
    value = copy[(threadIdx.x + 1) % blockDim.x];
    if (kSecondBarrier) __syncthreads();
  }
  if (value != (threadIdx.x + 5) % blockDim.x) atomicAdd(wrong, 1);
}

__global__ void reverse_dynamic(int count, int* wrong) {
  GRPO_DYNAMIC_SHARED(double, copy);
  for (int i = threadIdx.x; i < count; i += blockDim.x) copy[i] = i;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    if (copy[count - 1 - i] != count - 1 - i) atomicAdd(wrong, 1);
  }
}

__global__ void fill_bins(int count, int* counts) {
  const int stride = blockDim.x * gridDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) atomicAdd(&counts[i % 10], 1);
}

__global__ void record_order(unsigned* next, unsigned* threads) {
  threads[atomicAdd(next, 1u)] = blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ int vote_of(unsigned thread) { return static_cast<int>((thread * thread + thread / 3) % 8); }

__global__ void vote(int* wrong) {
  const int value = vote_of(threadIdx.x), lane = static_cast<int>(threadIdx.x % 32);
  unsigned above = 0, equal = 0, sum = 0, odd = 0, even = 0, least = 7;
  for (unsigned i = 0; i < 32; ++i) {
    const int other = vote_of(threadIdx.x - lane + i);
    above |= static_cast<unsigned>(other > 3) << i;
    equal |= static_cast<unsigned>(other == value) << i;
    odd |= static_cast<unsigned>(i < 16 && other % 2 != 0) << i;
    even += i >= 16 && other % 2 == 0;
    sum += other;
    least = min(least, static_cast<unsigned>(other));
  }
  int first = 1, count = 0, zeros = 32;
  while (vote_of(threadIdx.x - lane + first - 1) != value) ++first;
  for (unsigned rest = above; rest != 0; rest &= rest - 1) ++count;
  for (int rest = value; rest != 0; rest /= 2) --zeros;
  bool right = __ballot_sync(kAllLanes, value > 3) == above;
  right &= __reduce_add_sync(kAllLanes, static_cast<unsigned>(value)) == sum;
  right &= __reduce_min_sync(kAllLanes, value - 4) == static_cast<int>(least) - 4;
  right &= __reduce_min_sync(kAllLanes, static_cast<unsigned>(value)) == least;
  right &= __popc(above) == count && __ffs(static_cast<int>(equal)) == first && __clz(value) == zeros;
  // the halves of a warp in different branches, each a group of its own
  if (lane < 16) {
    right &= __ballot_sync(0x0000FFFFu, value & 1) == odd;
  } else {
    right &= __reduce_add_sync(0xFFFF0000u, value % 2 == 0 ? 1 : 0) == static_cast<int>(even);
  }
  right &= __syncthreads_or(value == 9) == 0 && __syncthreads_or(threadIdx.x == 40) != 0;
  if (!right) atomicAdd(wrong, 1);
}

// A shuffle by XOR can only reach earlier segments beyond its own; 5 stays within a segment of 8.
__global__ void shuffle_segments(int* wrong) {
  const int lane = static_cast<int>(threadIdx.x), place = lane % 8;
  const double value = lane + 0.25;
  bool right = __shfl_sync(kAllLanes, value, 3, 8) == lane - place + 3.25;
  right &= __shfl_up_sync(kAllLanes, value, 2, 8) == (place < 2 ? value : value - 2);
  right &= __shfl_down_sync(kAllLanes, value, 2, 8) == (place < 6 ? value + 2 : value);
  right &= __shfl_xor_sync(kAllLanes, value, 5, 8) == (lane ^ 5) + 0.25;
  if (!right) atomicAdd(wrong, 1);
}

// Threads that return early take no part in later barriers and warp operations.
__global__ void return_early(unsigned count, int* wrong) {
  if (threadIdx.x >= count) return;
  __syncthreads();
  if (__popc(__ballot_sync(kAllLanes, 1)) != (threadIdx.x < 64 ? 32 : 8)) atomicAdd(wrong, 1);
}

// Shared words that are not poisoned when a block starts; overwrites all of them.
template <typename T>
__device__ int unpoisoned_in_template() {
  __shared__ T words[64];
  const int is_unpoisoned = words[threadIdx.x] != T(-1);
  words[threadIdx.x] = 0;
  return is_unpoisoned;
}
__global__ void count_unpoisoned(int* wrong) {
  __shared__ unsigned words[64];
  GRPO_DYNAMIC_SHARED(unsigned, dynamic);
  const int mine = (words[threadIdx.x] != ~0u) + (dynamic[threadIdx.x] != ~0u) + unpoisoned_in_template<unsigned>() +
                   unpoisoned_in_template<uint64_t>();
  words[threadIdx.x] = dynamic[threadIdx.x] = 0;
  atomicAdd(wrong, mine);
}

// Small integers, and their bits in 16-bit floats.
__device__ int factor(int i) { return i * i % 13 - 6; }
template <typename T>
__device__ T encoded(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t size = bits & 0x7fffffffu, half = size == 0 ? 0 : (size - (112u << 23)) >> 13;
  return {static_cast<uint16_t>(std::is_same_v<T, BFloat16> ? bits >> 16 : (bits >> 16 & 0x8000u) | half)};
}

// Multiplies 16 rows by 16 of 16 numbers each. The fragments of the left ones are made word by word, those of the right
// ones by ldmatrix. Sums of integers are exact. With `digits`, 0.77 units in the last place of 1 are added, which
// tensor cores cut off.
template <typename T>
__global__ void multiply_rows(bool digits, int* wrong) {
  __shared__ __align__(16) T left_rows[256], right_rows[256];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4, matrix = lane / 8;
  for (int i = lane * 8; i < lane * 8 + 8; ++i) {
    left_rows[i] = encoded<T>(digits ? (i % 16 == 0 ? 0x1.cp-12f : 0) : static_cast<float>(factor(i)));
    right_rows[i] = encoded<T>(digits ? (i % 16 == 0 ? 0x1.cp-12f : 0) : static_cast<float>(factor(i + 5)));
  }
  __syncwarp();
  grpo_kernels::Fragment left, right;
  for (int i = 0; i < 4; ++i) memcpy(&left.words[i], left_rows + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8, 4);
  grpo_kernels::load_matrices(right_rows + (matrix % 2 * 8 + lane % 8) * 16 + matrix / 2 * 8, right.words);
  for (int half = 0; half < 2; ++half) {
    grpo_kernels::Sums sums = {1, 1, 1, 1};
    grpo_kernels::add_products(sums, left, right, half, T{});
    for (int i = 0; i < 4; ++i) {
      const int row = g + i / 2 * 8, column = half * 8 + 2 * t + i % 2;
      float expected = 1;
      for (int k = 0; k < 16; ++k) expected += static_cast<float>(factor(row * 16 + k) * factor(column * 16 + k + 5));
      if (sums[i] != (digits ? 1 + 0x1p-23f : expected)) atomicAdd(wrong, 1);
    }
  }
}

// Copies 64 pieces in two groups, waits until at most `kGroups` are under way, and reads the first one, which is
// garbage if none was waited for, zeros included.
template <int kGroups>
__global__ void copy_pieces(const float* from, int count, int* wrong) {
  using Piece = grpo_kernels::Piece<float>;
  __shared__ Piece pieces[64];
  for (int group = 0; group < 2; ++group) {
    const int i = group * 32 + threadIdx.x;
    pieces[i] = {};
    grpo_kernels::copy_async(pieces + i, from + i * 4, i < count);
    grpo_kernels::commit_copies();
  }
  grpo_kernels::wait_for_copies<kGroups>();
  __syncthreads();
  const int i = 31 - threadIdx.x;
  float items[4];
  memcpy(items, pieces + i, 16);
  for (int k = 0; k < 4; ++k) {
    const bool right = kGroups == 2 ? items[k] != items[k] : items[k] == (i < count ? from[i * 4 + k] : 0);
    if (!right) atomicAdd(wrong, 1);
  }
}

// Writes 32 values per block from `index` on, of global, static, a template's static or dynamic shared memory: 0 is
// right, 1 writes one element past the end.
template <typename T>
__device__ T* static_of_template() {
  __shared__ T values[32];
  return values;
}
__global__ void write(int memory, float* out, int index) {
  __shared__ float values[32];
  GRPO_DYNAMIC_SHARED(float, dynamic);
  float* const to[] = {out, values, static_of_template<float>(), dynamic};
  to[memory][index + threadIdx.x] = 1.0f;
}

__global__ void misuse(int kind, int* out) {
  __shared__ grpo_kernels::Piece<float> pieces[32];
  const unsigned lane = threadIdx.x % 32;
  int value = static_cast<int>(lane);
  if ((kind == 5 || kind == 8) && lane == 20) return;
  switch (kind) {
    case 0:  // Half a warp waits for the other half, which waits for the block.
      if (lane < 16) __syncthreads();
      if (lane >= 16) __syncwarp();
      break;
    case 1:  // Two barriers in the source for one in the program.
      if (threadIdx.y == 0) __syncthreads();
      if (threadIdx.y == 1) __syncthreads();
      break;
    case 2:
      value = __shfl_sync(0x0000FFFFu, value, 0);
      break;
    case 3:
      value = lane < 16 ? __shfl_sync(kAllLanes, value, 0) : static_cast<int>(__ballot_sync(kAllLanes, value));
      break;
    case 4:
      if (lane < 16) value = __shfl_sync(0x0000FFFFu, value, 20);
      break;
    case 5:
      value = __shfl_sync(kAllLanes, value, 20);
      break;
    case 6:
      if (threadIdx.y == 0) value = __syncthreads_or(value);
      if (threadIdx.y == 1) __syncthreads();
      break;
    case 7:
      value = __shfl_sync(kAllLanes, value, 0, 5);
      break;
    case 8: {
      grpo_kernels::Sums sums = {};
      grpo_kernels::add_products(sums, {}, {}, 0, Half{});
      break;
    }
    case 9:  // The copy may arrive after the zero.
      grpo_kernels::copy_async(pieces + lane, static_cast<const float*>(nullptr), false);
      grpo_kernels::commit_copies();
      pieces[lane] = {};
      break;
  }
  out[threadIdx.x] = value;
}

template <bool kBarrier>
void run_sums(int block, int* wrong) {
  std::vector<float> rows(5 * 300);
  for (int i = 0; i < 5 * 300; ++i) rows[i] = static_cast<float>(i % 300 % 7) / 8;
  const float expected = std::accumulate(rows.begin(), rows.begin() + 300, 0.0f);
  launch(sum_rows<kBarrier>, 5, block, 0, nullptr, rows.data(), expected, wrong);
}

void run_atomics(int* wrong) {
  int counts[10] = {};
  launch(fill_bins, 3, 64, 0, nullptr, 1000, counts);
  for (const int count : counts) *wrong += count != 100;
}

// Launches leave the host's thread-local variables alone.
void run_garbage(int* wrong) {
  thread_local int host_value = 7;
  const int before = host_value++;
  launch(count_unpoisoned, 5, 64, 64 * sizeof(unsigned), nullptr, wrong);
  *wrong += host_value != before + 1;
}

void run_copies(int* wrong) {
  alignas(16) float from[256];
  for (int i = 0; i < 256; ++i) from[i] = static_cast<float>(i + 1);
  for (const int count : {0, 5, 64}) {
    for (const auto kernel : {copy_pieces<0>, copy_pieces<1>, copy_pieces<2>}) {
      launch(kernel, 1, 32, 0, nullptr, from, count, wrong);
    }
  }
}

// Each check adds to `wrong`; the first kPlanted must do so with some seed, the others never.
constexpr int kPlanted = 3;
const std::pair<const char*, void (*)(int* wrong)> kChecks[] = {
    {"a missing barrier", [](int* wrong) { run_sums<false>(128, wrong); }},
    {"a missing __syncwarp()", [](int* wrong) { launch(reverse_warps<false>, 1, 256, 0, nullptr, wrong); }},
    {"a missing second barrier", [](int* wrong) { launch(rotate_rounds<false>, 1, 96, 384, nullptr, wrong); }},
    {"sums of a warp", [](int* wrong) { run_sums<true>(32, wrong); }},
    {"sums of a block", [](int* wrong) { run_sums<true>(1024, wrong); }},
    {"warps", [](int* wrong) { launch(reverse_warps<true>, 1, 256, 0, nullptr, wrong); }},
    {"rounds", [](int* wrong) { launch(rotate_rounds<true>, 1, 96, 384, nullptr, wrong); }},
    {"more than 48 KiB", [](int* wrong) { launch(reverse_dynamic, 1, 96, 56000, nullptr, 7000, wrong); }},
    {"atomics", run_atomics},
    {"votes", [](int* wrong) { launch(vote, 1, 64, 0, nullptr, wrong); }},
    {"shuffles", [](int* wrong) { launch(shuffle_segments, 1, 32, 0, nullptr, wrong); }},
    {"threads that returned", [](int* wrong) { launch(return_early, 1, 128, 0, nullptr, 72u, wrong); }},
    {"garbage in shared memory", run_garbage},
    {"products", [](int* wrong) { launch(multiply_rows<BFloat16>, 1, 32, 0, nullptr, false, wrong); }},
    {"products of digits", [](int* wrong) { launch(multiply_rows<BFloat16>, 1, 32, 0, nullptr, true, wrong); }},
    {"products of float16", [](int* wrong) { launch(multiply_rows<Half>, 1, 32, 0, nullptr, false, wrong); }},
    {"copies", run_copies},
};

// The message of the exception that a call ends with, in a line; an empty one if it ends without.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
    return "\n";
  } catch (const std::exception& error) {
    return error.what() + std::string("\n");
  }
}

#ifdef GRPO_KERNELS_EMULATE

namespace emulation = grpo_kernels::emulation;
constexpr int kSeeds = 40;

std::string wrong_checks() {
  std::string report;
  for (const auto& [name, run] : kChecks) {
    int right = 0;
    for (int seed = 0; seed < kSeeds; ++seed) {
      int wrong = 0;
      emulation::set_schedule_seed(seed);
      run(&wrong);
      right += wrong == 0;
    }
    const bool is_planted = &name < &kChecks[kPlanted].first;
    if ((right < kSeeds) != is_planted) report += name + (" is right with " + std::to_string(right)) + "\n";
  }
  return report;
}

// Messages with each seed. The launches after a misuse are not affected.
std::string misuses(int kind) {
  std::string report;
  for (int seed = 0; seed < kSeeds; ++seed) {
    int out[64], wrong = 0;
    emulation::set_schedule_seed(seed);
    report += error_of([&] { launch(misuse, dim3(1, 2), dim3(32, 2), 0, nullptr, kind, out); });
    run_sums<true>(128, &wrong);
    if (wrong != 0) report += "the next launch is wrong\n";
  }
  return report;
}

// Threads run in another order with every seed and launch, and in the same one with the same; any block may be first.
std::string wrong_orders() {
  std::set<std::vector<unsigned>> different;
  std::set<unsigned> first_blocks;
  for (int seed = 0; seed < kSeeds; ++seed) {
    std::vector<unsigned> orders[4];
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == 0) emulation::set_schedule_seed(seed);
      unsigned next = 0;
      orders[i].resize(160);
      launch(record_order, 5, 32, 0, nullptr, &next, orders[i].data());
      different.insert(orders[i]);
      first_blocks.insert(orders[i][0] / 32);
      if (std::set<unsigned>(orders[i].begin(), orders[i].end()).size() != 160) return "a thread runs twice or never";
    }
    if (orders[0] != orders[2] || orders[1] != orders[3]) return "an order does not repeat";
    if (emulation::schedule_seed() != static_cast<std::uint64_t>(seed)) return "the seed is another";
  }
  return different.size() > kSeeds && first_blocks.size() == 5 ? "" : "orders are alike";
}

// Impossible launches, and those without a guard for the device of their stream; one with.
std::string refused_launches() {
  float out[32];
  const auto run = [&](int grid, int block, int bytes, void* stream) {
    return error_of([&] { launch(write, grid, block, bytes, stream, 0, out, 0); });
  };
  std::string report = run(0, 32, 0, nullptr) + run(1, 0, 0, nullptr) + run(1, 1025, 0, nullptr);
  report += run(1, 32, 228 * 1024, nullptr) + run(1, 32, 128, grpo_kernels::current_stream(1));
  const grpo_kernels::DeviceGuard guard(0);
  report += run(1, 32, 128, grpo_kernels::current_stream(1)) + run(1, 32, 128, nullptr);
  const grpo_kernels::DeviceGuard inner(1);
  return report + run(1, 32, 128, grpo_kernels::current_stream(1));
}

std::string wrong_threads() {
  int wrong[4] = {};
  {
    std::vector<std::jthread> threads;
    for (int& mine : wrong) {
      threads.emplace_back([&mine] {
        for (int i = 0; i < 20; ++i) run_sums<true>(256, &mine);
      });
    }
  }
  return wrong[0] + wrong[1] + wrong[2] + wrong[3] == 0 ? "" : "wrong";
}

// Two threads launch with shared memory of two sizes: the second has read the kernel's limit before the first raises
// it, and raises it before the first launches.
thread_local int bytes_of_thread = 0;
std::string errors_of_two_sizes() {
  constexpr int kSmall = 60 * 1024, kLarge = 100 * 1024;
  std::latch both_read(2), large_is_set(1), small_is_set(1);
  const auto nothing = std::exchange(emulation::dynamic_shared_limits.after_call, [&](bool has_set) {
    if (!has_set) both_read.arrive_and_wait();
    if (!has_set && bytes_of_thread == kSmall) large_is_set.wait();
    if (has_set) (bytes_of_thread == kLarge ? large_is_set : small_is_set).count_down();
    if (has_set && bytes_of_thread == kLarge) small_is_set.wait();
  });
  std::string errors[2];
  const auto run = [](int bytes, std::string* error) {
    int wrong = 0;
    bytes_of_thread = bytes;
    *error = error_of([&] { launch(rotate_rounds<true>, 1, 32, bytes, nullptr, &wrong); });
  };
  std::thread large(run, kLarge, errors), small(run, kSmall, errors + 1);
  large.join();
  small.join();
  emulation::dynamic_shared_limits.after_call = nothing;
  return errors[0] + errors[1] == "\n\n" ? "" : errors[0] + errors[1];
}

}  // namespace

extern "C" const char* selftest(const char* mode, int kind) {
  static std::string report;
  const auto is = [mode](const char* name) { return std::strcmp(mode, name) == 0; };
  const std::string error = error_of([&] {
    report = is("checks")    ? wrong_checks()
             : is("orders")  ? wrong_orders()
             : is("threads") ? wrong_threads()
             : is("sizes")   ? errors_of_two_sizes()
             : is("refused") ? refused_launches()
                             : misuses(kind);
  });
  if (error != "\n") report = error;
  return report.c_str();
}

// Arguments: MEMORY INDEX, one overrun per process, which AddressSanitizer ends; or none, for errors, which leave
// fibers within a kernel: they must be usable again, and nothing may leak.
int main(int argc, char** argv) {
  std::vector<float> values(32);
  if (argc == 3) launch(write, 2, 32, 128, nullptr, std::atoi(argv[1]), values.data(), std::atoi(argv[2]));
  for (int kind = 0; argc == 1 && kind < 9; ++kind) std::puts(misuses(kind).c_str());
  std::puts("finished");
}

#else
}  // namespace
#endif
