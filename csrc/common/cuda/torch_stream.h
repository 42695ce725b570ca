// torch's current stream and device for kernel launches, through the stable ABI. An emulated build has neither and
// needs no torch header; there launch() checks that a guard for the stream's device is alive.
#pragma once

#include <cstdint>

#ifdef GRPO_KERNELS_EMULATE
#include "common/cuda/launch.h"
#else
#ifndef USE_CUDA
#error "compile with -DUSE_CUDA: torch declares its CUDA stream shim only then"
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/shim_utils.h>
#endif

// Dispatch key of the CUDA ops, which take CPU tensors when tests compile them for the host.
#ifdef GRPO_KERNELS_EMULATE
#define GRPO_CUDA_DEVICE CPU
#else
#define GRPO_CUDA_DEVICE CUDA
#endif

namespace grpo_kernels {

#ifdef GRPO_KERNELS_EMULATE

inline void* current_stream(int32_t device_index) {
  return reinterpret_cast<void*>(static_cast<std::intptr_t>(device_index) + kStreamOffset);
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device_index) : before_(emulated_device) { emulated_device = device_index; }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { emulated_device = before_; }

 private:
  int before_;
};

#else

// The cudaStream_t on which torch currently queues work for the device.
inline void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

// Makes a device current for its scope, because a launch must go to the device of its stream.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device_index) : guard_(device_index) {}
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

#endif

}  // namespace grpo_kernels
