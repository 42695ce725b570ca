#pragma once

#include <stdint.h>

#include "grpo_kernels/half_bits.h"
#include "grpo_kernels/similarity.h"

namespace grpo_kernels {

constexpr int kDepthBlock = 1024;  // of a row at a time: with 64 rows 256 KiB, which the second cache has

// Memory for one prompt of up to `items` responses. `matrix` holds products, then distances, then sums of clusters.
struct PromptMemory {
  static constexpr int kMatrices = 2, kVectors = 11, kIntegers = 6;

  int stride;
  double *matrix, *tree;
  double* vectors;
  int32_t* integers;
  float* rows;  // embeddings of half precision, kDepthBlock of each

  GRPO_HD static int stride_of(int items) {
    return (items + kPad - 1) / kPad * kPad + kPad;  // not a power of two, whose columns share a cache line's place
  }
  GRPO_HD double* vector(int which) const { return vectors + which * stride; }
  GRPO_HD double* silhouettes() const { return vector(8); }
  GRPO_HD int32_t* integer(int which) const { return integers + which * stride; }
};

}  // namespace grpo_kernels

// multiply_rows  into memory.matrix for i <= j: sums of `depth` products, always in the same order
// measure        distances from products, in their place; 0 on the diagonal
// group_items    the groups of n items from their distances (used up), labels in order of first appearance
// link_items     the merges of their tree, [2 (n - 1)], and their heights; the distances are kept
// score_items    the silhouette of given clusters from the distances (used up); those of items in memory.silhouettes()
#define GRPO_DECLARE(level)                                                                                     \
  namespace grpo_kernels::level {                                                                               \
  void multiply_rows(const float* const* rows, int n, int64_t depth, const PromptMemory& memory);               \
  void multiply_rows(const Half* const* rows, int n, int64_t depth, const PromptMemory& memory);                \
  void multiply_rows(const BFloat16* const* rows, int n, int64_t depth, const PromptMemory& memory);            \
  void measure(const PromptMemory& memory, int n);                                                              \
  Grouping group_items(const SimilaritySettings& settings, const PromptMemory& memory, int n, int32_t* labels); \
  void link_items(int linkage, const PromptMemory& memory, int n, int32_t* merges, double* heights);            \
  double score_items(const PromptMemory& memory, int n, const int32_t* first);                                  \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
