#include "simd/group_advantages.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "allocate.h"
#include "checks.h"
#include "cpu_ops.h"
#include "row_groups.h"
#include "scattered_groups.h"
#include "simd/levels.h"

namespace grpo_kernels {
namespace {

constexpr const char* kOp = "group_advantages";
constexpr int64_t kRowsPerTask = 4096;  // below this a second thread costs more than it saves
constexpr int64_t kCombined = -1;       // the "column" that is the weighted sum of all

template <typename T>
struct Inputs {
  const T* rewards;  // [rows, columns]
  int64_t rows, columns;
  const double* weights;  // [columns], or null for all 1
  const int64_t* subgroups;
  const bool* valid;
  const double* lengths;
  const T* baselines;
  AdvantagePlan plan;

  double weight(int64_t column) const { return weights == nullptr ? 1 : weights[column]; }
  double length(int64_t row) const { return lengths == nullptr ? 1 : lengths[row]; }
  double baseline(int64_t row) const { return baselines == nullptr ? 0 : static_cast<double>(baselines[row]); }

  // NaN where the row takes no part or is not scored.
  double reward(int64_t row, int64_t column) const {
    if ((valid != nullptr && !valid[row]) || (subgroups != nullptr && subgroups[row] < 0)) return NAN;
    const T* of_row = rewards + row * columns;
    if (column != kCombined) return static_cast<double>(of_row[column]);
    if (columns == 1) return weight(0) * static_cast<double>(of_row[0]);
    double sum = 0;
    bool scored = false;
    for (int64_t c = 0; c < columns; ++c) {
      if (std::isnan(of_row[c])) continue;
      sum += weight(c) * static_cast<double>(of_row[c]);
      scored = true;
    }
    return scored ? sum : NAN;
  }

  bool plain() const {
    return columns == 1 && weights == nullptr && valid == nullptr && subgroups == nullptr && baselines == nullptr &&
           plan.combine == Combine::kSumThenNormalize && plan.center != Center::kLength &&
           plan.center != Center::kRunnerUp;
  }
};

// The rows of one segment.
struct Span {
  const int32_t* order;  // null: rows first, first + 1, ...
  int64_t first, count;

  int64_t operator[](int64_t k) const { return order == nullptr ? first + k : order[first + k]; }
};

Span span_of(const RowGroups& groups, int64_t segment) {
  const int64_t first = groups.starts[segment];
  return {groups.order.empty() ? nullptr : groups.order.data(), first, groups.starts[segment + 1] - first};
}

template <typename T>
SegmentStats stats_of(const Inputs<T>& in, const Span& span, int64_t column, std::vector<double>& values) {
  if (static_cast<int64_t>(values.size()) < span.count) values.resize(span.count);
  for (int64_t k = 0; k < span.count; ++k) values[k] = in.reward(span[k], column);
  SegmentStats stats = GRPO_SIMD_CALL(segment_stats, values.data(), span.count);
  if (in.plan.center != Center::kLength && in.plan.center != Center::kRunnerUp) return stats;
  SegmentStats more;
  for (int64_t k = 0; k < span.count; ++k) {
    if (!std::isnan(values[k])) more.add(values[k], in.length(span[k]));
  }
  stats.second = more.second;
  stats.length = more.length;
  stats.length_reward = more.length_reward;
  return stats;
}

// visit(segment) for every segment, on several threads.
template <typename Visit>
void for_each_segment(const RowGroups& groups, Visit visit) {
  const int64_t mean_size = std::max<int64_t>(1, groups.starts.back() / std::max<int64_t>(1, groups.size()));
  torch::stable::parallel_for(0, groups.size(), kRowsPerTask / mean_size + 1, [&](int64_t begin, int64_t end) {
    std::vector<double> values;
    for (int64_t segment = begin; segment < end; ++segment) visit(segment, values);
  });
}

// From one column (or the combined rewards) to what the rows of each segment need.
template <typename T>
std::vector<SegmentEntry<T>> segment_entries(const Inputs<T>& in, const RowGroups& groups, int64_t column) {
  std::vector<SegmentEntry<T>> entries(groups.size());
  if (!in.plan.needs_parent() || groups.parent.empty()) {
    for_each_segment(groups, [&](int64_t segment, std::vector<double>& values) {
      const SegmentStats own = stats_of(in, span_of(groups, segment), column, values);
      entries[segment] = SegmentEntry<T>(map_rows(in.plan, own, nullptr), own.count);
    });
    return entries;
  }
  std::vector<SegmentStats> stats(groups.size()), parents(groups.parents);
  for_each_segment(groups, [&](int64_t segment, std::vector<double>& values) {
    stats[segment] = stats_of(in, span_of(groups, segment), column, values);
  });
  for (int64_t s = 0; s < groups.size(); ++s) parents[groups.parent[s]].merge(stats[s]);
  for_each_segment(groups, [&](int64_t s, std::vector<double>&) {
    entries[s] = SegmentEntry<T>(map_rows(in.plan, stats[s], &parents[groups.parent[s]]), stats[s].count);
  });
  return entries;
}

template <typename T>
double advantage_of(const Inputs<T>& in, const SegmentEntry<T>& entry, int64_t row, double reward) {
  RowMap map;
  map.center = entry.center;
  map.factor = entry.factor;
  map.live = entry.live && !std::isnan(reward);
  return row_advantage(in.plan, map, reward, in.baseline(row));
}

// visit(row, segment) for every row, in memory order.
template <typename Visit>
void for_each_row(const RowGroups& groups, Visit visit) {
  if (!groups.order.empty()) {
    const int64_t rows = static_cast<int64_t>(groups.order.size());
    torch::stable::parallel_for(0, rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) visit(row, groups.number[row]);
    });
    return;
  }
  for_each_segment(groups, [&](int64_t segment, std::vector<double>&) {
    for (int64_t row = groups.starts[segment]; row < groups.starts[segment + 1]; ++row) visit(row, segment);
  });
}

