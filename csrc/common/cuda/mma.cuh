#pragma once

#include <stdint.h>

#include "common/cuda/launch.h"
#include "common/half_bits.h"

// Matrix products of a warp on tensor cores (sm_80 and later).
namespace grpo_kernels {

// One lane's part of 16 rows of 16 numbers of 16 bits, two to a word, the first in the low half. With g = lane / 4 and
// t = lane % 4, the words hold
//   [0] row g,     columns 2t and 2t + 1        [1] row g + 8, columns 2t and 2t + 1
//   [2] row g,     columns 2t + 8 and 2t + 9    [3] row g + 8, columns 2t + 8 and 2t + 9
// These are the registers of mma.sync's A and, for either half of the rows, of its B: a product of rows with rows needs
// no transposition.
struct Fragment {
  uint32_t words[4];
};

// One lane's part of 16 x 8 sums: [0] and [1] are row g, columns 2t and 2t + 1; [2] and [3] the same of row g + 8.
using Sums = float[4];

#ifdef GRPO_KERNELS_EMULATE

__forceinline__ void load_matrices(const void* row, uint32_t (&words)[4],
                                   emulation::Site where = emulation::Site::current()) {
  emulation::ldmatrix_x4(row, words, where);
}
inline void add_products(Sums& sums, const Fragment& a, const Fragment& b, int half, BFloat16,
                         emulation::Site where = emulation::Site::current()) {
  const auto decode = [](uint16_t bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); };
  emulation::mma_m16n8k16(sums, a.words, {b.words[half], b.words[half + 2]}, decode, where);
}
inline void add_products(Sums& sums, const Fragment& a, const Fragment& b, int half, Half,
                         emulation::Site where = emulation::Site::current()) {
  const auto decode = [](uint16_t bits) { return __half2float(__ushort_as_half(bits)); };
  emulation::mma_m16n8k16(sums, a.words, {b.words[half], b.words[half + 2]}, decode, where);
}

#else

// Loads four matrices of 8 rows of 16 bytes from shared memory; the lanes 8m to 8m + 7 pass the rows of matrix m. Lane
// l gets word l % 4 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(const void* row, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Adds the inner products of the 16 rows of `a` with 8 rows of `b`: the first for half 0, the last for half 1. (With
// "+f" operands, zeros would have to be moved into the registers of new sums first.)
#define GRPO_ADD_PRODUCTS(type)                                                                                  \
  const Sums from = {sums[0], sums[1], sums[2], sums[3]};                                                        \
  const uint32_t left = half == 0 ? b.words[0] : b.words[1], right = half == 0 ? b.words[2] : b.words[3];        \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                                     \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"                                 \
      : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])                                               \
      : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(left), "r"(right), "f"(from[0]), \
        "f"(from[1]), "f"(from[2]), "f"(from[3]))
__device__ __forceinline__ void add_products(Sums& sums, const Fragment& a, const Fragment& b, int half, BFloat16) {
  GRPO_ADD_PRODUCTS("bf16");
}
__device__ __forceinline__ void add_products(Sums& sums, const Fragment& a, const Fragment& b, int half, Half) {
  GRPO_ADD_PRODUCTS("f16");
}
#undef GRPO_ADD_PRODUCTS

#endif

}  // namespace grpo_kernels
