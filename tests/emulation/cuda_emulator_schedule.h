// Runs the threads of a grid for the kernel emulator: one block at a time, one fiber per thread, in an order drawn from
// a seed. A fiber runs until it has to wait or yields at an atomic; then another one is picked.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_emulator_fiber.h"
#include "cuda_emulator_races.h"
#include "cuda_emulator_shared.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#pragma GCC visibility push(hidden)
inline uint3 threadIdx{}, blockIdx{};
inline dim3 blockDim, gridDim;

namespace grpo_kernels::emulation {

using Site = std::source_location;

enum class Operation : std::uint8_t {
  kSyncthreads,
  kSyncthreadsOr,
  kSyncwarp,
  kShfl,
  kShflUp,
  kShflDown,
  kShflXor,
  kBallot,
  kReduceAdd,
  kReduceMinSigned,
  kReduceMin,
  kMma,
  kLdmatrix,
};

inline const char* name_of(Operation operation) {
  static constexpr const char* kNames[] = {
      "__syncthreads",     "__syncthreads_or", "__syncwarp",    "__shfl_sync",       "__shfl_up_sync",
      "__shfl_down_sync",  "__shfl_xor_sync",  "__ballot_sync", "__reduce_add_sync", "__reduce_min_sync",
      "__reduce_min_sync", "mma.sync",         "ldmatrix"};
  return kNames[static_cast<int>(operation)];
}

// The operands of one lane in a warp operation: raw bits and, for a shuffle, the lane to read.
struct Request {
  Operation operation;
  std::uint8_t bytes;
  std::uint8_t source_lane;
  std::uint32_t mask;
  std::uint64_t value;
  std::uint64_t result;
  Site where;
};

// Sets of lanes, a bit each. A live lane is exactly one of runnable, at_barrier and at_collective.
struct Warp {
  std::uint32_t live = 0;
  std::uint32_t runnable = 0;
  std::uint32_t at_barrier = 0;
  std::uint32_t at_collective = 0;
  unsigned last_arrival = 0;
  Request requests[32];
};

struct Barrier {
  unsigned arrived = 0;
  unsigned first_arrival = 0;
  bool is_any_true = false;
  int result = 0;
  Operation operation{};
  Site where;
};

class Scheduler {
 public:
  template <typename Thread>
  void run_grid(const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes, const Thread& thread) {
    // any OS thread may launch; the state of one grid at a time is kept
    const std::lock_guard<std::mutex> lock(mutex_);
    call_ = [](const void* callable) { (*static_cast<const Thread*>(callable))(); };
    callable_ = &thread;
    kernels_.insert(kernel);
    races::begin_launch(kernel);
    run_blocks(grid, block, shared_bytes);
  }

