// torch's current stream and device for kernel launches, through the stable ABI only. An emulated build has neither;
// there launch() checks that a guard for the stream's device is alive, and no torch header is needed.
#pragma once

#include <cstdint>

#ifdef GRPO_KERNELS_EMULATE
#include "launch.h"
#else
#ifndef USE_CUDA
#error "compile with -DUSE_CUDA: torch declares its CUDA stream shim only then"
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/shim_utils.h>
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

// The cudaStream_t on which torch currently queues work for the device; pass it on to launch().
inline void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

// Makes a device current for its scope: a launch goes to the current device, whatever its stream belongs to.
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
