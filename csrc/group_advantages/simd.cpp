// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "group_advantages/simd.h"

#include "common/simd/lanes.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

template <typename T>
GRPO_HD GroupStatistics stats_of(const T* values, int64_t count) {
  const Quad one = broadcast(1), none = broadcast(0);
  Lanes scored{}, sum{};
  Lanes low{{broadcast(INFINITY), broadcast(INFINITY)}}, high{{broadcast(-INFINITY), broadcast(-INFINITY)}};
  const Lanes first = load(values, count);  // kept for the second pass, as most groups are no larger
  for (int64_t k = 0; k < count; k += kLanes) {
    const Lanes value = k == 0 ? first : load(values + k, count - k);
    for (int h = 0; h < 2; ++h) {
      const Quad v = value.part[h];
      scored.part[h] += v == v ? one : none;
      sum.part[h] += v == v ? v : none;
      low.part[h] = lower(low.part[h], v);
      high.part[h] = higher(high.part[h], v);
    }
  }
  GroupStatistics stats;
  stats.count = fold_sum(scored);
  stats.sum = fold_sum(sum);
  stats.low = fold_low(low);
  stats.high = -fold_low({{-high.part[0], -high.part[1]}});

  const Quad mean = broadcast(stats.mean());
  Lanes squares{};
  for (int64_t k = 0; k < count; k += kLanes) {
    const Lanes value = k == 0 ? first : load(values + k, count - k);
    for (int h = 0; h < 2; ++h) {
      const Quad v = value.part[h];
      const Quad distance = v == v ? v - mean : none;
      squares.part[h] += distance * distance;
    }
  }
  stats.m2 = fold_sum(squares);
  return stats;
}

template <typename T>
GRPO_HD void all_groups(const PlainGroups<T>& groups, int64_t begin, int64_t end) {
  const AdvantagePlan plan = groups.plan;
  const Quad bound = broadcast(plan.needs_batch() ? INFINITY : plan.clip), none = broadcast(0);
  for (int64_t g = begin; g < end; ++g) {
    const int64_t first = groups.starts == nullptr ? g * groups.group_size : groups.starts[g];
    const int64_t count = groups.starts == nullptr ? groups.group_size : groups.starts[g + 1] - first;
    const GroupStatistics own = stats_of(groups.rewards + first, count);
    const RowMap map = map_rows(plan, own, nullptr);
    const Quad center = broadcast(map.center), factor = broadcast(map.factor);
    // NaN marks a row without an advantage, and adding NaN marks all rows of a degenerate group
    const Quad nan_if_degenerate = broadcast(map.live ? 0.0 : NAN);
    const Lanes mean{{broadcast(map.mean), broadcast(map.mean)}}, std{{broadcast(map.std), broadcast(map.std)}};
    const int32_t size = static_cast<int32_t>(own.count);
    for (int64_t row = first; row < first + count; row += kLanes) {
      const int64_t left = first + count - row;
      Lanes advantage = load(groups.rewards + row, left);
      for (int h = 0; h < 2; ++h) {
        const Quad reward = advantage.part[h] + nan_if_degenerate;
        Quad value = (reward - center) * factor;
        value = value > bound ? bound : value;
        value = value < -bound ? -bound : value;
        advantage.part[h] = reward == reward ? value : none;
      }
      store(groups.out.advantages + row, left, advantage);
      store(groups.out.mean + row, left, mean);
      store(groups.out.std + row, left, std);
      for (int64_t l = 0; l < kLanes && l < left; ++l) groups.out.size[row + l] = size;
      for (int64_t l = 0; l < kLanes && l < left; ++l) groups.out.degenerate[row + l] = !map.live;
    }
  }
}

template <typename T>
GRPO_HD void all_entries(const PlainGroups<T>& groups, int64_t begin, int64_t end, GroupEntry<T>* entries) {
  for (int64_t g = begin; g < end; ++g) {
    const int64_t first = groups.starts[g], count = groups.starts[g + 1] - first;
    const GroupStatistics own = stats_of(groups.rewards + first, count);
    entries[g] = GroupEntry<T>(map_rows(groups.plan, own, nullptr), own.count);
  }
}

}  // namespace

GroupStatistics group_statistics(const double* values, int64_t count) { return stats_of(values, count); }

void plain_groups(const PlainGroups<float>& groups, int64_t begin, int64_t end) { all_groups(groups, begin, end); }
void plain_groups(const PlainGroups<double>& groups, int64_t begin, int64_t end) { all_groups(groups, begin, end); }

void plain_entries(const PlainGroups<float>& groups, int64_t begin, int64_t end, GroupEntry<float>* entries) {
  all_entries(groups, begin, end, entries);
}
void plain_entries(const PlainGroups<double>& groups, int64_t begin, int64_t end, GroupEntry<double>* entries) {
  all_entries(groups, begin, end, entries);
}

}  // namespace grpo_kernels::GRPO_SIMD