  void set_seed(std::uint64_t seed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    seed_ = seed;
    launches_ = 0;
    kernels_.clear();
  }
  std::uint64_t launches() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return launches_;
  }
  std::set<const void*> kernels() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kernels_;
  }

  // The rest is called by the running kernel.
  void* dynamic_shared() const { return dynamic_shared_; }
  unsigned lane() const { return current_ % 32; }
  unsigned warp() const { return current_ / 32; }
  unsigned thread() const { return current_; }
  int block_barrier(Operation operation, bool predicate, const Site& where);
  std::uint64_t warp_collective(Operation operation, std::uint32_t mask, unsigned bytes, std::uint64_t value,
                                unsigned source_lane, const Site& where);
  // Lets another thread run now and then, so that threads reach an atomic in any order.
  void yield() {
    const races::Paused paused;
    if ((random() & 3) == 0) switch_to(pick(/*any=*/true));
  }
  [[noreturn]] void fail(std::string reason, const Site& where) { fail(current_, std::move(reason), where); }

 private:
  static std::string at(const Site& where) {
    const std::string file = where.file_name();
    return " at " + file.substr(file.rfind('/') + 1) + ":" + std::to_string(where.line());
  }
  static std::string hexadecimal(std::uint32_t mask) {
    char digits[16];
    std::snprintf(digits, sizeof(digits), "0x%08x", mask);
    return digits;
  }
  static std::string text(const uint3& index) {
    char digits[64];
    std::snprintf(digits, sizeof(digits), "(%u,%u,%u)", index.x, index.y, index.z);
    return digits;
  }
  std::string described_schedule() const {
    return " [schedule seed " + std::to_string(seed_) + ", launch " + std::to_string(launches_) + "]";
  }
  std::string describe(unsigned thread) const {
    return "block " + text(blockIdx) + " thread " + text(indexes_[thread]);
  }
  std::uint64_t random() {
    // splitmix64: every seed, 0 included, gives a good sequence.
    std::uint64_t bits = random_state_ += 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
  }

  void run_blocks(dim3 grid, dim3 block, std::size_t shared_bytes);
  void run_block(std::size_t shared_bytes, StaticShared& static_shared);
  void start_threads();
  void forget_copies();
  void check_copies();
  std::string deadlock() const;

  static void fiber_main();
  void finish_thread();
  [[noreturn]] void fail(unsigned thread, std::string reason, const Site& where);
  [[noreturn]] void leave();
  unsigned pick(bool any);
  void set_current(unsigned thread);
  void switch_to(unsigned next);
  void wait() { switch_to(pick(/*any=*/false)); }

  void release_barrier();
  void check_agreement(const Warp& warp, unsigned lane);
  void complete_if_ready(Warp& warp, const Request& request);
  std::uint64_t combine(const Warp& warp, std::uint32_t group, Operation operation) const;
  std::uint64_t shuffled(const Warp& warp, unsigned lane);
  void set_runnable(Warp& warp, std::uint32_t lanes) {
    warp.runnable |= lanes;
    runnable_warps_ |= 1u << (&warp - warps_);
  }
  void set_waiting(Warp& warp, std::uint32_t lanes) {
    warp.runnable &= ~lanes;
    if (warp.runnable == 0) runnable_warps_ &= ~(1u << (&warp - warps_));
  }

  static constexpr unsigned kNobody = ~0u;

  std::mutex mutex_;
  std::uint64_t seed_ = 0;
  std::uint64_t launches_ = 0;     // since the seed was set; each launch gets its own schedule
  std::set<const void*> kernels_;  // launched since then
  std::uint64_t random_state_ = 0;

  void (*call_)(const void*) = nullptr;
  const void* callable_ = nullptr;
  void* dynamic_shared_ = nullptr;

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<uint3> indexes_;
  Context caller_;
  unsigned threads_ = 0;
  unsigned current_ = kNobody;
  unsigned live_ = 0;
  Warp warps_[32];
  std::uint32_t runnable_warps_ = 0;
  Barrier barrier_;

  // Threads of a block are picked at random each time, or else as the first (or last) runnable one counting from a
  // fixed one, which lets some warps run as far ahead as the barriers allow.
  bool pick_at_random_ = true;
  bool pick_last_ = false;
  unsigned fixed_rotation_ = 0;

  std::string failure_;
  std::exception_ptr exception_;
};

inline Scheduler scheduler;
inline std::size_t shared_memory_limit = 227 * 1024;  // of a block, as on sm_90

inline void Scheduler::run_blocks(dim3 grid, dim3 block, std::size_t shared_bytes) {
  const std::uint64_t threads = std::uint64_t{block.x} * block.y * block.z;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > 1024 || block.z > 64 || blocks == 0 || grid.x > 0x7FFFFFFF || grid.y > 65535 ||
      grid.z > 65535 || shared_bytes > shared_memory_limit) {
    throw std::runtime_error("kernel launch: invalid configuration argument");
  }
  gridDim = grid;
  blockDim = block;
  threads_ = static_cast<unsigned>(threads);
  while (fibers_.size() < threads_) {
    fibers_.push_back(std::make_unique<Fiber>());
    fibers_.back()->prepare(fiber_main, fibers_.size() - 1);
  }
  indexes_.resize(threads_);
  for (unsigned i = 0; i < threads_; ++i) {
    indexes_[i] = {i % block.x, i / block.x % block.y, i / block.x / block.y};
  }
  random_state_ = seed_;
  random_state_ = random() + launches_++;

  // a step coprime to the number of blocks visits every block once
  StaticShared static_shared;
  std::uint64_t step = 1 + random() % blocks;
  while (std::gcd(step, blocks) != 1) ++step;
  std::uint64_t position = random() % blocks;
  for (std::uint64_t done = 0; done < blocks; ++done, position = (position + step) % blocks) {
    blockIdx = {static_cast<unsigned>(position % grid.x), static_cast<unsigned>(position / grid.x % grid.y),
                static_cast<unsigned>(position / grid.x / grid.y)};
    run_block(shared_bytes, static_shared);
  }
  const std::string races = races::end_launch();
  if (!races.empty()) throw std::runtime_error(races + described_schedule());
}

