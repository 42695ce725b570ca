// Kernels that test the emulator and its race detector; tests/test_emulation.py compiles and calls them.
#include <cstdint>
#include <exception>
#include <latch>
#include <string>
#include <thread>
#include <utility>

#include "common/cuda/async_copy.cuh"
#include "common/cuda/torch_stream.h"

namespace {

using grpo_kernels::launch;

constexpr unsigned kAllLanes = 0xFFFFFFFFu, kLowerHalf = 0x0000FFFFu, kUpperHalf = 0xFFFF0000u;
constexpr int kThreads = 64;

// Each kind up to 12 is ordered or, without what orders it, has a race. Lines with racing accesses end in a comment
// with the kind.
__global__ void walk(int kind, bool is_ordered, int* out) {
  __shared__ int values[kThreads];
  __shared__ int total;
  GRPO_DYNAMIC_SHARED(int, dynamic);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  int *const mine = out + blockIdx.x * kThreads, *const counter = out + 2 * kThreads;
  switch (kind) {
    case 0:                     // A read after a write of another warp.
      values[thread] = thread;  // race 0
      if (is_ordered) __syncthreads();
      mine[thread] = values[kThreads - 1 - thread];  // race 0
      break;
    case 1:                     // The lanes of a warp.
      values[thread] = thread;  // race 1
      if (is_ordered) __syncwarp();
      mine[thread] = values[thread ^ 1];  // race 1
      break;
    case 2:  // Rounds, whose barrier in between may be missing.
      for (int round = 0; round < 3; ++round) {
        values[thread] = round;  // race 2
        __syncthreads();
        mine[thread] += values[(thread + 1) % kThreads];  // race 2
        if (is_ordered) __syncthreads();
      }
      break;
    case 3:                                                 // The same value, written twice.
      if (is_ordered ? thread == 0 : lane == 0) total = 1;  // race 3
      __syncthreads();
      mine[thread] = total;
      break;
    case 4:                     // A shuffle orders no memory.
      values[thread] = thread;  // race 4
      mine[thread] = __shfl_xor_sync(kAllLanes, thread, 1);
      if (is_ordered) __syncwarp();
      mine[thread] += values[thread ^ 1];  // race 4
      break;
    case 5:                     // Each half of a warp waits for itself.
      values[thread] = thread;  // race 5
      __syncwarp(lane < 16 ? kLowerHalf : kUpperHalf);
      mine[thread] = values[thread ^ (is_ordered ? 15 : 16)];  // race 5
      break;
    case 6:  // A plain read of what others count in; atomics are no race among themselves.
      if (thread == 0) total = 0;
      __syncthreads();
      atomicAdd(&total, 1);  // race 6
      if (is_ordered) __syncthreads();
      mine[thread] = total;  // race 6
      break;
    case 7:                                                                          // Two blocks.
      if (thread == 0) (is_ordered ? mine : out)[0] = static_cast<int>(blockIdx.x);  // race 7
      break;
    case 8:                      // All readers, or half of them, wait for the writer.
      mine[thread] = values[0];  // race 8
      if (is_ordered) __syncthreads();
      if (lane < 16) __syncwarp(kLowerHalf);
      if (thread == 0) values[0] = 1;  // race 8
      break;
    case 9:                            // Lane 1 waits for the writer, and lane 2 for lane 1.
      if (thread == 0) values[0] = 1;  // race 9
      if (thread == 0 || thread == 1) __syncwarp(0x3);
      if (is_ordered && (thread == 1 || thread == 2)) __syncwarp(0x6);
      if (thread == 2) mine[0] = values[0];  // race 9
      break;
    case 10:  // The block that counts last reads what others wrote, before their fence or after it,
    case 11:  // before all threads of theirs have written or after that,
    case 12:  // in a thread that has waited for the counter or not.
      if (kind == 10 && !is_ordered) __threadfence();
      mine[thread] = thread;  // race 10 11 12
      if (kind != 10 || is_ordered) __threadfence();
      if (kind != 11 || is_ordered) __syncthreads();
      if (thread == 0) total = atomicAdd(counter, 1);
      if (kind != 12 || is_ordered) __syncthreads();
      if ((kind == 12 && !is_ordered) || total % 2 == 1)
        values[thread] = out[thread] + out[kThreads + thread];  // race 10 11 12
      break;
    case 13:  // The order of the threads.
      out[atomicAdd(counter, 1)] = static_cast<int>(blockIdx.x) * kThreads + thread;
      break;
    case 14:  // What shared memory holds when a block starts.
      mine[thread] = (values[thread] == -1) + (dynamic[thread] == -1);
      values[thread] = dynamic[thread] = 0;
      break;
    default:
      break;
  }
}

__global__ void misuse(int kind, int* out) {
  __shared__ grpo_kernels::Piece<float> pieces[32];
  const unsigned lane = threadIdx.x % 32;
  int value = static_cast<int>(lane);
  if (kind == 5 && lane == 20) return;
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
      value = __shfl_sync(kLowerHalf, value, 0);
      break;
    case 3:
      value = lane < 16 ? __shfl_sync(kAllLanes, value, 0) : static_cast<int>(__ballot_sync(kAllLanes, value));
      break;
    case 4:
      if (lane < 16) value = __shfl_sync(kLowerHalf, value, 20);
      break;
    case 5:
      value = __shfl_sync(kAllLanes, value, 20);
      break;
    case 6:  // The copy may arrive after the zero.
      grpo_kernels::copy_async(pieces + lane, static_cast<const float*>(nullptr), false);
      grpo_kernels::commit_copies();
      pieces[lane] = {};
      break;
  }
  out[threadIdx.x] = value;
}

