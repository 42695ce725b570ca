// Kernels that test the race detector: each kind is ordered or, without what orders it, has a race. Lines with racing
// accesses end in a comment with the kind. nvcc compiles the file, too.
#include <cstdint>
#include <exception>
#include <string>

#include "common/cuda/launch.h"

namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu, kLowerHalf = 0x0000FFFFu, kUpperHalf = 0xFFFF0000u;
constexpr int kThreads = 64;

__global__ void walk(int kind, bool is_ordered, int* out) {
  __shared__ int values[kThreads];
  __shared__ unsigned char bytes[kThreads];
  __shared__ int total;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  int *const mine = out + blockIdx.x * kThreads, *const counter = out + 2 * kThreads;
  switch (kind) {
    case 0:                     // A read after a write of another warp.
      values[thread] = thread;  // race 0
      if (is_ordered) __syncthreads();
      mine[thread] = values[kThreads - 1 - thread];  // race 0
      break;
    case 1:                                                 // The same value, written twice.
      if (is_ordered ? thread == 0 : lane == 0) total = 1;  // race 1
      __syncthreads();
      mine[thread] = total;
      break;
    case 2:                     // The lanes of a warp.
      values[thread] = thread;  // race 2
      if (is_ordered) __syncwarp();
      mine[thread] = values[thread ^ 1];  // race 2
      break;
    case 3:                     // A shuffle orders no memory.
      values[thread] = thread;  // race 3
      mine[thread] = __shfl_xor_sync(kAllLanes, thread, 1);
      if (is_ordered) __syncwarp();
      mine[thread] += values[thread ^ 1];  // race 3
      break;
    case 4:                     // Each half of a warp waits for itself.
      values[thread] = thread;  // race 4
      __syncwarp(lane < 16 ? kLowerHalf : kUpperHalf);
      mine[thread] = values[thread ^ (is_ordered ? 15 : 16)];  // race 4
      break;
    case 5:                     // A warp waits for itself.
      values[thread] = thread;  // race 5
      __syncwarp();
      mine[thread] = values[thread ^ (is_ordered ? 31 : 32)];  // race 5
      break;
    case 6:  // Rounds, whose barrier in between may be missing.
      for (int round = 0; round < 3; ++round) {
        values[thread] = round;  // race 6
        __syncthreads();
        mine[thread] = values[(thread + 1) % kThreads];  // race 6
        if (is_ordered) __syncthreads();
      }
      break;
    case 7:  // A plain read of what others count in; atomics are no race among themselves.
      if (thread == 0) total = 0;
      __syncthreads();
      atomicAdd(&total, 1);  // race 7
      if (is_ordered) __syncthreads();
      mine[thread] = total;  // race 7
      break;
    case 8:                   // Global memory of one block.
      mine[thread] = thread;  // race 8
      if (is_ordered) __syncthreads();
      if (thread > 0) mine[thread - 1] += 1;  // race 8
      break;
    case 9:                                                                          // Two blocks.
      if (thread == 0) (is_ordered ? mine : out)[0] = static_cast<int>(blockIdx.x);  // race 9
      break;
    case 10:                     // All readers, or half of them, wait for the writer.
      mine[thread] = values[0];  // race 10
      if (is_ordered) __syncthreads();
      if (lane < 16) __syncwarp(kLowerHalf);
      if (thread == 0) values[0] = 1;  // race 10
      break;
    case 11:  // Rounds of a warp.
      for (int round = 0; round < 2; ++round) {
        values[thread] = round;  // race 11
        __syncwarp();
        mine[thread] = values[thread ^ 1];  // race 11
        if (is_ordered) __syncwarp();
      }
      break;
    case 12:                           // Lane 1 waits for the writer, and lane 2 for lane 1.
      if (thread == 0) values[0] = 1;  // race 12
      if (thread == 0 || thread == 1) __syncwarp(0x3);
      if (is_ordered && (thread == 1 || thread == 2)) __syncwarp(0x6);
      if (thread == 2) mine[0] = values[0];  // race 12
      break;
    case 13:  // The block that counts last reads what others wrote, before their fence or after it,
    case 14:  // before all threads of theirs have written or after that,
    case 15:  // in a thread that has waited for the counter or not.
      if (kind == 13 && !is_ordered) __threadfence();
      mine[thread] = thread;  // race 13 14 15
      if (kind != 13 || is_ordered) __threadfence();
      if (kind != 14 || is_ordered) __syncthreads();
      if (thread == 0) total = atomicAdd(counter, 1);
      if (kind != 15 || is_ordered) __syncthreads();
      if ((kind == 15 && !is_ordered) || total % 2 == 1)
        values[thread] = out[thread] + out[kThreads + thread];  // race 13 14 15
      break;
    case 16:                                                                         // Neighbouring bytes of one word.
      bytes[is_ordered ? thread : thread / 2] = static_cast<unsigned char>(thread);  // race 16
      __syncthreads();
      mine[thread] = bytes[thread ^ 1];
      break;
    case 17:                    // Threads that return leave nothing to wait for.
      values[thread] = thread;  // race 17
      if (thread >= 32) return;
      if (is_ordered) __syncthreads();
      mine[thread] = values[thread + 32];  // race 17
      break;
    default:
      break;
  }
}

}  // namespace

// The message of the error that the kernel ends with; empty if there is none.
extern "C" const char* selftest(int kind, int is_ordered) {
  static int out[2 * kThreads + 1];  // two blocks, and a counter
  static std::string error;
  error.clear();
  try {
    grpo_kernels::launch(walk, 2, kThreads, 0, nullptr, kind, is_ordered != 0, out);
  } catch (const std::exception& race) {
    error = race.what();
  }
  return error.c_str();
}
