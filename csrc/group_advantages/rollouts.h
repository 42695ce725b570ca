#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "common/check.h"
#include "common/row_groups.h"
#include "common/simd/levels.h"
#include "group_advantages/batch.h"
#include "group_advantages/simd.h"

namespace grpo_kernels {

// The rows of one group.
struct Span {
  const int32_t* order;  // null: rows are first, first + 1, ...
  int64_t first, count;

  int64_t operator[](int64_t k) const { return order == nullptr ? first + k : order[first + k]; }
};

inline Span span_of(const RowGroups& groups, int64_t group) {
  const int64_t first = groups.starts[group];
  return {groups.order.empty() ? nullptr : groups.order.data(), first, groups.starts[group + 1] - first};
}

// A batch whose rows are rollouts, made from one in which a rollout may be several rows. It has the reward that its
// scored rows state, and the lengths of those that take part, added.
template <typename T>
class Rollouts {
 public:
  // `groups` is null for groups of group_size consecutive rows.
  Rollouts(const AdvantageBatch<T>& rows, const int64_t* ids, const int64_t* groups, int64_t group_size)
      : rows_(rows),
        ids_(ids),
        ends_(new int32_t[rows.rows]),
        runs_(GRPO_SIMD_CALL(find_runs, ids, groups, rows.rewards, rows.rows, ends_.get())) {
    if (!runs_.ascend) siblings_ = groups_from_ids(ids, rows.rows);
    if (is_plain(group_size)) {
      take_first_rows(groups, group_size);
    } else {
      take_all_rows(groups, group_size);
    }
  }

  // Whether every id is that of one row, where that is seen at a glance: there is then nothing to fold.
  static bool are_rows(const int64_t* ids, int64_t rows) {
    return std::adjacent_find(ids, ids + rows, std::greater_equal<>()) == ids + rows;
  }

  AdvantageBatch<T> batch() const {
    AdvantageBatch<T> batch = rows_;
    batch.rows = static_cast<int64_t>(groups_.size());
    batch.rewards = rewards_.data();
    if (rows_.subgroups != nullptr) batch.subgroups = subgroups_.data();
    if (rows_.valid != nullptr) batch.valid = reinterpret_cast<const bool*>(valid_.data());
    if (rows_.lengths != nullptr) batch.lengths = lengths_.data();
    if (rows_.baselines != nullptr) batch.baselines = baselines_.data();
    return batch;
  }

  const int64_t* groups() const { return groups_.data(); }

  // Calls compute(outputs of the rollouts), and gives them to their rows.
  template <typename Compute>
  void spread(const AdvantageOutputs<T>& out, Compute compute) const {
    const std::size_t count = groups_.size();
    std::vector<T> advantages(count), mean(count), std(count);
    std::vector<int32_t> size(count);
    std::vector<uint8_t> degenerate(count);
    const AdvantageOutputs<T> own{advantages.data(), mean.data(), std.data(), size.data(),
                                  reinterpret_cast<bool*>(degenerate.data())};
    compute(own);
    if (runs_.ascend) {
      GRPO_SIMD_CALL(spread_runs, own, ends_.get(), runs_.count, rows_.rows, out);
    } else {
      std::size_t rollout = 0;
      for_each([&](const Span& span) {
        for (int64_t k = 0; k < span.count; ++k) copy_outputs(own, rollout, out, span[k]);
        ++rollout;
      });
    }
    if (rows_.valid == nullptr && rows_.subgroups == nullptr) return;
    for (int64_t row = 0; row < rows_.rows; ++row) {
      if (!rows_.takes_part(row)) out.advantages[row] = 0;
    }
  }

 private:
  // Calls visit(its rows) for every rollout.
  template <typename Visit>
  void for_each(Visit visit) const {
    if (runs_.ascend) {
      int64_t first = 0;
      for (int64_t r = 0; r < runs_.count; ++r) {
        const int64_t end = ends_[r];
        visit(Span{nullptr, first, end - first});
        first = end;
      }
      return;
    }
    for (int64_t s = 0; s < siblings_.size(); ++s) {
      const Span span = span_of(siblings_, s);
      if (span.count > 0) visit(span);
    }
  }

  // Whether there is one reward a row, which all rows of a rollout state, and nothing else.
  bool is_plain(int64_t group_size) const {
    if (!runs_.ascend || !runs_.agree || rows_.columns != 1 || rows_.valid != nullptr || rows_.subgroups != nullptr ||
        rows_.lengths != nullptr || rows_.baselines != nullptr) {
      return false;
    }
    for (int64_t row = group_size; group_size > 0 && row < rows_.rows; row += group_size) {
      if (ids_[row] == ids_[row - 1]) return false;
    }
    return true;
  }

