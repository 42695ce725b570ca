#pragma once

#include "common/tensors.h"

// Checks of the tensors of the ops over a support.
namespace grpo_kernels {

constexpr const char* kSupportOp = "sampled_support";

// A matrix whose rows may be any number of elements apart.
struct MatrixLayout {
  int64_t rows, columns, stride;
};

inline MatrixLayout check_matrix(const char* name, const Tensor& matrix) {
  GRPO_CHECK(matrix.dim() == 2, kSupportOp, ": ", name, " must have two dimensions, got ", matrix.dim());
  GRPO_CHECK(matrix.stride(1) == 1 || matrix.size(1) <= 1, kSupportOp, ": ", name,
             " must have stride 1 over columns, got ", matrix.stride(1));
  return {matrix.size(0), matrix.size(1), matrix.stride(0)};
}

inline void check_same_dtype(const char* name, const Tensor& tensor, const Tensor& like) {
  GRPO_CHECK(tensor.scalar_type() == like.scalar_type(), kSupportOp, ": ", name, " must be ",
             torch::headeronly::toString(like.scalar_type()), ", got ",
             torch::headeronly::toString(tensor.scalar_type()));
}

inline const int64_t* int64_data(const Tensor& tensor) { return static_cast<const int64_t*>(tensor.const_data_ptr()); }

}  // namespace grpo_kernels
