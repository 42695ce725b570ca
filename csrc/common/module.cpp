#include <pybind11/pybind11.h>

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "allocate.h"
#include "build_facts.h"
#include "simd/levels.h"

// Importing the module runs the static registrations linked into it; what is left to offer is how it was
// built.
PYBIND11_MODULE(GRPO_MODULE_NAME, module) {
  module.def("poison_allocations", [](bool on) { grpo_kernels::poison_allocations = on; });
#ifdef USE_CUDA
  // The newest CUDA that the driver runs, 13020 for 13.2; 0 without a driver.
  module.def("driver_version", [] {
    int version = 0;
    cudaDriverGetVersion(&version);
    return version;
  });
#endif
  module.def("build_facts", [] {
    pybind11::dict facts;
    facts["compiler"] = GRPO_COMPILER;
    facts["flags"] = GRPO_FLAGS;
    facts["torch_target"] = GRPO_TORCH_TARGET;
    facts["built_with_torch"] = GRPO_BUILT_WITH_TORCH;
    facts["simd_compiled"] = GRPO_SIMD_LEVELS;
    facts["simd_here"] = grpo_kernels::simd_name(grpo_kernels::simd_level());
    facts["cuda"] = GRPO_CUDA_VERSION;
    facts["cuda_architectures"] = GRPO_CUDA_ARCHITECTURES;
    return facts;
  });
}
