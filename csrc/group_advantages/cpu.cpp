#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/op_namespace.h"
#include "common/parallel.h"
#include "common/row_groups.h"
#include "common/simd/levels.h"
#include "group_advantages/rollouts.h"
#include "group_advantages/scattered_groups.h"
#include "group_advantages/simd.h"
#include "group_advantages/tensors.h"

namespace grpo_kernels {
namespace {

constexpr const char* kOp = AdvantageInputs::kOp;
constexpr int64_t kRowsPerChunk = 4096;  // of the sums over a batch, which are added in order
// Nanoseconds a row on one thread: all of a plain call, and a walk over the groups or the rows of any other.
constexpr double kPlainCost = 4, kWalkCost = 5;

// The batch with its reward weights.
template <typename T>
struct WeightedBatch : AdvantageBatch<T> {
  const double* weights;  // [columns]

  double reward(int64_t row, int column) const { return AdvantageBatch<T>::reward(row, column, weights); }
};

// Whether the call has one reward per row and nothing else that the estimator reads.
bool is_plain(const AdvantageInputs& in) {
  const AdvantagePlan& plan = in.plan;
  return in.columns == 1 && !in.has_weights && !in.valid && !in.subgroups && !in.baselines &&
         plan.combine == Combine::kSumThenNormalize && plan.center != Center::kLength &&
         plan.center != Center::kRunnerUp && plan.scale != Scale::kLeaveOneOutStd;
}

template <typename T>
GroupStatistics stats_of(const WeightedBatch<T>& in, const Span& span, int column, std::vector<double>& values) {
  if (static_cast<int64_t>(values.size()) < span.count) values.resize(span.count);
  for (int64_t k = 0; k < span.count; ++k) values[k] = in.reward(span[k], column);
  GroupStatistics stats = GRPO_SIMD_CALL(group_statistics, values.data(), span.count);
  if (in.plan.center != Center::kLength && in.plan.center != Center::kRunnerUp) return stats;
  GroupStatistics all;
  for (int64_t k = 0; k < span.count; ++k) {
    if (!std::isnan(values[k])) all.add(values[k], in.length(span[k]));
  }
  stats.second = all.second;
  stats.length = all.length;
  stats.length_reward = all.length_reward;
  return stats;
}

// Calls visit(group, values) for every group, on several threads; `values` is the thread's memory.
template <typename Visit>
void for_each_group(const RowGroups& groups, Visit visit) {
  const double work = kWalkCost * static_cast<double>(groups.starts.back());
  divide(groups.size(), threads_for(work), [&](int64_t begin, int64_t end) {
    std::vector<double> values;
    for (int64_t group = begin; group < end; ++group) visit(group, values);
  });
}

// From one column, or the combined rewards, to the entry of each group.
template <typename T>
std::vector<GroupEntry<T>> group_entries(const WeightedBatch<T>& in, const RowGroups& groups, int column) {
  std::vector<GroupEntry<T>> entries(groups.size());
  if (!in.plan.needs_parent() || groups.parent.empty()) {
    for_each_group(groups, [&](int64_t group, std::vector<double>& values) {
      const GroupStatistics own = stats_of(in, span_of(groups, group), column, values);
      entries[group] = GroupEntry<T>(map_rows(in.plan, own, nullptr), own.count);
    });
    return entries;
  }
  std::vector<GroupStatistics> stats(groups.size()), parents(groups.parents);
  for_each_group(groups, [&](int64_t group, std::vector<double>& values) {
    stats[group] = stats_of(in, span_of(groups, group), column, values);
  });
  for (int64_t s = 0; s < groups.size(); ++s) parents[groups.parent[s]].merge(stats[s]);
  for_each_group(groups, [&](int64_t s, std::vector<double>&) {
    entries[s] = GroupEntry<T>(map_rows(in.plan, stats[s], &parents[groups.parent[s]]), stats[s].count);
  });
  return entries;
}

template <typename T>
double advantage_of(const WeightedBatch<T>& in, const GroupEntry<T>& entry, int64_t row, double reward) {
  RowMap map;
  map.center = entry.center;
  map.factor = entry.factor;
  map.live = entry.live && !std::isnan(reward);
  map.count = entry.size;
  return row_advantage(in.plan, map, reward, in.baseline(row));
}

// Calls visit(row, group) for every row, in memory order.
template <typename Visit>
void for_each_row(const RowGroups& groups, Visit visit) {
  if (!groups.order.empty()) {
    const int64_t rows = static_cast<int64_t>(groups.order.size());
    parallel_for(rows, kWalkCost, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) visit(row, groups.number[row]);
    });
    return;
  }
  for_each_group(groups, [&](int64_t group, std::vector<double>&) {
    for (int64_t row = groups.starts[group]; row < groups.starts[group + 1]; ++row) visit(row, group);
  });
}

