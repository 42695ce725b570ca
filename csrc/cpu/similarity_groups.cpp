#include "simd/similarity_groups.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "allocate.h"
#include "cpu_ops.h"
#include "logit_tensors.h"
#include "prompts.h"
#include "scratch.h"
#include "simd/levels.h"

namespace grpo_kernels {
namespace {

constexpr float kAbsent = std::numeric_limits<float>::infinity();
constexpr double kWorkPerTask = 1e5;  // multiplications, some twenty microseconds

// A thread's memory, kept for the next prompt.
PromptMemory memory_for(int items, bool for_halves) {
  static thread_local Scratch<double> doubles;
  static thread_local Scratch<int32_t> integers;
  static thread_local Scratch<float> floats;
  const int stride = PromptMemory::stride_of(items);
  const int64_t matrix = static_cast<int64_t>(items) * stride;
  double* const first = doubles.get(PromptMemory::kMatrices * matrix + PromptMemory::kVectors * stride);
  int32_t* const whole = integers.get(PromptMemory::kIntegers * stride);
  float* const rows = for_halves ? floats.get(static_cast<int64_t>(items) * kDepthBlock) : nullptr;
  return {stride, first, first + matrix, first + PromptMemory::kMatrices * matrix, whole, rows};
}

// Every prompt once, those with most rows first, each thread as many as it gets done.
template <typename Visit>
void for_each_prompt(const Prompts& prompts, int64_t depth, Visit visit) {
  std::vector<int64_t> queue(prompts.count);
  std::iota(queue.begin(), queue.end(), int64_t{0});
  if (prompts.offsets != nullptr) {
    std::stable_sort(queue.begin(), queue.end(),
                     [&](int64_t a, int64_t b) { return prompts.rows(a) > prompts.rows(b); });
  }
  const double work = static_cast<double>(prompts.size * prompts.size) * (static_cast<double>(depth) / 2 + 40);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, prompts.count, std::max<int64_t>(1, static_cast<int64_t>(kWorkPerTask / (work + 1))),
                              [&](int64_t, int64_t) {
                                for (int64_t i = next++; i < prompts.count; i = next++) visit(queue[i]);
                              });
}

// Offsets come from outside: every prompt has to lie within the rows.
void check_offsets(const Prompts& prompts, int64_t rows) {
  for (int64_t p = 0; p < prompts.count; ++p) {
    STD_TORCH_CHECK(prompts.begin(p) >= 0 && prompts.begin(p + 1) <= rows && prompts.rows(p) >= 0 &&
                        prompts.rows(p) <= prompts.size,
                    kSimilarityOp, ": offsets must ascend within [0, ", rows, "] by at most ", prompts.size);
  }
  for (int64_t i = 0; prompts.order != nullptr && i < rows; ++i) {
    STD_TORCH_CHECK(prompts.order[i] >= 0 && prompts.order[i] < rows, kSimilarityOp, ": order must be of rows");
  }
}

template <typename T>
struct Embeddings {
  const T* data;
  int64_t depth;
  const bool* valid;  // null: all
  uint8_t* status;    // [rows], written

  // The rows of a prompt that can be used, as places among its own. Their distances are in memory.matrix.
  int measure_prompt(const Prompts& prompts, int64_t prompt, const PromptMemory& memory, int* places) const {
    const T* rows[kMostItems];
    int count = 0;
    for (int k = 0; k < prompts.rows(prompt); ++k) {
      const int64_t row = prompts.row(prompts.begin(prompt) + k);
      status[row] = valid == nullptr || valid[row] ? kInUse : kMasked;
      if (status[row] == kMasked) continue;
      rows[count] = data + row * depth;
      places[count++] = k;
    }
    GRPO_SIMD_CALL(multiply_rows, rows, count, depth, memory);
    count = drop_not_finite(prompts, prompt, memory, places, count);
    GRPO_SIMD_CALL(measure, memory, count);
    return count;
  }

