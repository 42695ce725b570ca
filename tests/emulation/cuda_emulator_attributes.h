// The dynamic shared memory that a launch of a kernel may ask for, which the host raises kernel by kernel. The emulator
// has one device and counts no static shared memory.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>

#include "cuda_emulator_schedule.h"

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

struct cudaFuncAttributes {
  std::size_t sharedSizeBytes;
  int maxDynamicSharedSizeBytes;
};

#pragma GCC visibility push(hidden)
namespace grpo_kernels::emulation {

class DynamicSharedLimits {
 public:
  int of(const void* kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto raised = limits_.find(kernel);
    return raised == limits_.end() ? kDefault : raised->second;
  }
  void set(const void* kernel, int bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    limits_[kernel] = bytes;
  }
  void check_launch(const void* kernel, std::size_t shared_bytes) {
    if (shared_bytes <= static_cast<std::size_t>(of(kernel))) return;
    throw std::runtime_error(
        "kernel launch: invalid configuration argument, more than the kernel's dynamic shared memory");
  }

  // Called after each call below, for tests of what other threads do in between.
  std::function<void(bool has_set)> after_call = [](bool) {};

 private:
  static constexpr int kDefault = 48 * 1024;
  std::mutex mutex_;
  std::map<const void*, int> limits_;
};

inline DynamicSharedLimits dynamic_shared_limits;

}  // namespace grpo_kernels::emulation

inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel* kernel) {
  auto& limits = grpo_kernels::emulation::dynamic_shared_limits;
  *attributes = {0, limits.of(reinterpret_cast<const void*>(kernel))};
  limits.after_call(/*has_set=*/false);
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int value) {
  if (static_cast<std::size_t>(value) > grpo_kernels::emulation::shared_memory_limit) return cudaErrorInvalidValue;
  auto& limits = grpo_kernels::emulation::dynamic_shared_limits;
  limits.set(reinterpret_cast<const void*>(kernel), value);
  limits.after_call(/*has_set=*/true);
  return cudaSuccess;
}
#pragma GCC visibility pop
