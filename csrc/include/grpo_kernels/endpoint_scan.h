#pragma once

#include <math.h>
#include <stdint.h>

#include "grpo_kernels/host_device.h"

// A row of tokens to segments that share an advantage: what GROUP-PPO's Algorithm 2 asks of each token, and the
// advantages of segments, as walks along the row. Everything is float64 inside, but for the weights of tokens on the
// CPU.
namespace grpo_kernels {

enum SegmentRule : int { kBounded = 0, kLiteral = 1 };
enum SegmentProxy : int { kCoherent = 0, kUncorrelated = 1 };
enum SegmentCredit : int { kEndpoint = 0, kBroadcast = 1 };
enum SegmentNorm : int { kNoNorm = 0, kBatchNorm = 1, kPromptNorm = 2 };

constexpr int kSegmentModes = 5, kSegmentCoefficients = 3;
constexpr double kMostLogRatio = 20;

// In the order of SegmentConfig.modes and .coefficients.
struct SegmentSettings {
  int rule, proxy, credit, norm;
  int64_t most;
  double epsilon, gamma, lam;
};

GRPO_HD SegmentSettings segment_settings(const int64_t* modes, const double* coefficients) {
  return {static_cast<int>(modes[0]),
          static_cast<int>(modes[1]),
          static_cast<int>(modes[2]),
          static_cast<int>(modes[3]),
          modes[4],
          coefficients[0],
          coefficients[1],
          coefficients[2]};
}

// A row's tokens. values may be null: `baseline` at every token then.
template <typename T>
struct SegmentRow {
  const T* rewards;
  const T* values;
  double baseline;
  const bool* mask;
  int64_t length;

  GRPO_HD double value(int64_t t) const { return values == nullptr ? baseline : static_cast<double>(values[t]); }
};

struct TokenSums {
  int64_t tokens = 0;
  double squares = 0;  // of the tokens' advantages; not finite if one of them is not
};

// Advantages of tokens, from the last: each sees those that follow it, masked ones are not there.
// visit(t, advantage, return); also of masked tokens, as 0.
template <typename T, typename Visit>
GRPO_HD TokenSums token_advantages(const SegmentSettings& settings, const SegmentRow<T>& row, Visit visit) {
  double following = 0, next_value = 0;
  TokenSums sums;
  for (int64_t t = row.length - 1; t >= 0; --t) {
    if (!row.mask[t]) {
      visit(t, 0.0, 0.0);
      continue;
    }
    const double value = row.value(t);
    following = static_cast<double>(row.rewards[t]) + settings.gamma * next_value - value +
                settings.gamma * settings.lam * following;
    next_value = value;
    visit(t, following, following + value);
    sums.squares += following * following;
    ++sums.tokens;
  }
  return sums;
}

// A segment that was closed: what its advantage is made of, which later stands in `gained`, and where it ends.
struct Segment {
  double gained;    // rewards, discounted to its first token
  double discount;  // gamma to its length
  double value;     // before its first token
  int64_t last;
};

struct Cuts {
  int32_t count;
  double weights;  // their sum; not finite if one of them is not
};

// What a token adds to P and Q of GROUP-PPO's Algorithm 2.
struct CutTerms {
  double moved, seen;

  GRPO_HD CutTerms operator+(const CutTerms& other) const { return {moved + other.moved, seen + other.seen}; }
};

GRPO_HD CutTerms cut_terms(bool is_coherent, double advantage, double weight) {
  const double seen = is_coherent ? weight : weight * weight;
  return {is_coherent ? seen * advantage : seen * advantage * advantage, seen};
}

// Of a segment that ends with this token, its P and Q in `sums`: the variance if each token keeps its own advantage,
// and if all have this one's. Not over the number of the row's tokens, as nothing they are compared with is.
struct CutVariances {
  double ppo, grpo;

