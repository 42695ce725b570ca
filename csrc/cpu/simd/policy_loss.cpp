// Compiled once per instruction set (GRPO_SIMD). Only project headers whose functions are always inlined may be used
// here: an inline function of the standard library could be merged with a copy built for another instruction set.
#include "simd/policy_loss.h"

#include "grpo_kernels/policy_walk.h"
#include "simd/lanes.h"
#include "simd/vector_math.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

typedef int32_t FloatFlags __attribute__((vector_size(32)));
typedef int64_t DoubleFlags __attribute__((vector_size(32)));
typedef long long MaskOfDoubles __attribute__((vector_size(32)));  // what the compiler's own function calls them

// Two vectors that go through the same steps: an exp is a chain of instructions each of which waits for the one before,
// and a processor does not look far enough ahead to find the next step's.
template <typename V>
struct Twin {
  V a, b;
  Twin& operator+=(const Twin& other) { return *this = *this + other; }
  Twin& operator*=(const Twin& other) { return *this = *this * other; }
};

#define GRPO_TWIN_OPERATOR(op)                                                               \
  template <typename V>                                                                      \
  GRPO_HD auto operator op(const Twin<V>& x, const Twin<V>& y)->Twin<decltype(x.a op y.a)> { \
    return {x.a op y.a, x.b op y.b};                                                         \
  }
GRPO_TWIN_OPERATOR(+)
GRPO_TWIN_OPERATOR(-)
GRPO_TWIN_OPERATOR(*)
GRPO_TWIN_OPERATOR(/)
GRPO_TWIN_OPERATOR(<)
GRPO_TWIN_OPERATOR(>)
GRPO_TWIN_OPERATOR(<=)
GRPO_TWIN_OPERATOR(>=)
GRPO_TWIN_OPERATOR(==)
GRPO_TWIN_OPERATOR(&)
GRPO_TWIN_OPERATOR(|)
#undef GRPO_TWIN_OPERATOR
template <typename V>
GRPO_HD Twin<V> operator-(const Twin<V>& x) {
  return {-x.a, -x.b};
}
template <typename V>
GRPO_HD Twin<V> operator~(const Twin<V>& x) {
  return {~x.a, ~x.b};
}

template <typename T>
struct VectorOf {
  using Value = Floats;
  using Flag = FloatFlags;
  using Integer = int32_t;
};
template <>
struct VectorOf<double> {
  using Value = Quad;
  using Flag = DoubleFlags;
  using Integer = int64_t;
};

// One vector of what policy_walk.h computes with.
template <typename T>
struct VectorMath {
  using Value = typename VectorOf<T>::Value;
  using Flag = typename VectorOf<T>::Flag;
  static constexpr int kCount = sizeof(Value) / sizeof(T);

  GRPO_HD static Value select(const Flag& flag, const Value& yes, const Value& no) {
#ifdef __AVX__
    // what GCC makes of `flag ? yes : no` compares the flag with 0 again, twice
    if constexpr (sizeof(T) == 4) {
      return __builtin_ia32_blendvps256(no, yes, (Value)flag);
    } else {
      return __builtin_ia32_blendvpd256(no, yes, (Value)flag);
    }
#else
    return (Value)((flag & (Flag)yes) | (~flag & (Flag)no));
#endif
  }

  GRPO_HD static Value log(Value x) {  // of one rare loss only
    for (int l = 0; l < kCount; ++l) x[l] = sizeof(T) == 4 ? logf(x[l]) : ::log(x[l]);
    return x;
  }

  // The first `left` lanes.
  GRPO_HD static Flag first(int64_t left) {
    Flag place;
    for (int l = 0; l < kCount; ++l) place[l] = l;
    // the comparison wants a number of the lanes' own width, and every number above kCount is as good as another
    const auto count = static_cast<typename VectorOf<T>::Integer>(left < kCount ? left : kCount);
    return place < count;
  }

  GRPO_HD static Value load(const T* from, int64_t left) {
    Value value{};
    if (left >= kCount) {
      memcpy(&value, from, sizeof value);
      return value;
    }
#ifdef __AVX__
    if constexpr (sizeof(T) == 4) {
      return __builtin_ia32_maskloadps256((const Value*)from, first(left));
    } else {
      return __builtin_ia32_maskloadpd256((const Value*)from, (MaskOfDoubles)first(left));
    }
#else
    for (int l = 0; l < kCount; ++l) {
      if (l < left) value[l] = from[l];
    }
    return value;
#endif
  }

