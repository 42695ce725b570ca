#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

// Python checks what users pass. These checks are what memory safety needs when an op is called directly;
// they use the same wording: "<op>: <argument> must be <rule>, got <value>".
namespace grpo_kernels {

using torch::stable::Tensor;

inline void check_array(const char* op, const char* name, const Tensor& tensor, int64_t length,
                        torch::headeronly::ScalarType dtype) {
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
  STD_TORCH_CHECK(tensor.numel() == length, op, ": ", name, " must have ", length, " elements, got ", tensor.numel());
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", name, " must be ", torch::headeronly::toString(dtype),
                  ", got ", torch::headeronly::toString(tensor.scalar_type()));
}

// The rule of grpo_kernels/segments.py, packed_bounds, for offsets that the host can read.
inline void check_packed_bounds(const char* op, const int64_t* cu_seqlens, int64_t rows, int64_t tokens) {
  for (int64_t row = 0; row <= rows; ++row) {
    const int64_t least = row == 0 ? 0 : cu_seqlens[row - 1], most = row == 0 ? 0 : tokens;
    STD_TORCH_CHECK(cu_seqlens[row] >= least && cu_seqlens[row] <= most, op,
                    ": cu_seqlens must ascend from 0 to at most the number of tokens, ", tokens, ", got ",
                    cu_seqlens[row], " at ", row);
  }
}

// The data of an optional array, or null.
template <typename T>
const T* optional_data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

}  // namespace grpo_kernels
