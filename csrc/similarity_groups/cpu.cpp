#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "common/allocate.h"
#include "common/op_namespace.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "common/tensors.h"
#include "similarity_groups/prompts.h"
#include "similarity_groups/simd.h"

namespace grpo_kernels {

// labels, group_ids, num_groups, silhouette, best_k, verdict, status
using SimilarityTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
// labels, num_groups, silhouette, best_k, verdict
using ClusterTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
namespace {

constexpr float kAbsent = std::numeric_limits<float>::infinity();
// Nanoseconds on one thread: of a prompt, of two of its rows, and of a column of these.
constexpr double kPromptCost = 1000, kPairCost = 8, kColumnCost = 0.013;

// Working memory of a thread, kept for the next prompt.
PromptMemory memory_for(int items, bool for_halves) {
  static thread_local Scratch<double> doubles;
  static thread_local Scratch<int32_t> integers;
  static thread_local Scratch<float> floats;
  const int stride = PromptMemory::stride_of(items);
  const int64_t matrix = static_cast<int64_t>(items) * stride;
  double* const first = doubles.get(PromptMemory::kMatrices * matrix + PromptMemory::kVectors * stride);
  int32_t* const indices = integers.get(PromptMemory::kIntegers * stride);
  float* const rows = for_halves ? floats.get(static_cast<int64_t>(items) * kDepthBlock) : nullptr;
  return {stride, first, first + matrix, first + PromptMemory::kMatrices * matrix, indices, rows};
}

// Calls visit(prompt) for every prompt, the largest first. Threads take the next prompt as they become free.
template <typename Visit>
void for_each_prompt(const Prompts& prompts, int64_t depth, Visit visit) {
  std::vector<int64_t> queue(prompts.count);
  std::iota(queue.begin(), queue.end(), int64_t{0});
  if (prompts.offsets != nullptr) {
    std::stable_sort(queue.begin(), queue.end(),
                     [&](int64_t a, int64_t b) { return prompts.rows(a) > prompts.rows(b); });
  }
  double work = 0;
  for (int64_t p = 0; p < prompts.count; ++p) {
    const double pairs = static_cast<double>(prompts.rows(p)) * static_cast<double>(prompts.rows(p));
    work += kPromptCost + pairs * (kPairCost + kColumnCost * static_cast<double>(depth));
  }
  std::atomic<int64_t> next{0};
  divide(prompts.count, threads_for(work), [&](int64_t, int64_t) {
    for (int64_t i = next++; i < prompts.count; i = next++) visit(queue[i]);
  });
}

// Offsets and order are the caller's: an index outside the rows would read foreign memory.
void check_offsets(const Prompts& prompts, int64_t rows) {
  for (int64_t p = 0; p < prompts.count; ++p) {
    GRPO_CHECK(prompts.begin(p) >= 0 && prompts.begin(p + 1) <= rows && prompts.rows(p) >= 0 &&
                   prompts.rows(p) <= prompts.size,
               kSimilarityOp, ": offsets must ascend within [0, ", rows, "] by at most ", prompts.size);
  }
  for (int64_t i = 0; prompts.order != nullptr && i < rows; ++i) {
    GRPO_CHECK(prompts.order[i] >= 0 && prompts.order[i] < rows, kSimilarityOp, ": order must be in [0, ", rows,
               "), got ", prompts.order[i], " at ", i);
  }
}

template <typename T>
struct Embeddings {
  const T* data;
  int64_t depth;
  const bool* valid;  // null: all
  uint8_t* status;    // [rows], written

  // Writes the distances of a prompt's usable rows to memory.matrix and their positions within the prompt to
  // `positions`; returns their number.
  int write_distances(const Prompts& prompts, int64_t prompt, const PromptMemory& memory, int* positions) const {
    const T* rows[kMaxItems];
    int count = 0;
    for (int k = 0; k < prompts.rows(prompt); ++k) {
      const int64_t row = prompts.row(prompts.begin(prompt) + k);
      const bool is_valid = valid == nullptr || valid[row];
      status[row] = static_cast<uint8_t>(is_valid ? RowStatus::kInUse : RowStatus::kMasked);
      if (!is_valid) continue;
      rows[count] = data + row * depth;
      positions[count++] = k;
    }
    GRPO_SIMD_CALL(multiply_rows, rows, count, depth, memory);
    count = drop_not_finite(prompts, prompt, memory, positions, count);
    GRPO_SIMD_CALL(products_to_distances, memory, count);
    return count;
  }

