// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "common/simd/half_lanes.h"
#include "linear_head/divergence.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

using Vector = LanesOf<float>::Widest;
using Bits = LaneMath<Vector>::Bits;
typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));
constexpr int kCount = LaneMath<Vector>::kCount;
constexpr int64_t kBlock = 2048;  // columns whose sum is kept in float32
constexpr float kFarthest = 80;   // exp of it and of its negative are normal numbers

// Of positive normal numbers, by log(m) = 2 atanh((m - 1) / (m + 1)) for m between sqrt(1/2) and sqrt(2).
GRPO_HD Vector log(const Vector& x) {
  constexpr uint32_t kRoot = 0x3f3504f3;  // sqrt(1/2)
  const Bits above = (Bits)x - kRoot;
  const Vector exponent = __builtin_convertvector((Integers)above >> 23, Vector);
  const Vector mantissa = (Vector)((above & 0x007fffffu) + kRoot);
  const Vector s = (mantissa - 1.0f) / (mantissa + 1.0f), square = s * s;
  const Vector series = ((square * (1.0f / 9) + 1.0f / 7) * square + 0.2f) * square + 1.0f / 3;
  return exponent * 0.693147180f + (s + s) * (square * series + 1.0f);
}

GRPO_HD Vector zero_unless(const Vector& condition, const Vector& value) {
  return select((Bits)(condition != 0), value, Vector{});
}

// A row's logits as log-probabilities. The log-sum-exp rounded to float32 would be what limits them.
struct LogProbs {
  const float* logits;
  LogitMap<float> map;
  float high, low;

  GRPO_HD explicit LogProbs(const LogitRow& row)
      : logits(row.logits),
        map(row.map),
        high(static_cast<float>(row.normalizer)),
        low(static_cast<float>(row.normalizer - static_cast<double>(high))) {}

  struct At {
    Vector log_p, slope;
  };
  GRPO_HD At at(const Vector& x) const {
    if (map.capped) {
      const auto capped = tanh_and_slope(Vector(x * map.inner));
      const Vector z = select((Bits)(absolute(x) == every<Vector>(INFINITY)), x, Vector(capped.tanh * map.outer));
      return {(z - high) - low, capped.slope * (map.inner * map.outer)};
    }
    return {(x * map.outer - high) - low, every<Vector>(map.outer)};
  }
};

// What columns add to the divergence, and its derivative by their log-probabilities in the student, as far as it does
// not cancel: with u the derivatives and q the probabilities, the gradient by a logit is u - q sum(u).
struct Terms {
  Vector part, slope;
};

template <DivergenceKind kKind>
GRPO_HD Terms terms_of(const Vector& log_q, const Vector& log_p, float beta) {
  const Vector q = exp_of_negative(log_q), p = exp_of_negative(log_p), gap = log_p - log_q;
  if constexpr (kKind == DivergenceKind::kForward) {
    return {zero_unless(p, p * gap), q - p};  // the slopes -p add up to -1
  } else if constexpr (kKind == DivergenceKind::kReverse) {
    const Vector part = zero_unless(q, -q * gap);
    return {part, part};
  } else {
    const Vector near = larger(every<Vector>(-kFarthest), smaller(every<Vector>(kFarthest), gap));
    // log(q / mixture), and the same of p; NaN of either row stays
    const Vector of_mixture = log(Vector(exp(near) * beta + (1 - beta)));
    const Vector of_q = select((Bits)(gap == gap), Vector(-of_mixture), gap), of_p = of_q + near;
    const Vector slope = zero_unless(q, q * of_q * (1 - beta));
    return {slope + zero_unless(p, p * of_p * beta), slope};
  }
}

GRPO_HD Vector load_row(const float* logits, int64_t left) {
  if (left >= kCount) return load_lanes<Vector>(logits);
  float padded[kCount];
  for (int l = 0; l < kCount; ++l) padded[l] = l < left ? logits[l] : -INFINITY;
  return load_lanes<Vector>(padded);
}

GRPO_HD double sum_of(const Vector& lanes) {
  double sum = 0;
  for (int l = 0; l < kCount; ++l) sum += static_cast<double>(lanes[l]);
  return sum;
}

struct Sums {
  double part = 0, slope = 0;
};

template <DivergenceKind kKind>
Sums sums_of(const DivergenceRow& row) {
  const LogProbs student(row.student), teacher(row.teacher);
  Sums sums;
  for (int64_t first = 0; first < row.columns; first += kBlock) {
    const int64_t end = first + kBlock < row.columns ? first + kBlock : row.columns;
    Vector part{}, slope{};
    for (int64_t i = first; i < end; i += kCount) {
      const Vector log_q = student.at(load_row(student.logits + i, end - i)).log_p;
      const Terms terms = terms_of<kKind>(log_q, teacher.at(load_row(teacher.logits + i, end - i)).log_p, row.beta);
      part += terms.part;
      slope += terms.slope;
    }
    sums.part += sum_of(part);
    sums.slope += sum_of(slope);
  }
  return sums;
}

template <DivergenceKind kKind, typename G>
double write_gradient(const DivergenceRow& row, G* gradient) {
  constexpr bool kNeedsSums = kKind != DivergenceKind::kForward;
  Sums sums;
  if constexpr (kNeedsSums) sums = sums_of<kKind>(row);
  const LogProbs student(row.student), teacher(row.teacher);
  const float mean = static_cast<float>(sums.slope), share = static_cast<float>(row.share);
  for (int64_t first = 0; first < row.columns; first += kBlock) {
    const int64_t end = first + kBlock < row.columns ? first + kBlock : row.columns;
    Vector part{};
    for (int64_t i = first; i < end; i += kCount) {
      const auto own = student.at(load_row(student.logits + i, end - i));
      const Vector log_p = teacher.at(load_row(teacher.logits + i, end - i)).log_p;
      const Terms terms = terms_of<kKind>(own.log_p, log_p, row.beta);
      part += terms.part;
      Vector by_log_q = terms.slope;
      if constexpr (kNeedsSums) by_log_q -= exp_of_negative(own.log_p) * mean;
      const Vector result = by_log_q * own.slope * share;
      if (end - i >= kCount) {
        store_lanes(gradient + i, result);
      } else {
        store_first(gradient + i, end - i, result);
      }
    }
    if constexpr (!kNeedsSums) sums.part += sum_of(part);
  }
  return sums.part;
}

template <typename G>
GRPO_HD double choose_gradient(const DivergenceRow& row, G* gradient) {
  switch (row.kind) {
    case DivergenceKind::kForward:
      return write_gradient<DivergenceKind::kForward>(row, gradient);
    case DivergenceKind::kReverse:
      return write_gradient<DivergenceKind::kReverse>(row, gradient);
    default:
      return write_gradient<DivergenceKind::kJsd>(row, gradient);
  }
}

}  // namespace

double row_divergence(const DivergenceRow& row) {
  switch (row.kind) {
    case DivergenceKind::kForward:
      return sums_of<DivergenceKind::kForward>(row).part;
    case DivergenceKind::kReverse:
      return sums_of<DivergenceKind::kReverse>(row).part;
    default:
      return sums_of<DivergenceKind::kJsd>(row).part;
  }
}
double divergence_row_gradient(const DivergenceRow& row, float* gradient) { return choose_gradient(row, gradient); }
double divergence_row_gradient(const DivergenceRow& row, BFloat16* gradient) { return choose_gradient(row, gradient); }

}  // namespace grpo_kernels::GRPO_SIMD
