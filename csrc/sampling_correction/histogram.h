#pragma once

#include <stdint.h>

#include <algorithm>
#include <array>
#include <vector>

// Counts of numbers and sums of their mantissas per digit of their bits, as integers: one pass of M2PO's search.
namespace grpo_kernels {

// A digit of the bits of a nonnegative float32, in the order of PASSES in ops/sampling_correction/m2.py.
struct BitsDigit {
  int shift, width;
};
constexpr std::array<BitsDigit, 3> kBitsDigits{{{19, 12}, {9, 10}, {0, 9}}};

struct BitsBin {
  int64_t count = 0, mantissas = 0;
};

// Adds the numbers whose bits begin with `prefix` to the bins of the digit `level`; level 0 has no prefix. NaN takes no
// part.
class BitsHistogram {
 public:
  explicit BitsHistogram(int level)
      : level_(level), bins_(size_t{1} << kBitsDigits[level].width), packed_(kCopies * (bins_.size() + 1)) {}

  void add(const int32_t* bits, int64_t count, int32_t prefix) {
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t block = std::min(kBlock, count - first);
      level_ == 0 ? add_block<true>(bits + first, block, prefix) : add_block<false>(bits + first, block, prefix);
    }
  }
  const std::vector<BitsBin>& bins() const { return bins_; }

 private:
  // A bin of a block is one integer: its count above, the sum of at most kBlock mantissas of 24 bits below. Neighbours
  // go to different copies, as many of them share a bin, and an addition waits for the last one to the same address.
  static constexpr int64_t kBlock = int64_t{1} << 16;
  static constexpr uint32_t kInfinity = 0x7F800000;
  static constexpr int kSumBits = 40, kCopies = 2;

  template <bool kIsFirst>
  void add_block(const int32_t* bits, int64_t count, int32_t prefix) {
    const BitsDigit digit = kBitsDigits[level_];
    const size_t size = bins_.size(), stride = size + 1;  // the last bin is for numbers that take no part
    const auto mask = static_cast<uint32_t>(size - 1);
    for (int64_t k = 0; k < count; ++k) {
      const auto value = static_cast<uint32_t>(bits[k]);
      // rare, so that the branch is foreseen
      if (!kIsFirst && value >> (digit.shift + digit.width) != static_cast<uint32_t>(prefix)) continue;
      const size_t bin = value <= kInfinity ? value >> digit.shift & mask : size;
      const uint64_t mantissa = (value & 0x7FFFFF) | static_cast<uint32_t>(value > 0x7FFFFF) << 23;
      packed_[(k % kCopies) * stride + bin] += (uint64_t{1} << kSumBits) + mantissa;
    }
    for (size_t bin = 0; bin < size; ++bin) {
      for (int copy = 0; copy < kCopies; ++copy) {
        const uint64_t packed = packed_[copy * stride + bin];
        bins_[bin].count += static_cast<int64_t>(packed >> kSumBits);
        bins_[bin].mantissas += static_cast<int64_t>(packed & ((uint64_t{1} << kSumBits) - 1));
      }
    }
    std::fill(packed_.begin(), packed_.end(), 0);
  }

  const int level_;
  std::vector<BitsBin> bins_;
  std::vector<uint64_t> packed_;
};

}  // namespace grpo_kernels
