// Race detection for the kernel emulator. A build with -fsanitize=thread makes a call at every load and store of the
// kernels; cuda_emulator_races.cpp implements these in place of ThreadSanitizer's runtime, which supports neither
// fibers nor CUDA's barriers. In other builds the functions below do nothing.
//
// Two accesses to the same byte race if at least one of them is a write, at least one is not atomic, and they come from
//   - two threads of a block with neither __syncthreads() between them nor a chain of __syncwarp() from one to the
//     other. As on a GPU, shuffles and votes do not order memory.
//   - two blocks of one launch, unless the earlier thread passed __threadfence() after its access and, by a barrier
//     or by itself, came to an atomic operation on an address before the later block did, whose thread was then reached
//     in the same way. Each block has its own shared memory.
// Two writes of the same value race as well, as in compute-sanitizer's racecheck.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#if defined(__SANITIZE_THREAD__)
#define GRPO_EMULATOR_RACES 1
#endif

#pragma GCC visibility push(hidden)
namespace grpo_kernels::emulation::races {

struct Range {
  const void* begin;
  std::size_t bytes;
};

#ifdef GRPO_EMULATOR_RACES

void begin_launch(const void* kernel);
void begin_block(Range static_shared, Range dynamic_shared);
// Description of the races since begin_launch(), empty if there are none.
std::string end_launch();

void set_thread(unsigned thread, Range stack);
void block_barrier();
void warp_barrier(unsigned first_thread, std::uint32_t lanes);
void fence();
void atomic_operation(const void* address);

// Distinguish accesses of a kernel's own code, which are recorded, from those of the emulator.
void set_recording(bool recording);
void set_atomic(bool atomic);

#else

inline void begin_launch(const void*) {}
inline void begin_block(Range, Range) {}
inline std::string end_launch() { return {}; }
inline void set_thread(unsigned, Range) {}
inline void block_barrier() {}
inline void warp_barrier(unsigned, std::uint32_t) {}
inline void fence() {}
inline void atomic_operation(const void*) {}
inline void set_recording(bool) {}
inline void set_atomic(bool) {}

#endif

// Marks the emulator's own code, to the end of the scope.
class Paused {
 public:
  Paused() { set_recording(false); }
  Paused(const Paused&) = delete;
  Paused& operator=(const Paused&) = delete;
  ~Paused() { set_recording(true); }
};

class Atomic {
 public:
  Atomic() { set_atomic(true); }
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;
  ~Atomic() { set_atomic(false); }
};

}  // namespace grpo_kernels::emulation::races
#pragma GCC visibility pop