// The message of the exception that a call ends with; empty if it ends without.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

#ifndef __SANITIZE_THREAD__
// Two threads launch with shared memory of two sizes: the second has read the kernel's limit before the first raises
// it, and raises it before the first launches.
thread_local int bytes_of_thread = 0;
std::string errors_of_two_sizes() {
  constexpr int kSmall = 60 * 1024, kLarge = 100 * 1024;
  auto& limits = grpo_kernels::emulation::dynamic_shared_limits;
  limits.set(reinterpret_cast<const void*>(walk), 48 * 1024);  // as for a kernel not yet launched with more
  std::latch both_read(2), large_is_set(1), small_is_set(1);
  const auto nothing = std::exchange(limits.after_call, [&](bool has_set) {
    if (!has_set) both_read.arrive_and_wait();
    if (!has_set && bytes_of_thread == kSmall) large_is_set.wait();
    if (has_set) (bytes_of_thread == kLarge ? large_is_set : small_is_set).count_down();
    if (has_set && bytes_of_thread == kLarge) small_is_set.wait();
  });
  std::string errors[2];
  const auto run = [](int bytes, std::string* error) {
    int out[2 * kThreads + 1];
    bytes_of_thread = bytes;
    *error = error_of([&] { launch(walk, 2, kThreads, bytes, nullptr, 0, true, out); });
  };
  std::thread large(run, kLarge, errors), small(run, kSmall, errors + 1);
  large.join();
  small.join();
  limits.after_call = nothing;
  return errors[0] + errors[1];
}
#endif

const char* kept(std::string message) {
  static std::string last;
  last = std::move(message);
  return last.c_str();
}

}  // namespace

extern "C" {
// `out` has an entry for each thread of two blocks, and a counter.
const char* walk_error(int kind, int is_ordered, int* out) {
  return kept(error_of([&] { launch(walk, 2, kThreads, 4 * kThreads, nullptr, kind, is_ordered != 0, out); }));
}
const char* misuse_error(int kind) {
  int out[kThreads];
  return kept(error_of([&] { launch(misuse, dim3(1, 2), dim3(32, 2), 0, nullptr, kind, out); }));
}
// A launch on a stream of `device`, with a guard for device 0.
const char* launch_error(int grid, int threads, int bytes, int device) {
  int out[2 * kThreads + 1];
  const grpo_kernels::DeviceGuard guard(0);
  return kept(
      error_of([&] { launch(walk, grid, threads, bytes, grpo_kernels::current_stream(device), -1, true, out); }));
}
#ifndef __SANITIZE_THREAD__
const char* two_sizes_error() { return kept(errors_of_two_sizes()); }
#endif
}
