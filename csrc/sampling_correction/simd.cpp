// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "sampling_correction/simd.h"

#include "common/simd/term_math.h"
#include "sampling_correction/walk.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

#define GRPO_SUM(name) flush_sum(lanes.name, totals.name);
#define GRPO_MINIMUM(name) fold_minimum(lanes.name, totals.name);
#define GRPO_MAXIMUM(name) fold_maximum(lanes.name, totals.name);

// Moves sums from lanes to doubles and starts the lanes again; extremes go on.
template <typename Lanes>
GRPO_HD void flush(Lanes& lanes, Mismatch& totals) {
  GRPO_MISMATCH_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_MISMATCH_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
}
template <typename Lanes>
GRPO_HD void flush(Lanes& lanes, WeightTotals& totals) {
  GRPO_WEIGHT_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_WEIGHT_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
}
template <typename Lanes>
GRPO_HD void flush(Lanes& lanes, EstimateTotals& totals) {
  GRPO_ESTIMATE_SUMS(GRPO_SUM, GRPO_SUM)
  GRPO_ESTIMATE_EXTREMES(GRPO_MINIMUM, GRPO_MAXIMUM)
}
#undef GRPO_SUM
#undef GRPO_MINIMUM
#undef GRPO_MAXIMUM

// Calls step(k, left) for the steps of `count` tokens, and flush() after few enough for sums in the type of the tokens.
template <typename Math, typename Step, typename Flush>
GRPO_HD void for_each_step(int64_t count, const Step& step, const Flush& flush_all) {
  constexpr int64_t kCount = Math::kCount, kBetweenFlushes = 64 * kCount;
  for (int64_t begin = 0; begin < count; begin += kBetweenFlushes) {
    const int64_t end = count < begin + kBetweenFlushes ? count : begin + kBetweenFlushes;
    for (int64_t k = begin; k < end; k += kCount) step(k, end - k);
    flush_all();
  }
}

template <typename T>
void correct(const CorrectionBatch<T>& batch, int64_t row) {
  using Math = typename MathOf<T>::Math;
  using Lanes = StepLanes<Math>;
  const CorrectionPlan& plan = batch.plan;
  const int64_t count = batch.length(row);
  const CorrectionWalk<Math> walk(tokens_of(batch, row), plan);

  Mismatch mismatch;
  typename Lanes::Mismatches mismatches;
  for_each_step<Math>(
      count, [&](int64_t k, int64_t left) { walk.measure(k, left, mismatches); }, [&] { flush(mismatches, mismatch); });

  const Verdict<T> verdict = judge<T>(plan, mismatch);
  Judged judged;
  typename Lanes::Weights weights;
  typename Lanes::Estimates estimates[kEstimators];
  for_each_step<Math>(
      count, [&](int64_t k, int64_t left) { walk.apply(k, left, verdict, weights, estimates); },
      [&] {
        flush(weights, judged.weights);
        for (int e = 0; e < kEstimators; ++e) {
          if (walk.bounds[e].is_used) flush(estimates[e], judged.estimates[e]);
        }
      });
  write_record(plan, mismatch, verdict, judged, batch.table + row * table_columns(plan.count));
}

}  // namespace

void correct_row(const CorrectionBatch<float>& batch, int64_t row) { correct(batch, row); }
void correct_row(const CorrectionBatch<double>& batch, int64_t row) { correct(batch, row); }

}  // namespace grpo_kernels::GRPO_SIMD
