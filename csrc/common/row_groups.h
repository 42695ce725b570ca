#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace grpo_kernels {

// Rows by group, which is a group or, with subgroups, a part of one. Group s holds rows order[starts[s]] to
// order[starts[s + 1] - 1], ascending; an empty `order` is the identity. The groups of one group are neighbours, and
// parent[s] is its number; without subgroups `parent` is empty.
struct RowGroups {
  std::vector<int32_t> order;
  std::vector<int64_t> starts;
  std::vector<int32_t> number;  // the group of each row; empty if `order` is
  std::vector<int32_t> parent;
  int64_t parents = 0;

  int64_t size() const { return static_cast<int64_t>(starts.size()) - 1; }
};

struct IdRange {
  int64_t low = std::numeric_limits<int64_t>::max();
  int64_t high = std::numeric_limits<int64_t>::min();
  bool sorted = true;

  // Unsigned, as the difference of two int64 can overflow.
  uint64_t width() const { return static_cast<uint64_t>(high) - static_cast<uint64_t>(low); }
  // Whether ids are numbered by subtraction rather than hashing.
  bool dense(int64_t rows) const { return width() < static_cast<uint64_t>(4 * rows + 1024); }
};

IdRange scan_ids(const int64_t* ids, int64_t rows);

RowGroups uniform_groups(int64_t rows, int64_t group_size);

// Groups of ids in ascending order: every run is a group.
RowGroups groups_of_runs(const int64_t* ids, int64_t rows);

// Groups of any ids, also unsorted, sparse or negative, in linear time.
RowGroups groups_from_ids(const int64_t* ids, int64_t rows);

// Splits every group by the labels of its rows.
RowGroups split_groups(const RowGroups& groups, const int64_t* labels);

// The high bits of the product mix strided ids well (Fibonacci hashing).
inline uint64_t hash_id(int64_t id) { return static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull; }

// Numbers ids by first appearance, from 0, in an open-addressing table that is at most half full.
class IdNumbering {
 public:
  explicit IdNumbering(int64_t rows) {
    while ((int64_t{1} << bits_) < 2 * rows) ++bits_;
    slots_.resize(std::size_t{1} << bits_);
  }

  int32_t number(int64_t id) {
    const std::size_t mask = slots_.size() - 1;
    // skips the highest bits, by which scattered_groups.h has divided the ids into buckets
    std::size_t slot = (hash_id(id) << 10) >> (64 - bits_);
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

}  // namespace grpo_kernels
