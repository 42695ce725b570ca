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
  static GRPO_HD V exp(const V& x) { return exp_of_negative(x); }  // of a log-probability
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

// The first `count` logits, padded with -inf.
template <typename T>
GRPO_HD auto load_logits(const T* logits, int64_t count) {
  using V = typename LanesOf<T>::Vector;
  return count >= LaneMath<V>::kCount ? load_lanes<V>(logits) : load_padded(logits, count, LowestOf<T>::kMinusInfinity);
}

template <typename T>
GRPO_HD Wide<T> largest_of(const T* logits, int64_t count) {
  using W = typename LanesOf<T>::Widest;
  constexpr int kWide = LaneMath<W>::kCount, kCount = LaneMath<typename LanesOf<T>::Vector>::kCount;
  W high[4];  // more chains than a maximum takes cycles
  for (W& each : high) each = every<W>(-INFINITY);
  int64_t i = 0;
  for (; i + 4 * kWide <= count; i += 4 * kWide) {
    for (int k = 0; k < 4; ++k) high[k] = larger(load_lanes<W>(logits + i + k * kWide), high[k]);
  }
  const W all = larger(larger(high[0], high[1]), larger(high[2], high[3]));
  Wide<T> largest = all[0];
  for (int l = 1; l < kWide; ++l) largest = all[l] > largest ? all[l] : largest;
  for (; i < count; i += kCount) {
    const auto lanes = load_logits(logits + i, count - i);
    for (int l = 0; l < kCount; ++l) largest = lanes[l] > largest ? lanes[l] : largest;
  }
  return largest;
}

template <typename V>
struct VectorSums {
  V ties{}, below{}, spread{};
};

template <bool kCapped, bool kSpread, bool kTies, typename V, typename T>
GRPO_HD void add_vector(VectorSums<V>& sums, const V& x, const LogitMap<T>& map, T top) {
  using Math = VectorMath<V>;
  const V z = map_logit<Math, kCapped>(map, x).z;
  if constexpr (kTies) {
    const auto terms = softmax_terms<Math, kSpread>(z, top);
    sums.ties += terms.tie;
    sums.below += terms.below;
    if constexpr (kSpread) sums.spread -= terms.spread;
  } else {
    const V distance = z - top, term = Math::exp(distance);
    sums.below += term;
    if constexpr (kSpread) sums.spread -= term * Math::at_least(distance, T(kNoExponent));
  }
}

// Sums of two vectors alternately, the same on every instruction set: a wide vector holds both. Where no logit of the
// block is the row's largest, as in nearly all blocks, there are no ties to look for.
template <bool kCapped, bool kSpread, bool kTies, typename T>
GRPO_HD void add_terms(RowSoftmax& row, const T* logits, int64_t count, const LogitMap<Wide<T>>& map) {
  using V = typename LanesOf<T>::Vector;
  using W = typename LanesOf<T>::Widest;
  constexpr int kCount = LaneMath<V>::kCount;
  const Wide<T> top = static_cast<Wide<T>>(row.top);
  VectorSums<V> sums[2];
  int64_t i = 0;
  if constexpr (sizeof(W) > sizeof(V)) {
    VectorSums<W> wide;
    for (; i + 2 * kCount <= count; i += 2 * kCount) {
      add_vector<kCapped, kSpread, kTies>(wide, load_lanes<W>(logits + i), map, top);
    }
    split(wide.ties, sums[0].ties, sums[1].ties);
    split(wide.below, sums[0].below, sums[1].below);
    split(wide.spread, sums[0].spread, sums[1].spread);
  }
  for (; i + 2 * kCount <= count; i += 2 * kCount) {
    for (int k = 0; k < 2; ++k) {
      add_vector<kCapped, kSpread, kTies>(sums[k], load_lanes<V>(logits + i + k * kCount), map, top);
    }
  }
  for (; i < count; i += kCount) {
    add_vector<kCapped, kSpread, kTies>(sums[0], load_logits(logits + i, count - i), map, top);
  }
  row.ties += sum_lanes(sums[0].ties + sums[1].ties);
  row.below += sum_lanes(sums[0].below + sums[1].below);
  row.spread += sum_lanes(sums[0].spread + sums[1].spread);
}

