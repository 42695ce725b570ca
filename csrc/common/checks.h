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

// The data of an optional array, or null.
template <typename T>
const T* optional_data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

}  // namespace grpo_kernels
