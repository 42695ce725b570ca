#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "checks.h"
#include "grpo_kernels/similarity.h"

// Which rows are whose: prompt p has the rows order[begin(p)] to order[end(p) - 1].
namespace grpo_kernels {

constexpr const char* kSimilarityOp = "similarity_groups";

struct Prompts {
  int64_t count, size;     // size: that of each, or without regularity the largest
  const int64_t* order;    // null: rows are in order
  const int64_t* offsets;  // null: all have `size` rows

  GRPO_HD int64_t begin(int64_t prompt) const { return offsets == nullptr ? prompt * size : offsets[prompt]; }
  GRPO_HD int rows(int64_t prompt) const { return static_cast<int>(begin(prompt + 1) - begin(prompt)); }
  GRPO_HD int64_t row(int64_t place) const { return order == nullptr ? place : order[place]; }
};

inline Prompts check_prompts(int64_t rows, const std::optional<Tensor>& order, const std::optional<Tensor>& offsets,
                             int64_t count, int64_t size) {
  STD_TORCH_CHECK(count >= 0 && size >= 0 && size <= kMostItems, kSimilarityOp, ": groups must have at most ",
                  kMostItems, " rows each, got ", size);
  if (order.has_value()) check_array(kSimilarityOp, "order", *order, rows, torch::headeronly::ScalarType::Long);
  if (offsets.has_value()) {
    check_array(kSimilarityOp, "offsets", *offsets, count + 1, torch::headeronly::ScalarType::Long);
  } else {
    STD_TORCH_CHECK(count * size == rows, kSimilarityOp, ": groups must divide the number of rows, ", rows, ", got ",
                    count, " groups of ", size);
  }
  return {count, size, optional_data<int64_t>(order), optional_data<int64_t>(offsets)};
}

inline SimilaritySettings check_settings(const std::vector<int64_t>& modes, const std::vector<double>& coefficients) {
  STD_TORCH_CHECK(modes.size() == kSimilarityModes && coefficients.size() == kSimilarityCoefficients, kSimilarityOp,
                  ": config has another number of settings than the kernels");
  return similarity_settings(modes.data(), coefficients.data());
}

}  // namespace grpo_kernels
