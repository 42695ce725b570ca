#pragma once

#include "grpo_kernels/segment_stats.h"

namespace grpo_kernels {

template <typename T>
struct AdvantageOutputs {
  T *advantages, *mean, *std;
  int32_t* size;
  bool* degenerate;
};

// What a row needs to know of its segment: small, as rows of one segment may lie far apart.
template <typename T>
struct SegmentEntry {
  double center, factor;
  T mean, std;
  int32_t size;
  bool live;

  SegmentEntry() = default;
  GRPO_HD SegmentEntry(const RowMap& map, double count)
      : center(map.center),
        factor(map.factor),
        mean(static_cast<T>(map.mean)),
        std(static_cast<T>(map.std)),
        size(static_cast<int32_t>(count)),
        live(map.live) {}
};

// Rows with one reward each and nothing else to look at: the common case. Group g holds rows starts[g] ..
// starts[g + 1] - 1; starts null: groups of group_size.
template <typename T>
struct PlainGroups {
  const T* rewards;
  const int64_t* starts;
  int64_t group_size;
  AdvantagePlan plan;
  AdvantageOutputs<T> out;
};

}  // namespace grpo_kernels

// segment_stats    two-pass statistics of values in which NaN means "not scored", without what only some
// estimators need
//                  (second, length, length_reward)
// plain_groups     all outputs of groups begin .. end - 1, whose rows are neighbours
// plain_entries    the entries of groups begin .. end - 1
#define GRPO_DECLARE_FOR(T)                                                    \
  void plain_groups(const PlainGroups<T>& groups, int64_t begin, int64_t end); \
  void plain_entries(const PlainGroups<T>& groups, int64_t begin, int64_t end, SegmentEntry<T>* entries);
#define GRPO_DECLARE(level)                                        \
  namespace grpo_kernels::level {                                  \
  SegmentStats segment_stats(const double* values, int64_t count); \
  GRPO_DECLARE_FOR(float)                                          \
  GRPO_DECLARE_FOR(double)                                         \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
#undef GRPO_DECLARE_FOR
