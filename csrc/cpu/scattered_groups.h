#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "row_groups.h"
#include "scratch.h"
#include "simd/group_advantages.h"
#include "simd/levels.h"

// Plain groups whose rows lie anywhere: a counting sort of the rewards by group, statistics of what are neighbours now,
// and a look-up of its group for every row. That touches memory at random twice a row, which past the caches costs ten
// times the arithmetic; there rows are first dealt into buckets by their id, each small enough for a cache, a bucket is
// sorted by one thread, and the results are collected by dealing once more. Memory is then only ever walked along as
// many lines as there are buckets.
namespace grpo_kernels {

// How much working memory a thread keeps for the next call.
constexpr int64_t kKeptRows = int64_t{1} << 20;

// Rows are split among hands, one a thread, each taking a share of neighbouring rows in order.
class Hands {
 public:
  Hands(int64_t rows, int64_t threads) : rows_(rows), count_(std::clamp<int64_t>(threads, 1, rows / 4096 + 1)) {}

  int64_t count() const { return count_; }

  // visit(hand, first row, last row + 1), on several threads
  template <typename Visit>
  void each(Visit visit) const {
    torch::stable::parallel_for(0, count_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t hand = begin; hand < end; ++hand) visit(hand, rows_ * hand / count_, rows_ * (hand + 1) / count_);
    });
  }

 private:
  int64_t rows_, count_;
};

// The first half of a counting sort into `piles`: where each hand's first row of each pile goes, positions[hand * piles
// + pile], so that a pile holds its rows in ascending order however many hands there are; and starts[0 .. piles].
template <typename PileOf>
void find_places(const Hands& hands, int64_t piles, PileOf pile_of, int32_t* positions, int64_t* starts) {
  hands.each([=](int64_t hand, int64_t first, int64_t last) {
    int32_t* const counts = positions + hand * piles;
    std::fill(counts, counts + piles, 0);
    for (int64_t row = first; row < last; ++row) ++counts[pile_of(row)];
  });
  int32_t next = 0;
  for (int64_t pile = 0; pile < piles; ++pile) {
    starts[pile] = next;
    for (int64_t hand = 0; hand < hands.count(); ++hand) {
      const int32_t count = positions[hand * piles + pile];
      positions[hand * piles + pile] = next;
      next += count;
    }
  }
  starts[piles] = next;
}

// Groups of so few rows that random access to them is cheap. number_of(row) is below `groups`; write(row, entry,
// advantage) is called for every row, whose number and reward are not asked for again.
template <typename T, typename RewardOf, typename NumberOf, typename Write>
void near_groups(int64_t rows, RewardOf reward_of, NumberOf number_of, int64_t groups, const AdvantagePlan& plan,
                 int64_t threads, Write write) {
  struct Buffers {
    Scratch<int32_t> positions;
    Scratch<int64_t> starts;
    Scratch<T> sorted;
    Scratch<SegmentEntry<T>> entries;
  };
  if (rows == 0) return;
  static thread_local Buffers buffers;
  // so many that their counts, which one thread adds up, stay fewer than the rows
  const Hands sorters(rows, std::min(threads, rows / (2 * groups) + 1));
  int32_t* const positions = buffers.positions.get(sorters.count() * groups);
  int64_t* const starts = buffers.starts.get(groups + 1);
  T* const sorted = buffers.sorted.get(rows);
  SegmentEntry<T>* const entries = buffers.entries.get(groups);
  find_places(sorters, groups, number_of, positions, starts);
  sorters.each([=](int64_t hand, int64_t first, int64_t last) {
    int32_t* const next = positions + hand * groups;
    for (int64_t row = first; row < last; ++row) sorted[next[number_of(row)]++] = reward_of(row);
  });
  const PlainGroups<T> plain{sorted, starts, 0, plan, {}};
  const auto some_entries = [&](int64_t begin, int64_t end) {
    GRPO_SIMD_CALL(plain_entries, plain, begin, end, entries);
  };
  const Hands hands(rows, threads);
  torch::stable::parallel_for(0, groups, groups / hands.count() + 1, some_entries);
  const double bound = plan.needs_batch() ? INFINITY : plan.clip;
  hands.each([=](int64_t, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const SegmentEntry<T> entry = entries[number_of(row)];
      const double reward = reward_of(row);
      const RowMap map{0, 0, entry.center, entry.factor, entry.live && reward == reward};
      write(row, entry, static_cast<T>(clip_to(row_advantage(plan, map, reward, 0), bound)));
    }
  });
  buffers.positions.keep_at_most(kKeptRows);
  buffers.starts.keep_at_most(kKeptRows);
  buffers.sorted.keep_at_most(kKeptRows);
  buffers.entries.keep_at_most(kKeptRows);
}

// As near_groups, for ids: dense ones are numbered by subtraction, others by hashing.
template <typename T, typename RewardOf, typename IdOf, typename Write>
void near_groups_by_id(int64_t rows, RewardOf reward_of, IdOf id_of, bool dense, int64_t low, int64_t width,
                       const AdvantagePlan& plan, int64_t threads, Write write) {
  if (dense) {
    const auto number_of = [id_of, low](int64_t row) { return id_of(row) - low; };
    return near_groups<T>(rows, reward_of, number_of, width, plan, threads, write);
  }
  static thread_local Scratch<int32_t> buffer;
  int32_t* const numbers = buffer.get(rows);
  IdNumbering numbering(rows);
  for (int64_t row = 0; row < rows; ++row) numbers[row] = numbering.number(id_of(row));
  const auto number_of = [numbers](int64_t row) { return numbers[row]; };
  near_groups<T>(rows, reward_of, number_of, numbering.count(), plan, threads, write);
  buffer.keep_at_most(kKeptRows);
}

