// The warp operations of the kernel emulator. Lanes wait for exactly the lanes of their masks, so groups of one warp
// can be at different operations at once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <utility>

#include "cuda_emulator_schedule.h"

#pragma GCC visibility push(hidden)
namespace grpo_kernels::emulation {

inline std::uint64_t Scheduler::warp_collective(Operation operation, std::uint32_t mask, unsigned bytes,
                                                std::uint64_t value, unsigned source_lane, const Site& where) {
  const races::Paused paused;
  Warp& warp = warps_[current_ / 32];
  const unsigned self = lane();
  if (!(mask >> self & 1)) {
    std::string reason = std::string(name_of(operation)) + " with mask " + hexadecimal(mask) +
                         ", which omits its own lane " + std::to_string(self);
    fail(std::move(reason), where);
  }
  Request& request = warp.requests[self];
  request.operation = operation;
  request.bytes = static_cast<std::uint8_t>(bytes);
  request.source_lane = static_cast<std::uint8_t>(source_lane);
  request.mask = mask;
  request.value = value;
  request.where = where;
  check_agreement(warp, self);
  warp.at_collective |= 1u << self;
  warp.last_arrival = self;
  set_waiting(warp, 1u << self);
  complete_if_ready(warp, request);
  wait();
  return request.result;
}

// Two lanes that wait for each other must do so in the same operation.
inline void Scheduler::check_agreement(const Warp& warp, unsigned lane) {
  const Request& mine = warp.requests[lane];
  const auto agrees = [&mine](const Request& other) {
    return other.operation == mine.operation && other.mask == mine.mask && other.bytes == mine.bytes;
  };
  const std::uint32_t waiting = warp.at_collective & mine.mask;
  // the last lane to arrive was compared with all before it
  if ((waiting >> warp.last_arrival & 1) && agrees(warp.requests[warp.last_arrival])) return;
  for (std::uint32_t left = waiting; left != 0; left &= left - 1) {
    const Request& other = warp.requests[std::countr_zero(left)];
    if (!(other.mask >> lane & 1) || agrees(other)) continue;
    std::string reason = std::string("reaches ") + name_of(mine.operation) + " with mask " + hexadecimal(mine.mask) +
                         " on " + std::to_string(mine.bytes) + " bytes while lane " +
                         std::to_string(std::countr_zero(left)) + " of its warp waits for it in " +
                         name_of(other.operation) + " with mask " + hexadecimal(other.mask) + " on " +
                         std::to_string(other.bytes) + " bytes" + at(other.where);
    fail(std::move(reason), mine.where);
  }
}

// Completes the operation of a group once all of its lanes wait for it, except for those that have returned.
inline void Scheduler::complete_if_ready(Warp& warp, const Request& request) {
  const Operation operation = request.operation;
  const std::uint32_t mask = request.mask;
  const std::uint32_t group = mask & warp.live;
  if ((group & ~warp.at_collective) != 0) return;
  for (std::uint32_t left = group; left != 0; left &= left - 1) {
    if (warp.requests[std::countr_zero(left)].mask != mask) return;
  }
  const bool is_shuffle = operation >= Operation::kShfl && operation <= Operation::kShflXor;
  const std::uint64_t common = is_shuffle ? 0 : combine(warp, group, operation);
  for (std::uint32_t left = group; left != 0; left &= left - 1) {
    const unsigned lane = std::countr_zero(left);
    warp.requests[lane].result = is_shuffle ? shuffled(warp, lane) : common;
  }
  if (operation == Operation::kSyncwarp) races::warp_barrier(static_cast<unsigned>(&warp - warps_) * 32, group);
  warp.at_collective &= ~group;
  set_runnable(warp, group);
}

inline std::uint64_t Scheduler::shuffled(const Warp& warp, unsigned lane) {
  const Request& mine = warp.requests[lane];
  const unsigned source = mine.source_lane;
  if (!(mine.mask & warp.live & (1u << source))) {
    const unsigned thread = static_cast<unsigned>(&warp - warps_) * 32 + lane;
    std::string reason =
        std::string(name_of(mine.operation)) + " reads lane " + std::to_string(source) +
        (mine.mask >> source & 1 ? ", which has returned or does not exist" : ", which its mask omits: ") +
        (mine.mask >> source & 1 ? "" : hexadecimal(mine.mask));
    fail(thread, std::move(reason), mine.where);
  }
  return warp.requests[source].value;
}

// Votes and reductions: one result for all lanes of the group.
inline std::uint64_t Scheduler::combine(const Warp& warp, std::uint32_t group, Operation operation) const {
  std::uint32_t result = static_cast<std::uint32_t>(warp.requests[std::countr_zero(group)].value);
  std::uint32_t ballot = 0;
  bool first = true;
  for (std::uint32_t left = group; left != 0; left &= left - 1) {
    const unsigned lane = std::countr_zero(left);
    const std::uint32_t value = static_cast<std::uint32_t>(warp.requests[lane].value);
    if (value != 0) ballot |= 1u << lane;
    if (std::exchange(first, false)) continue;
    switch (operation) {
      case Operation::kReduceAdd:
        result += value;
        break;
      case Operation::kReduceMinSigned:
        result =
            static_cast<std::uint32_t>(std::min(static_cast<std::int32_t>(result), static_cast<std::int32_t>(value)));
        break;
      case Operation::kReduceMin:
        result = std::min(result, value);
        break;
      default:
        break;
    }
  }
  if (operation == Operation::kBallot || operation >= Operation::kMma) return ballot;
  return result;
}

}  // namespace grpo_kernels::emulation
#pragma GCC visibility pop
