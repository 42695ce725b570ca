#pragma once

// Marks functions shared by host code and CUDA kernels. They are always inlined, so that a copy compiled for one
// instruction set is never linked into code for another.
#if defined(__CUDACC__)
#define GRPO_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define GRPO_HD inline __attribute__((always_inline))
#else
#define GRPO_HD inline
#endif
