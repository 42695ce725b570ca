#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/check.h"
#include "common/half_bits.h"

// Checks and data access shared by the ops. Python checks the arguments of users; the checks here keep a direct call of
// an op memory-safe, in the same wording: "<op>: <argument> must be <rule>, got <value>".
namespace grpo_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_array(const char* op, const char* name, const Tensor& tensor, int64_t length, ScalarType dtype) {
  GRPO_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
  GRPO_CHECK(tensor.numel() == length, op, ": ", name, " must have ", length, " elements, got ", tensor.numel());
  GRPO_CHECK(tensor.scalar_type() == dtype, op, ": ", name, " must be ", torch::headeronly::toString(dtype), ", got ",
             torch::headeronly::toString(tensor.scalar_type()));
}

// For an optional argument; nothing to check where it is not given.
inline void check_array(const char* op, const char* name, const std::optional<Tensor>& tensor, int64_t length,
                        ScalarType dtype) {
  if (tensor) check_array(op, name, *tensor, length, dtype);
}

inline void check_float_or_double(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  GRPO_CHECK(dtype == ScalarType::Double || dtype == ScalarType::Float, op, ": ", name,
             " must be float32 or float64, got ", torch::headeronly::toString(dtype));
}

template <typename Settings>
Settings check_settings(const char* op, const std::vector<double>& numbers) {
  GRPO_CHECK(numbers.size() == Settings::kSettings, op, ": settings must have ", Settings::kSettings, " numbers, got ",
             numbers.size());
  return Settings::from(numbers.data());
}

// The rule of packed_bounds in grpo_kernels/groups.py, for offsets in host memory.
inline void check_packed_bounds(const char* op, const int64_t* cu_seqlens, int64_t rows, int64_t tokens) {
  for (int64_t row = 0; row <= rows; ++row) {
    const int64_t low = row == 0 ? 0 : cu_seqlens[row - 1], high = row == 0 ? 0 : tokens;
    GRPO_CHECK(cu_seqlens[row] >= low && cu_seqlens[row] <= high, op,
               ": cu_seqlens must ascend from 0 to at most the number of tokens, ", tokens, ", got ", cu_seqlens[row],
               " at ", row);
  }
}

// The data of an optional argument, or null.
template <typename T>
const T* optional_data(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

template <typename T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls `run` with a null pointer to the tensor's floating-point type.
template <bool kDouble, typename Run>
void for_float_dtype(const char* op, const char* name, const Tensor& tensor, Run run) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return run(static_cast<float*>(nullptr));
    case ScalarType::Half:
      return run(static_cast<Half*>(nullptr));
    case ScalarType::BFloat16:
      return run(static_cast<BFloat16*>(nullptr));
    default:
      break;
  }
  if constexpr (kDouble) {
    if (tensor.scalar_type() == ScalarType::Double) return run(static_cast<double*>(nullptr));
  }
  GRPO_CHECK(false, op, ": ", name, " must be float16, bfloat16", kDouble ? ", float32 or float64" : " or float32",
             ", got ", torch::headeronly::toString(tensor.scalar_type()));
}

}  // namespace grpo_kernels