template <typename T>
void write_statistics(const AdvantageOutputs<T>& out, int64_t row, const GroupEntry<T>& entry) {
  out.mean[row] = entry.mean;
  out.std[row] = entry.std;
  out.size[row] = entry.size;
  out.degenerate[row] = !entry.live;
}

// The common case of is_plain().
template <typename T>
void plain_groups(const WeightedBatch<T>& in, const AdvantageOutputs<T>& out, const int64_t* ids, int64_t group_size) {
  RowGroups groups;
  if (ids != nullptr) {
    const IdRange range = scan_ids(ids, in.rows);
    if (!range.sorted) return scattered_groups(in.rewards, ids, in.rows, range, in.plan, out);
    groups = groups_of_runs(ids, in.rows);
  }
  const int64_t* starts = groups.starts.empty() ? nullptr : groups.starts.data();
  const PlainGroups<T> plain{in.rewards, starts, group_size, in.plan, out};
  const int64_t count = starts == nullptr ? in.rows / group_size : groups.size();
  divide(count, threads_for(kPlainCost * static_cast<double>(in.rows)),
         [&](int64_t begin, int64_t end) { GRPO_SIMD_CALL(plain_groups, plain, begin, end); });
}

template <typename T>
void general_groups(const WeightedBatch<T>& in, const AdvantageOutputs<T>& out, const RowGroups& groups) {
  const std::vector<GroupEntry<T>> combined = group_entries(in, groups, kCombined);
  const double bound = in.plan.needs_batch() ? INFINITY : in.plan.clip;
  for_each_row(groups, [&](int64_t row, int64_t group) {
    const GroupEntry<T>& entry = combined[group];
    write_statistics(out, row, entry);
    if (in.plan.combine == Combine::kSumThenNormalize) {
      const double advantage = advantage_of(in, entry, row, in.reward(row, kCombined));
      out.advantages[row] = static_cast<T>(clip_to(advantage, bound));
    } else {
      out.advantages[row] = 0;
      out.degenerate[row] = true;
    }
  });
  if (in.plan.combine == Combine::kSumThenNormalize) return;

  // GDPO: normalises each column, then takes the weighted sum.
  std::vector<double> sums(in.rows);
  for (int column = 0; column < in.columns; ++column) {
    const std::vector<GroupEntry<T>> entries = group_entries(in, groups, column);
    for_each_row(groups, [&](int64_t row, int64_t group) {
      sums[row] += in.weights[column] * advantage_of(in, entries[group], row, in.reward(row, column));
      out.degenerate[row] = out.degenerate[row] && !entries[group].live;
    });
  }
  for (int64_t row = 0; row < in.rows; ++row) out.advantages[row] = static_cast<T>(clip_to(sums[row], bound));
}

// Moments over the batch, in chunks of fixed size added in order, so that the number of threads changes no bit.
template <typename T>
Moments batch_moments(const WeightedBatch<T>& in, const AdvantageOutputs<T>& out) {
  const int64_t chunks = (in.rows + kRowsPerChunk - 1) / kRowsPerChunk;
  std::vector<Moments> parts(chunks);
  const auto weight_of = [&](int64_t row, double reward) {
    return std::isnan(reward) ? 0 : batch_weight(in.plan, in.length(row), out.size[row] == 1, out.degenerate[row]);
  };
  double base = 0;  // the first value that counts; differences from it make the mean of equal values exact
  for (int64_t row = 0; row < in.rows; ++row) {
    const double reward = in.reward(row, kCombined);
    if (weight_of(row, reward) == 0) continue;
    base = batch_value(in.plan, reward, out.advantages[row]);
    break;
  }
  auto for_each_value = [&](auto visit) {
    parallel_for(chunks, kWalkCost * kRowsPerChunk, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t last = std::min(in.rows, (chunk + 1) * kRowsPerChunk);
        for (int64_t row = chunk * kRowsPerChunk; row < last; ++row) {
          const double reward = in.reward(row, kCombined), weight = weight_of(row, reward);
          if (weight > 0) visit(parts[chunk], weight, batch_value(in.plan, reward, out.advantages[row]));
        }
      }
    });
  };
  for_each_value([base](Moments& part, double weight, double value) {
    part.weight += weight;
    part.mean += weight * (value - base);  // the sum, divided below
  });
  Moments batch;
  for (const Moments& part : parts) batch.weight += part.weight, batch.mean += part.mean;
  if (batch.weight > 0) batch.mean = base + batch.mean / batch.weight;
  const double mean = batch.mean;
  for_each_value(
      [mean](Moments& part, double weight, double value) { part.m2 += weight * (value - mean) * (value - mean); });
  for (const Moments& part : parts) batch.m2 += part.m2;
  return batch;
}

