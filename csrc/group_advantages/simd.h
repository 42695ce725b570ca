#pragma once

#include "group_advantages/batch.h"

namespace grpo_kernels {

// The statistics of a group that its rows need, kept small because rows of one group may lie far apart.
template <typename T>
struct GroupEntry {
  double center, factor;
  T mean, std;
  int32_t size;
  bool live;

  GroupEntry() = default;
  GRPO_HD GroupEntry(const RowMap& map, double count)
      : center(map.center),
        factor(map.factor),
        mean(static_cast<T>(map.mean)),
        std(static_cast<T>(map.std)),
        size(static_cast<int32_t>(count)),
        live(map.live) {}
};

// Groups of neighbouring rows with one reward each: group g holds rows starts[g] to starts[g + 1] - 1, or group_size
// rows where starts is null.
template <typename T>
struct PlainGroups {
  const T* rewards;
  const int64_t* starts;
  int64_t group_size;
  AdvantagePlan plan;
  AdvantageOutputs<T> out;
};

// The runs of equal ids among the rows of a batch.
struct Runs {
  int64_t count;
  bool ascend;  // whether every id has one run, and the ids ascend
  bool agree;   // whether the rows of every run have the same reward, and the same group where groups are given
};

}  // namespace grpo_kernels

// group_statistics    statistics of values in which NaN means "not scored"; leaves out second, length and length_reward
// plain_groups     writes all outputs of groups begin to end - 1
// plain_entries    writes the entries of groups begin to end - 1
// find_runs        writes the row past the last one of every run; looks at the first of several columns of rewards only
// spread_runs      copies the outputs of runs to their rows
#define GRPO_DECLARE_FOR(T)                                                                                 \
  void plain_groups(const PlainGroups<T>& groups, int64_t begin, int64_t end);                              \
  void plain_entries(const PlainGroups<T>& groups, int64_t begin, int64_t end, GroupEntry<T>* entries);     \
  Runs find_runs(const int64_t* ids, const int64_t* groups, const T* rewards, int64_t rows, int32_t* ends); \
  void spread_runs(const AdvantageOutputs<T>& of_runs, const int32_t* ends, int64_t runs, int64_t rows,     \
                   const AdvantageOutputs<T>& out);
#define GRPO_DECLARE(level)                                              \
  namespace grpo_kernels::level {                                        \
  GroupStatistics group_statistics(const double* values, int64_t count); \
  GRPO_DECLARE_FOR(float)                                                \
  GRPO_DECLARE_FOR(double)                                               \
  }
GRPO_DECLARE(baseline)
GRPO_DECLARE(avx2)
GRPO_DECLARE(avx512)
#undef GRPO_DECLARE
#undef GRPO_DECLARE_FOR
