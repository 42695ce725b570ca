// Compiled once per instruction set (GRPO_SIMD). Use only C headers and always-inlined project functions here: the
// linker could merge an inline function of the standard library with a copy built for another instruction set.
#include "group_advantages/simd.h"

#include "common/simd/lanes.h"

namespace grpo_kernels::GRPO_SIMD {
namespace {

typedef int64_t QuadBits __attribute__((vector_size(32)));

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

// The row maps of four groups, one a lane. `live` has all bits of a lane set or none.
struct FourMaps {
  Quad mean, std, center, factor;
  QuadBits live;
};

GRPO_HD Quad pick(const QuadBits& condition, const Quad& yes, const Quad& no) {
  return (Quad)((condition & (QuadBits)yes) | (~condition & (QuadBits)no));
}

GRPO_HD Quad square_root(const Quad& x) {
#ifdef __AVX__
  return _mm256_sqrt_pd(x);
#else
  return Quad{sqrt(x[0]), sqrt(x[1]), sqrt(x[2]), sqrt(x[3])};
#endif
}

GRPO_HD void transpose(Quad (&q)[4]) {
  const Quad a = __builtin_shufflevector(q[0], q[1], 0, 4, 2, 6), b = __builtin_shufflevector(q[0], q[1], 1, 5, 3, 7);
  const Quad c = __builtin_shufflevector(q[2], q[3], 0, 4, 2, 6), d = __builtin_shufflevector(q[2], q[3], 1, 5, 3, 7);
  q[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5), q[1] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  q[2] = __builtin_shufflevector(a, c, 2, 3, 6, 7), q[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

// Folds eight values of each of four groups in the order of fold_sum and fold_low.
template <typename Combine>
GRPO_HD Quad fold(const Quad (&v)[kLanes], Combine combine) {
  const Quad h0 = combine(v[0], v[4]), h1 = combine(v[1], v[5]), h2 = combine(v[2], v[6]), h3 = combine(v[3], v[7]);
  return combine(combine(h0, h2), combine(h1, h3));
}

// map_rows() of four groups of eight rewards, with the same bits. Other groups than those of a mean or without a center
// are left to it, and so are groups with a missing reward; then it returns false.
template <typename T>
GRPO_HD bool map_four(const AdvantagePlan& plan, const T* rewards, FourMaps& maps) {
  Quad v[kLanes];
  for (int half = 0; half < 2; ++half) {
    Quad q[4];
    for (int g = 0; g < 4; ++g) q[g] = load_quad(rewards + g * kLanes + 4 * half);
    transpose(q);
    for (int l = 0; l < 4; ++l) v[4 * half + l] = q[l];
  }
  const auto add = [](const Quad& a, const Quad& b) { return a + b; };
  const Quad sum = fold(v, add);
  const double total = sum_lanes(sum);
  if (total != total) return false;
  const Quad low = fold(v, [](const Quad& a, const Quad& b) { return lower(a, b); });
  const Quad high = fold(v, [](const Quad& a, const Quad& b) { return higher(a, b); });
  const QuadBits is_flat = ~(QuadBits)(low < high);
  maps.mean = pick(is_flat, low, sum / broadcast(kLanes));
  for (Quad& lane : v) lane = (lane - maps.mean) * (lane - maps.mean);
  maps.std = (Quad)(~is_flat & (QuadBits)square_root(fold(v, add) / broadcast(kLanes - plan.ddof)));
  const bool is_centered = plan.center != Center::kNone;
  maps.center = is_centered ? maps.mean : broadcast(0);
  maps.factor = broadcast(plan.center == Center::kLeaveOneOut ? kLanes / (kLanes - 1.0) : 1.0);
  maps.live = is_centered || plan.scale == Scale::kStd ? ~is_flat : ~QuadBits{};
  if (plan.scale == Scale::kStd) {
    const Quad least = broadcast(plan.std_floor);
    maps.factor /= pick((QuadBits)(maps.std < least), least, maps.std) + broadcast(plan.eps);
  }
  if (plan.scale == Scale::kMean) {
    maps.live &= (QuadBits)(maps.mean > broadcast(0));
    maps.factor /= maps.mean + broadcast(plan.eps);
  }
  maps.live &= (QuadBits)(maps.factor != broadcast(INFINITY));
  return true;
}

// The number of groups from g on, four or none, that map_four() takes.
template <typename T>
GRPO_HD bool takes_four(const PlainGroups<T>& groups, int64_t g, int64_t end) {
  const Center center = groups.plan.center;
  if (end - g < 4 || (center != Center::kMean && center != Center::kLeaveOneOut && center != Center::kNone))
    return false;
  if (groups.starts == nullptr) return groups.group_size == kLanes;
  const int64_t* const starts = groups.starts + g;
  return starts[1] - starts[0] == kLanes && starts[2] - starts[1] == kLanes && starts[3] - starts[2] == kLanes &&
         starts[4] - starts[3] == kLanes;
}

template <typename T>
GRPO_HD int64_t start_of(const PlainGroups<T>& groups, int64_t g) {
  return groups.starts == nullptr ? g * groups.group_size : groups.starts[g];
}

template <typename T, typename Value>
GRPO_HD void store_eight(T* to, Value value) {
  T eight[kLanes];
  for (T& one : eight) one = static_cast<T>(value);
  memcpy(to, eight, sizeof eight);
}

template <bool kIsClipped, typename T>
GRPO_HD void write_four(const T* rewards, const AdvantageOutputs<T>& out, int64_t row, const FourMaps& maps,
                        double bound) {
  const Quad high = broadcast(bound);
  for (int g = 0; g < 4; ++g, row += kLanes) {
    const Quad center = broadcast(maps.center[g]), factor = broadcast(maps.factor[g]);
    const int64_t is_live = maps.live[g];
    for (int half = 0; half < 2; ++half) {
      Quad value = (load_quad(rewards + row + 4 * half) - center) * factor;
      if (kIsClipped) {
        value = value > high ? high : value;
        value = value < -high ? -high : value;
      }
      store_quad(out.advantages + row + 4 * half,
                 (Quad)((QuadBits)value & QuadBits{is_live, is_live, is_live, is_live}));
    }
    store_eight(out.mean + row, maps.mean[g]);
    store_eight(out.std + row, maps.std[g]);
    store_eight(out.size + row, kLanes);
    memset(out.degenerate + row, is_live == 0, kLanes);
  }
}

template <typename T>
GRPO_HD void one_group(const PlainGroups<T>& groups, int64_t g, double limit) {
  const Quad bound = broadcast(limit), none = broadcast(0);
  const int64_t first = start_of(groups, g), count = start_of(groups, g + 1) - first;
  const GroupStatistics own = stats_of(groups.rewards + first, count);
  const RowMap map = map_rows(groups.plan, own, nullptr);
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

template <typename T>
GRPO_HD void all_groups(const PlainGroups<T> groups, int64_t begin, int64_t end) {  // a copy, which no store can change
  const double bound = groups.plan.needs_batch() ? INFINITY : groups.plan.clip;
  int64_t g = begin;
  while (g < end) {
    FourMaps maps;
    const int64_t first = start_of(groups, g);
    if (takes_four(groups, g, end) && map_four(groups.plan, groups.rewards + first, maps)) {
      if (bound < INFINITY) {
        write_four<true>(groups.rewards, groups.out, first, maps, bound);
      } else {
        write_four<false>(groups.rewards, groups.out, first, maps, bound);
      }
      g += 4;
    } else {
      one_group(groups, g++, bound);
    }
  }
}

template <typename T>
GRPO_HD void all_entries(const PlainGroups<T>& groups, int64_t begin, int64_t end, GroupEntry<T>* entries) {
  int64_t g = begin;
  while (g < end) {
    FourMaps maps;
    const int64_t first = start_of(groups, g);
    if (takes_four(groups, g, end) && map_four(groups.plan, groups.rewards + first, maps)) {
      for (int k = 0; k < 4; ++k) {
        const RowMap map{maps.mean[k], maps.std[k], maps.center[k], maps.factor[k], maps.live[k] != 0};
        entries[g + k] = GroupEntry<T>(map, kLanes);
      }
      g += 4;
    } else {
      const GroupStatistics own = stats_of(groups.rewards + first, start_of(groups, g + 1) - first);
      entries[g++] = GroupEntry<T>(map_rows(groups.plan, own, nullptr), own.count);
    }
  }
}

GRPO_HD QuadBits load_ids(const int64_t* from) {
  QuadBits ids;
  memcpy(&ids, from, sizeof ids);
  return ids;
}

// Free of branches that depend on the ids, as it cannot be predicted where a run ends.
template <bool kHasGroups, typename T>
GRPO_HD Runs all_runs(const int64_t* ids, const int64_t* groups, const T* rewards, int64_t rows, int32_t* ends) {
  int64_t count = 0, row = 1;
  bool descends = false, differs = false;
#ifdef __AVX2__  // other comparisons of 64 bits are slower than those of one row
  QuadBits any_descends{}, any_differs{};
  for (; row + 4 <= rows; row += 4) {
    const QuadBits own = load_ids(ids + row), previous = load_ids(ids + row - 1), is_same = own == previous;
    any_descends |= own < previous;
    any_differs |= is_same & (load_quad(rewards + row) != load_quad(rewards + row - 1));
    if (kHasGroups) any_differs |= is_same & (load_ids(groups + row) != load_ids(groups + row - 1));
    const int same = _mm256_movemask_pd((Quad)is_same);
    for (int l = 0; l < 4; ++l) {
      ends[count] = static_cast<int32_t>(row + l);
      count += ~same >> l & 1;
    }
  }
  descends = _mm256_movemask_pd((Quad)any_descends) != 0;
  differs = _mm256_movemask_pd((Quad)any_differs) != 0;
#endif
  for (; row < rows; ++row) {
    const bool is_same = ids[row] == ids[row - 1];
    descends |= ids[row] < ids[row - 1];
    differs |= is_same & (rewards[row] != rewards[row - 1]);
    if (kHasGroups) differs |= is_same & (groups[row] != groups[row - 1]);
    ends[count] = static_cast<int32_t>(row);
    count += !is_same;
  }
  ends[count++] = static_cast<int32_t>(rows);
  return {count, !descends, !differs};
}

// Eight rows at a time: the next run overwrites what is too much.
template <typename T>
GRPO_HD void to_rows(const AdvantageOutputs<T> of_runs, const int32_t* ends, int64_t runs, int64_t rows,
                     const AdvantageOutputs<T> out) {
  int64_t row = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t end = ends[run];
    for (; row < end && row + kLanes <= rows; row += kLanes) {
      store_eight(out.advantages + row, of_runs.advantages[run]);
      store_eight(out.mean + row, of_runs.mean[run]);
      store_eight(out.std + row, of_runs.std[run]);
      store_eight(out.size + row, of_runs.size[run]);
      memset(out.degenerate + row, of_runs.degenerate[run], kLanes);
    }
    for (; row < end; ++row) copy_outputs(of_runs, run, out, row);
    row = end;
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

#define GRPO_DEFINE(T)                                                                                       \
  Runs find_runs(const int64_t* ids, const int64_t* groups, const T* rewards, int64_t rows, int32_t* ends) { \
    return groups == nullptr ? all_runs<false>(ids, groups, rewards, rows, ends)                             \
                             : all_runs<true>(ids, groups, rewards, rows, ends);                             \
  }                                                                                                          \
  void spread_runs(const AdvantageOutputs<T>& of_runs, const int32_t* ends, int64_t runs, int64_t rows,      \
                   const AdvantageOutputs<T>& out) {                                                         \
    to_rows(of_runs, ends, runs, rows, out);                                                                 \
  }
GRPO_DEFINE(float)
GRPO_DEFINE(double)
#undef GRPO_DEFINE

}  // namespace grpo_kernels::GRPO_SIMD
