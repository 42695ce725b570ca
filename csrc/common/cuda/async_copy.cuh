#pragma once

#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/cuda/pieces.cuh"

// Copies from global to shared memory that a thread starts and later waits for (sm_80 and later), without registers.
namespace grpo_kernels {

#ifdef GRPO_KERNELS_EMULATE

template <typename T>
__forceinline__ void copy_async(Piece<T>* to, const T* from, bool is_inside,
                                emulation::Site where = emulation::Site::current()) {
  emulation::copy_async_16(to, from, is_inside, where);
}
__forceinline__ void commit_copies() { emulation::commit_copies(); }
template <int kGroups>
__forceinline__ void wait_for_copies() {
  emulation::wait_for_copies(kGroups);
}

#else

// Starts to copy an aligned piece. One that is not inside becomes zeros and `from` is not read, but must be aligned.
template <typename T>
__device__ __forceinline__ void copy_async(Piece<T>* to, const T* from, bool is_inside) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
      "l"(__cvta_generic_to_global(from)), "r"(is_inside ? 16 : 0)
      : "memory");
}

// Makes a group of the thread's copies since the last one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kGroups` groups of the thread are under way. Other threads see the data after a barrier.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

#endif

}  // namespace grpo_kernels
