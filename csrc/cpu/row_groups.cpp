#include "row_groups.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace grpo_kernels {
namespace {

struct IdRange {
  int64_t low = std::numeric_limits<int64_t>::max();
  int64_t high = std::numeric_limits<int64_t>::min();
  bool sorted = true;
};

IdRange scan(const int64_t* ids, int64_t rows) {
  IdRange range;
  int64_t descents = 0;
  for (int64_t i = 0; i < rows; ++i) {
    range.low = std::min(range.low, ids[i]);
    range.high = std::max(range.high, ids[i]);
    descents += i > 0 && ids[i] < ids[i - 1];
  }
  range.sorted = descents == 0;
  return range;
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

// Dense numbers 0..count-1 for ids, by first appearance: an open-addressing table at most half full.
class IdNumbering {
 public:
  explicit IdNumbering(int64_t rows) {
    while ((int64_t{1} << bits_) < 2 * rows) ++bits_;
    slots_.resize(size_t{1} << bits_);
  }

  int32_t number(int64_t id) {
    const size_t mask = slots_.size() - 1;
    // Fibonacci hashing: the high bits of the product mix strided ids well.
    size_t slot = (static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull) >> (64 - bits_);
    while (slots_[slot].number >= 0) {
      if (slots_[slot].id == id) return slots_[slot].number;
      slot = (slot + 1) & mask;
    }
    slots_[slot] = {id, count_};
    return count_++;
  }

  int32_t count() const { return count_; }

 private:
  struct Slot {
    int64_t id = 0;
    int32_t number = -1;
  };
  int bits_ = 1;
  int32_t count_ = 0;
  std::vector<Slot> slots_;
};

// Counting sort of rows by number, keeping the order of rows within a segment.
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

}  // namespace

RowGroups uniform_groups(int64_t rows, int64_t group_size) {
  RowGroups groups;
  groups.starts.resize(rows / group_size + 1);
  for (size_t g = 0; g < groups.starts.size(); ++g) groups.starts[g] = static_cast<int64_t>(g) * group_size;
  groups.parents = groups.size();
  return groups;
}

RowGroups groups_from_ids(const int64_t* ids, int64_t rows) {
  const IdRange range = scan(ids, rows);
  if (rows == 0 || range.sorted) return groups_of_runs(ids, rows);

  std::vector<int32_t> numbers(rows);
  // Unsigned, as the difference of two int64 can overflow.
  const uint64_t width = static_cast<uint64_t>(range.high) - static_cast<uint64_t>(range.low);
  if (width < static_cast<uint64_t>(4 * rows + 1024)) {  // close enough together to count without hashing
    for (int64_t i = 0; i < rows; ++i) numbers[i] = static_cast<int32_t>(ids[i] - range.low);
    return groups_from_numbers(std::move(numbers), static_cast<int64_t>(width) + 1);
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
