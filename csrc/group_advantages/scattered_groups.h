#pragma once

#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/row_groups.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "group_advantages/simd.h"

// Plain groups whose rows lie anywhere: a counting sort of the rewards by group, statistics of each group, and a
// look-up of the group for every row. That is two random accesses per row. Past the caches they cost ten times the
// arithmetic, so larger batches are first scattered into buckets of ids that fit into a cache; a thread sorts a bucket,
// and a second scatter in the same order collects the results. With one thread that is 1.6 times as fast at 1 M rows
// with dense ids (sparse: 2.0), 2.4 (3.2) at 4 M and 1.0 (1.5) at 16 M; with two threads 1.2 (2.6), 2.8 (3.6) and 1.6
// (2.7).
namespace grpo_kernels {

// Working memory that a thread keeps for the next call.
constexpr int64_t kKeptRows = int64_t{1} << 20;

constexpr double kScatterCost = 12;  // nanoseconds a row on one thread

// Shards of neighbouring rows, one per thread.
class Shards {
 public:
  Shards(int64_t rows, int64_t threads) : rows_(rows), count_(std::clamp<int64_t>(threads, 1, rows / 4096 + 1)) {}

  int64_t count() const { return count_; }

  // Calls visit(shard, first row, last row + 1) for every shard, on several threads.
  template <typename Visit>
  void for_each(Visit visit) const {
    divide(count_, count_, [&](int64_t begin, int64_t end) {
      for (int64_t shard = begin; shard < end; ++shard)
        visit(shard, rows_ * shard / count_, rows_ * (shard + 1) / count_);
    });
  }