inline void Scheduler::run_block(std::size_t shared_bytes, StaticShared& static_shared) {
  static_shared.poison();
  const DynamicShared dynamic(shared_bytes);
  dynamic_shared_ = dynamic.get();
  races::begin_block(static_shared.range(), dynamic.range());
  start_threads();
  set_current(pick(/*any=*/true));
  switch_context(caller_, fibers_[current_]->context);
  if (exception_ == nullptr && failure_.empty()) return;
  // the fibers stopped within the kernel and must be reset before the next block
  for (std::size_t i = 0; i < fibers_.size(); ++i) fibers_[i]->prepare(fiber_main, i);
  if (exception_ != nullptr) std::rethrow_exception(std::exchange(exception_, nullptr));
  throw std::runtime_error(std::exchange(failure_, {}) + described_schedule());
}

inline void Scheduler::start_threads() {
  forget_copies();
  runnable_warps_ = 0;
  barrier_ = Barrier{};
  live_ = threads_;
  for (unsigned first = 0; first < threads_; first += 32) {
    Warp& warp = warps_[first / 32];
    warp.live = threads_ - first >= 32 ? ~0u : (1u << (threads_ - first)) - 1;
    warp.runnable = warp.at_barrier = warp.at_collective = 0;
    set_runnable(warp, warp.live);
  }
  const std::uint64_t bits = random();
  pick_at_random_ = bits & 1;
  pick_last_ = bits >> 1 & 1;
  fixed_rotation_ = static_cast<std::uint32_t>(bits >> 32);
}

// A fiber serves one thread of every block. Between blocks it is parked in finish_thread().
inline void Scheduler::fiber_main() {
  Scheduler& self = scheduler;
  arrive(self.fibers_[self.current_]->context);
  for (;;) {
    try {
      races::set_recording(true);
      self.call_(self.callable_);
      races::set_recording(false);
    } catch (...) {
      races::set_recording(false);
      self.exception_ = std::current_exception();
    }
    if (self.exception_ != nullptr) self.leave();
    self.finish_thread();
  }
}

inline void Scheduler::finish_thread() {
  check_copies();
  Warp& warp = warps_[current_ / 32];
  const std::uint32_t bit = 1u << lane();
  warp.live &= ~bit;
  set_waiting(warp, bit);
  --live_;
  // a thread that has returned takes no part in later operations, so others may have waited for it alone
  if (barrier_.arrived > 0 && barrier_.arrived == live_) release_barrier();
  for (std::uint32_t left = warp.at_collective; left != 0; left &= left - 1) {
    const unsigned other = std::countr_zero(left);
    const Request& request = warp.requests[other];
    if ((warp.at_collective >> other & 1) && (request.mask & bit)) complete_if_ready(warp, request);
  }
  wait();
}

// Objects on the fibers' stacks are never destroyed, so nothing here or in the callers may own memory. Temporaries of
// the expression that calls fail() would, hence callers build `reason` before.
inline void Scheduler::fail(unsigned thread, std::string reason, const Site& where) {
  failure_ = describe(thread) + at(where) + ": " + reason;
  std::string().swap(reason);
  leave();
}

inline void Scheduler::leave() {
  races::set_recording(false);
  switch_context(fibers_[current_]->context, caller_);
  std::abort();
}