template <typename T>
void finish_batch(const WeightedBatch<T>& in, const AdvantageOutputs<T>& out) {
  const BatchMap map = map_batch(in.plan, batch_moments(in, out));
  parallel_for(in.rows, kWalkCost, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const bool live = !out.degenerate[row] && !std::isnan(in.reward(row, kCombined));
      const double advantage = (out.advantages[row] - map.shift) * map.factor;
      out.advantages[row] = static_cast<T>(live ? clip_to(advantage, in.plan.clip) : 0);
      if (in.plan.scale == Scale::kBatchStd) out.std[row] = static_cast<T>(map.std);
    }
  });
}

template <typename T>
void compute(const WeightedBatch<T>& in, const AdvantageOutputs<T>& out, const int64_t* ids, int64_t group_size,
             bool is_plain) {
  if (is_plain) {
    plain_groups(in, out, ids, group_size);
  } else {
    RowGroups groups = ids == nullptr ? uniform_groups(in.rows, group_size) : groups_from_ids(ids, in.rows);
    if (in.subgroups != nullptr) groups = split_groups(groups, in.subgroups);
    general_groups(in, out, groups);
  }
  if (in.plan.needs_batch()) finish_batch(in, out);
}

// The rule of check_lengths in reference.py.
template <typename T>
void check_lengths(const WeightedBatch<T>& in) {
  if (in.lengths == nullptr) return;
  for (int64_t row = 0; row < in.rows; ++row) {
    if (!in.takes_part(row)) continue;
    GRPO_CHECK(in.lengths[row] >= 0 && std::isfinite(in.lengths[row]), kOp,
               ": lengths must be finite and not negative, got ", in.lengths[row], " in row ", row);
  }
}

}  // namespace

AdvantageTensors group_advantages_cpu(Tensor rewards, std::optional<Tensor> groups, int64_t group_size,
                                      std::optional<Tensor> rollouts, std::optional<Tensor> subgroups,
                                      std::optional<Tensor> valid, std::optional<Tensor> lengths,
                                      std::optional<Tensor> baselines, std::vector<double> weights,
                                      std::vector<double> numbers) {
  const AdvantageInputs in = advantage_inputs(rewards, subgroups, valid, lengths, baselines, weights, numbers);
  check_array(kOp, "groups", groups, in.rows, ScalarType::Long);
  check_array(kOp, "rollouts", rollouts, in.rows, ScalarType::Long);
  if (!groups) check_group_size(group_size, in.rows);
  GRPO_CHECK(in.rows <= std::numeric_limits<int32_t>::max(), kOp, ": rewards must have at most 2^31 - 1 rows, got ",
             in.rows);
  const AdvantageResults results(in);
  if (in.rows == 0) return results.tensors();  // arrays without elements are null, as if not given
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const WeightedBatch<T> batch{in.batch<T>(), in.weights.data()};
    check_lengths(batch);
    const AdvantageOutputs<T> out = results.outputs<T>();
    for (T* array : {out.advantages, out.mean, out.std}) advise_huge_pages(array, in.rows * sizeof(T));
    advise_huge_pages(out.size, in.rows * sizeof(int32_t));
    const int64_t* const ids = optional_data<int64_t>(groups);
    const int64_t* const rollout_ids = optional_data<int64_t>(rollouts);
    if (!rollouts || Rollouts<T>::are_rows(rollout_ids, in.rows)) {
      return compute(batch, out, ids, group_size, is_plain(in));
    }
    const Rollouts<T> folded(batch, rollout_ids, ids, group_size);
    const WeightedBatch<T> of_rollouts{folded.batch(), in.weights.data()};
    folded.spread(out, [&](const AdvantageOutputs<T>& results_of_rollouts) {
      compute(of_rollouts, results_of_rollouts, folded.groups(), 0, is_plain(in));
    });
  };
  in.is_double() ? run(double{}) : run(float{});
  return results.tensors();
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("group_advantages", TORCH_BOX(&grpo_kernels::group_advantages_cpu));
}
