#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace grpo_kernels {

constexpr std::size_t kHugePage = 2 << 20;

// Asks the kernel for huge pages before the first write: 512 times fewer page faults of a microsecond or more each.
inline void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

// Uninitialised working memory, to be kept across calls as a static thread_local: a page fault takes longer than the
// work on a page. keep_at_most() frees it after a large batch.
template <typename T>
class Scratch {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // Memory for `count` elements; discards the previous contents.
  T* get(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = 0;
      const std::size_t alignment = static_cast<std::size_t>(count) * sizeof(T) >= kHugePage ? kHugePage : 64;
      const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + alignment - 1) / alignment * alignment;
      data_ = static_cast<T*>(std::aligned_alloc(alignment, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      if (alignment == kHugePage) advise_huge_pages(data_, bytes);
      capacity_ = count;
    }
    return data_;
  }

  void keep_at_most(int64_t count) {
    if (capacity_ <= count) return;
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
  }

 private:
  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace grpo_kernels
