// The one way a kernel of this project is launched. The same kernel source runs on a GPU (nvcc) and, for
// tests without one, on the host (-DGRPO_KERNELS_EMULATE with tests/emulation on the include path). Free of
// torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#ifdef GRPO_KERNELS_EMULATE

#include "cuda_emulator.h"

// Names the block's dynamic shared memory, 16-byte aligned, as `type* const name`.
#define GRPO_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::grpo_kernels::emulation::scheduler.dynamic_shared())

#else

#include <cuda_runtime.h>

// Every kernel declares the same untyped array: CUDA gives all dynamic arrays of a block one address, and one
// name used with two element types would not compile.
#define GRPO_DYNAMIC_SHARED(type, name)                                        \
  extern __shared__ __align__(16) unsigned char grpo_kernels_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(grpo_kernels_dynamic_shared)

#endif

namespace grpo_kernels {

#ifdef GRPO_KERNELS_EMULATE

// The most shared memory that a block can have, in bytes; on a GPU, of the current device.
inline std::size_t shared_memory_limit() { return emulation::shared_memory_limit; }

// The device that a DeviceGuard made current. A stream of torch_stream.h is its device's index + kStreamOffset.
constexpr int kNoDevice = -2, kStreamOffset = 2;
inline thread_local int emulated_device = kNoDevice;

// Runs the whole grid before it returns. A stream of another device than the current one is an error, as on a GPU.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, void* stream,
            Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  static_assert((std::is_convertible_v<Arguments, Parameters> && ...), "wrong type of kernel argument");
  static_assert(((std::is_trivially_copyable_v<Parameters> && !std::is_reference_v<Parameters>) && ...),
                "kernel parameters are passed by value, bytewise");
  const auto device = static_cast<int>(reinterpret_cast<std::intptr_t>(stream)) - kStreamOffset;
  if (stream != nullptr && device != emulated_device) throw std::runtime_error("kernel launch: no DeviceGuard");
  const std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
  auto thread = [kernel, &values] { std::apply(kernel, values); };
  emulation::scheduler.run_grid(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, thread);
}

#else

inline void check_cuda(cudaError_t status, const char* action) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(action) + ": " + cudaGetErrorString(status));
}

// From 64 KiB (sm_75) over 99 (sm_86, sm_89, sm_120) to 227 (sm_90, sm_100).
inline std::size_t shared_memory_limit() {
  constexpr int kKnownDevices = 64;
  static std::atomic<int> known[kKnownDevices];  // 0: not asked yet
  int device = 0, limit = 0;
  check_cuda(cudaGetDevice(&device), "reading the current device");
  if (device < kKnownDevices) limit = known[device].load(std::memory_order_relaxed);
  if (limit == 0) {
    check_cuda(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "reading the shared memory limit");
    if (device < kKnownDevices) known[device].store(limit, std::memory_order_relaxed);
  }
  return static_cast<std::size_t>(limit);
}

// `stream` is a cudaStream_t (which converts to void*). Launches and returns; an error the launch itself
// shows is thrown, one of a running kernel appears at a later call.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, void* stream,
            Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  static_assert((std::is_convertible_v<Arguments, Parameters> && ...), "wrong type of kernel argument");
  if (shared_bytes > 0) {
    // What is left of the default 48 KiB depends on the kernel's static arrays, so ask rather than compare.
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "reading kernel attributes");
    if (shared_bytes > static_cast<std::size_t>(attributes.maxDynamicSharedSizeBytes)) {
      check_cuda(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "raising the dynamic shared memory limit");
    }
  }
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  // clang-format off: it splits the closing chevrons.
  kernel<<<grid, block, shared_bytes, cuda_stream>>>(std::forward<Arguments>(arguments)...);
  // clang-format on
  check_cuda(cudaGetLastError(), "kernel launch");
}

#endif

}  // namespace grpo_kernels
