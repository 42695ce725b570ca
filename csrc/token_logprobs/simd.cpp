// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "token_logprobs/simd.h"

#include "common/simd/half_lanes.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

// A block is read twice, for its maximum and for its sums, the second time from the L1 cache.
constexpr int64_t kBlock = 2048;

// The Math of softmax.h on vectors of lanes.
template <typename V>
struct VectorMath {
  using Scalar = typename LaneMath<V>::Scalar;
  using Bits = typename LaneMath<V>::Bits;
  static GRPO_HD V exp(const V& x) { return grpo_kernels::GRPO_SIMD::exp(x); }
  static GRPO_HD V every(Scalar x) { return grpo_kernels::GRPO_SIMD::every<V>(x); }
  static GRPO_HD TanhAndSlope<V> tanh_and_slope(const V& x) { return grpo_kernels::GRPO_SIMD::tanh_and_slope(x); }
  static GRPO_HD V infinite_or(const V& x, const V& finite) {
    return select((Bits)(absolute(x) == every(INFINITY)), x, finite);
  }
  static GRPO_HD V one_where_equal(const V& z, Scalar top) { return (V)((Bits)(z == top) & (Bits)every(1)); }
  static GRPO_HD V zero_where_equal(const V& z, Scalar top, const V& other) {
    return (V)(~(Bits)(z == top) & (Bits)other);
  }
  static GRPO_HD V at_least(const V& x, Scalar floor) { return larger(every(floor), x); }
};

// The Math for the sums between blocks. Not libm, whose last digits depend on the machine.
struct DoubleMath {
  static GRPO_HD double exp(double x) { return grpo_kernels::GRPO_SIMD::exp(every<Quad>(x))[0]; }
};

template <typename T>
struct LowestOf;
template <>
struct LowestOf<float> {
  static constexpr float kMinusInfinity = -INFINITY;
};
template <>
struct LowestOf<double> {
  static constexpr double kMinusInfinity = -INFINITY;
};
template <>
struct LowestOf<Half> {
  static constexpr Half kMinusInfinity{0xfc00};
};
template <>
struct LowestOf<BFloat16> {
  static constexpr BFloat16 kMinusInfinity{0xff80};
};

// Calls visit(vector, accumulator, index) along a row, which is padded with -inf; accumulators 0 and 1 alternate.
template <typename T, typename Visit>
GRPO_HD void for_each_vector(const T* logits, int64_t count, Visit visit) {
  constexpr int kCount = LaneMath<typename LanesOf<T>::Vector>::kCount;
  int64_t i = 0;
  for (; i + 2 * kCount <= count; i += 2 * kCount) {
    visit(load_lanes(logits + i), 0, i);
    visit(load_lanes(logits + i + kCount), 1, i + kCount);
  }
  for (; i < count; i += kCount) {
    visit(
        i + kCount <= count ? load_lanes(logits + i) : load_padded(logits + i, count - i, LowestOf<T>::kMinusInfinity),
        0, i);
  }
}

template <bool kCapped, bool kSpread, typename T>
GRPO_HD void add_block(RowSoftmax<double>& row, const T* logits, int64_t count, const LogitMap<Wide<T>>& map) {
  using V = typename LanesOf<T>::Vector;
  using Math = VectorMath<V>;
  V high[2] = {Math::every(-INFINITY), Math::every(-INFINITY)};
  for_each_vector(logits, count,
                  [&](const V& x, int accumulator, int64_t) { high[accumulator] = larger(x, high[accumulator]); });
  V highest = larger(high[0], high[1]);
  Wide<T> largest = highest[0];
  for (int l = 1; l < LaneMath<V>::kCount; ++l) largest = highest[l] > largest ? highest[l] : largest;
  // the map is monotonic, so the largest logit has the largest z
  row.raise<DoubleMath>(static_cast<double>(map_logit<Math, kCapped>(map, Math::every(largest)).z[0]));

  const Wide<T> top = static_cast<Wide<T>>(row.top);
  V ties[2] = {}, below[2] = {}, spread[2] = {};
  for_each_vector(logits, count, [&](const V& x, int accumulator, int64_t) {
    const auto terms = softmax_terms<Math, kSpread>(map_logit<Math, kCapped>(map, x).z, top);
    ties[accumulator] += terms.tie;
    below[accumulator] += terms.below;
    if constexpr (kSpread) spread[accumulator] -= terms.spread;
  });
  row.ties += sum_lanes(ties[0] + ties[1]);
  row.below += sum_lanes(below[0] + below[1]);
  row.spread += sum_lanes(spread[0] + spread[1]);
}

