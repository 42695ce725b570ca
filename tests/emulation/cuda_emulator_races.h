// Race detection for the kernel emulator. A build with -fsanitize=thread calls back at every load and store of the
// kernels; cuda_emulator_races.cpp answers those calls in place of ThreadSanitizer's runtime, which knows nothing of
// fibers or of CUDA's barriers. In every other build the functions below do nothing.
//
// Two accesses to the same byte race if at least one of them is a write, at least one is not atomic, and they come from
//   - two threads of a block with neither __syncthreads() between them nor a chain of __syncwarp() from one to the
//     other. Shuffles and votes order no memory, as on a GPU, so they do not count.
//   - two blocks of one launch, which nothing orders. Shared memory is each block's own.
// Two writes of the same value race as well: compute-sanitizer's racecheck reports those, too.
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

// `block` is the size of a block in threads, `index` the place of one in its grid, each as {x, y, z}.
void begin_launch(const void* kernel, const unsigned (&block)[3]);
void begin_block(const unsigned (&index)[3], Range static_shared, Range dynamic_shared);
// Describes the races since begin_launch(), an empty string if there are none.
std::string end_launch();

void set_thread(unsigned thread, Range stack);
void block_barrier();
void warp_barrier(unsigned first_thread, std::uint32_t lanes);

// Accesses are recorded only while a kernel's own code runs, which these two tell apart from the emulator's.
void set_recording(bool recording);
void set_atomic(bool atomic);

#else

inline void begin_launch(const void*, const unsigned (&)[3]) {}
inline void begin_block(const unsigned (&)[3], Range, Range) {}
inline std::string end_launch() { return {}; }
inline void set_thread(unsigned, Range) {}
inline void block_barrier() {}
inline void warp_barrier(unsigned, std::uint32_t) {}
inline void set_recording(bool) {}
inline void set_atomic(bool) {}

#endif

// The emulator's own code, from here to the end of the scope.
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
