#pragma once

#include <math.h>
#include <stdint.h>

#include "grpo_kernels/host_device.h"

// A row of tokens to segments that share an advantage: what GROUP-PPO's Algorithm 2 asks of each token, and the
// advantages of segments, as walks along the row. Everything is float64 inside.
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
  int64_t tokens;
  double squares;  // of the tokens' advantages
};

// Advantages of tokens, from the last: each sees those that follow it, masked ones are not there.
template <typename T>
GRPO_HD TokenSums token_advantages(const SegmentSettings& settings, const SegmentRow<T>& row, double* advantages,
                                   T* returns) {
  double following = 0, next_value = 0;
  TokenSums sums{0, 0};
  for (int64_t t = row.length - 1; t >= 0; --t) {
    if (!row.mask[t]) {
      returns[t] = 0;
      continue;
    }
    const double value = row.value(t);
    following = static_cast<double>(row.rewards[t]) + settings.gamma * next_value - value +
                settings.gamma * settings.lam * following;
    next_value = value;
    advantages[t] = following;
    returns[t] = static_cast<T>(following + value);
    sums.squares += following * following;
    ++sums.tokens;
  }
  return sums;
}

// Cuts the row, left to right; `weights` stand in for the lengths of tokens' gradients. The number of segments.
template <typename T>
GRPO_HD int32_t cut_row(const SegmentSettings& settings, const SegmentRow<T>& row, const double* advantages,
                        const double* weights, double scale, double tau, int64_t tokens, int32_t* ids, bool* ends) {
  const double count = static_cast<double>(tokens), margin = settings.epsilon / count;
  double moved = 0, seen = 0;  // P and Q of the open segment, which has
  int64_t length = 0;          // so many tokens
  int32_t number = 0;
  const auto close = [&](int64_t last) {
    ends[last] = true;
    ++number;
    moved = seen = 0;
    length = 0;
  };
  for (int64_t t = 0; t < row.length; ++t) {
    ends[t] = false;
    if (!row.mask[t]) {
      ids[t] = -1;
      if (length > 0) close(t - 1);
      continue;
    }
    const double a = advantages[t] / scale;
    const double w = settings.proxy == kCoherent ? weights[t] : weights[t] * weights[t];
    const double plus = settings.proxy == kCoherent ? w * a : w * a * a;
    const double p = moved + plus, q = seen + w;
    const double ppo = (settings.proxy == kCoherent ? p * p : p) / count;
    const double grpo = (settings.proxy == kCoherent ? (q * a) * (q * a) : q * a * a) / count;
    if (settings.rule == kBounded && length > 0 && grpo > tau * ppo + margin) close(t - 1);
    ids[t] = number;
    ++length;
    moved += plus;
    seen += w;
    const bool reached =
        settings.rule == kLiteral && length >= 2 && static_cast<double>(length) * tau * (ppo + margin) >= grpo;
    if (reached || length == settings.most) close(t);
  }
  if (length > 0) close(row.length - 1);
  return number;
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

// Advantages of segments, right to left: each at its last token. They are float64 until they are normalised.
template <typename T>
GRPO_HD EndpointMoments credit_row(const SegmentSettings& settings, const SegmentRow<T>& row, const int32_t* ids,
                                   double* credits) {
  double following = 0, next_value = 0, gained = 0, discount = 1;
  int64_t first = -1, last = -1;
  EndpointMoments moments;
  const auto finish = [&] {
    const double value = row.value(first);
    const double delta = gained + discount * next_value - value;
    following = delta + discount * settings.lam * following;
    next_value = value;
    credits[last] = following;
    moments.add(following);
  };
  for (int64_t t = row.length - 1; t >= 0; --t) {
    credits[t] = 0;
    if (ids[t] < 0) continue;
    if (first < 0 || ids[t] != ids[first]) {
      if (first >= 0) finish();
      last = t;
      gained = 0;
      discount = 1;
    }
    first = t;
    gained = static_cast<double>(row.rewards[t]) + settings.gamma * gained;
    discount *= settings.gamma;
  }
  if (first >= 0) finish();
  return moments;
}

// What the row's advantages become; credits are those of credit_row.
template <typename T>
GRPO_HD void write_row(const SegmentSettings& settings, const EndpointMoments& moments, const bool* ends,
                       const int32_t* ids, const double* credits, int64_t length, T* advantages) {
  double shared = 0;
  for (int64_t t = length - 1; t >= 0; --t) {
    if (ends[t]) {
      shared = settings.norm == kNoNorm ? credits[t] : moments.normalized(credits[t], settings.epsilon);
      advantages[t] = static_cast<T>(shared);
    } else {
      advantages[t] = settings.credit == kBroadcast && ids[t] >= 0 ? static_cast<T>(shared) : T{};
    }
  }
}

}  // namespace grpo_kernels