template <typename T>
void write_statistics(const AdvantageOutputs<T>& out, int64_t row, const SegmentEntry<T>& entry) {
  out.mean[row] = entry.mean;
  out.std[row] = entry.std;
  out.size[row] = entry.size;
  out.degenerate[row] = !entry.live;
}

// Nothing but rewards, as in simd/group_advantages.h.
template <typename T>
void plain_groups(const Inputs<T>& in, const AdvantageOutputs<T>& out, const int64_t* ids, int64_t group_size) {
  RowGroups groups;
  if (ids != nullptr) {
    const IdRange range = scan_ids(ids, in.rows);
    if (!range.sorted) return scattered_groups(in.rewards, ids, in.rows, range, in.plan, out);
    groups = groups_of_runs(ids, in.rows);
  }
  const int64_t* starts = groups.starts.empty() ? nullptr : groups.starts.data();
  const PlainGroups<T> plain{in.rewards, starts, group_size, in.plan, out};
  const int64_t count = starts == nullptr ? in.rows / group_size : groups.size();
  const int64_t grain = kRowsPerTask / std::max<int64_t>(1, in.rows / std::max<int64_t>(1, count)) + 1;
  torch::stable::parallel_for(0, count, grain,
                              [&](int64_t begin, int64_t end) { GRPO_SIMD_CALL(plain_groups, plain, begin, end); });
}

template <typename T>
void general_groups(const Inputs<T>& in, const AdvantageOutputs<T>& out, const RowGroups& groups) {
  const std::vector<SegmentEntry<T>> combined = segment_entries(in, groups, kCombined);
  const double bound = in.plan.needs_batch() ? INFINITY : in.plan.clip;
  for_each_row(groups, [&](int64_t row, int64_t segment) {
    const SegmentEntry<T>& entry = combined[segment];
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

  // GDPO: every column by itself, then the weighted sum of the results.
  std::vector<double> sums(in.rows);
  for (int64_t column = 0; column < in.columns; ++column) {
    const std::vector<SegmentEntry<T>> entries = segment_entries(in, groups, column);
    for_each_row(groups, [&](int64_t row, int64_t segment) {
      sums[row] += in.weight(column) * advantage_of(in, entries[segment], row, in.reward(row, column));
      out.degenerate[row] = out.degenerate[row] && !entries[segment].live;
    });
  }
  for (int64_t row = 0; row < in.rows; ++row) out.advantages[row] = static_cast<T>(clip_to(sums[row], bound));
}

// Batch moments in chunks of fixed size, added in order: the result does not depend on the number of threads.
template <typename T>
Moments batch_moments(const Inputs<T>& in, const AdvantageOutputs<T>& out) {
  const int64_t chunks = (in.rows + kRowsPerTask - 1) / kRowsPerTask;
  std::vector<Moments> parts(chunks);
  auto for_each_value = [&](auto visit) {
    torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const int64_t last = std::min(in.rows, (chunk + 1) * kRowsPerTask);
        for (int64_t row = chunk * kRowsPerTask; row < last; ++row) {
          const double reward = in.reward(row, kCombined);
          if (std::isnan(reward)) continue;
          const double weight = batch_weight(in.plan, in.length(row), out.size[row] == 1, out.degenerate[row]);
          visit(parts[chunk], weight, batch_value(in.plan, reward, out.advantages[row]));
        }
      }
    });
  };
  for_each_value([](Moments& part, double weight, double value) {
    part.weight += weight;
    part.mean += weight * value;  // a sum until it is divided below
  });
  Moments batch;
  for (const Moments& part : parts) batch.weight += part.weight, batch.mean += part.mean;
  if (batch.weight > 0) batch.mean /= batch.weight;
  const double mean = batch.mean;
  for_each_value(
      [mean](Moments& part, double weight, double value) { part.m2 += weight * (value - mean) * (value - mean); });
  for (const Moments& part : parts) batch.m2 += part.m2;
  return batch;
}