  GRPO_HD bool opens_next(double tau, double epsilon) const { return grpo > tau * ppo + epsilon; }
  GRPO_HD bool reached_by(int64_t length, double tau, double epsilon) const {
    return static_cast<double>(length) * tau * (ppo + epsilon) >= grpo;
  }
};

GRPO_HD CutVariances cut_variances(bool is_coherent, const CutTerms& sums, double advantage) {
  const double shared = sums.seen * advantage;
  return {is_coherent ? sums.moved * sums.moved : sums.moved, shared * (is_coherent ? shared : advantage)};
}

// Cuts a row, left to right: what GROUP-PPO's Algorithm 2 asks of each token. `weights` stand in for the lengths of
// tokens' gradients. Both sides of its test are over the number of the row's tokens, which is left out here.
template <bool kIsBounded, bool kIsCoherent, typename T>
GRPO_HD Cuts cut_row(const SegmentSettings& settings, const SegmentRow<T>& row, const double* advantages,
                     const T* weights, double scale, double tau, int32_t* ids, Segment* segments) {
  const double per_scale = 1 / scale;
  CutTerms open{0, 0};                         // P and Q of the open segment, which has
  double gained = 0, discount = 1, value = 0;  // and what Segment says of it
  int64_t length = 0;
  Cuts cuts{0, 0};
  const auto close = [&](int64_t last) {
    segments[cuts.count++] = {gained, discount, value, last};
    open = {0, 0};
    gained = 0;
    discount = 1;
    length = 0;
  };
  for (int64_t t = 0; t < row.length; ++t) {
    if (!row.mask[t]) {
      ids[t] = -1;
      if (length > 0) close(t - 1);
      continue;
    }
    const double a = advantages[t] * per_scale;
    const double weight = static_cast<double>(weights[t]);
    const CutTerms own = cut_terms(kIsCoherent, a, weight);
    const CutVariances variances = cut_variances(kIsCoherent, open + own, a);
    if (kIsBounded && length > 0 && variances.opens_next(tau, settings.epsilon)) close(t - 1);
    if (length == 0) value = row.value(t);
    ids[t] = cuts.count;
    ++length;
    open = open + own;
    cuts.weights += own.seen;
    gained += discount * static_cast<double>(row.rewards[t]);
    discount *= settings.gamma;
    const bool reached = !kIsBounded && length >= 2 && variances.reached_by(length, tau, settings.epsilon);
    if (reached || length == settings.most) close(t);
  }
  if (length > 0) close(row.length - 1);
  return cuts;
}

// Of endpoints' advantages: merged in a fixed order.
struct EndpointMoments {
  int64_t count = 0;
  double mean = 0, squares = 0, low = INFINITY, high = -INFINITY;

  GRPO_HD void add(double x) {
    ++count;
    const double from_old = x - mean;
    mean += from_old / static_cast<double>(count);
    squares += from_old * (x - mean);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  GRPO_HD void merge(const EndpointMoments& other) {
    if (other.count == 0) return;
    const double n = static_cast<double>(count + other.count), apart = other.mean - mean;
    squares += other.squares + apart * apart * static_cast<double>(count) * static_cast<double>(other.count) / n;
    mean += apart * static_cast<double>(other.count) / n;
    count += other.count;
    low = other.low < low ? other.low : low;
    high = other.high > high ? other.high : high;
  }
  // One endpoint, or only equal ones, have nothing to be compared with.
  GRPO_HD double normalized(double x, double epsilon) const {
    if (count < 2 || low == high) return 0;
    return (x - mean) / (sqrt(squares / static_cast<double>(count - 1)) + epsilon);
  }
};

// Advantages of a row's segments, from the last, in the place of what the rewards gained.
GRPO_HD EndpointMoments credit_segments(const SegmentSettings& settings, Segment* segments, int32_t count) {
  double following = 0, next_value = 0;
  EndpointMoments moments;
  for (int32_t j = count - 1; j >= 0; --j) {
    Segment& segment = segments[j];
    following =
        segment.gained + segment.discount * next_value - segment.value + segment.discount * settings.lam * following;
    next_value = segment.value;
    segment.gained = following;
    moments.add(following);
  }
  return moments;
}

}  // namespace grpo_kernels
