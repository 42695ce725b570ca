#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// Counts and finds the true ones of an array of flags.
namespace grpo_kernels {

// Counts sixteen flags at a time: of vectors whose bytes are 0 or 1, 255 can be added before a byte overflows.
inline int64_t count_true(const bool* flags, int64_t count) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  constexpr int64_t kWidth = sizeof(Bytes);
  constexpr uint64_t kEven = 0x00FF00FF00FF00FFull;
  int64_t total = 0, k = 0;
  while (k + kWidth <= count) {
    Bytes sums{};
    for (int vector = 0; vector < 255 && k + kWidth <= count; ++vector, k += kWidth) {
      Bytes bytes;
      std::memcpy(&bytes, flags + k, kWidth);
      sums += bytes;
    }
    uint64_t words[2];
    std::memcpy(words, &sums, kWidth);
    for (const uint64_t word : words) {
      const uint64_t pairs = (word & kEven) + ((word >> 8) & kEven);
      total += static_cast<int64_t>((pairs * 0x0001000100010001ull) >> 48);
    }
  }
  for (; k < count; ++k) total += flags[k];
  return total;
}

// Writes the indices of the true flags and returns their number. Free of branches that depend on the flags, which are
// unpredictable: for eight flags it writes eight indices, the true ones first, and the next eight overwrite the rest.
// `indices` has room for 7 more.
inline int64_t find_true(const bool* flags, int64_t first, int64_t last, int32_t* indices) {
  struct Table {
    uint8_t indices[256][8] = {}, count[256] = {};
    constexpr Table() {
      for (int byte = 0; byte < 256; ++byte) {
        for (uint8_t bit = 0; bit < 8; ++bit) {
          if (byte >> bit & 1) indices[byte][count[byte]++] = bit;
        }
      }
    }
  };
  static constexpr Table kTable;
  int64_t total = 0;
  for (int64_t k = first; k < last; k += 8) {
    uint64_t eight = 0;
    std::memcpy(&eight, flags + k, std::min<int64_t>(8, last - k));
    // gathers the lowest bits of the eight bytes
    const auto byte = static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56);
    for (int i = 0; i < 8; ++i) indices[total + i] = static_cast<int32_t>(k) + kTable.indices[byte][i];
    total += kTable.count[byte];
  }
  return total;
}

}  // namespace grpo_kernels
