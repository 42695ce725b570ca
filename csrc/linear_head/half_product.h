#pragma once

#include <stdint.h>

// Products of bfloat16 matrices with float32 sums, on the matrix units of a CPU (Intel AMX).
namespace grpo_kernels {

struct Range {
  int64_t begin, end;
};

// A factor by its lanes, the rows or columns that it gives to the product, and its depth, which is summed over. One of
// the strides is 1.
struct HalfFactor {
  const uint16_t* data;
  int64_t lane_stride, depth_stride;
};

struct HalfProduct {
  HalfFactor a, b;  // of the rows and of the columns
  int64_t depth;
  void* out;  // float32, or bfloat16
  int64_t out_stride;
  bool is_half;
  bool is_sum;  // the product is added to `out`, which is float32
};

// Which units this machine has: "amx" or "none".
const char* half_products_here();

namespace amx {

constexpr int64_t kPanel = 32;  // lanes of two tiles

// Whether this machine has the units, and the system lets this process use them.
bool is_available();

// Bytes of memory, aligned to 64, that one part of the product works in.
int64_t workspace_bytes(const HalfProduct& product, Range rows, Range columns);

// The part of the product in these rows and columns, which begin at whole panels.
void multiply(const HalfProduct& product, Range rows, Range columns, void* workspace);

}  // namespace amx
}  // namespace grpo_kernels
