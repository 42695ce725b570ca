#pragma once

#include "common/host_device.h"

namespace grpo_kernels {

// The map x -> factor * x + shift. A recurrence is a composition of such maps, which needs no order of evaluation.
struct AffineMap {
  double factor, shift;

  GRPO_HD double operator()(double x) const { return factor * x + shift; }
  // x -> (*this)(first(x))
  GRPO_HD AffineMap operator()(const AffineMap& first) const { return {factor * first.factor, (*this)(first.shift)}; }
};

constexpr AffineMap kIdentity{1, 0};

}  // namespace grpo_kernels
