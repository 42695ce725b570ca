#include "common/row_groups.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/parallel.h"

namespace grpo_kernels {
namespace {

// A stable counting sort of rows by number.
RowGroups groups_from_numbers(std::vector<int32_t> numbers, int64_t count) {
  RowGroups groups;
  groups.starts.assign(count + 1, 0);
  for (int32_t number : numbers) ++groups.starts[number + 1];
  for (int64_t g = 0; g < count; ++g) groups.starts[g + 1] += groups.starts[g];
  std::vector<int32_t> next(groups.starts.begin(), groups.starts.end() - 1);
  groups.order.resize(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) groups.order[next[numbers[i]]++] = static_cast<int32_t>(i);
  groups.number = std::move(numbers);
  groups.parents = count;
  return groups;
}

// Sorted ids end at their bounds; those of others are found in four independent chains of comparisons.
IdRange scan_part(const int64_t* ids, int64_t count) {
  if (std::is_sorted(ids, ids + count)) return {ids[0], ids[count - 1], true};
  int64_t low[4], high[4];
  std::fill_n(low, 4, ids[0]);
  std::fill_n(high, 4, ids[0]);
  const int64_t whole = count / 4 * 4;
  for (int64_t i = 0; i < whole; i += 4) {
    for (int k = 0; k < 4; ++k) {
      low[k] = std::min(low[k], ids[i + k]);
      high[k] = std::max(high[k], ids[i + k]);
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    low[0] = std::min(low[0], ids[i]);
    high[0] = std::max(high[0], ids[i]);
  }
  return {*std::min_element(low, low + 4), *std::max_element(high, high + 4), false};
}

}  // namespace

IdRange scan_ids(const int64_t* ids, int64_t rows) {
  constexpr int64_t kRowsPerTask = 16384;
  std::vector<IdRange> parts((rows + kRowsPerTask - 1) / kRowsPerTask);
  const int64_t tasks = static_cast<int64_t>(parts.size());
  parallel_for(tasks, 0.4 * kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * kRowsPerTask, last = std::min(rows, first + kRowsPerTask);
      parts[task] = scan_part(ids + first, last - first);
      parts[task].sorted = parts[task].sorted && (first == 0 || ids[first - 1] <= ids[first]);
    }
  });
  IdRange range;
  for (const IdRange& part : parts) {
    range.low = std::min(range.low, part.low);
    range.high = std::max(range.high, part.high);
    range.sorted = range.sorted && part.sorted;
  }
  return range;
}

RowGroups uniform_groups(int64_t rows, int64_t group_size) {
  RowGroups groups;
  groups.starts.resize(rows / group_size + 1);
  for (size_t g = 0; g < groups.starts.size(); ++g) groups.starts[g] = static_cast<int64_t>(g) * group_size;
  groups.parents = groups.size();
  return groups;
}

RowGroups groups_of_runs(const int64_t* ids, int64_t rows) {
  RowGroups groups;
  for (int64_t i = 0; i < rows; ++i) {
    if (i == 0 || ids[i] != ids[i - 1]) groups.starts.push_back(i);
  }
  groups.starts.push_back(rows);
  groups.parents = groups.size();
  return groups;
}

RowGroups groups_from_ids(const int64_t* ids, int64_t rows) {
  const IdRange range = scan_ids(ids, rows);
  if (range.sorted) return groups_of_runs(ids, rows);
  std::vector<int32_t> numbers(rows);
  if (range.dense(rows)) {
    for (int64_t i = 0; i < rows; ++i) numbers[i] = static_cast<int32_t>(ids[i] - range.low);
    return groups_from_numbers(std::move(numbers), static_cast<int64_t>(range.width()) + 1);
  }
  IdNumbering numbering(rows);
  for (int64_t i = 0; i < rows; ++i) numbers[i] = numbering.number(ids[i]);
  return groups_from_numbers(std::move(numbers), numbering.count());
}

RowGroups split_groups(const RowGroups& groups, const int64_t* labels) {
  const int64_t rows = groups.starts.back();
  RowGroups split;
  split.parents = groups.size();
  split.order = groups.order;
  if (split.order.empty()) {
    split.order.resize(rows);
    std::iota(split.order.begin(), split.order.end(), 0);
  }
  split.number.resize(rows);
  for (int64_t g = 0; g < groups.size(); ++g) {
    const auto begin = split.order.begin() + groups.starts[g], end = split.order.begin() + groups.starts[g + 1];
    const auto lower = [labels](int32_t a, int32_t b) { return labels[a] < labels[b]; };
    if (!std::is_sorted(begin, end, lower)) std::stable_sort(begin, end, lower);
    for (auto row = begin; row != end; ++row) {
      if (row == begin || labels[*row] != labels[row[-1]]) {
        split.starts.push_back(row - split.order.begin());
        split.parent.push_back(static_cast<int32_t>(g));
      }
      split.number[*row] = static_cast<int32_t>(split.starts.size()) - 1;
    }
  }
  split.starts.push_back(rows);
  return split;
}

}  // namespace grpo_kernels