  GRPO_HD static void store(T* to, int64_t left, const Value& value) {
    if (left >= kCount) {
      memcpy(to, &value, sizeof value);
      return;
    }
#ifdef __AVX__
    if constexpr (sizeof(T) == 4) {
      __builtin_ia32_maskstoreps256((Value*)to, first(left), value);
    } else {
      __builtin_ia32_maskstorepd256((Value*)to, (MaskOfDoubles)first(left), value);
    }
#else
    for (int l = 0; l < kCount; ++l) {
      if (l < left) to[l] = value[l];
    }
#endif
  }

  // The first `left` lanes, and of those the ones whose byte is not 0; null: all of them.
  GRPO_HD static Flag load_flags(const bool* from, int64_t left) {
    if (left >= kCount) {
      if (from == nullptr) return ~Flag{};
      // every lane looks at its own byte of a word that all have: no conversion of bytes, which costs as much as an exp
      constexpr int kLast = kCount - 1;
      uint32_t words[2];
      memcpy(words, from, kCount);
      Flag bytes;
      if constexpr (sizeof(T) == 4) {
        const int32_t a = static_cast<int32_t>(words[0]), b = static_cast<int32_t>(words[kLast / 4]);
        bytes =
            Flag{a, a, a, a, b, b, b, b} & Flag{0xFF, 0xFF00, 0xFF0000, ~0xFFFFFF, 0xFF, 0xFF00, 0xFF0000, ~0xFFFFFF};
      } else {
        const int64_t a = static_cast<int64_t>(words[0]);
        bytes = Flag{a, a, a, a} & Flag{0xFF, 0xFF00, 0xFF0000, 0xFF000000};
      }
      return bytes != 0;
    }
    if (from == nullptr) return first(left);
    Flag flags{};
    for (int l = 0; l < kCount; ++l) flags[l] = l < left && from[l] ? -1 : 0;
    return flags;
  }

  GRPO_HD static Flag not_negative(const int32_t* from, int64_t left) {
    Flag flags{};
    for (int l = 0; l < kCount; ++l) flags[l] = l < left && from[l] >= 0 ? -1 : 0;
    return flags;
  }
};

// What policy_walk.h computes with: two vectors.
template <typename T>
struct TwinMath {
  using One = VectorMath<T>;
  using Scalar = T;
  using Value = Twin<typename One::Value>;
  using Flag = Twin<typename One::Flag>;
  using Counter = Flag;
  static constexpr int kCount = 2 * One::kCount, kHalf = One::kCount;

