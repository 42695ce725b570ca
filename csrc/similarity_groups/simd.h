#pragma once

#include <stdint.h>

#include "common/half_bits.h"
#include "similarity_groups/rules.h"

namespace grpo_kernels {

constexpr int kPad = 4;            // doubles at a time
constexpr int kDepthBlock = 1024;  // columns at a time: 64 rows of them take 256 KiB, which fits into the L2 cache

// Working memory for one prompt. `matrix` holds inner products, then distances, then the sums of clusters.
struct PromptMemory {
  static constexpr int kMatrices = 2, kVectors = 11, kIntegers = 6;

  int stride;
  double *matrix, *tree;
  double* vectors;
  int32_t* integers;
  float* rows;  // kDepthBlock columns of each half-precision embedding

  GRPO_HD static int stride_of(int items) {
    return (items + kPad - 1) / kPad * kPad + kPad;  // not a power of two, which would map a column to one cache set
  }
  GRPO_HD double* vector(int which) const { return vectors + which * stride; }
  GRPO_HD double* silhouettes() const { return vector(8); }
  GRPO_HD int32_t* integer(int which) const { return integers + which * stride; }
};

}  // namespace grpo_kernels

// multiply_rows      writes inner products to memory.matrix for i <= j, each summed in the same order
// products_to_distances  replaces inner products by cosine distances, 0 on the diagonal
// group_items        groups n items by their distances (overwritten); labels in order of first appearance
// link_items         writes the merges of their tree, [2 (n - 1)], and the heights; keeps the distances
// score_items        returns the silhouette of given clusters, from the distances (overwritten); those of the items are
// in
//                    memory.silhouettes()
#define GRPO_DECLARE(level)                                                                                     \
  namespace grpo_kernels::level {                                                                               \
  void multiply_rows(const float* const* rows, int n, int64_t depth, const PromptMemory& memory);               \
  void multiply_rows(const Half* const* rows, int n, int64_t depth, const PromptMemory& memory);                \
  void multiply_rows(const BFloat16* const* rows, int n, int64_t depth, const PromptMemory& memory);            \
  void products_to_distances(const PromptMemory& memory, int n);                                                \
  Grouping group_items(const SimilaritySettings& settings, const PromptMemory& memory, int n, int32_t* labels); \
  void link_items(Linkage linkage, const PromptMemory& memory, int n, int32_t* merges, double* heights);        \
  double score_items(const PromptMemory& memory, int n, const int32_t* first);                                  \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