template <bool kCapped, bool kSpread, typename T>
RowSums sums_of(const T* logits, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map) {
  using Math = VectorMath<typename LanesOf<T>::Vector>;
  RowSums sums;
  sums.softmax.top = Lowest<Wide<T>>::kValue;
  for (int64_t first = 0; first < columns; first += kBlock) {
    add_block<kCapped, kSpread>(sums.softmax, logits + first, columns - first < kBlock ? columns - first : kBlock, map);
  }
  const auto at_target = load_padded(logits + target, 1, logits[target]);
  sums.target_z = static_cast<double>(map_logit<Math, kCapped>(map, at_target).z[0]);
  return sums;
}

template <bool kCapped, bool kEntropy, typename T>
void write_gradient(const T* logits, T* gradient, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map,
                    const RowGradient<Wide<T>>& row) {
  using V = typename LanesOf<T>::Vector;
  using Math = VectorMath<V>;
  const auto at_target = map_logit<Math, kCapped>(map, load_padded(logits + target, 1, logits[target]));
  for_each_vector(logits, columns, [&](const V& x, int, int64_t i) {
    const auto mapped = map_logit<Math, kCapped>(map, x);
    const V lanes = other_gradient<Math, kEntropy>(row, mapped.z) * mapped.slope;
    if (columns - i >= LaneMath<V>::kCount) {
      store_lanes(gradient + i, lanes);
    } else {
      store_first(gradient + i, columns - i, lanes);
    }
  });
  const double own = target_gradient(row, static_cast<double>(at_target.z[0]));
  store_first(gradient + target, 1, Math::every(static_cast<Wide<T>>(own) * at_target.slope[0]));
}

template <typename T>
GRPO_HD RowSums choose_sums(const T* logits, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map,
                            bool spread) {
  if (map.capped) {
    return spread ? sums_of<true, true>(logits, columns, target, map)
                  : sums_of<true, false>(logits, columns, target, map);
  }
  return spread ? sums_of<false, true>(logits, columns, target, map)
                : sums_of<false, false>(logits, columns, target, map);
}

template <typename T>
GRPO_HD void choose_gradient(const T* logits, T* gradient, int64_t columns, int64_t target,
                             const LogitMap<Wide<T>>& map, const RowGradient<Wide<T>>& row) {
  const bool entropy = row.for_entropy != 0;
  if (map.capped) {
    return entropy ? write_gradient<true, true>(logits, gradient, columns, target, map, row)
                   : write_gradient<true, false>(logits, gradient, columns, target, map, row);
  }
  return entropy ? write_gradient<false, true>(logits, gradient, columns, target, map, row)
                 : write_gradient<false, false>(logits, gradient, columns, target, map, row);
}

}  // namespace

#define GRPO_DEFINE(T)                                                                                            \
  RowSums row_sums(const T* logits, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map, bool spread) { \
    return choose_sums(logits, columns, target, map, spread);                                                     \
  }                                                                                                               \
  void row_gradient(const T* logits, T* gradient, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map,  \
                    const RowGradient<Wide<T>>& row) {                                                            \
    choose_gradient(logits, gradient, columns, target, map, row);                                                 \
  }
GRPO_DEFINE(float)
GRPO_DEFINE(double)
GRPO_DEFINE(Half)
GRPO_DEFINE(BFloat16)
#undef GRPO_DEFINE

}  // namespace grpo_kernels::GRPO_SIMD
