#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

// Divides work among threads where one thread would take long. A parallel region ends when its last thread has run its
// part. Beside as many busy processes as cores that thread first waits milliseconds for a core, which made calls of
// 0.1 ms 10 to 40 times as slow. Below a millisecond the gain is not worth that risk. Callers state the time of an item
// on one thread, measured on an AMD EPYC with AVX-512 and warm caches; a factor of two in it moves the size from which
// a call is divided by as much and changes no result.
namespace grpo_kernels {

// The shortest time of one thread that is divided. Tests set 0, so that small inputs run on several threads.
inline double fork_nanoseconds = 1e6;

// Work divided so far, for tests.
inline std::atomic<int64_t> forks{0};

// Number of threads for work that one thread does in so many nanoseconds: each gets a quarter of a millisecond or more.
inline int64_t threads_for(double nanoseconds) {
  if (nanoseconds < fork_nanoseconds) return 1;
  const double threads = static_cast<double>(torch::stable::get_num_threads());
  return std::max<int64_t>(1, static_cast<int64_t>(std::min(threads, nanoseconds / (fork_nanoseconds / 4))));
}

// Calls visit(begin, end) for neighbouring parts of [0, count), at most one a thread. Exceptions are those of one
// thread: the first part's is thrown again here, as torch would replace its text.
template <typename Visit>
void divide(int64_t count, int64_t threads, const Visit& visit) {
  if (count <= 0) return;
  if (threads <= 1 || count == 1) return visit(int64_t{0}, count);
  forks.fetch_add(1, std::memory_order_relaxed);
  std::mutex mutex;
  std::exception_ptr error;
  int64_t failed = count;
  torch::stable::parallel_for(0, count, (count + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    try {
      visit(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (begin >= failed) return;
      error = std::current_exception();
      failed = begin;
    }
  });
  if (error) std::rethrow_exception(error);
}

// divide() for items that take one thread so many nanoseconds each.
template <typename Visit>
void parallel_for(int64_t count, double nanoseconds_each, const Visit& visit) {
  divide(count, threads_for(static_cast<double>(count) * nanoseconds_each), visit);
}

}  // namespace grpo_kernels
