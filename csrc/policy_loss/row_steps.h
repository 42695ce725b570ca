#pragma once

#include "common/simd/term_math.h"
#include "policy_loss/future_kl.h"

// The passes over a row before the terms of losses that look beyond a token. Included once per instruction set.
namespace grpo_kernels::GRPO_SIMD {
namespace {

// Four differences of log-probs as doubles, 0 where the mask is not set.
template <typename T>
GRPO_HD Quad four_differences(const T* logprobs, const T* base, const bool* mask) {
  using Math = VectorMath<double>;
  return Math::select(Math::load_flags(mask, 4), load_quad(logprobs) - load_quad(base), Quad{});
}

template <typename T>
GRPO_HD double sum_of_differences(const T* logprobs, const T* base, const bool* mask, int64_t count) {
  Lanes sums = {};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    sums.part[0] += four_differences(logprobs + k, base + k, offset_or_null(mask, k));
    sums.part[1] += four_differences(logprobs + k + 4, base + k + 4, offset_or_null(mask, k + 4));
  }
  double sum = fold_sum(sums);
  for (; k < count; ++k) {
    if (mask == nullptr || mask[k]) sum += static_cast<double>(logprobs[k]) - static_cast<double>(base[k]);
  }
  return sum;
}

// Lanes kDistance further on, then zeros.
template <int kDistance>
GRPO_HD Floats ahead(const Floats& x) {
  constexpr int d = kDistance;
  return __builtin_shufflevector(x, Floats{}, d, d + 1, d + 2, d + 3, d + 4, d + 5, d + 6, d + 7);
}
template <int kDistance>
GRPO_HD Quad ahead(const Quad& x) {
  constexpr int d = kDistance < 4 ? kDistance : 4;
  return __builtin_shufflevector(x, Quad{}, d, d + 1, d + 2, d + 3);
}

// The discounted sums of the log ratios of a row from each token on, from its end to its start, a vector of tokens at a
// time. Within a vector, each token gets the sum of those behind it in steps of doubling distance; only the sum of all,
// in double, waits for the vector behind.
template <typename T>
GRPO_HD void discounted_sums(const FutureKl<T>& row, int64_t count, T* sums) {
  using Math = VectorMath<T>;
  using V = typename Math::Value;
  constexpr int kCount = Math::kCount;
  const auto every = [](double value) { return static_cast<T>(value) - V{}; };
  V behind;  // the discount of the sum behind a vector at each of its lanes
  double of_all = 1;
  for (int l = kCount - 1; l >= 0; --l) behind[l] = static_cast<T>(of_all *= row.gamma);
  const double square = row.gamma * row.gamma;
  const V by_one = every(row.gamma), by_two = every(square), by_four = every(square * square);
  const V cap = every(static_cast<double>(row.log_cap));
  const FutureKl<T> tokens = row;  // a copy: a reference would be read again after every store
  double next = 0;
  const auto step = [&](int64_t k, int64_t left) {
    const V raw = Math::load(tokens.logprobs + k, left) - Math::load(tokens.old_logprobs + k, left);
    const V x = Math::select(Math::load_flags(offset_or_null(tokens.mask, k), left), raw, V{});
    V sum = Math::select(x > cap, V{}, x);
    sum += by_one * ahead<1>(sum);
    sum += by_two * ahead<2>(sum);
    if constexpr (kCount == 8) sum += by_four * ahead<4>(sum);
    const double own = static_cast<double>(sum[0]);
    Math::store(sums + k, left, sum + behind * every(next));
    next = own + of_all * next;
  };
  // the last tokens first, so that only they can be fewer than a vector, with none behind them
  int64_t k = count / kCount * kCount;
  if (k < count) step(k, count - k);
  while ((k -= kCount) >= 0) step(k, kCount);
}

template <typename T>
GRPO_HD void weights_of_future_kl(const FutureKl<T>& row, int64_t count, T* weights) {
  using Math = VectorMath<T>;
  using V = typename Math::Value;
  const auto every = [](T value) { return value - V{}; };
  discounted_sums(row, count, weights);
  const FutureKl<T> tokens = row;
  const V low = every(row.low), high = every(row.high), log_safety = every(row.log_safety);
  const V safe_low = every(row.safe_low), safe_high = every(row.safe_high);
  const auto bounded = [&](int64_t k, int64_t left) {
    return smaller(high, larger(low, exp(Math::load(weights + k, left))));
  };
  const auto step = [&](int64_t k, int64_t left) {
    const V weight = bounded(k, left);
    const V log_ratio = Math::load(tokens.logprobs + k, left) - Math::load(tokens.old_logprobs + k, left);
    V advantage = every(tokens.row_advantage);
    if (tokens.advantages != nullptr) advantage = Math::load(tokens.advantages + k, left);
    const V safe = smaller(safe_high, larger(safe_low, weight));
    Math::store(weights + k, left, Math::select((log_ratio > log_safety) & (advantage < V{}), safe, weight));
  };
  const bool has_worse = row.advantages != nullptr || row.row_advantage < 0;
  int64_t k = 0;
  if (!has_worse || isinf(row.log_safety)) {
    for (; k + Math::kCount <= count; k += Math::kCount)
      Math::store(weights + k, Math::kCount, bounded(k, Math::kCount));
    if (k < count) Math::store(weights + k, count - k, bounded(k, count - k));
    return;
  }
  for (; k + Math::kCount <= count; k += Math::kCount) step(k, Math::kCount);
  if (k < count) step(k, count - k);
}

}  // namespace
}  // namespace grpo_kernels::GRPO_SIMD
