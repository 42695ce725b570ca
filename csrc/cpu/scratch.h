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

// Asks for huge pages where whole ones fit, before anything is written: 512 times fewer first touches, each of which
// costs a microsecond or more. Advice only: may well be refused.
inline void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

// Working memory that is meant to be kept from call to call, as a static thread_local: the first touch of a fresh page
// costs a microsecond or more, and a page holds less work than that. Not initialised. Large pieces ask for huge pages,
// and are given back by keep_at_most so that nobody notices memory held after one large batch.
template <typename T>
class Scratch {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // Room for `count` elements; what was there is lost.
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
