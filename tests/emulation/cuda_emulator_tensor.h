// Tensor cores and asynchronous copies of the kernel emulator.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "cuda_emulator_schedule.h"

#pragma GCC visibility push(hidden)
namespace grpo_kernels::emulation {

// --- mma.sync

struct MmaOperands {
  std::uint32_t a[4], b[2];
};

// Operands of two operations: a lane may reach the next one while others still read those of this one.
struct MmaWarp {
  MmaOperands lanes[2][32];
  unsigned turns[32] = {};
};
inline MmaWarp mma_warps[32];

// Tensor cores cut off the digits of a sum that float32 cannot hold.
inline float chopped(double value) {
  const float rounded = static_cast<float>(value);
  return std::fabs(rounded) > std::fabs(value) && !std::isinf(rounded) ? std::nextafter(rounded, 0.0f) : rounded;
}

// D += A B with A of 16 x 16, B of 16 x 8 and D of 16 x 8, distributed over the lanes as "Matrix fragments for
// mma.m16n8k16" in the PTX manual says: with g = lane / 4 and t = lane % 4, two numbers a word,
//   a[0] row g, columns 2t, 2t + 1; a[1] row g + 8; a[2] and a[3] the same, 8 columns further;
//   b[0] rows 2t, 2t + 1 of column g; b[1] the same, 8 rows further;
//   d[0], d[1] row g, columns 2t, 2t + 1; d[2], d[3] row g + 8.
template <typename Decode>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], const Decode& decode,
                  const Site& where) {
  const unsigned lane = scheduler.lane(), row = lane / 4, column = lane % 4 * 2;
  MmaWarp& warp = mma_warps[scheduler.warp()];
  MmaOperands* lanes;
  {
    const races::Paused paused;
    lanes = warp.lanes[warp.turns[lane]++ % 2];
    std::memcpy(lanes[lane].a, a, sizeof(a));
    std::memcpy(lanes[lane].b, b, sizeof(b));
  }
  if (scheduler.warp_collective(Operation::kMma, ~0u, 4, 1, 0, where) != ~0u) {
    scheduler.fail("mma.sync in a warp with lanes that have returned or do not exist", where);
  }
  const races::Paused paused;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned m = row + i / 2 * 8, n = column + i % 2;
    double sum = d[i];
    for (unsigned k = 0; k < 16; ++k) {
      const std::uint32_t left = lanes[m % 8 * 4 + k % 8 / 2].a[m / 8 + k / 8 * 2];
      const std::uint32_t right = lanes[n * 4 + k % 8 / 2].b[k / 8];
      sum += static_cast<double>(decode(static_cast<std::uint16_t>(left >> k % 2 * 16))) *
             decode(static_cast<std::uint16_t>(right >> k % 2 * 16));
    }
    d[i] = chopped(sum);
  }
}

// --- ldmatrix

struct MatrixRows {
  const void* rows[2][32];
  unsigned turns[32] = {};
};
inline MatrixRows matrix_rows[32];

// The lanes 8m to 8m + 7 pass the rows of 16 bytes of matrix m, and lane l gets word l % 4 of row l / 4 of each.
// Inlined, so that a race is reported at the kernel's line.
__forceinline__ void ldmatrix_x4(const void* row, std::uint32_t (&words)[4], const Site& where) {
  const unsigned lane = scheduler.lane();
  const void** rows;
  {
    const races::Paused paused;
    MatrixRows& warp = matrix_rows[scheduler.warp()];
    rows = warp.rows[warp.turns[lane]++ % 2];
    rows[lane] = row;
  }
  if (scheduler.warp_collective(Operation::kLdmatrix, ~0u, 4, 1, 0, where) != ~0u) {
    scheduler.fail("ldmatrix in a warp with lanes that have returned or do not exist", where);
  }
  for (unsigned m = 0; m < 4; ++m) {
    words[m] = static_cast<const std::uint32_t*>(rows[m * 8 + lane / 4])[lane % 4];
  }
}

// --- cp.async

constexpr std::uint64_t kGarbage = ~std::uint64_t{0};

struct Copy {
  std::uint64_t* to;
  const std::uint64_t* from;  // null: zeros
  unsigned group;
  Site where;
};

// The copies of each thread that have not arrived, oldest first, and the number of groups it has made.
struct Copies {
  std::deque<Copy> pending;
  unsigned groups = 0;
};
inline std::vector<Copies> copies_of_threads(1024);

inline void Scheduler::forget_copies() {
  for (unsigned thread = 0; thread < threads_; ++thread) copies_of_threads[thread] = {};
}

// A copy that was never waited for may arrive as late as this, over what was written to its place in the meantime.
inline void Scheduler::check_copies() {
  for (const Copy& copy : copies_of_threads[current_].pending) {
    if (copy.to[0] != kGarbage || copy.to[1] != kGarbage) {
      fail("cp.async was not waited for, and its shared memory was written", copy.where);
    }
  }
}

inline void commit_copies() {
  const races::Paused paused;
  ++copies_of_threads[scheduler.thread()].groups;
}

inline void start_copy(const Copy& copy) {
  const races::Paused paused;
  Copies& copies = copies_of_threads[scheduler.thread()];
  copies.pending.push_back({copy.to, copy.from, copies.groups, copy.where});
}

// Takes the oldest copy of the thread, unless it is in one of the last `groups` groups.
inline bool take_copy(unsigned groups, Copy& copy) {
  const races::Paused paused;
  Copies& copies = copies_of_threads[scheduler.thread()];
  if (copies.pending.empty() || copies.pending.front().group + groups >= copies.groups) return false;
  copy = copies.pending.front();
  copies.pending.pop_front();
  return true;
}

// The destination may change at any time until the copy is waited for: it is garbage from now on, and right at the last
// moment. Both writes are inlined, so that a race is reported at the kernel's line.
__forceinline__ void copy_async_16(void* to, const void* from, bool is_inside, const Site& where) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
    scheduler.fail("cp.async from an address that is not aligned", where);
  }
  const auto words = static_cast<std::uint64_t*>(to);
  words[0] = words[1] = kGarbage;
  start_copy({words, is_inside ? static_cast<const std::uint64_t*>(from) : nullptr, 0, where});
}

__forceinline__ void wait_for_copies(unsigned groups) {
  for (Copy copy; take_copy(groups, copy);) {
    copy.to[0] = copy.from == nullptr ? 0 : copy.from[0];
    copy.to[1] = copy.from == nullptr ? 0 : copy.from[1];
  }
}

}  // namespace grpo_kernels::emulation
#pragma GCC visibility pop
