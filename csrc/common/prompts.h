#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "grpo_kernels/similarity.h"

namespace grpo_kernels {

constexpr const char* kSimilarityOp = "similarity_groups";

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