  int drop_not_finite(const Prompts& prompts, int64_t prompt, const PromptMemory& memory, int* places,
                      int count) const {
    int kept = 0, from[kMostItems];
    for (int i = 0; i < count; ++i) {
      const double norm = memory.matrix[static_cast<int64_t>(i) * memory.stride + i];
      uint8_t& of_row = status[prompts.row(prompts.begin(prompt) + places[i])];
      of_row = status_of(norm);
      if (of_row == kNotFinite) continue;
      places[kept] = places[i];
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

// f(pointer to the element type) for what embeddings may be.
template <typename F>
void for_embedding_dtype(const Tensor& embeddings, F f) {
  STD_TORCH_CHECK(embeddings.dim() == 2 && embeddings.is_contiguous() && embeddings.size(1) > 0, kSimilarityOp,
                  ": embeddings must be contiguous of shape [N, D] with D > 0");
  for_logit_dtype<false>(embeddings, f);
}

template <typename T>
Embeddings<T> embeddings_of(const Tensor& embeddings, const std::optional<Tensor>& valid, const Tensor& status) {
  if (valid.has_value()) {
    check_array(kSimilarityOp, "valid", *valid, embeddings.size(0), torch::headeronly::ScalarType::Bool);
  }
  return {static_cast<const T*>(embeddings.const_data_ptr()), embeddings.size(1), optional_data<bool>(valid),
          data_of<uint8_t>(status)};
}

// Distances of prompts as a tensor has them: [P, K, K], infinite where there is no row.
struct DistanceTensor {
  const float* data;
  int64_t prompts, size;

  explicit DistanceTensor(const Tensor& distances)
      : data(static_cast<const float*>(distances.const_data_ptr())),
        prompts(distances.dim() == 3 ? distances.size(0) : 0),
        size(distances.dim() == 3 ? distances.size(1) : 0) {
    STD_TORCH_CHECK(distances.dim() == 3 && distances.size(2) == size && size <= kMostItems, kSimilarityOp,
                    ": distances must have shape [P, K, K] with K at most ", kMostItems);
    check_array(kSimilarityOp, "distances", distances, prompts * size * size, torch::headeronly::ScalarType::Float);
  }

  Prompts as_prompts() const { return {prompts, size, nullptr, nullptr}; }

  // Those of the places for which `takes_part` into memory.matrix.
  template <typename TakesPart>
  int read(int64_t prompt, const PromptMemory& memory, int* places, TakesPart takes_part) const {
    const float* const from = data + prompt * size * size;
    int count = 0;
    for (int k = 0; k < size; ++k) {
      if (std::isfinite(from[k * size + k]) && takes_part(k)) places[count++] = k;
    }
    for (int i = 0; i < count; ++i) {
      double* const to = memory.matrix + static_cast<int64_t>(i) * memory.stride;
      for (int j = 0; j < count; ++j) to[j] = from[places[i] * size + places[j]];
    }
    return count;
  }
  int read(int64_t prompt, const PromptMemory& memory, int* places) const {
    return read(prompt, memory, places, [](int) { return true; });
  }
};

struct GroupArrays {
  int32_t* num_groups;
  float* silhouette;
  int32_t* best_k;
  uint8_t* verdict;

  void write(int64_t prompt, const Grouping& found) const {
    num_groups[prompt] = found.groups;
    silhouette[prompt] = static_cast<float>(found.silhouette);
    best_k[prompt] = found.best_k;
    verdict[prompt] = found.verdict;
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
                                        std::vector<int64_t> modes, std::vector<double> coefficients) {
  const SimilaritySettings settings = check_settings(modes, coefficients);
  const int64_t rows = embeddings.size(0);
  const Prompts prompts = check_prompts(rows, order, offsets, num_groups, size);
  check_offsets(prompts, rows);
  const Tensor labels = empty_vector(embeddings, rows, aoti_torch_dtype_int32());
  const Tensor ids = empty_vector(embeddings, rows, aoti_torch_dtype_int64());
  const Tensor status = empty_vector(embeddings, rows, aoti_torch_dtype_uint8());
  const GroupTensors groups(embeddings, num_groups);
  for_embedding_dtype(embeddings, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Embeddings<T> given = embeddings_of<T>(embeddings, valid, status);
    int32_t* const to = data_of<int32_t>(labels);
    int64_t* const to_ids = data_of<int64_t>(ids);
    for_each_prompt(prompts, given.depth, [&](int64_t p) {
      const PromptMemory memory = memory_for(prompts.rows(p), sizeof(T) == 2);
      int places[kMostItems];
      int32_t found[kMostItems];
      const int count = given.measure_prompt(prompts, p, memory, places);
      groups.arrays().write(p, GRPO_SIMD_CALL(group_items, settings, memory, count, found));
      for (int64_t place = prompts.begin(p); place < prompts.begin(p + 1); ++place) {
        to[prompts.row(place)] = -1;
        to_ids[prompts.row(place)] = -1;
      }
      for (int i = 0; i < count; ++i) {
        const int64_t row = prompts.row(prompts.begin(p) + places[i]);
        to[row] = found[i];
        to_ids[row] = prompts.begin(p) + found[i];
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
    const Embeddings<T> given = embeddings_of<T>(embeddings, valid, status);
    for_each_prompt(prompts, given.depth, [&](int64_t p) {
      const PromptMemory memory = memory_for(prompts.rows(p), sizeof(T) == 2);
      int places[kMostItems];
      const int count = given.measure_prompt(prompts, p, memory, places);
      float* const to = data_of<float>(distances) + p * size * size;
      std::fill_n(to, size * size, kAbsent);
      for (int i = 0; i < count; ++i) {
        const double* const from = memory.matrix + static_cast<int64_t>(i) * memory.stride;
        for (int j = 0; j < count; ++j) to[places[i] * size + places[j]] = static_cast<float>(from[j]);
      }
    });
  });
  return {distances, status};
}

ClusterTensors cluster_distances_cpu(Tensor distances, std::vector<int64_t> modes, std::vector<double> coefficients) {
  const SimilaritySettings settings = check_settings(modes, coefficients);
  const DistanceTensor given(distances);
  const int64_t shape[2] = {given.prompts, given.size};
  const Tensor labels = empty_tensor(distances, shape, 2, aoti_torch_dtype_int32());
  const GroupTensors groups(distances, given.prompts);
  for_each_prompt(given.as_prompts(), 0, [&](int64_t p) {
    const PromptMemory memory = memory_for(static_cast<int>(given.size), false);
    int places[kMostItems];
    int32_t found[kMostItems];
    const int count = given.read(p, memory, places);
    groups.arrays().write(p, GRPO_SIMD_CALL(group_items, settings, memory, count, found));
    int32_t* const to = data_of<int32_t>(labels) + p * given.size;
    std::fill_n(to, given.size, -1);
    for (int i = 0; i < count; ++i) to[places[i]] = found[i];
  });
  return {labels, groups.num_groups, groups.silhouette, groups.best_k, groups.verdict};
}

std::tuple<Tensor, Tensor> agglomerate_cpu(Tensor distances, int64_t linkage) {
  const DistanceTensor given(distances);
  const int64_t most = std::max<int64_t>(given.size - 1, 0), shape[3] = {given.prompts, most, 2};
  const Tensor merges = empty_tensor(distances, shape, 3, aoti_torch_dtype_int32());
  const Tensor heights = empty_tensor(distances, shape, 2, aoti_torch_dtype_float32());
  for_each_prompt(given.as_prompts(), 0, [&](int64_t p) {
    const PromptMemory memory = memory_for(static_cast<int>(given.size), false);
    int places[kMostItems];
    int32_t found[2 * kMostItems];
    double of_tree[kMostItems];
    const int count = given.read(p, memory, places);
    GRPO_SIMD_CALL(link_items, static_cast<int>(linkage), memory, count, found, of_tree);
    int32_t* const to = data_of<int32_t>(merges) + p * most * 2;
    float* const to_heights = data_of<float>(heights) + p * most;
    for (int64_t m = 0; m < most; ++m) {
      const bool is_merge = m + 1 < count;
      to[2 * m] = is_merge ? places[found[2 * m]] : -1;
      to[2 * m + 1] = is_merge ? places[found[2 * m + 1]] : -1;
      to_heights[m] = is_merge ? static_cast<float>(of_tree[m]) : kAbsent;
    }
  });
  return {merges, heights};
}

std::tuple<Tensor, Tensor> silhouette_cpu(Tensor distances, Tensor labels) {
  const DistanceTensor given(distances);
  check_array(kSimilarityOp, "labels", labels, given.prompts * given.size, torch::headeronly::ScalarType::Long);
  const int64_t shape[2] = {given.prompts, given.size};
  const Tensor scores = empty_vector(distances, given.prompts, aoti_torch_dtype_float32());
  const Tensor samples = empty_tensor(distances, shape, 2, aoti_torch_dtype_float32());
  for_each_prompt(given.as_prompts(), 0, [&](int64_t p) {
    const PromptMemory memory = memory_for(static_cast<int>(given.size), false);
    const int64_t* const of = static_cast<const int64_t*>(labels.const_data_ptr()) + p * given.size;
    int places[kMostItems];
    int32_t first[kMostItems];
    const int count = given.read(p, memory, places, [&](int k) { return of[k] >= 0; });
    for (int i = 0; i < count; ++i) {
      first[i] = 0;
      while (of[places[first[i]]] != of[places[i]]) ++first[i];
    }
    data_of<float>(scores)[p] = static_cast<float>(GRPO_SIMD_CALL(score_items, memory, count, first));
    float* const to = data_of<float>(samples) + p * given.size;
    std::fill_n(to, given.size, NAN);
    for (int i = 0; i < count; ++i) to[places[i]] = static_cast<float>(memory.silhouettes()[i]);
  });
  return {scores, samples};
}

}  // namespace grpo_kernels
