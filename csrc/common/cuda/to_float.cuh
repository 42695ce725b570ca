#pragma once

#include "common/half_bits.h"

#ifndef GRPO_KERNELS_EMULATE
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Converts numbers of any width to float, and back with rounding to nearest even.
namespace grpo_kernels {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Half value) { return __half2float(__ushort_as_half(value.bits)); }
__device__ __forceinline__ float to_float(BFloat16 value) { return __bfloat162float(__ushort_as_bfloat16(value.bits)); }
__device__ __forceinline__ void from_float(float value, float& to) { to = value; }
__device__ __forceinline__ void from_float(float value, Half& to) {
  to.bits = __half_as_ushort(__float2half_rn(value));
}
__device__ __forceinline__ void from_float(float value, BFloat16& to) {
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

}  // namespace grpo_kernels
