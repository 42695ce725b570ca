#pragma once

// Functions marked GRPO_HD run in host code and in CUDA kernels, so that a formula is written once. They are
// always inlined: a copy compiled for one instruction set must never be linked into code for another.
#if defined(__CUDACC__)
#define GRPO_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define GRPO_HD inline __attribute__((always_inline))
#else
#define GRPO_HD inline
#endif
