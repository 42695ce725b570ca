#pragma once

#include <cstdint>
#include <vector>

namespace grpo_kernels {

// Which rows belong together. Segment s holds rows order[starts[s]] .. order[starts[s + 1] - 1], in ascending
// order; an empty `order` stands for the identity, rows of a segment being neighbours. Subgroups refine
// groups: the segments of one group are neighbours and parent[s] is its number; without subgroups a segment
// is a group and `parent` is empty.
struct RowGroups {
  std::vector<int32_t> order;
  std::vector<int64_t> starts;
  std::vector<int32_t> number;  // of each row's segment; empty where order is
  std::vector<int32_t> parent;
  int64_t parents = 0;

  int64_t size() const { return static_cast<int64_t>(starts.size()) - 1; }
};

RowGroups uniform_groups(int64_t rows, int64_t group_size);

// Any ids: unsorted, sparse, negative. Linear time.
RowGroups groups_from_ids(const int64_t* ids, int64_t rows);

// Splits every group by the labels of its rows.
RowGroups split_groups(const RowGroups& groups, const int64_t* labels);

}  // namespace grpo_kernels
