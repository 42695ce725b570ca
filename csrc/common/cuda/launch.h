// Every kernel is launched through launch(), so that the same source runs on a GPU (nvcc) and, in tests without one, on
// the host (-DGRPO_KERNELS_EMULATE with tests/emulation on the include path). Free of torch.
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

// Declares `type* const name`, the block's dynamic shared memory, aligned to 16 bytes.
#define GRPO_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::grpo_kernels::emulation::scheduler.dynamic_shared())

#else

#include <cuda_runtime.h>

// Every kernel declares the same untyped array: all dynamic arrays of a block have one address in CUDA, and one name
// with two element types would not compile.
#define GRPO_DYNAMIC_SHARED(type, name)                                        \
  extern __shared__ __align__(16) unsigned char grpo_kernels_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(grpo_kernels_dynamic_shared)

#endif

// Promises ptxas one resident block per multiprocessor only: asked for more, it spills registers to make room for them.
#define GRPO_BOUNDS(threads) __launch_bounds__(threads, 1)

namespace grpo_kernels {

inline void check_cuda(cudaError_t status, const char* action) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(action) + ": " + cudaGetErrorString(status));
}

// The most shared memory that a block can have on the current device, in bytes: from 64 KiB (sm_75) over 99 (sm_86,
// sm_89, sm_120) to 227 (sm_90, sm_100).
inline std::size_t shared_memory_limit();

// Lets a block of the kernel have `bytes` of dynamic shared memory. The limit belongs to the kernel on this device, not
// to a launch: it is raised to the most there is, as one of just `bytes` could lower what another thread has raised and
// not launched with yet.
template <typename... Parameters>
void allow_dynamic_shared(void (*kernel)(Parameters...), std::size_t bytes) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), "reading kernel attributes");
  // the part of the default 48 KiB that is left depends on the kernel's static arrays
  if (bytes <= static_cast<std::size_t>(attributes.maxDynamicSharedSizeBytes)) return;
  const auto most = static_cast<int>(shared_memory_limit() - attributes.sharedSizeBytes);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
             "raising the dynamic shared memory limit");
}

#ifdef GRPO_KERNELS_EMULATE

inline std::size_t shared_memory_limit() { return emulation::shared_memory_limit; }

// The device that a DeviceGuard made current. current_stream() of torch_stream.h returns a device index +
// kStreamOffset.
constexpr int kNoDevice = -2, kStreamOffset = 2;
inline thread_local int emulated_device = kNoDevice;

// Runs the whole grid before it returns. As on a GPU, the stream must belong to the current device; the null stream, on
// which torch queues nothing during a capture, belongs to none.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, void* stream,
            Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  static_assert((std::is_convertible_v<Arguments, Parameters> && ...), "wrong type of kernel argument");
  static_assert(((std::is_trivially_copyable_v<Parameters> && !std::is_reference_v<Parameters>) && ...),
                "kernel parameters are passed by value, bytewise");
  const auto device = static_cast<int>(reinterpret_cast<std::intptr_t>(stream)) - kStreamOffset;
  if (device != emulated_device) throw std::runtime_error("kernel launch: no DeviceGuard");
  if (shared_bytes > 0) allow_dynamic_shared(kernel, shared_bytes);
  const std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
  auto thread = [kernel, &values] { std::apply(kernel, values); };
  const auto* const address = reinterpret_cast<const void*>(kernel);
  emulation::dynamic_shared_limits.check_launch(address, shared_bytes);
  emulation::scheduler.run_grid(address, grid, block, shared_bytes, thread);
}

#else

inline std::size_t shared_memory_limit() {
  constexpr int kCachedDevices = 64;
  static std::atomic<int> limits[kCachedDevices];  // 0: not queried yet
  int device = 0, limit = 0;
  check_cuda(cudaGetDevice(&device), "reading the current device");
  if (device < kCachedDevices) limit = limits[device].load(std::memory_order_relaxed);
  if (limit == 0) {
    check_cuda(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "reading the shared memory limit");
    if (device < kCachedDevices) limits[device].store(limit, std::memory_order_relaxed);
  }
  return static_cast<std::size_t>(limit);
}

// `stream` is a cudaStream_t (which converts to void*). Throws if the launch fails; an error in the running kernel
// appears at a later call.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, void* stream,
            Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  static_assert((std::is_convertible_v<Arguments, Parameters> && ...), "wrong type of kernel argument");
  if (shared_bytes > 0) allow_dynamic_shared(kernel, shared_bytes);
  const cudaStream_t cuda_stream = static_cast<cudaStream_t>(stream);
  // clang-format off: it splits the closing chevrons.
  kernel<<<grid, block, shared_bytes, cuda_stream>>>(std::forward<Arguments>(arguments)...);
  // clang-format on
  check_cuda(cudaGetLastError(), "kernel launch");
}

#endif

}  // namespace grpo_kernels
