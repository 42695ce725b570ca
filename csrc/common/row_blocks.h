#pragma once

#include <stdint.h>

// How kernels that walk along rows divide them: a block works on a row, or on a chunk of one, tile by tile, and a
// thread on neighbouring tokens of a tile.
namespace grpo_kernels {

constexpr int kRowItems = 8;                                 // tokens of a thread
constexpr int kShortRowThreads = 32, kLongRowThreads = 256;  // of the block that works on a row
constexpr int64_t kLongRow = 512;                            // mean length from which rows get the larger blocks

}  // namespace grpo_kernels
