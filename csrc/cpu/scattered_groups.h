#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "row_groups.h"
#include "scratch.h"
#include "simd/group_advantages.h"
#include "simd/levels.h"

// Plain groups whose rows lie anywhere. Sorting rows by id and looking up each row's group afterwards would touch
// memory at random four times a row, which past the caches costs ten times the arithmetic. Instead rows are dealt into
// buckets by their id, each small enough for a cache; a bucket is worked on by one thread; and the results are
// collected by dealing once more. Memory is only ever walked along as many lines as there are buckets.
namespace grpo_kernels {

// Which bucket an id goes to: a range of ids each, or where ids are sparse, a range of hashes.
class Dealer {
 public:
  Dealer(const IdRange& range, int64_t rows) : low_(range.low), dense_(range.dense(rows)) {
    // 8,192 rows and their results take half of a small second-level cache; more than 1,024 buckets would each
    // need a page in the address cache
    while (bits_ < 10 && (rows >> bits_) > 8192) ++bits_;
    while (dense_ && (range.width() >> shift_) >> bits_ != 0) ++shift_;
  }

  int64_t buckets() const { return int64_t{1} << bits_; }
  bool dense() const { return dense_; }
  int64_t of(int64_t id) const {
    if (dense_) return static_cast<int64_t>((static_cast<uint64_t>(id) - static_cast<uint64_t>(low_)) >> shift_);
    return bits_ == 0 ? 0 : static_cast<int64_t>(hash_id(id) >> (64 - bits_));
  }
  // Of dense ids: the number within the bucket, and how many there can be.
  int64_t number(int64_t id) const { return (id - low_) & ((int64_t{1} << shift_) - 1); }
  int64_t numbers() const { return int64_t{1} << shift_; }