  int drop_not_finite(const Prompts& prompts, int64_t prompt, const PromptMemory& memory, int* positions,
                      int count) const {
    int kept = 0, from[kMaxItems];
    for (int i = 0; i < count; ++i) {
      const double norm = memory.matrix[static_cast<int64_t>(i) * memory.stride + i];
      status[prompts.row(prompts.begin(prompt) + positions[i])] = static_cast<uint8_t>(status_of(norm));
      if (status_of(norm) == RowStatus::kNotFinite) continue;
      positions[kept] = positions[i];
      from[kept++] = i;
    }
    if (kept == count) return kept;
    for (int i = 0; i < kept; ++i) {
      for (int j = i; j < kept; ++j) {
        memory.matrix[static_cast<int64_t>(i) * memory.stride + j] =
            memory.matrix[static_cast<int64_t>(from[i]) * memory.stride + from[j]];
      }
    }
    return kept;
  }
};

// Calls run with a null pointer to the element type.
template <typename Run>
void for_embedding_dtype(const Tensor& embeddings, Run run) {
  GRPO_CHECK(embeddings.dim() == 2 && embeddings.is_contiguous() && embeddings.size(1) > 0, kSimilarityOp,
             ": embeddings must be contiguous of shape [N, D] with D > 0");
  for_float_dtype<false>(kSimilarityOp, "embeddings", embeddings, run);
}

template <typename T>
Embeddings<T> embeddings_of(const Tensor& embeddings, const std::optional<Tensor>& valid, const Tensor& status) {
  check_array(kSimilarityOp, "valid", valid, embeddings.size(0), ScalarType::Bool);
  return {static_cast<const T*>(embeddings.const_data_ptr()), embeddings.size(1), optional_data<bool>(valid),
          data_of<uint8_t>(status)};
}

// Distances [P, K, K] of prompts, infinite where there is no row.
struct DistanceTensor {
  const float* data;
  int64_t prompts, size;

  explicit DistanceTensor(const Tensor& distances)
      : data(static_cast<const float*>(distances.const_data_ptr())),
        prompts(distances.dim() == 3 ? distances.size(0) : 0),
        size(distances.dim() == 3 ? distances.size(1) : 0) {
    GRPO_CHECK(distances.dim() == 3 && distances.size(2) == size && size <= kMaxItems, kSimilarityOp,
               ": distances must have shape [P, K, K] with K at most ", kMaxItems);
    check_array(kSimilarityOp, "distances", distances, prompts * size * size, ScalarType::Float);
  }

  Prompts as_prompts() const { return {prompts, size, nullptr, nullptr}; }

  // Copies the distances of the rows at positions k with is_included(k) to memory.matrix; returns their number.
  template <typename IsIncluded>
  int read(int64_t prompt, const PromptMemory& memory, int* positions, IsIncluded is_included) const {
    const float* const from = data + prompt * size * size;
    int count = 0;
    for (int k = 0; k < size; ++k) {
      if (std::isfinite(from[k * size + k]) && is_included(k)) positions[count++] = k;
    }
    for (int i = 0; i < count; ++i) {
      double* const to = memory.matrix + static_cast<int64_t>(i) * memory.stride;
      for (int j = 0; j < count; ++j) to[j] = from[positions[i] * size + positions[j]];
    }
    return count;
  }
  int read(int64_t prompt, const PromptMemory& memory, int* positions) const {
    return read(prompt, memory, positions, [](int) { return true; });
  }
};

struct GroupArrays {
  int32_t* num_groups;
  float* silhouette;
  int32_t* best_k;
  uint8_t* verdict;

  void write(int64_t prompt, const Grouping& grouping) const {
    num_groups[prompt] = grouping.groups;
    silhouette[prompt] = static_cast<float>(grouping.silhouette);
    best_k[prompt] = grouping.best_k;
    verdict[prompt] = static_cast<uint8_t>(grouping.verdict);
  }
};

struct GroupTensors {
  Tensor num_groups, silhouette, best_k, verdict;

  GroupTensors(const Tensor& like, int64_t prompts)
      : num_groups(empty_vector(like, prompts, aoti_torch_dtype_int32())),
        silhouette(empty_vector(like, prompts, aoti_torch_dtype_float32())),
        best_k(empty_vector(like, prompts, aoti_torch_dtype_int32())),
        verdict(empty_vector(like, prompts, aoti_torch_dtype_uint8())) {}