// Which bucket an id goes to: a range of ids each, or where ids are sparse, a range of hashes.
class Dealer {
 public:
  Dealer(const IdRange& range, int64_t rows) : low_(range.low), dense_(range.dense(rows)) {
    // more than 1,024 buckets would each need a page in the address cache
    while (bits_ < 10 && (rows >> bits_) > kRowsPerBucket) ++bits_;
    while (dense_ && (range.width() >> shift_) >> bits_ != 0) ++shift_;
  }

  int64_t buckets() const { return int64_t{1} << bits_; }
  bool dense() const { return dense_; }
  int64_t of(int64_t id) const {
    if (dense_) return static_cast<int64_t>((static_cast<uint64_t>(id) - static_cast<uint64_t>(low_)) >> shift_);
    return bits_ == 0 ? 0 : static_cast<int64_t>(hash_id(id) >> (64 - bits_));
  }
  // Of a bucket of dense ids: the lowest, and how many there can be.
  int64_t low(int64_t bucket) const { return low_ + (bucket << shift_); }
  int64_t width() const { return int64_t{1} << shift_; }

 private:
  static constexpr int64_t kRowsPerBucket = 8192;  // with their results half of a small second-level cache
  int64_t low_;
  bool dense_;
  int bits_ = 0, shift_ = 0;
};

// A row in its bucket, and later, in the same place, what came out for it: fresh memory is what large batches wait for.
template <typename T>
union Slot {
  struct {
    int64_t id;
    T reward;
  } row;
  struct {
    T advantage, mean, std;
    int32_t size;  // -1 - size where the group is degenerate
  } result;
};

// Groups of any number of rows, through buckets.
template <typename T>
void far_groups(const T* rewards, const int64_t* ids, int64_t rows, const IdRange& range, const AdvantagePlan& plan,
                const AdvantageOutputs<T>& out) {
  static thread_local Scratch<Slot<T>> buffer;
  Slot<T>* const slots = buffer.get(rows);
  const Hands hands(rows, torch::stable::get_num_threads());
  const Dealer dealer(range, rows);
  const int64_t buckets = dealer.buckets();
  std::vector<int32_t> positions(hands.count() * buckets);
  std::vector<int64_t> starts(buckets + 1);
  const int32_t* const places = positions.data();
  find_places(hands, buckets, [=](int64_t row) { return dealer.of(ids[row]); }, positions.data(), starts.data());
  const auto deal = [&](auto visit) {
    hands.each([=](int64_t hand, int64_t first, int64_t last) {
      std::vector<int32_t> own(places + hand * buckets, places + (hand + 1) * buckets);
      int32_t* const next = own.data();
      for (int64_t row = first; row < last; ++row) visit(row, slots[next[dealer.of(ids[row])]++]);
    });
  };
  deal([=](int64_t row, Slot<T>& slot) { slot.row = {ids[row], rewards[row]}; });
  torch::stable::parallel_for(0, buckets, 1, [&](int64_t begin, int64_t end) {
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      Slot<T>* const here = slots + starts[bucket];
      const auto write = [here](int64_t row, const SegmentEntry<T>& entry, T advantage) {
        here[row].result = {advantage, entry.mean, entry.std, entry.live ? entry.size : -1 - entry.size};
      };
      near_groups_by_id<T>(
          starts[bucket + 1] - starts[bucket], [here](int64_t row) { return here[row].row.reward; },
          [here](int64_t row) { return here[row].row.id; }, dealer.dense(), dealer.low(bucket), dealer.width(), plan, 1,
          write);
    }
  });
  deal([=](int64_t row, const Slot<T>& slot) {
    const auto result = slot.result;
    out.advantages[row] = result.advantage;
    out.mean[row] = result.mean;
    out.std[row] = result.std;
    out.size[row] = result.size < 0 ? -1 - result.size : result.size;
    out.degenerate[row] = result.size < 0;
  });
  buffer.keep_at_most(kKeptRows);
}

template <typename T>
void scattered_groups(const T* rewards, const int64_t* ids, int64_t rows, const IdRange& range,
                      const AdvantagePlan& plan, const AdvantageOutputs<T>& out) {
  constexpr int64_t kNearRows = int64_t{1} << 18;
  if (rows > kNearRows) return far_groups(rewards, ids, rows, range, plan, out);
  const auto write = [out](int64_t row, const SegmentEntry<T>& entry, T advantage) {
    out.advantages[row] = advantage;
    out.mean[row] = entry.mean;
    out.std[row] = entry.std;
    out.size[row] = entry.size;
    out.degenerate[row] = !entry.live;
  };
  const bool dense = range.dense(rows);
  const int64_t width = dense ? static_cast<int64_t>(range.width()) + 1 : 0;
  near_groups_by_id<T>(
      rows, [rewards](int64_t row) { return rewards[row]; }, [ids](int64_t row) { return ids[row]; }, dense, range.low,
      width, plan, torch::stable::get_num_threads(), write);
}

}  // namespace grpo_kernels
