// Kernels that test the race detector: correct ones, and ones with a planted race. Lines with racing accesses end in a
// comment with the kind of the race. nvcc compiles the file, too.
#include <cstdint>
#include <exception>
#include <string>

#include "common/cuda/launch.h"

namespace {

using grpo_kernels::launch;

constexpr unsigned kAllLanes = 0xFFFFFFFFu, kLowerHalf = 0x0000FFFFu, kUpperHalf = 0xFFFF0000u;
constexpr int kThreads = 64;

__global__ void ordered(int kind, int* out) {
  __shared__ int values[kThreads];
  __shared__ unsigned char bytes[kThreads];
  __shared__ int total;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  int* const mine = out + blockIdx.x * kThreads;
  switch (kind) {
    case 0:  // Shared memory is used again after a barrier, by another thread and in the next block.
      for (int round = 0; round < 3; ++round) {
        values[(thread + round) % kThreads] = round;
        __syncthreads();
        mine[thread] = values[(thread + 7) % kThreads];
        __syncthreads();
      }
      break;
    case 1:  // The lanes of a warp.
      values[thread] = thread;
      __syncwarp();
      mine[thread] = values[thread ^ 31];
      break;
    case 2:  // Each half of a warp waits for itself.
      values[thread] = thread;
      __syncwarp(lane < 16 ? kLowerHalf : kUpperHalf);
      mine[thread] = values[thread ^ 15];
      break;
    case 3:  // Lane 2 never meets lane 0, but lane 1 meets both.
      if (thread == 0) values[0] = 1;
      if (thread == 0 || thread == 1) __syncwarp(0x3);
      if (thread == 1 || thread == 2) __syncwarp(0x6);
      if (thread == 2) mine[0] = values[0];
      break;
    case 4:  // Atomics among themselves, and a plain read behind a barrier.
      if (thread == 0) total = 0;
      __syncthreads();
      atomicAdd(&total, thread);
      __syncthreads();
      mine[thread] = total;
      break;
    case 5:  // Neighbouring bytes of one word.
      bytes[thread] = static_cast<unsigned char>(thread);
      __syncthreads();
      mine[thread] = bytes[thread ^ 1];
      break;
    case 6:  // Global memory of one block.
      mine[thread] = thread;
      __syncthreads();
      if (thread > 0) mine[thread - 1] += 1;
      break;
    case 7:  // Threads that return leave nothing to wait for.
      values[thread] = thread;
      if (thread >= 32) return;
      __syncthreads();
      mine[thread] = values[thread + 32];
      break;
    case 8:  // The block that counts last reads what all have written.
      mine[thread] = thread;
      __threadfence();
      __syncthreads();
      if (thread == 0) total = atomicAdd(out + 2 * kThreads, 1);
      __syncthreads();
      if (total % 2 == 1) mine[thread] = out[thread] + out[kThreads + thread];
      break;
    default:
      break;
  }
}

__global__ void racing(int kind, int* out) {
  __shared__ int values[kThreads];
  __shared__ int total;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  int* const mine = out + blockIdx.x * kThreads;
  switch (kind) {
    case 0:                                          // A read after a write of another warp.
      values[thread] = thread;                       // race 0
      mine[thread] = values[kThreads - 1 - thread];  // race 0
      break;
    case 1:                      // The same value, written twice.
      if (lane == 0) total = 1;  // race 1
      __syncthreads();
      mine[thread] = total;
      break;
    case 2:                               // A missing __syncwarp().
      values[thread] = thread;            // race 2
      mine[thread] = values[thread ^ 1];  // race 2
      break;
    case 3:                     // A shuffle orders no memory.
      values[thread] = thread;  // race 3
      mine[thread] = __shfl_xor_sync(kAllLanes, thread, 1);
      mine[thread] += values[thread ^ 1];  // race 3
      break;
    case 4:                     // Each half of a warp waits for itself, and reads from the other.
      values[thread] = thread;  // race 4
      __syncwarp(lane < 16 ? kLowerHalf : kUpperHalf);
      mine[thread] = values[thread ^ 16];  // race 4
      break;
    case 5:                     // A warp waits for itself, and reads from the other.
      values[thread] = thread;  // race 5
      __syncwarp();
      mine[thread] = values[thread ^ 32];  // race 5
      break;
    case 6:  // The barrier that is missing lies between two rounds.
      for (int round = 0; round < 2; ++round) {
        values[thread] = round;  // race 6
        __syncthreads();
        mine[thread] = values[(thread + 1) % kThreads];  // race 6
      }
      break;
    case 7:  // A plain read of what others count in.
      if (thread == 0) total = 0;
      __syncthreads();
      atomicAdd(&total, 1);  // race 7
      mine[thread] = total;  // race 7
      break;
    case 8:                                   // Global memory of one block.
      mine[thread] = thread;                  // race 8
      if (thread > 0) mine[thread - 1] += 1;  // race 8
      break;
    case 9:                                                    // Two blocks.
      if (thread == 0) out[0] = static_cast<int>(blockIdx.x);  // race 9
      break;
    case 10:                     // Half of the readers wait for the writer.
      mine[thread] = values[0];  // race 10
      if (lane < 16) __syncwarp(kLowerHalf);
      if (thread == 0) values[0] = 1;  // race 10
      break;
    case 11:  // The __syncwarp() that is missing lies between two rounds.
      for (int round = 0; round < 2; ++round) {
        values[thread] = round;  // race 11
        __syncwarp();
        mine[thread] = values[thread ^ 1];  // race 11
      }
      break;
    case 12:                           // Lane 1 waits for the writer, lane 2 reads.
      if (thread == 0) values[0] = 1;  // race 12
      if (thread == 0 || thread == 1) __syncwarp(0x3);
      if (thread == 2) mine[0] = values[0];  // race 12
      break;
    case 13:  // The block that counts last reads what others wrote without a fence behind it.
      __threadfence();
      mine[thread] = thread;  // race 13
      __syncthreads();
      if (thread == 0) total = atomicAdd(out + 2 * kThreads, 1);
      __syncthreads();
      if (total % 2 == 1) values[thread] = out[thread] + out[kThreads + thread];  // race 13
      break;
    case 14:                  // The block is counted before all of its threads have written.
      mine[thread] = thread;  // race 14
      __threadfence();
      if (thread == 0) total = atomicAdd(out + 2 * kThreads, 1);
      __syncthreads();
      if (total % 2 == 1) values[thread] = out[thread] + out[kThreads + thread];  // race 14
      break;
    case 15:                  // The counter is read, but the thread that reads on has not waited for it.
      mine[thread] = thread;  // race 15
      __threadfence();
      __syncthreads();
      if (thread == 0) total = atomicAdd(out + 2 * kThreads, 1);
      values[thread] = out[thread] + out[kThreads + thread];  // race 15
      break;
    default:
      break;
  }
}

std::string last_error;

int run(void (*kernel)(int, int*), int kind) {
  static int out[2 * kThreads + 1];  // two blocks, and a counter
  try {
    launch(kernel, 2, kThreads, 0, nullptr, kind, out);
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {
const char* selftest_error() { return last_error.c_str(); }
int selftest_ordered(int kind) { return run(ordered, kind); }
int selftest_racing(int kind) { return run(racing, kind); }
}