  GroupArrays arrays() const {
    return {data_of<int32_t>(num_groups), data_of<float>(silhouette), data_of<int32_t>(best_k),
            data_of<uint8_t>(verdict)};
  }
};

}  // namespace

SimilarityTensors similarity_groups_cpu(Tensor embeddings, std::optional<Tensor> order, std::optional<Tensor> offsets,
                                        int64_t num_groups, int64_t size, std::optional<Tensor> valid,
                                        std::vector<double> numbers) {
  const SimilaritySettings settings = check_settings<SimilaritySettings>(kSimilarityOp, numbers);
  const int64_t rows = embeddings.size(0);
  const Prompts prompts = check_prompts(rows, order, offsets, num_groups, size);
  check_offsets(prompts, rows);
  const Tensor labels = empty_vector(embeddings, rows, aoti_torch_dtype_int32());
  const Tensor ids = empty_vector(embeddings, rows, aoti_torch_dtype_int64());
  const Tensor status = empty_vector(embeddings, rows, aoti_torch_dtype_uint8());
  const GroupTensors groups(embeddings, num_groups);
  for_embedding_dtype(embeddings, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Embeddings<T> rows_of_prompts = embeddings_of<T>(embeddings, valid, status);
    int32_t* const to = data_of<int32_t>(labels);
    int64_t* const to_ids = data_of<int64_t>(ids);
    for_each_prompt(prompts, rows_of_prompts.depth, [&](int64_t p) {
      const PromptMemory memory = memory_for(prompts.rows(p), sizeof(T) == 2);
      int positions[kMaxItems];
      int32_t prompt_labels[kMaxItems];
      const int count = rows_of_prompts.write_distances(prompts, p, memory, positions);
      groups.arrays().write(p, GRPO_SIMD_CALL(group_items, settings, memory, count, prompt_labels));
      for (int64_t position = prompts.begin(p); position < prompts.begin(p + 1); ++position) {
        to[prompts.row(position)] = -1;
        to_ids[prompts.row(position)] = -1;
      }
      for (int i = 0; i < count; ++i) {
        const int64_t row = prompts.row(prompts.begin(p) + positions[i]);
        to[row] = prompt_labels[i];
        to_ids[row] = prompts.begin(p) + prompt_labels[i];
      }
    });
  });
  return {labels, ids, groups.num_groups, groups.silhouette, groups.best_k, groups.verdict, status};
}

std::tuple<Tensor, Tensor> pairwise_cosine_cpu(Tensor embeddings, std::optional<Tensor> order,
                                               std::optional<Tensor> offsets, int64_t num_groups, int64_t size,
                                               std::optional<Tensor> valid) {
  const int64_t rows = embeddings.size(0);
  const Prompts prompts = check_prompts(rows, order, offsets, num_groups, size);
  check_offsets(prompts, rows);
  const int64_t shape[3] = {num_groups, size, size};
  const Tensor distances = empty_tensor(embeddings, shape, 3, aoti_torch_dtype_float32());
  const Tensor status = empty_vector(embeddings, rows, aoti_torch_dtype_uint8());
  for_embedding_dtype(embeddings, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Embeddings<T> rows_of_prompts = embeddings_of<T>(embeddings, valid, status);
    for_each_prompt(prompts, rows_of_prompts.depth, [&](int64_t p) {
      const PromptMemory memory = memory_for(prompts.rows(p), sizeof(T) == 2);
      int positions[kMaxItems];
      const int count = rows_of_prompts.write_distances(prompts, p, memory, positions);
      float* const to = data_of<float>(distances) + p * size * size;
      std::fill_n(to, size * size, kAbsent);
      for (int i = 0; i < count; ++i) {
        const double* const from = memory.matrix + static_cast<int64_t>(i) * memory.stride;
        for (int j = 0; j < count; ++j) to[positions[i] * size + positions[j]] = static_cast<float>(from[j]);
      }
    });
  });
  return {distances, status};
}

