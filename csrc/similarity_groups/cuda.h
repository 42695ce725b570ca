#pragma once

#include "common/half_bits.h"
#include "similarity_groups/rules.h"

namespace grpo_kernels {

// Raw device pointers; null where an argument was not given.
template <typename T>
struct EmbeddingArrays {
  const T* embeddings;  // [N, depth]
  int64_t depth;
  Prompts prompts;
  const bool* valid;
  float* distances;  // [P, size, size]
  uint8_t* status;   // [N]
};

struct ClusterArrays {
  const float* distances;  // [prompts.count, size, size]
  Prompts prompts;         // rows of the labels
  SimilaritySettings settings;
  double* matrices;  // one for each block; null: in shared memory
  int32_t* labels;
  int64_t* ids;  // may be null
  int32_t* num_groups;
  float* silhouette;
  int32_t* best_k;
  uint8_t* verdict;
};

struct TreeArrays {
  const float* distances;
  Prompts prompts;
  Linkage linkage;
  double* matrices;
  int32_t* merges;  // [P, size - 1, 2]
  float* heights;   // [P, size - 1]
};

struct SilhouetteArrays {
  const float* distances;
  Prompts prompts;
  const int64_t* labels;  // [P, size]
  double* matrices;
  float *scores, *samples;  // [P], [P, size]
};

// Number of doubles that `matrices` needs on the current device; 0: shared memory is large enough.
int64_t matrix_doubles(const Prompts& prompts);

template <typename T>
void launch_pairwise_cosine(const EmbeddingArrays<T>& arrays, void* stream);
void launch_clusters(const ClusterArrays& arrays, void* stream);
void launch_trees(const TreeArrays& arrays, void* stream);
void launch_silhouettes(const SilhouetteArrays& arrays, void* stream);

}  // namespace grpo_kernels