  void take_first_rows(const int64_t* groups, int64_t group_size) {
    groups_.resize(runs_.count);
    rewards_.resize(runs_.count);
    int64_t first = 0;
    for (int64_t r = 0; r < runs_.count; ++r) {
      groups_[r] = group_of(first, groups, group_size);
      rewards_[r] = rows_.rewards[first];
      first = ends_[r];
    }
  }

  void take_all_rows(const int64_t* groups, int64_t group_size) {
    groups_.reserve(rows_.rows);
    rewards_.reserve(rows_.rows * rows_.columns);
    for_each([&](const Span& span) {
      const int64_t leader = leader_of(span);
      add_group(span, leader, groups, group_size);
      add_rewards(span, leader);
      add_shared("subgroups", rows_.subgroups, subgroups_, span, leader);
      add_shared("baselines", rows_.baselines, baselines_, span, leader);
      if (rows_.valid != nullptr) valid_.push_back(rows_.takes_part(leader));
      if (rows_.lengths != nullptr) add_length(span);
    });
  }

  static int64_t group_of(int64_t row, const int64_t* groups, int64_t group_size) {
    // rows are fewer than 2^31, and a division of 32 bits is several times as fast
    return groups == nullptr ? static_cast<uint32_t>(row) / static_cast<uint32_t>(group_size) : groups[row];
  }

  // The row that stands for a rollout: its first that takes part, or else its first.
  int64_t leader_of(const Span& span) const {
    for (int64_t k = 0; k < span.count; ++k) {
      if (rows_.takes_part(span[k])) return span[k];
    }
    return span[0];
  }

  void add_group(const Span& span, int64_t leader, const int64_t* groups, int64_t group_size) {
    const int64_t group = group_of(leader, groups, group_size);
    groups_.push_back(group);
    for (int64_t k = 0; k < span.count; ++k) {
      const int64_t row = span[k];
      const bool is_own =
          groups == nullptr ? group * group_size <= row && row < (group + 1) * group_size : groups[row] == group;
      if (!is_own) refuse_sibling("groups", groups == nullptr ? row / group_size : groups[row], group, row);
    }
  }

  void add_rewards(const Span& span, int64_t leader) {
    for (int c = 0; c < rows_.columns; ++c) {
      const auto reward_of = [&](int64_t row) { return rows_.rewards[row * rows_.columns + c]; };
      T stated = rows_.takes_part(leader) ? reward_of(leader) : std::numeric_limits<T>::quiet_NaN();
      for (int64_t k = 0; k < span.count; ++k) {
        const T own = reward_of(span[k]);
        if (own == stated || std::isnan(own) || !rows_.takes_part(span[k])) continue;
        if (!std::isnan(stated)) refuse_sibling("rewards", own, stated, span[k]);
        stated = own;
      }
      rewards_.push_back(stated);
    }
  }

  // A value that the rows of a rollout that take part have in common.
  template <typename V>
  void add_shared(const char* name, const V* of_rows, std::vector<V>& of_rollouts, const Span& span, int64_t leader) {
    if (of_rows == nullptr) return;
    const V common = of_rows[leader];
    of_rollouts.push_back(common);
    for (int64_t k = 0; k < span.count; ++k) {
      const V own = of_rows[span[k]];
      const bool are_nan = own != own && common != common;
      if (own != common && !are_nan && rows_.takes_part(span[k])) refuse_sibling(name, own, common, span[k]);
    }
  }

  void add_length(const Span& span) {
    double length = 0;
    for (int64_t k = 0; k < span.count; ++k) {
      if (rows_.takes_part(span[k])) length += rows_.lengths[span[k]];
    }
    lengths_.push_back(length);
  }

  template <typename V>
  [[noreturn]] void refuse_sibling(const char* name, V own, V common, int64_t row) const {
    refuse("group_advantages: ", name, " must be equal in all rows of a rollout, got ", own, " in row ", row, " after ",
           common, " in rollout ", ids_[row]);
  }

  const AdvantageBatch<T>& rows_;
  const int64_t* ids_;
  std::unique_ptr<int32_t[]> ends_;  // past the last row of each rollout, if ids ascend
  Runs runs_;
  RowGroups siblings_;  // otherwise
  std::vector<int64_t> groups_, subgroups_;
  std::vector<T> rewards_, baselines_;
  std::vector<uint8_t> valid_;
  std::vector<double> lengths_;
};

}  // namespace grpo_kernels