ClusterTensors cluster_distances_cpu(Tensor distances, std::vector<double> numbers) {
  const SimilaritySettings settings = check_settings<SimilaritySettings>(kSimilarityOp, numbers);
  const DistanceTensor input(distances);
  const int64_t shape[2] = {input.prompts, input.size};
  const Tensor labels = empty_tensor(distances, shape, 2, aoti_torch_dtype_int32());
  const GroupTensors groups(distances, input.prompts);
  for_each_prompt(input.as_prompts(), 0, [&](int64_t p) {
    const PromptMemory memory = memory_for(static_cast<int>(input.size), false);
    int positions[kMaxItems];
    int32_t prompt_labels[kMaxItems];
    const int count = input.read(p, memory, positions);
    groups.arrays().write(p, GRPO_SIMD_CALL(group_items, settings, memory, count, prompt_labels));
    int32_t* const to = data_of<int32_t>(labels) + p * input.size;
    std::fill_n(to, input.size, -1);
    for (int i = 0; i < count; ++i) to[positions[i]] = prompt_labels[i];
  });
  return {labels, groups.num_groups, groups.silhouette, groups.best_k, groups.verdict};
}

std::tuple<Tensor, Tensor> agglomerate_cpu(Tensor distances, int64_t linkage) {
  const DistanceTensor input(distances);
  const int64_t max_merges = std::max<int64_t>(input.size - 1, 0), shape[3] = {input.prompts, max_merges, 2};
  const Tensor merges = empty_tensor(distances, shape, 3, aoti_torch_dtype_int32());
  const Tensor heights = empty_tensor(distances, shape, 2, aoti_torch_dtype_float32());
  for_each_prompt(input.as_prompts(), 0, [&](int64_t p) {
    const PromptMemory memory = memory_for(static_cast<int>(input.size), false);
    int positions[kMaxItems];
    int32_t tree_merges[2 * kMaxItems];
    double tree_heights[kMaxItems];
    const int count = input.read(p, memory, positions);
    GRPO_SIMD_CALL(link_items, static_cast<Linkage>(linkage), memory, count, tree_merges, tree_heights);
    int32_t* const to = data_of<int32_t>(merges) + p * max_merges * 2;
    float* const to_heights = data_of<float>(heights) + p * max_merges;
    for (int64_t m = 0; m < max_merges; ++m) {
      const bool is_merge = m + 1 < count;
      to[2 * m] = is_merge ? positions[tree_merges[2 * m]] : -1;
      to[2 * m + 1] = is_merge ? positions[tree_merges[2 * m + 1]] : -1;
      to_heights[m] = is_merge ? static_cast<float>(tree_heights[m]) : kAbsent;
    }
  });
  return {merges, heights};
}

std::tuple<Tensor, Tensor> silhouette_cpu(Tensor distances, Tensor labels) {
  const DistanceTensor input(distances);
  check_array(kSimilarityOp, "labels", labels, input.prompts * input.size, ScalarType::Long);
  const int64_t shape[2] = {input.prompts, input.size};
  const Tensor scores = empty_vector(distances, input.prompts, aoti_torch_dtype_float32());
  const Tensor samples = empty_tensor(distances, shape, 2, aoti_torch_dtype_float32());
  for_each_prompt(input.as_prompts(), 0, [&](int64_t p) {
    const PromptMemory memory = memory_for(static_cast<int>(input.size), false);
    const int64_t* const prompt_labels = static_cast<const int64_t*>(labels.const_data_ptr()) + p * input.size;
    int positions[kMaxItems];
    int32_t first[kMaxItems];
    const int count = input.read(p, memory, positions, [&](int k) { return prompt_labels[k] >= 0; });
    for (int i = 0; i < count; ++i) {
      first[i] = 0;
      while (prompt_labels[positions[first[i]]] != prompt_labels[positions[i]]) ++first[i];
    }
    data_of<float>(scores)[p] = static_cast<float>(GRPO_SIMD_CALL(score_items, memory, count, first));
    float* const to = data_of<float>(samples) + p * input.size;
    std::fill_n(to, input.size, NAN);
    for (int i = 0; i < count; ++i) to[positions[i]] = static_cast<float>(memory.silhouettes()[i]);
  });
  return {scores, samples};
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("similarity_groups", TORCH_BOX(&grpo_kernels::similarity_groups_cpu));
  library.impl("pairwise_cosine", TORCH_BOX(&grpo_kernels::pairwise_cosine_cpu));
  library.impl("cluster_distances", TORCH_BOX(&grpo_kernels::cluster_distances_cpu));
  library.impl("agglomerate", TORCH_BOX(&grpo_kernels::agglomerate_cpu));
  library.impl("silhouette", TORCH_BOX(&grpo_kernels::silhouette_cpu));
}
