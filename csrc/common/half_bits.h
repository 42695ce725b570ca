#pragma once

#include <stdint.h>

namespace grpo_kernels {

// The bits of 16-bit floating-point numbers.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace grpo_kernels
