// Compiles the CUDA kernels, unchanged, as host C++20 and runs them on the CPU, to test their logic without a GPU.
// csrc/common/cuda/launch.h includes it under -DGRPO_KERNELS_EMULATE.
//
// Unlike on a GPU, threads run in an order drawn from a seed, shared memory starts as garbage, and misused barriers and
// warp operations are errors that name the thread. Limits: threads are switched only at synchronising calls and
// atomics, so a loop that polls a plain load never ends; blocks run one after another, so a block cannot wait for a
// later one; arithmetic is the host's. Neither __CUDACC__ nor __CUDA_ARCH__ is defined.
#pragma once

// First the headers that use the names defined below themselves.
#include <dlfcn.h>
#include <math.h>

#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>

#include "cuda_emulator_attributes.h"
#include "cuda_emulator_schedule.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

using cudaStream_t = void*;

// Called by tests by name; each library has its own state.
extern "C" {
// Later launches get the schedules of this seed, from its first on.
__attribute__((used, visibility("default"))) inline void grpo_kernels_set_schedule_seed(std::uint64_t seed) {
  grpo_kernels::emulation::scheduler.set_seed(seed);
}
__attribute__((used, visibility("default"))) inline void grpo_kernels_set_shared_memory_limit(std::uint64_t bytes) {
  grpo_kernels::emulation::shared_memory_limit = bytes;
}
// Number of kernel launches since the seed was set.
__attribute__((used, visibility("default"))) inline std::uint64_t grpo_kernels_launches() {
  return grpo_kernels::emulation::scheduler.launches();
}
// Writes the addresses of at most `capacity` of those kernels, as offsets in the library; returns their number.
__attribute__((used, visibility("default"))) inline std::uint64_t grpo_kernels_launched(std::uint64_t* offsets,
                                                                                        std::uint64_t capacity) {
  std::uint64_t count = 0;
  for (const void* kernel : grpo_kernels::emulation::scheduler.kernels()) {
    Dl_info library;
    dladdr(kernel, &library);
    const auto first = reinterpret_cast<std::uintptr_t>(library.dli_fbase);
    if (count < capacity) offsets[count] = reinterpret_cast<std::uintptr_t>(kernel) - first;
    ++count;
  }
  return count;
}
}

#pragma GCC visibility push(hidden)

namespace grpo_kernels::emulation {

// The types that CUDA has warp operations for; smaller ones convert to int, as in CUDA.
template <typename T>
concept WarpValue = std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename T>
inline T shuffle(Operation operation, unsigned mask, T value, unsigned argument, int width, const Site& where) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    std::string reason = std::string(name_of(operation)) + " with width " + std::to_string(width);
    scheduler.fail(std::move(reason), where);
  }
  // As in hardware, the argument counts modulo 32, and a lane that would read outside its segment reads itself, except
  // that an exclusive or may reach an earlier segment.
  const unsigned lane = scheduler.lane();
  const unsigned first = lane & ~(width - 1u);
  const unsigned last = lane | (width - 1u);
  argument &= 31;
  unsigned source = lane;
  if (operation == Operation::kShfl) {
    source = first | (argument & (width - 1u));
  } else if (operation == Operation::kShflUp) {
    if (lane >= first + argument) source = lane - argument;
  } else if (operation == Operation::kShflDown) {
    if (lane + argument <= last) source = lane + argument;
  } else if ((lane ^ argument) <= last) {
    source = lane ^ argument;
  }
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = scheduler.warp_collective(operation, mask, sizeof(T), bits, source, where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned vote(Operation operation, unsigned mask, unsigned value, const Site& where) {
  return static_cast<unsigned>(scheduler.warp_collective(operation, mask, 4, value, 0, where));
}

// Threads are switched only in calls of the scheduler, so a plain update is atomic.
// Inlined, so that a race is reported at the kernel's line.
template <typename T, typename Update>
__forceinline__ T atomic(T* address, Update update) {
  scheduler.yield();
  races::atomic_operation(address);
  const races::Atomic access;
  const T old = *address;
  *address = update(old);
  return old;
}

}  // namespace grpo_kernels::emulation

#define GRPO_OP(name) grpo_kernels::emulation::Operation::k##name
#define GRPO_SITE grpo_kernels::emulation::Site where = grpo_kernels::emulation::Site::current()

inline void __syncthreads(GRPO_SITE) {
  grpo_kernels::emulation::scheduler.block_barrier(GRPO_OP(Syncthreads), false, where);
}
inline int __syncthreads_or(int predicate, GRPO_SITE) {
  return grpo_kernels::emulation::scheduler.block_barrier(GRPO_OP(SyncthreadsOr), predicate != 0, where);
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, GRPO_SITE) {
  grpo_kernels::emulation::vote(GRPO_OP(Syncwarp), mask, 0, where);
}
template <grpo_kernels::emulation::WarpValue T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, GRPO_SITE) {
  return grpo_kernels::emulation::shuffle(GRPO_OP(Shfl), mask, value, source, width, where);
}
template <grpo_kernels::emulation::WarpValue T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, GRPO_SITE) {
  return grpo_kernels::emulation::shuffle(GRPO_OP(ShflUp), mask, value, delta, width, where);
}
template <grpo_kernels::emulation::WarpValue T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, GRPO_SITE) {
  return grpo_kernels::emulation::shuffle(GRPO_OP(ShflDown), mask, value, delta, width, where);
}
template <grpo_kernels::emulation::WarpValue T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, GRPO_SITE) {
  return grpo_kernels::emulation::shuffle(GRPO_OP(ShflXor), mask, value, lane_mask, width, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, GRPO_SITE) {
  return grpo_kernels::emulation::vote(GRPO_OP(Ballot), mask, predicate != 0, where);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, GRPO_SITE) {
  return grpo_kernels::emulation::vote(GRPO_OP(ReduceAdd), mask, value, where);
}
inline int __reduce_add_sync(unsigned mask, int value, GRPO_SITE) {
  return static_cast<int>(grpo_kernels::emulation::vote(GRPO_OP(ReduceAdd), mask, value, where));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, GRPO_SITE) {
  return grpo_kernels::emulation::vote(GRPO_OP(ReduceMin), mask, value, where);
}
inline int __reduce_min_sync(unsigned mask, int value, GRPO_SITE) {
  return static_cast<int>(grpo_kernels::emulation::vote(GRPO_OP(ReduceMinSigned), mask, value, where));
}
#undef GRPO_OP
#undef GRPO_SITE

inline void __threadfence() {
  grpo_kernels::emulation::scheduler.yield();
  grpo_kernels::emulation::races::fence();
}

// One overload per type, not a template, so that arguments convert as in CUDA. Signed overflow wraps.
#define GRPO_ATOMIC_ADD(T)                                                              \
  __forceinline__ T atomicAdd(T* address, T value) {                                    \
    return grpo_kernels::emulation::atomic(address, [value](T old) {                    \
      return static_cast<T>(static_cast<unsigned>(old) + static_cast<unsigned>(value)); \
    });                                                                                 \
  }
GRPO_ATOMIC_ADD(int)
GRPO_ATOMIC_ADD(unsigned)
#undef GRPO_ATOMIC_ADD

#pragma GCC visibility pop

#include "cuda_emulator_half.h"
#include "cuda_emulator_math.h"
#include "cuda_emulator_tensor.h"