inline std::string Scheduler::deadlock() const {
  struct Place {
    unsigned count = 0;
    unsigned first = 0;
  };
  std::map<std::string, Place> places;
  for (unsigned thread = 0; thread < threads_; ++thread) {
    const Warp& warp = warps_[thread / 32];
    const Request& request = warp.requests[thread % 32];
    std::string place;
    if (warp.at_barrier >> thread % 32 & 1) {
      place = name_of(barrier_.operation) + at(barrier_.where);
    } else if (warp.at_collective >> thread % 32 & 1) {
      place = name_of(request.operation) + (" with mask " + hexadecimal(request.mask)) + at(request.where);
    } else {
      continue;
    }
    if (places[place].count++ == 0) places[place].first = thread;
  }
  std::string reason = "deadlock in block " + text(blockIdx) + ":";
  for (const auto& [place, who] : places) {
    reason.append(" ").append(std::to_string(who.count)).append(" threads, the first ");
    reason.append(text(indexes_[who.first])).append(", wait in ").append(place).append(";");
  }
  return reason + " " + std::to_string(threads_ - live_) + " have returned";
}

inline unsigned Scheduler::pick(bool any) {
  if (runnable_warps_ == 0) return kNobody;
  const bool at_random = any || pick_at_random_;
  const std::uint32_t bits = at_random ? static_cast<std::uint32_t>(random()) : fixed_rotation_;
  // the first member counting up (or the last counting down) from `place`, cyclically
  const bool last = pick_last_;
  const auto choose = [last](std::uint32_t members, unsigned place) {
    if (last) {
      const std::uint32_t below = members & (0xFFFFFFFFu >> (31 - place));
      return 31u - std::countl_zero(below != 0 ? below : members);
    }
    const std::uint32_t above = members & (0xFFFFFFFFu << place);
    return static_cast<unsigned>(std::countr_zero(above != 0 ? above : members));
  };
  const unsigned warp = choose(runnable_warps_, (bits & 0xFFFF) * ((threads_ + 31) / 32) >> 16);
  return warp * 32 + choose(warps_[warp].runnable, (bits >> 16) * std::min(threads_, 32u) >> 16);
}

inline void Scheduler::set_current(unsigned thread) {
  current_ = thread;
  threadIdx = indexes_[thread];
  const Context& context = fibers_[thread]->context;
  races::set_thread(thread, {context.stack_bottom, context.stack_bytes});
}

inline void Scheduler::switch_to(unsigned next) {
  if (next == current_) return;
  Context& here = fibers_[current_]->context;
  if (next == kNobody) {
    if (live_ > 0) failure_ = deadlock();
    switch_context(here, caller_);
    return;
  }
  set_current(next);
  switch_context(here, fibers_[next]->context);
}

inline int Scheduler::block_barrier(Operation operation, bool predicate, const Site& where) {
  const races::Paused paused;
  if (barrier_.arrived == 0) {
    barrier_.operation = operation;
    barrier_.where = where;
    barrier_.first_arrival = current_;
    barrier_.is_any_true = false;
  } else if (operation != barrier_.operation || where.line() != barrier_.where.line() ||
             where.column() != barrier_.where.column() ||
             std::strcmp(where.file_name(), barrier_.where.file_name()) != 0) {
    std::string reason = std::string("reaches ") + name_of(operation) + " while thread " +
                         text(indexes_[barrier_.first_arrival]) + " waits in another barrier, " +
                         name_of(barrier_.operation) + at(barrier_.where);
    fail(std::move(reason), where);
  }
  ++barrier_.arrived;
  barrier_.is_any_true |= predicate;
  Warp& warp = warps_[current_ / 32];
  warp.at_barrier |= 1u << lane();
  set_waiting(warp, 1u << lane());
  if (barrier_.arrived == live_) release_barrier();
  wait();
  // valid until this thread reaches the next barrier
  return barrier_.result;
}

inline void Scheduler::release_barrier() {
  barrier_.result = barrier_.is_any_true;
  barrier_.arrived = 0;
  races::block_barrier();
  for (unsigned i = 0; i < (threads_ + 31) / 32; ++i) {
    if (warps_[i].at_barrier == 0) continue;
    set_runnable(warps_[i], std::exchange(warps_[i].at_barrier, 0));
  }
}

}  // namespace grpo_kernels::emulation
#pragma GCC visibility pop

#include "cuda_emulator_warp.h"
