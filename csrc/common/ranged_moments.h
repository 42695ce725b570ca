#pragma once

#include <math.h>
#include <stdint.h>

#include "common/host_device.h"

namespace grpo_kernels {

// Number, mean, sum of squared distances from the mean, and range of some values. Built value by value, or from the
// parts of a set that several threads worked on.
struct RangedMoments {
  int64_t count = 0;
  double mean = 0, squares = 0, low = INFINITY, high = -INFINITY;

  GRPO_HD void add(double x) {
    ++count;
    const double deviation = x - mean;
    mean += deviation / static_cast<double>(count);
    squares += deviation * (x - mean);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  GRPO_HD void merge(const RangedMoments& other) {
    if (other.count == 0) return;
    const double n = static_cast<double>(count + other.count), delta = other.mean - mean;
    squares += other.squares + delta * delta * static_cast<double>(count) * static_cast<double>(other.count) / n;
    mean += delta * static_cast<double>(other.count) / n;
    count += other.count;
    low = other.low < low ? other.low : low;
    high = other.high > high ? other.high : high;
  }
  // Whether a normalisation has anything to compare.
  GRPO_HD bool differ() const { return count >= 2 && low != high; }
  GRPO_HD double variance() const { return squares / static_cast<double>(count - 1); }
};

}  // namespace grpo_kernels
