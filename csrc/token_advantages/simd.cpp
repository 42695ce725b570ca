// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "token_advantages/simd.h"

#include "common/simd/lanes.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

typedef int64_t QuadBits __attribute__((vector_size(32)));
typedef uint8_t ByteQuad __attribute__((vector_size(4)));

// All ones where the mask counts.
GRPO_HD QuadBits load_mask_quad(const bool* mask) {
  ByteQuad bytes;
  memcpy(&bytes, mask, sizeof bytes);
  return -__builtin_convertvector(bytes, QuadBits);
}

GRPO_HD Quad where(const QuadBits& condition, const Quad& yes, const Quad& no) {
  return (Quad)((condition & (QuadBits)yes) | (~condition & (QuadBits)no));
}

// Maps of four neighbouring tokens, or compositions of maps.
struct QuadMap {
  Quad factor, shift;

  // Composes each lane's map after that of the lane kDistance after it.
  template <int kDistance>
  GRPO_HD QuadMap after_lanes() const {
    constexpr int d = kDistance;
    const Quad one = broadcast(1);
    const Quad other_factor = __builtin_shufflevector(factor, one, d, d + 1, d + 2, d + 3);
    const Quad other_shift = __builtin_shufflevector(shift, Quad{}, d, d + 1, d + 2, d + 3);
    return {factor * other_factor, factor * other_shift + shift};
  }
};

// The recurrence of four tokens at once: each gets the composed maps of the tokens after it, and only those of all
// four wait for the tokens before.
template <bool kHasValues, typename T>
GRPO_HD bool walk(const TokenAdvantageSettings& settings, const T* rewards, const T* values, const bool* mask,
                  int64_t count, T* advantages, T* returns) {
  const Quad factor = broadcast(settings.gamma * settings.lam), share = broadcast(settings.gamma * (1 - settings.lam));
  const Quad one = broadcast(1);
  const QuadBits is_carried = settings.carry_rewards ? ~QuadBits{} : QuadBits{};
  QuadBits scored = ~QuadBits{};
  double entering = 0;
  const auto visit = [&](const QuadBits& counts, const Quad& raw_reward, const Quad& raw_value, Quad& advantage,
                         Quad& token_return) {
    const Quad reward = where(counts, raw_reward, Quad{}), value = where(counts, raw_value, Quad{});
    // as carried_reward: of tokens that do not count, and a number
    const QuadBits is_number = (QuadBits)(raw_reward - raw_reward == Quad{});
    const Quad carried = where(is_carried & is_number & ~counts, raw_reward, Quad{});
    const QuadMap own{where(counts, factor, one), share * value + where(counts, factor, Quad{}) * reward + carried};
    const QuadMap all = own.after_lanes<1>().template after_lanes<2>();
    const Quad later_factor = __builtin_shufflevector(all.factor, one, 1, 2, 3, 4);
    const Quad later_shift = __builtin_shufflevector(all.shift, Quad{}, 1, 2, 3, 4);
    const Quad gained = reward + (later_factor * broadcast(entering) + later_shift);
    entering = all.factor[0] * entering + all.shift[0];
    scored &= (QuadBits)(reward == reward);
    token_return = where(counts, gained, Quad{});
    advantage = where(counts, gained - value, Quad{});
  };
  int64_t t = count;
  Quad advantage, token_return;
  for (; t >= 4; t -= 4) {
    const int64_t at = t - 4;
    const Quad value = kHasValues ? load_quad(values + at) : Quad{};
    visit(load_mask_quad(mask + at), load_quad(rewards + at), value, advantage, token_return);
    store_quad(advantages + at, advantage);
    store_quad(returns + at, token_return);
  }
  if (t > 0) {  // the row's first tokens, after slots that do not count
    T reward[4] = {}, value[4] = {};
    bool counts[4] = {};
    for (int64_t l = 0; l < t; ++l) {
      reward[l] = rewards[l], counts[l] = mask[l];
      if (kHasValues) value[l] = values[l];
    }
    visit(load_mask_quad(counts), load_quad(reward), load_quad(value), advantage, token_return);
    store_quad(reward, advantage);
    store_quad(value, token_return);
    for (int64_t l = 0; l < t; ++l) advantages[l] = reward[l], returns[l] = value[l];
  }
  return (scored[0] & scored[1] & scored[2] & scored[3]) != 0;
}

