#include <pthread.h>

#include <limits>
#include <string>
#include <utility>

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "build_facts.h"
#include "common/allocate.h"
#include "common/parallel.h"
#include "common/simd/levels.h"
#include "linear_head/half_product.h"

// The C functions that grpo_kernels/compiled.py calls through ctypes. The ops are registered with torch when the
// library is loaded. Nothing here includes Python's headers, so one build serves every version of Python.
#define GRPO_C_API extern "C" __attribute__((visibility("default")))

using namespace grpo_kernels;

// Lines of "name=value".
GRPO_C_API const char* grpo_build_facts() {
  static const std::string facts =
      std::string("compiler=" GRPO_COMPILER "\nflags=" GRPO_FLAGS "\ntorch_target=" GRPO_TORCH_TARGET
                  "\nbuilt_with_torch=" GRPO_BUILT_WITH_TORCH "\nsimd_compiled=" GRPO_SIMD_LEVELS "\nsimd_here=") +
      simd_name(simd_level()) +
#ifndef USE_CUDA
      "\nhalf_products_here=" + half_products_here() +
#endif
      "\ncuda=" GRPO_CUDA_VERSION "\ncuda_architectures=" GRPO_CUDA_ARCHITECTURES;
  return facts.c_str();
}

GRPO_C_API void grpo_poison_allocations(bool on) { poison_allocations = on; }

#ifndef USE_CUDA
// For tests: sets the least work that is divided among threads and returns the last setting; how often work was.
GRPO_C_API double grpo_set_fork_nanoseconds(double nanoseconds) { return std::exchange(fork_nanoseconds, nanoseconds); }
GRPO_C_API int64_t grpo_forks() { return forks.load(); }

// The threads of the parent's pool do not exist in a forked child, where OpenMP would wait for them forever.
[[maybe_unused]] const int fork_handler =
    pthread_atfork(nullptr, nullptr, [] { fork_nanoseconds = std::numeric_limits<double>::infinity(); });
#else
// The newest CUDA that the driver supports, 13020 for 13.2; 0 without a driver.
GRPO_C_API int grpo_driver_version() {
  int version = 0;
  cudaDriverGetVersion(&version);
  return version;
}
#endif
