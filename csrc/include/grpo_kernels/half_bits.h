#pragma once

#include <stdint.h>

namespace grpo_kernels {

// 16-bit numbers as they lie in memory.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

}  // namespace grpo_kernels