template <bool kCapped, bool kSpread, typename T>
GRPO_HD void add_block(RowSoftmax& row, const T* logits, int64_t count, const LogitMap<Wide<T>>& map) {
  using Math = VectorMath<typename LanesOf<T>::Vector>;
  // the map is monotonic, so the largest logit has the largest z
  const auto largest = map_logit<Math, kCapped>(map, Math::every(largest_of(logits, count)));
  const double largest_z = static_cast<double>(largest.z[0]);
  row.raise<DoubleMath>(largest_z);
  if (largest_z < row.top) {
    add_terms<kCapped, kSpread, false>(row, logits, count, map);
  } else {
    add_terms<kCapped, kSpread, true>(row, logits, count, map);
  }
}

template <bool kCapped, bool kSpread, typename T>
RowSums sums_of(const T* logits, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map) {
  using Math = VectorMath<typename LanesOf<T>::Vector>;
  RowSums sums{{Lowest<Wide<T>>::kValue}, 0};
  for (int64_t first = 0; first < columns; first += kBlock) {
    add_block<kCapped, kSpread>(sums.softmax, logits + first, columns - first < kBlock ? columns - first : kBlock, map);
  }
  const auto at_target = load_padded(logits + target, 1, logits[target]);
  sums.target_z = static_cast<double>(map_logit<Math, kCapped>(map, at_target).z[0]);
  return sums;
}

template <bool kCapped, bool kEntropy, typename T, typename G>
void write_gradient(const T* logits, G* gradient, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map,
                    const RowGradient<Wide<T>>& row) {
  using V = typename LanesOf<T>::Vector;
  using W = typename LanesOf<T>::Widest;
  using Math = VectorMath<V>;
  const auto at_target = map_logit<Math, kCapped>(map, load_padded(logits + target, 1, logits[target]));
  const auto gradient_of = [&](const auto& x) {
    using Lanes = __typeof__(x + x);
    const auto mapped = map_logit<VectorMath<Lanes>, kCapped>(map, x);
    return Lanes(other_gradient<VectorMath<Lanes>, kEntropy>(row, mapped.z) * mapped.slope);
  };
  constexpr int kWide = LaneMath<W>::kCount, kCount = LaneMath<V>::kCount;
  int64_t i = 0;
  for (; i + kWide <= columns; i += kWide) store_lanes(gradient + i, gradient_of(load_lanes<W>(logits + i)));
  for (; i < columns; i += kCount) {
    const V lanes = gradient_of(load_logits(logits + i, columns - i));
    if (columns - i >= kCount) {
      store_lanes(gradient + i, lanes);
    } else {
      store_first(gradient + i, columns - i, lanes);
    }
  }
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

template <typename T, typename G>
GRPO_HD void choose_gradient(const T* logits, G* gradient, int64_t columns, int64_t target,
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

#define GRPO_DEFINE_GRADIENT(T, G)                                                                               \
  void row_gradient(const T* logits, G* gradient, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map, \
                    const RowGradient<Wide<T>>& row) {                                                           \
    choose_gradient(logits, gradient, columns, target, map, row);                                                \
  }
#define GRPO_DEFINE(T)                                                                                            \
  RowSums row_sums(const T* logits, int64_t columns, int64_t target, const LogitMap<Wide<T>>& map, bool spread) { \
    return choose_sums(logits, columns, target, map, spread);                                                     \
  }                                                                                                               \
  GRPO_DEFINE_GRADIENT(T, T)
GRPO_DEFINE(float)
GRPO_DEFINE(double)
GRPO_DEFINE(Half)
GRPO_DEFINE(BFloat16)
GRPO_DEFINE_GRADIENT(float, BFloat16)
#undef GRPO_DEFINE
#undef GRPO_DEFINE_GRADIENT

}  // namespace grpo_kernels::GRPO_SIMD
