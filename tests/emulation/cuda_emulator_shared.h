// Shared memory of the block that the kernel emulator runs.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cuda_emulator_fiber.h"
#include "cuda_emulator_races.h"

// Static shared arrays must hold garbage when a block starts. A named section cannot collect them, because it does not
// take those of templates; but all thread-local variables of a library form one contiguous block per OS thread, which
// can be result and filled. AddressSanitizer puts no red zones around thread-local variables, so its build uses plain
// statics: that build detects overruns of static arrays, the other one reads before writes.
#if defined(__linux__) && !defined(GRPO_EMULATOR_ASAN)
#define GRPO_EMULATOR_POISON_STATIC 1
#include <link.h>
#define __shared__ static thread_local
#else
#define __shared__ static
#endif

#pragma GCC visibility push(hidden)
namespace grpo_kernels::emulation {

// NaN as a float, double or bfloat16, -1 as an index.
inline constexpr int kPoison = 0xFF;

#ifdef GRPO_EMULATOR_POISON_STATIC

inline thread_local unsigned char thread_local_anchor = 0;

struct ThreadLocalBlock {
  std::size_t anchor_offset = 0;
  std::size_t bytes = 0;
};

inline int match_thread_local_block(dl_phdr_info* info, std::size_t, void* result) {
  const auto* const begin = static_cast<const unsigned char*>(info->dlpi_tls_data);
  if (begin == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
    const std::size_t bytes = info->dlpi_phdr[i].p_memsz;
    if (&thread_local_anchor < begin || &thread_local_anchor >= begin + bytes) continue;
    *static_cast<ThreadLocalBlock*>(result) = {static_cast<std::size_t>(&thread_local_anchor - begin), bytes};
    return 1;
  }
  return 0;
}

// The block also holds thread-local variables of host code, which does not run during a launch; hence the block is
// restored when the launch ends. (Do not link libc statically: its variables would be in the block as well.)
class StaticShared {
 public:
  StaticShared() {
    // the same for every OS thread
    static const ThreadLocalBlock layout = [] {
      thread_local_anchor = 0;  // the first use allocates the block of a thread
      ThreadLocalBlock block;
      dl_iterate_phdr(match_thread_local_block, &block);
      return block;
    }();
    begin_ = &thread_local_anchor - layout.anchor_offset;
    saved_.assign(begin_, begin_ + layout.bytes);
  }
  StaticShared(const StaticShared&) = delete;
  StaticShared& operator=(const StaticShared&) = delete;
  ~StaticShared() {
    if (!saved_.empty()) std::memcpy(begin_, saved_.data(), saved_.size());
  }

  void poison() {
    if (!saved_.empty()) std::memset(begin_, kPoison, saved_.size());
  }
  races::Range range() const { return {begin_, saved_.size()}; }

 private:
  unsigned char* begin_ = nullptr;
  std::vector<unsigned char> saved_;
};

#else

class StaticShared {
 public:
  void poison() {}
  races::Range range() const { return {}; }
};

#endif

// Allocated for every block, in the exact size, so that AddressSanitizer detects overruns and pointers kept from an
// earlier block.
class DynamicShared {
 public:
  explicit DynamicShared(std::size_t bytes) : bytes_(bytes), memory_(std::malloc(bytes)) {
    if (memory_ == nullptr && bytes > 0) throw std::bad_alloc();
    if (bytes > 0) std::memset(memory_.get(), kPoison, bytes);
  }
  void* get() const { return memory_.get(); }
  races::Range range() const { return {memory_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::size_t bytes_;
  std::unique_ptr<void, Free> memory_;
};

}  // namespace grpo_kernels::emulation
#pragma GCC visibility pop