// Calls visit(part, x, counts) for the advantages in fours; slots after the last are 0 and do not count.
template <typename T, typename Visit>
GRPO_HD void for_each_quad(const T* advantages, const bool* mask, int64_t count, Visit visit) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    visit(0, load_quad(advantages + i), load_mask_quad(mask + i));
    visit(1, load_quad(advantages + i + 4), load_mask_quad(mask + i + 4));
  }
  for (; i < count; i += 4) {
    T values[4] = {};
    bool counts[4] = {};
    for (int64_t l = 0; l < 4 && i + l < count; ++l) values[l] = advantages[i + l], counts[l] = mask[i + l];
    visit(static_cast<int>(i / 4 % 2), load_quad(values), load_mask_quad(counts));
  }
}

template <typename T>
GRPO_HD RangedMoments moments_of(const T* advantages, const bool* mask, int64_t count) {
  RangedMoments moments;
  QuadBits numbers = {};
  Lanes sums = {}, low = {broadcast(INFINITY), broadcast(INFINITY)},
        high = {broadcast(-INFINITY), broadcast(-INFINITY)};
  for_each_quad(advantages, mask, count, [&](int part, const Quad& x, const QuadBits& counts) {
    numbers -= counts;
    sums.part[part] += x;
    low.part[part] = lower(low.part[part], where(counts, x, low.part[part]));
    high.part[part] = higher(high.part[part], where(counts, x, high.part[part]));
  });
  moments.count = numbers[0] + numbers[1] + numbers[2] + numbers[3];
  if (moments.count == 0) return moments;
  moments.mean = fold_sum(sums) / static_cast<double>(moments.count);
  const Quad all_high = higher(high.part[0], high.part[1]);
  moments.low = fold_low(low);
  for (int l = 0; l < 4; ++l) moments.high = all_high[l] > moments.high ? all_high[l] : moments.high;
  const Quad mean = broadcast(moments.mean);
  Lanes squares = {};
  for_each_quad(advantages, mask, count, [&](int part, const Quad& x, const QuadBits& counts) {
    const Quad distance = where(counts, x - mean, Quad{});
    squares.part[part] += distance * distance;
  });
  moments.squares = fold_sum(squares);
  return moments;
}

template <typename T>
GRPO_HD void whiten(const TokenNorm& norm, const bool* mask, int64_t count, T* advantages) {
  const Quad mean = broadcast(norm.mean), factor = broadcast(norm.factor);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    store_quad(advantages + i, where(load_mask_quad(mask + i), (load_quad(advantages + i) - mean) * factor, Quad{}));
  }
  for (; i < count; ++i) advantages[i] = mask[i] ? static_cast<T>(norm(static_cast<double>(advantages[i]))) : T{0};
}

}  // namespace

bool walk_tokens(const TokenAdvantageSettings& settings, const float* rewards, const float* values, const bool* mask,
                 int64_t count, float* advantages, float* returns) {
  return values == nullptr ? walk<false>(settings, rewards, values, mask, count, advantages, returns)
                           : walk<true>(settings, rewards, values, mask, count, advantages, returns);
}
bool walk_tokens(const TokenAdvantageSettings& settings, const double* rewards, const double* values, const bool* mask,
                 int64_t count, double* advantages, double* returns) {
  return values == nullptr ? walk<false>(settings, rewards, values, mask, count, advantages, returns)
                           : walk<true>(settings, rewards, values, mask, count, advantages, returns);
}
RangedMoments advantage_moments(const float* advantages, const bool* mask, int64_t count) {
  return moments_of(advantages, mask, count);
}
RangedMoments advantage_moments(const double* advantages, const bool* mask, int64_t count) {
  return moments_of(advantages, mask, count);
}
void whiten_advantages(const TokenNorm& norm, const bool* mask, int64_t count, float* advantages) {
  whiten(norm, mask, count, advantages);
}
void whiten_advantages(const TokenNorm& norm, const bool* mask, int64_t count, double* advantages) {
  whiten(norm, mask, count, advantages);
}

}  // namespace grpo_kernels::GRPO_SIMD