template <typename T>
void finish_batch(const Inputs<T>& in, const AdvantageOutputs<T>& out) {
  const BatchMap map = map_batch(in.plan, batch_moments(in, out));
  torch::stable::parallel_for(0, in.rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const bool live = !out.degenerate[row] && !std::isnan(in.reward(row, kCombined));
      const double advantage = (out.advantages[row] - map.shift) * map.factor;
      out.advantages[row] = static_cast<T>(live ? clip_to(advantage, in.plan.clip) : 0);
      if (in.plan.scale == Scale::kBatchStd) out.std[row] = static_cast<T>(map.std);
    }
  });
}

template <typename T>
void compute(const Inputs<T>& in, const AdvantageOutputs<T>& out, const int64_t* ids, int64_t group_size) {
  if (in.plain()) {
    plain_groups(in, out, ids, group_size);
  } else {
    RowGroups groups = ids == nullptr ? uniform_groups(in.rows, group_size) : groups_from_ids(ids, in.rows);
    if (in.subgroups != nullptr) groups = split_groups(groups, in.subgroups);
    general_groups(in, out, groups);
  }
  if (in.plan.needs_batch()) finish_batch(in, out);
}

}  // namespace

AdvantageTensors group_advantages_cpu(Tensor rewards, std::optional<Tensor> groups, int64_t group_size,
                                      std::optional<Tensor> subgroups, std::optional<Tensor> valid,
                                      std::optional<Tensor> lengths, std::optional<Tensor> baselines,
                                      std::vector<double> weights, std::vector<int64_t> modes,
                                      std::vector<double> coefficients) {
  using torch::headeronly::ScalarType;
  const int64_t rows = rewards.size(0);
  const int64_t columns = rewards.dim() == 1 ? 1 : rewards.size(1);
  const ScalarType dtype = rewards.scalar_type();
  check_array(kOp, "rewards", rewards, rows * columns, dtype);
  if (groups) check_array(kOp, "groups", *groups, rows, ScalarType::Long);
  if (subgroups) check_array(kOp, "subgroups", *subgroups, rows, ScalarType::Long);
  if (valid) check_array(kOp, "valid", *valid, rows, ScalarType::Bool);
  if (lengths) check_array(kOp, "lengths", *lengths, rows, ScalarType::Double);
  if (baselines) check_array(kOp, "baselines", *baselines, rows, dtype);
  STD_TORCH_CHECK(modes.size() == kModes && coefficients.size() == kCoefficients, kOp, ": wrong number of settings");
  STD_TORCH_CHECK(weights.empty() || static_cast<int64_t>(weights.size()) == columns, kOp, ": weights must have ",
                  columns, " elements, got ", weights.size());
  STD_TORCH_CHECK(groups || (group_size > 0 && rows % group_size == 0), kOp, ": group_size must divide ", rows,
                  ", got ", group_size);
  STD_TORCH_CHECK(rows <= std::numeric_limits<int32_t>::max(), kOp, ": rewards must have at most 2^31 - 1 rows, got ",
                  rows);

  const int32_t float_code = dtype_of(rewards);
  const Tensor advantages = empty_vector(rewards, rows, float_code);
  const Tensor mean = empty_vector(rewards, rows, float_code);
  const Tensor std = empty_vector(rewards, rows, float_code);
  const Tensor size = empty_vector(rewards, rows, aoti_torch_dtype_int32());
  const Tensor degenerate = empty_vector(rewards, rows, aoti_torch_dtype_bool());

  if (rows == 0) return {advantages, mean, std, size, degenerate};  // where given arrays have no address either

  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Inputs<T> in{static_cast<const T*>(rewards.const_data_ptr()),
                       rows,
                       columns,
                       weights.empty() ? nullptr : weights.data(),
                       optional_data<int64_t>(subgroups),
                       optional_data<bool>(valid),
                       optional_data<double>(lengths),
                       optional_data<T>(baselines),
                       make_plan(modes.data(), coefficients.data())};
    const AdvantageOutputs<T> out{static_cast<T*>(advantages.mutable_data_ptr()),
                                  static_cast<T*>(mean.mutable_data_ptr()), static_cast<T*>(std.mutable_data_ptr()),
                                  static_cast<int32_t*>(size.mutable_data_ptr()),
                                  static_cast<bool*>(degenerate.mutable_data_ptr())};
    compute(in, out, optional_data<int64_t>(groups), group_size);
  };
  STD_TORCH_CHECK(dtype == ScalarType::Double || dtype == ScalarType::Float, kOp,
                  ": rewards must be float32 or float64");
  dtype == ScalarType::Double ? run(double{}) : run(float{});
  return {advantages, mean, std, size, degenerate};
}

}  // namespace grpo_kernels