 private:
  int64_t low_;
  bool dense_;
  int bits_ = 0, shift_ = 0;
};

template <typename T>
struct DealtResult {
  T advantage, mean, std;
  int32_t size;  // -1 - size where the group is degenerate
};

template <typename T>
class ScatteredGroups {
 public:
  ScatteredGroups(const T* rewards, const int64_t* ids, int64_t rows, const IdRange& range, const AdvantagePlan& plan)
      : rewards_(rewards),
        ids_(ids),
        rows_(rows),
        plan_(plan),
        dealer_(range, rows),
        hands_(std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), rows / 4096))) {}

  void run(const AdvantageOutputs<T>& out) {
    place();
    // Raw pointers in locals here and below: a store through one could otherwise change any member, for all the
    // compiler knows, and every row would read them all again.
    const int64_t* const ids = ids_;
    const T* const rewards = rewards_;
    static thread_local Buffers buffers;
    int64_t* const dealt_ids = buffers.ids.get(rows_);
    T* const dealt_rewards = buffers.rewards.get(rows_);
    DealtResult<T>* const results = buffers.results.get(rows_);
    deal([=](int64_t row, int64_t position) {
      dealt_ids[position] = ids[row];
      dealt_rewards[position] = rewards[row];
    });
    torch::stable::parallel_for(0, dealer_.buckets(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t first = bucket_starts_[b];
        work(dealt_ids + first, dealt_rewards + first, bucket_starts_[b + 1] - first, results + first);
      }
    });
    deal([=](int64_t row, int64_t position) {
      const DealtResult<T> result = results[position];
      out.advantages[row] = result.advantage;
      out.mean[row] = result.mean;
      out.std[row] = result.std;
      out.size[row] = result.size < 0 ? -1 - result.size : result.size;
      out.degenerate[row] = result.size < 0;
    });
    buffers.ids.keep_at_most(kKeptRows);
    buffers.rewards.keep_at_most(kKeptRows);
    buffers.results.keep_at_most(kKeptRows);
  }

 private:
  static constexpr int64_t kKeptRows = 1 << 18;
  struct Buffers {
    Scratch<int64_t> ids;
    Scratch<T> rewards;
    Scratch<DealtResult<T>> results;
  };
  struct BucketBuffers {
    Scratch<int32_t> numbers, order;
    Scratch<int64_t> starts;
    Scratch<SegmentEntry<T>> entries;
  };

  // Rows are split among hands, one a thread, each dealing its share in order; positions_ says where each hand's first
  // row of each bucket goes, so that a bucket holds its rows in ascending order however many hands there are.
  void place() {
    const int64_t buckets = dealer_.buckets();
    positions_.assign(hands_ * buckets, 0);
    torch::stable::parallel_for(0, hands_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t hand = begin; hand < end; ++hand) {
        int64_t* const counts = positions_.data() + hand * buckets;
        const int64_t* const ids = ids_;
        const Dealer dealer = dealer_;
        const int64_t last = first_row(hand + 1);
        for (int64_t row = first_row(hand); row < last; ++row) ++counts[dealer.of(ids[row])];
      }
    });
    int64_t next = 0;
    for (int64_t bucket = 0; bucket < buckets; ++bucket) {
      bucket_starts_.push_back(next);
      for (int64_t hand = 0; hand < hands_; ++hand) {
        const int64_t count = positions_[hand * buckets + bucket];
        positions_[hand * buckets + bucket] = next;
        next += count;
      }
    }
    bucket_starts_.push_back(next);
  }

  template <typename Visit>
  void deal(Visit visit) {
    torch::stable::parallel_for(0, hands_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t hand = begin; hand < end; ++hand) {
        const auto from = positions_.begin() + hand * dealer_.buckets();
        std::vector<int64_t> positions(from, from + dealer_.buckets());
        int64_t* const next = positions.data();
        const int64_t* const ids = ids_;
        const Dealer dealer = dealer_;
        const int64_t last = first_row(hand + 1);
        for (int64_t row = first_row(hand); row < last; ++row) visit(row, next[dealer.of(ids[row])]++);
      }
    });
  }

  int64_t first_row(int64_t hand) const { return rows_ * hand / hands_; }

  // Groups of one bucket, by a counting sort of its rows.
  void work(const int64_t* ids, const T* rewards, int64_t count, DealtResult<T>* results) const {
    if (count == 0) return;
    static thread_local BucketBuffers buffers;
    const Dealer dealer = dealer_;
    const AdvantagePlan plan = plan_;
    int32_t* const numbers = buffers.numbers.get(count);
    int64_t groups = dealer.numbers();
    if (dealer.dense()) {
      for (int64_t k = 0; k < count; ++k) numbers[k] = static_cast<int32_t>(dealer.number(ids[k]));
    } else {
      IdNumbering numbering(count);
      for (int64_t k = 0; k < count; ++k) numbers[k] = numbering.number(ids[k]);
      groups = numbering.count();
    }
    // starts[g + 1] counts, then becomes where group g begins, then moves to where it ends, which is where g + 1 begins
    int64_t* const starts = buffers.starts.get(groups + 2);
    std::fill(starts, starts + groups + 2, 0);
    for (int64_t k = 0; k < count; ++k) ++starts[numbers[k] + 2];
    for (int64_t g = 2; g < groups + 2; ++g) starts[g] += starts[g - 1];
    int32_t* const order = buffers.order.get(count);
    for (int64_t k = 0; k < count; ++k) order[starts[numbers[k] + 1]++] = static_cast<int32_t>(k);
    SegmentEntry<T>* const entries = buffers.entries.get(groups);
    const PlainGroups<T> plain{rewards, order, starts, 0, plan, {}};
    GRPO_SIMD_CALL(plain_entries, plain, 0, groups, entries);

    const double bound = plan.needs_batch() ? INFINITY : plan.clip;
    for (int64_t k = 0; k < count; ++k) {
      const SegmentEntry<T> entry = entries[numbers[k]];
      const double reward = rewards[k];
      const RowMap map{0, 0, entry.center, entry.factor, entry.live && reward == reward};
      const double advantage = clip_to(row_advantage(plan, map, reward, 0), bound);
      const int32_t size = entry.live ? entry.size : -1 - entry.size;
      results[k] = {static_cast<T>(advantage), entry.mean, entry.std, size};
    }
  }

  const T* rewards_;
  const int64_t* ids_;
  const int64_t rows_;
  const AdvantagePlan plan_;
  const Dealer dealer_;
  const int64_t hands_;
  std::vector<int64_t> positions_, bucket_starts_;
};

}  // namespace grpo_kernels
