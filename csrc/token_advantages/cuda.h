#pragma once

#include "common/affine_map.h"
#include "common/row_blocks.h"
#include "token_advantages/terms.h"

namespace grpo_kernels {

constexpr int kMaxTokenChunks = 32;  // of a row, one for each lane of a warp

// Summary of a chunk: the map from what its last token gets to what its first token passes on.
struct TokenChunk {
  AffineMap map;
  int64_t is_scored;  // whether every reward is a number
};

// Raw device pointers; null where an argument was not given. bounds (cu_seqlens) ascend within the tokens.
template <typename T>
struct TokenArrays {
  const T *rewards, *values;
  const bool* mask;
  const int32_t* turns;
  const int64_t* bounds;
  int64_t rows, width, total;
  bool has_values;  // of no tokens, `values` can be null
  TokenAdvantageSettings settings;
  unsigned char* roles;    // with turns, of each token
  TokenChunk* chunks;      // [rows, num_chunks]
  RangedMoments* moments;  // [rows, num_chunks]
  TokenNorm* norm;         // [1]
  T *advantages, *returns;

  bool has_long_rows() const { return total >= kLongRow * rows; }
  // Few long rows are cut into chunks, so that every multiprocessor has work. Turns may cross any cut.
  int64_t num_chunks() const {
    constexpr int64_t kWantedBlocks = 512, kTile = kLongRowThreads * kRowItems;
    if (turns != nullptr || !has_long_rows()) return 1;
    const int64_t wanted = (kWantedBlocks + rows - 1) / rows, tiles = total / rows / kTile;
    const int64_t chunks = wanted < tiles ? wanted : tiles;
    return chunks < 1 ? 1 : chunks < kMaxTokenChunks ? chunks : kMaxTokenChunks;
  }
};

template <typename T>
void launch_token_advantages(const TokenArrays<T>& arrays, void* stream);

}  // namespace grpo_kernels
