#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/tensors.h"
#include "similarity_groups/rules.h"

namespace grpo_kernels {

constexpr const char* kSimilarityOp = "similarity_groups";

inline Prompts check_prompts(int64_t rows, const std::optional<Tensor>& order, const std::optional<Tensor>& offsets,
                             int64_t count, int64_t size) {
  GRPO_CHECK(count >= 0 && size >= 0 && size <= kMaxItems, kSimilarityOp, ": groups must have at most ", kMaxItems,
             " rows each, got ", size);
  check_array(kSimilarityOp, "order", order, rows, ScalarType::Long);
  check_array(kSimilarityOp, "offsets", offsets, count + 1, ScalarType::Long);
  if (!offsets) {
    GRPO_CHECK(count * size == rows, kSimilarityOp, ": groups must divide the number of rows, ", rows, ", got ", count,
               " groups of ", size);
  }
  return {count, size, optional_data<int64_t>(order), optional_data<int64_t>(offsets)};
}

}  // namespace grpo_kernels
