// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "sampled_support/simd.h"

#include "common/simd/half_lanes.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

// Four sums, so that additions do not wait for one another. A wide vector holds two of them.
template <typename T>
Wide<T> dot_of(const T* a, const T* b, int64_t count) {
  using V = typename LanesOf<T>::Vector;
  using W = typename LanesOf<T>::Widest;
  constexpr int kCount = LaneMath<V>::kCount;
  V sums[4]{};
  int64_t i = 0;
  if constexpr (sizeof(W) > sizeof(V)) {
    W wide[2]{};
    for (; i + 4 * kCount <= count; i += 4 * kCount) {
      for (int k = 0; k < 2; ++k) {
        wide[k] += load_lanes<W>(a + i + 2 * k * kCount) * load_lanes<W>(b + i + 2 * k * kCount);
      }
    }
    split(wide[0], sums[0], sums[1]);
    split(wide[1], sums[2], sums[3]);
  }
  for (; i + 4 * kCount <= count; i += 4 * kCount) {
    for (int k = 0; k < 4; ++k) sums[k] += load_lanes<V>(a + i + k * kCount) * load_lanes<V>(b + i + k * kCount);
  }
  for (; i + kCount <= count; i += kCount) sums[0] += load_lanes<V>(a + i) * load_lanes<V>(b + i);
  if (i < count) sums[0] += load_padded(a + i, count - i, T{}) * load_padded(b + i, count - i, T{});
  return static_cast<Wide<T>>(sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

template <typename T>
void add_scaled_to(Wide<T>* sum, const T* x, Wide<T> factor, int64_t count) {
  using W = typename LanesOf<T>::Widest;
  using V = typename LanesOf<T>::Vector;
  constexpr int kWide = LaneMath<W>::kCount, kCount = LaneMath<V>::kCount;
  int64_t i = 0;
  for (; i + kWide <= count; i += kWide) store_lanes(sum + i, load_lanes<W>(sum + i) + load_lanes<W>(x + i) * factor);
  for (; i < count; i += kCount) {
    const int64_t rest = count - i < kCount ? count - i : kCount;
    const V total = load_padded(sum + i, rest, Wide<T>(0)) + load_padded(x + i, rest, T{}) * factor;
    store_first(sum + i, rest, total);
  }
}

template <typename T>
void add_rounded_to(T* to, const Wide<T>* sum, int64_t count) {
  using V = typename LanesOf<T>::Vector;
  constexpr int kCount = LaneMath<V>::kCount;
  int64_t i = 0;
  for (; i + kCount <= count; i += kCount) store_lanes(to + i, load_lanes<V>(to + i) + load_lanes<V>(sum + i));
  if (i < count) {
    const int64_t rest = count - i;
    store_first(to + i, rest, load_padded(to + i, rest, T{}) + load_padded(sum + i, rest, Wide<T>(0)));
  }
}

}  // namespace

#define GRPO_DEFINE(T)                                                                                               \
  Wide<T> dot(const T* a, const T* b, int64_t count) { return dot_of(a, b, count); }                                 \
  void add_scaled(Wide<T>* sum, const T* x, Wide<T> factor, int64_t count) { add_scaled_to(sum, x, factor, count); } \
  void add_rounded(T* to, const Wide<T>* sum, int64_t count) { add_rounded_to(to, sum, count); }
GRPO_DEFINE(float)
GRPO_DEFINE(double)
GRPO_DEFINE(Half)
GRPO_DEFINE(BFloat16)
#undef GRPO_DEFINE

}  // namespace grpo_kernels::GRPO_SIMD
