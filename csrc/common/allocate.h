#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "common/check.h"

namespace grpo_kernels {

using torch::stable::Tensor;

// Set by tests to fill new host memory with halves that are NaN in every floating-point type and large as integers,
// which exposes elements that no kernel wrote. Emulated kernels, whose library has no way to set it, always have it
// filled.
#ifdef GRPO_KERNELS_EMULATE
inline bool poison_allocations = true;
#else
inline bool poison_allocations = false;
#endif

inline void poison(void* memory, int64_t bytes) {
  std::fill_n(static_cast<uint16_t*>(memory), bytes / 2, uint16_t{0x7FFF});
  if (bytes % 2 == 1) static_cast<uint8_t*>(memory)[bytes - 1] = 0x7F;
}

// An uninitialised contiguous tensor on the device of `like`. Calls the C shim, because torch::stable::new_empty goes
// through the dispatcher, which takes longer than a small op.
inline Tensor empty_tensor(const Tensor& like, const int64_t* sizes, int64_t dimensions, int32_t dtype) {
  std::array<int64_t, 8> strides{};
  GRPO_CHECK(dimensions <= static_cast<int64_t>(strides.size()), "cannot allocate ", dimensions, " dimensions");
  int64_t length = 1;
  for (int64_t d = dimensions - 1; d >= 0; --d) {
    strides[d] = length > 0 ? length : 1;
    length *= sizes[d];
  }
  int32_t device_type = 0;
  AtenTensorHandle handle = nullptr;
  GRPO_CHECK(aoti_torch_get_device_type(like.get(), &device_type) == AOTI_TORCH_SUCCESS &&
                 aoti_torch_empty_strided(dimensions, sizes, strides.data(), dtype, device_type,
                                          like.get_device_index(), &handle) == AOTI_TORCH_SUCCESS,
             "cannot allocate a tensor of ", length, " elements");
  Tensor tensor(handle);
  if (poison_allocations && tensor.is_cpu()) poison(tensor.mutable_data_ptr(), length * tensor.element_size());
  return tensor;
}

inline Tensor empty_vector(const Tensor& like, int64_t length, int32_t dtype) {
  return empty_tensor(like, &length, 1, dtype);
}

// Device memory for `count` records, owned by `memory`.
template <typename Record>
Record* allocate_records(std::optional<Tensor>& memory, const Tensor& like, int64_t count) {
  static_assert(sizeof(Record) % sizeof(double) == 0);
  const int64_t doubles = count * static_cast<int64_t>(sizeof(Record) / sizeof(double));
  memory = empty_vector(like, doubles, aoti_torch_dtype_float64());
  return static_cast<Record*>(memory->mutable_data_ptr());
}

inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  GRPO_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype) == AOTI_TORCH_SUCCESS, "cannot read a tensor's dtype");
  return dtype;
}

}  // namespace grpo_kernels