  GRPO_HD static Value all(T value) {
    const auto one = every<typename One::Value>(value);
    return {one, one};
  }
  GRPO_HD static Flag none() { return Flag{}; }
  GRPO_HD static Flag negate(const Flag& flag) { return ~flag; }
  GRPO_HD static Value select(const Flag& flag, const Value& yes, const Value& no) {
    return {One::select(flag.a, yes.a, no.a), One::select(flag.b, yes.b, no.b)};
  }
  GRPO_HD static Flag select_flag(const Flag& flag, const Flag& yes, const Flag& no) {
    return (flag & yes) | (~flag & no);
  }
  GRPO_HD static Value lower(const Value& x, const Value& y) { return {smaller(x.a, y.a), smaller(x.b, y.b)}; }
  GRPO_HD static Value higher(const Value& x, const Value& y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
  GRPO_HD static Value exp(const Value& x) { return {GRPO_SIMD::exp(x.a), GRPO_SIMD::exp(x.b)}; }
  GRPO_HD static Value expm1(const Value& x) { return {GRPO_SIMD::expm1(x.a), GRPO_SIMD::expm1(x.b)}; }
  GRPO_HD static Value log(const Value& x) { return {One::log(x.a), One::log(x.b)}; }
  GRPO_HD static void count(Counter& counter, const Flag& flag) { counter = counter - flag; }  // a true lane is -1
  GRPO_HD static Value load(const T* from, int64_t left) {
    return {One::load(from, left), One::load(from + kHalf, left - kHalf)};
  }
  GRPO_HD static void store(T* to, int64_t left, const Value& value) {
    One::store(to, left, value.a);
    One::store(to + kHalf, left - kHalf, value.b);
  }
  GRPO_HD static Flag load_flags(const bool* from, int64_t left) {
    return {One::load_flags(from, left), One::load_flags(at_or_null(from, kHalf), left - kHalf)};
  }
  GRPO_HD static Flag not_negative(const int32_t* from, int64_t left) {
    return {One::not_negative(from, left), One::not_negative(from + kHalf, left - kHalf)};
  }
};

GRPO_HD double sum(const Quad& lanes) {
  const Pair pair = __builtin_shufflevector(lanes, lanes, 0, 1) + __builtin_shufflevector(lanes, lanes, 2, 3);
  return pair[0] + pair[1];
}

template <typename Lanes>
GRPO_HD void fold(const Twin<Lanes>& twin, double& into) {
  const Lanes lanes = twin.a + twin.b;
  if constexpr (sizeof(lanes[0]) == 4) {
    const Quad low = __builtin_convertvector(__builtin_shufflevector(lanes, lanes, 0, 1, 2, 3), Quad);
    into += sum(low + __builtin_convertvector(__builtin_shufflevector(lanes, lanes, 4, 5, 6, 7), Quad));
  } else {
    into += sum(__builtin_convertvector(lanes, Quad));
  }
}

// From lanes to double; the lanes start again at 0.
template <typename T, WalkKind kKind>
GRPO_HD void flush(StepSums<TwinMath<T>>& lanes, PolicySums& sums) {
  fold(lanes.policy, sums.policy);
  fold(lanes.kl, sums.kl);
  fold(lanes.plain_kl, sums.plain_kl);
  fold(lanes.log_ratio, sums.log_ratio);
  fold(lanes.ratio, sums.ratio);
  fold(lanes.ratio_spread, sums.ratio_spread);
  fold(lanes.low, sums.low);
  fold(lanes.high, sums.high);
  fold(lanes.clipped, sums.clipped);
  fold(lanes.dual, sums.dual);
  if (kKind != WalkKind::kPlainClip) {
    fold(lanes.entropy, sums.entropy);
    fold(lanes.plain_entropy, sums.plain_entropy);
    fold(lanes.through, sums.through);
    fold(lanes.phi, sums.phi);
    fold(lanes.is, sums.is);
    fold(lanes.is_square, sums.is_square);
    fold(lanes.gap, sums.gap);
    fold(lanes.is_count, sums.is_count);
    fold(lanes.gap_count, sums.gap_count);
    fold(lanes.off_policy, sums.off_policy);
  }
  lanes = StepSums<TwinMath<T>>{};
}

template <typename T, WalkKind kKind>
GRPO_HD void flush(const StepExtremes<TwinMath<T>>& lanes, PolicySums& sums) {
  const auto extreme = [](const auto& twin, bool lowest, double& into) {
    const auto lanes = lowest ? smaller(twin.a, twin.b) : larger(twin.a, twin.b);
    for (int l = 0; l < VectorMath<T>::kCount; ++l) {
      if (lowest ? lanes[l] < into : lanes[l] > into) into = lanes[l];
    }
  };
  extreme(lanes.ratio_min, true, sums.ratio_min);
  extreme(lanes.ratio_max, false, sums.ratio_max);
  if (kKind == WalkKind::kPlainClip) return;
  extreme(lanes.is_min, true, sums.is_min);
  extreme(lanes.is_max, false, sums.is_max);
  extreme(lanes.gap_max, false, sums.gap_max);
}

template <typename T, WalkKind kKind, bool kAllTakePart>
void run(const PolicyTokens<T>& tokens, const PolicyPlan& plan, int64_t count, PolicySums& sums) {
  constexpr int64_t kCount = TwinMath<T>::kCount, kBetweenFlushes = 64 * kCount;
  PolicyWalk<TwinMath<T>, kKind> walk(tokens, plan);
  PolicySums found;
  for (int64_t begin = 0; begin < count; begin += kBetweenFlushes) {
    const int64_t end = count < begin + kBetweenFlushes ? count : begin + kBetweenFlushes;
    int64_t k = begin;
    for (; k + kCount <= end; k += kCount) walk.template step<kAllTakePart>(k, kCount);
    if (k < end) walk.step(k, end - k);
    walk.settle();
    flush<T, kKind>(walk.sums, found);
  }
  flush<T, kKind>(walk.extremes, found);
  found.weigh(tokens.shares);
  sums.merge(found);
}

template <typename T>
void walk(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, PolicySums& sums) {
  switch (kind) {
    case WalkKind::kPlainClip:
      return tokens.mask == nullptr ? run<T, WalkKind::kPlainClip, true>(tokens, plan, count, sums)
                                    : run<T, WalkKind::kPlainClip, false>(tokens, plan, count, sums);
    case WalkKind::kClip:
      return run<T, WalkKind::kClip, false>(tokens, plan, count, sums);
    default:
      return run<T, WalkKind::kAny, false>(tokens, plan, count, sums);
  }
}

}  // namespace

void policy_tokens(const PolicyTokens<float>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count,
                   PolicySums& sums) {
  walk(tokens, plan, kind, count, sums);
}
void policy_tokens(const PolicyTokens<double>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count,
                   PolicySums& sums) {
  walk(tokens, plan, kind, count, sums);
}

}  // namespace grpo_kernels::GRPO_SIMD
