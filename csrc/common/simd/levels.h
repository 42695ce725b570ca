#pragma once

// The best compiled instruction set that this machine supports, determined once.
namespace grpo_kernels {

enum class SimdLevel { kBaseline, kAvx2, kAvx512 };

inline SimdLevel simd_level() {
#if defined(GRPO_SIMD_X86)
  static const SimdLevel level = [] {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512) return SimdLevel::kAvx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? SimdLevel::kAvx2 : SimdLevel::kBaseline;
  }();
  return level;
#else
  return SimdLevel::kBaseline;
#endif
}

inline const char* simd_name(SimdLevel level) {
  return level == SimdLevel::kAvx512 ? "avx512" : level == SimdLevel::kAvx2 ? "avx2" : "baseline";
}

}  // namespace grpo_kernels

// Calls the function of that name in the namespace of simd_level().
#if defined(GRPO_SIMD_X86)
#define GRPO_SIMD_CALL(name, ...)                                                                           \
  (grpo_kernels::simd_level() == grpo_kernels::SimdLevel::kAvx512 ? grpo_kernels::avx512::name(__VA_ARGS__) \
   : grpo_kernels::simd_level() == grpo_kernels::SimdLevel::kAvx2 ? grpo_kernels::avx2::name(__VA_ARGS__)   \
                                                                  : grpo_kernels::baseline::name(__VA_ARGS__))
#else
#define GRPO_SIMD_CALL(name, ...) grpo_kernels::baseline::name(__VA_ARGS__)
#endif
