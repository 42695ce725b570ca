#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstring>

namespace grpo_kernels {

using torch::stable::Tensor;

// Set by tests: new memory is filled with NaN (integers: -1), so that reading or returning an element that no
// kernel wrote shows. On the host only.
inline bool poison_allocations = false;

// An uninitialised vector beside `like`. Straight through the C shim: torch::stable::new_empty goes through
// the dispatcher, which for a small op costs more than the op.
inline Tensor empty_vector(const Tensor& like, int64_t length, int32_t dtype) {
  const int64_t stride = 1;
  int32_t device_type = 0;
  AtenTensorHandle handle = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_device_type(like.get(), &device_type) == AOTI_TORCH_SUCCESS &&
                      aoti_torch_empty_strided(1, &length, &stride, dtype, device_type, like.get_device_index(),
                                               &handle) == AOTI_TORCH_SUCCESS,
                  "cannot allocate a vector of ", length, " elements");
  Tensor vector(handle);
  if (poison_allocations && vector.is_cpu()) memset(vector.mutable_data_ptr(), 0xFF, length * vector.element_size());
  return vector;
}

inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  STD_TORCH_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype) == AOTI_TORCH_SUCCESS, "cannot read a tensor's dtype");
  return dtype;
}

}  // namespace grpo_kernels