 private:
  int64_t rows_, count_;
};

// The first half of a counting sort into bins: starts[0 .. bins], and in positions[shard * bins + bin] where the first
// row of the shard in that bin goes. A bin holds its rows in ascending order, whatever the number of shards.
template <typename BinOf>
void find_positions(const Shards& shards, int64_t bins, BinOf bin_of, int32_t* positions, int64_t* starts) {
  shards.for_each([=](int64_t shard, int64_t first, int64_t last) {
    int32_t* const counts = positions + shard * bins;
    std::fill(counts, counts + bins, 0);
    for (int64_t row = first; row < last; ++row) ++counts[bin_of(row)];
  });
  int32_t next = 0;
  for (int64_t bin = 0; bin < bins; ++bin) {
    starts[bin] = next;
    for (int64_t shard = 0; shard < shards.count(); ++shard) {
      const int32_t count = positions[shard * bins + bin];
      positions[shard * bins + bin] = next;
      next += count;
    }
  }
  starts[bins] = next;
}

// One counting sort, for batches that fit into the caches. number_of(row) is below `groups`. Calls write(row, entry,
// advantage) for every row, and reads neither its number nor its reward afterwards.
template <typename T, typename RewardOf, typename NumberOf, typename Write>
void sort_groups(int64_t rows, RewardOf reward_of, NumberOf number_of, int64_t groups, const AdvantagePlan& plan,
                 int64_t threads, Write write) {
  struct Buffers {
    Scratch<int32_t> positions;
    Scratch<int64_t> starts;
    Scratch<T> sorted;
    Scratch<GroupEntry<T>> entries;
  };
  if (rows == 0) return;
  static thread_local Buffers buffers;
  // few enough that their counts, which one thread adds, are fewer than the rows
  const Shards sort_shards(rows, std::min(threads, rows / (2 * groups) + 1));
  int32_t* const positions = buffers.positions.get(sort_shards.count() * groups);
  int64_t* const starts = buffers.starts.get(groups + 1);
  T* const sorted = buffers.sorted.get(rows);
  GroupEntry<T>* const entries = buffers.entries.get(groups);
  find_positions(sort_shards, groups, number_of, positions, starts);
  sort_shards.for_each([=](int64_t shard, int64_t first, int64_t last) {
    int32_t* const next = positions + shard * groups;
    for (int64_t row = first; row < last; ++row) sorted[next[number_of(row)]++] = reward_of(row);
  });
  const PlainGroups<T> plain{sorted, starts, 0, plan, {}};
  const auto write_entries = [&](int64_t begin, int64_t end) {
    GRPO_SIMD_CALL(plain_entries, plain, begin, end, entries);
  };
  const Shards shards(rows, threads);
  divide(groups, shards.count(), write_entries);
  const double bound = plan.needs_batch() ? INFINITY : plan.clip;
  shards.for_each([=](int64_t, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const GroupEntry<T> entry = entries[number_of(row)];
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

// sort_groups for ids: dense ones are numbered by subtraction, others by hashing.
template <typename T, typename RewardOf, typename IdOf, typename Write>
void sort_groups_by_id(int64_t rows, RewardOf reward_of, IdOf id_of, bool dense, int64_t low, int64_t width,
                       const AdvantagePlan& plan, int64_t threads, Write write) {
  if (dense) {
    const auto number_of = [id_of, low](int64_t row) { return id_of(row) - low; };
    return sort_groups<T>(rows, reward_of, number_of, width, plan, threads, write);
  }
  static thread_local Scratch<int32_t> buffer;
  int32_t* const numbers = buffer.get(rows);
  IdNumbering numbering(rows);
  for (int64_t row = 0; row < rows; ++row) numbers[row] = numbering.number(id_of(row));
  const auto number_of = [numbers](int64_t row) { return numbers[row]; };
  sort_groups<T>(rows, reward_of, number_of, numbering.count(), plan, threads, write);
  buffer.keep_at_most(kKeptRows);
}

// Maps ids to buckets. A bucket takes a range of ids or, where ids are sparse, a range of hashes.
class IdBuckets {
 public:
  IdBuckets(const IdRange& range, int64_t rows) : low_(range.low), dense_(range.dense(rows)) {
    // the pages of more than 1,024 buckets do not fit into the TLB
    while (bits_ < 10 && (rows >> bits_) > kRowsPerBucket) ++bits_;
    while (dense_ && (range.width() >> shift_) >> bits_ != 0) ++shift_;
  }

  int64_t count() const { return int64_t{1} << bits_; }
  bool is_dense() const { return dense_; }
  int64_t bucket_of(int64_t id) const {
    if (dense_) return static_cast<int64_t>((static_cast<uint64_t>(id) - static_cast<uint64_t>(low_)) >> shift_);
    return bits_ == 0 ? 0 : static_cast<int64_t>(hash_id(id) >> (64 - bits_));
  }
  // The lowest id of a bucket of dense ids, and the number of ids in its range.
  int64_t low(int64_t bucket) const { return low_ + (bucket << shift_); }
  int64_t width() const { return int64_t{1} << shift_; }

 private:
  static constexpr int64_t kRowsPerBucket = 8192;  // with their results, half of a small L2 cache
  int64_t low_;
  bool dense_;
  int bits_ = 0, shift_ = 0;
};

// A row in its bucket, later overwritten by its result: large batches are bound by first touches of memory.
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

// Sorts by bucket first, for batches that do not fit into the caches.
template <typename T>
void bucket_groups(const T* rewards, const int64_t* ids, int64_t rows, const IdRange& range, const AdvantagePlan& plan,
                   const AdvantageOutputs<T>& out) {
  static thread_local Scratch<Slot<T>> buffer;
  Slot<T>* const slots = buffer.get(rows);
  const Shards shards(rows, threads_for(kScatterCost * static_cast<double>(rows)));
  const IdBuckets id_buckets(range, rows);
  const int64_t buckets = id_buckets.count();
  std::vector<int32_t> positions(shards.count() * buckets);
  std::vector<int64_t> starts(buckets + 1);
  const int32_t* const first_positions = positions.data();
  find_positions(
      shards, buckets, [=](int64_t row) { return id_buckets.bucket_of(ids[row]); }, positions.data(), starts.data());
  // calls visit(row, slot) for every row with its slot in its bucket
  const auto for_each_slot = [&](auto visit) {
    shards.for_each([=](int64_t shard, int64_t first, int64_t last) {
      std::vector<int32_t> own(first_positions + shard * buckets, first_positions + (shard + 1) * buckets);
      int32_t* const next = own.data();
      for (int64_t row = first; row < last; ++row) visit(row, slots[next[id_buckets.bucket_of(ids[row])]++]);
    });
  };
  for_each_slot([=](int64_t row, Slot<T>& slot) { slot.row = {ids[row], rewards[row]}; });
  divide(buckets, shards.count(), [&](int64_t begin, int64_t end) {
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      Slot<T>* const bucket_slots = slots + starts[bucket];
      const auto write = [bucket_slots](int64_t row, const GroupEntry<T>& entry, T advantage) {
        bucket_slots[row].result = {advantage, entry.mean, entry.std, entry.live ? entry.size : -1 - entry.size};
      };
      sort_groups_by_id<T>(
          starts[bucket + 1] - starts[bucket], [bucket_slots](int64_t row) { return bucket_slots[row].row.reward; },
          [bucket_slots](int64_t row) { return bucket_slots[row].row.id; }, id_buckets.is_dense(),
          id_buckets.low(bucket), id_buckets.width(), plan, 1, write);
    }
  });
  for_each_slot([=](int64_t row, const Slot<T>& slot) {
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
  constexpr int64_t kCachedRows = int64_t{1} << 18;
  if (rows > kCachedRows) return bucket_groups(rewards, ids, rows, range, plan, out);
  const auto write = [out](int64_t row, const GroupEntry<T>& entry, T advantage) {
    out.advantages[row] = advantage;
    out.mean[row] = entry.mean;
    out.std[row] = entry.std;
    out.size[row] = entry.size;
    out.degenerate[row] = !entry.live;
  };
  const bool dense = range.dense(rows);
  const int64_t width = dense ? static_cast<int64_t>(range.width()) + 1 : 0;
  sort_groups_by_id<T>(
      rows, [rewards](int64_t row) { return rewards[row]; }, [ids](int64_t row) { return ids[row]; }, dense, range.low,
      width, plan, threads_for(kScatterCost * static_cast<double>(rows)), write);
}

}  // namespace grpo_kernels
