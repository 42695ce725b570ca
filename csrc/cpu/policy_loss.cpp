#include "simd/policy_loss.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "allocate.h"
#include "cpu_ops.h"
#include "policy_inputs.h"
#include "simd/levels.h"

namespace grpo_kernels {
namespace {

constexpr const char* kOp = PolicyInputs::kOp;
constexpr int64_t kTokensPerTask = 4096;  // a multiple of what the kernel adds up before it turns to double

// The number of true ones, eight at a time: in a word of bytes that each hold 0 or 1, 255 words can be added before a
// byte is full.
int64_t count_true(const bool* flags, int64_t count) {
  constexpr uint64_t kEven = 0x00FF00FF00FF00FFull;
  int64_t found = 0, k = 0;
  while (k + 8 <= count) {
    uint64_t bytes = 0;
    for (int word = 0; word < 255 && k + 8 <= count; ++word, k += 8) {
      uint64_t eight;
      std::memcpy(&eight, flags + k, 8);
      bytes += eight;
    }
    const uint64_t pairs = (bytes & kEven) + ((bytes >> 8) & kEven);
    found += static_cast<int64_t>((pairs * 0x0001000100010001ull) >> 48);
  }
  for (; k < count; ++k) found += flags[k];
  return found;
}

// Where the true ones are; returns how many. Without a branch on what is found, which no processor would predict: of
// eight flags all eight places are written, the true ones first, and those behind them are written over. `places` has
// room for 7 more.
int64_t find_true(const bool* flags, int64_t first, int64_t last, int32_t* places) {
  struct Table {
    uint8_t places[256][8] = {}, count[256] = {};
    constexpr Table() {
      for (int byte = 0; byte < 256; ++byte) {
        for (uint8_t bit = 0; bit < 8; ++bit) {
          if (byte >> bit & 1) places[byte][count[byte]++] = bit;
        }
      }
    }
  };
  static constexpr Table kTable;
  int64_t found = 0;
  for (int64_t k = first; k < last; k += 8) {
    uint64_t eight = 0;
    std::memcpy(&eight, flags + k, std::min<int64_t>(8, last - k));
    // the lowest bits of the eight bytes, side by side
    const auto byte = static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56);
    for (int i = 0; i < 8; ++i) places[found + i] = static_cast<int32_t>(k) + kTable.places[byte][i];
    found += kTable.count[byte];
  }
  return found;
}

template <typename T>
Counts count_row(const PolicyBatch<T>& in, int64_t row) {
  const int64_t first = in.start(row), last = first + in.length(row);
  Counts counts;
  int64_t tokens = 0, kept = 0;
  if (in.segments == nullptr) {
    tokens = last - first;
    if (in.mask != nullptr) tokens = count_true(in.mask + first, last - first);
  } else {
    for (int64_t t = first; t < last; ++t) tokens += in.valid(t);
  }
  kept = tokens;
  if (in.entropy_floor > -INFINITY) {
    kept = 0;
    for (int64_t t = first; t < last; ++t) kept += in.kept(t);
  }
  int64_t terms = tokens;
  if (in.plan.loss == Loss::kGeoMean) terms = kept > 0;
  if (in.plan.by_segment()) {
    terms = 0;
    int32_t open = -1;
    for (int64_t t = first; t < last; ++t) {
      if (!in.valid(t)) continue;
      const int32_t segment = in.segments[t];
      STD_TORCH_CHECK(segment >= open && segment < in.length(row), kOp,
                      ": segments must ascend from 0 along each row, ", "got ", segment, " after ", open, " in row ",
                      row);
      terms += segment != open;
      open = segment;
    }
  }
  counts.rows = 1;
  counts.active = tokens > 0;
  counts.tokens = static_cast<double>(tokens);
  counts.kept = static_cast<double>(kept);
  counts.terms = static_cast<double>(terms);
  return counts;
}

// Working memory of a row, kept by each thread.
template <typename T>
struct RowScratch {
  std::vector<char> terms;
  std::vector<T> log_ratios, scores, term_gradient;
};

// A row whose terms depend on all of it.
template <typename T>
class WholeRow {
 public:
  WholeRow(const PolicyBatch<T>& in, int64_t row, const Counts& counts, const Shares& shares, T* gradient)
      : in_(in),
        plan_(in.plan),
        row_(row),
        first_(in.start(row)),
        last_(first_ + in.length(row)),
        counts_(counts),
        tokens_(tokens_of(in, row, first_, shares, gradient)) {}

  void run(PolicySums& sums) {
    static thread_local RowScratch<T> scratch;
    RowFacts<T> facts;
    for (int64_t t = first_; t < last_; ++t) facts.add(in_, row_, t);
    facts.tell(in_, row_, counts_, tokens_, sums);
    if (plan_.by_segment() || plan_.loss == Loss::kGeoMean) {
      scratch.terms.assign(last_ - first_, 0);
      tokens_.terms = reinterpret_cast<const bool*>(scratch.terms.data());
    }
    if (plan_.by_segment()) open_segments(scratch);
    if (plan_.loss == Loss::kGeoMean) mark_end(scratch);
    PolicySums of_row;
    GRPO_SIMD_CALL(policy_tokens, tokens_, plan_, in_.kind(), last_ - first_, of_row);
    if (plan_.by_segment()) close_segments(scratch);
    if (plan_.spreads_over_row()) {
      const double members = plan_.loss == Loss::kGeoMean ? counts_.kept : counts_.tokens;
      const T each = static_cast<T>(of_row.through / std::max(members, 1.0));
      for (int64_t t = first_; t < last_; ++t) tokens_.gradient[t - first_] += from_row(in_, row_, t, each);
    }
    sums.merge(of_row);
  }

 private:
  // GMPO has one term a row, which stands at the last token of those kept.
  void mark_end(RowScratch<T>& scratch) const {
    for (int64_t t = last_ - 1; t >= first_; --t) {
      if (!in_.kept(t)) continue;
      scratch.terms[t - first_] = 1;
      return;
    }
  }

  // visit(first, last, size) for every segment: where its tokens begin and end, and what a mean divides by.
  template <typename Visit>
  void for_segments(Visit visit) const {
    int64_t first = -1, last = -1, size = 0;
    const auto close = [&] {
      if (size > 0) visit(first, last, plan_.ratio == Ratio::kSegmentMean ? size : 1);
      size = 0;
    };
    for (int64_t t = first_; t < last_; ++t) {
      if (!in_.valid(t)) continue;
      if (size > 0 && in_.segments[t] != in_.segments[last]) close();
      if (size == 0) first = t;
      last = t;
      ++size;
    }
    close();
  }

  // The joint log ratio and log-prob of every segment, at its last token, which is where its term is.
  void open_segments(RowScratch<T>& scratch) {
    for (auto* values : {&scratch.log_ratios, &scratch.scores, &scratch.term_gradient}) values->resize(last_ - first_);
    for_segments([&](int64_t first, int64_t last, int64_t size) {
      double ratio = 0, score = 0;
      for (int64_t t = first; t <= last; ++t) {
        if (!in_.valid(t)) continue;
        ratio += in_.log_ratio(t);
        score += static_cast<double>(in_.logprobs[t]);
      }
      scratch.log_ratios[last - first_] = static_cast<T>(ratio / static_cast<double>(size));
      scratch.scores[last - first_] = static_cast<T>(score / static_cast<double>(size));
      scratch.terms[last - first_] = 1;
    });
    tokens_.log_ratios = scratch.log_ratios.data();
    tokens_.scores = scratch.scores.data();
    tokens_.term_gradient = scratch.term_gradient.data();
  }

  // What came out at a segment's last token belongs to all of its tokens.
  void close_segments(const RowScratch<T>& scratch) {
    for_segments([&](int64_t first, int64_t last, int64_t size) {
      const T each = scratch.term_gradient[last - first_] / static_cast<T>(size);
      for (int64_t t = first; t <= last; ++t) {
        if (in_.valid(t)) tokens_.gradient[t - first_] += each;
      }
    });
  }

  const PolicyBatch<T>& in_;
  const PolicyPlan plan_;
  const int64_t row_, first_, last_;
  const Counts counts_;
  PolicyTokens<T> tokens_;
};

// Tokens that depend on nothing but themselves. What lies before the first and behind the last that takes part costs
// next to nothing and changes no bit; and where few take part in between, those are worked on alone.
template <typename T>
class SparseTokens {
 public:
  SparseTokens(const PolicyTokens<T>& tokens, int64_t count) : tokens_(tokens), count_(count) {
    while (first_ + 8 <= count && eight_false(first_)) first_ += 8;
    while (first_ < count && !tokens.mask[first_]) ++first_;
    last_ = count;
    while (last_ - 8 >= first_ && eight_false(last_ - 8)) last_ -= 8;
    while (last_ > first_ && !tokens.mask[last_ - 1]) --last_;
  }

  void run(const PolicyPlan& plan, WalkKind kind, PolicySums& sums) {
    constexpr int64_t kSparse = 4;  // copying a token there and back costs a quarter of working on it
    std::fill(tokens_.gradient, tokens_.gradient + first_, T{0});
    std::fill(tokens_.gradient + last_, tokens_.gradient + count_, T{0});
    const int64_t span = last_ - first_;
    if (span == 0) return;
    const int64_t members = count_true(tokens_.mask + first_, span);
    if (members * kSparse > span) {
      PolicyTokens<T> part = tokens_;
      for (const T** array : arrays(part)) *array = at_or_null(*array, first_);
      part.mask = members == span ? nullptr : part.mask + first_;
      part.gradient += first_;
      GRPO_SIMD_CALL(policy_tokens, part, plan, kind, span, sums);
    } else {
      run_alone(plan, kind, sums);
    }
  }

 private:
  bool eight_false(int64_t k) const {
    uint64_t eight;
    std::memcpy(&eight, tokens_.mask + k, 8);
    return eight == 0;
  }

  static std::array<const T**, 8> arrays(PolicyTokens<T>& tokens) {
    return {&tokens.logprobs,   &tokens.old,     &tokens.ref,     &tokens.sampling,
            &tokens.is_weights, &tokens.entropy, &tokens.weights, &tokens.advantages};
  }

  void run_alone(const PolicyPlan& plan, WalkKind kind, PolicySums& sums) {
    static thread_local std::vector<int32_t> places;
    static thread_local std::vector<T> memory;
    places.resize(last_ - first_ + 8);
    const int64_t count = find_true(tokens_.mask, first_, last_, places.data());
    PolicyTokens<T> part = tokens_;
    memory.resize(9 * count);
    T* room = memory.data();
    for (const T** array : arrays(part)) {
      if (*array == nullptr) continue;
      for (int64_t i = 0; i < count; ++i) room[i] = (*array)[places[i]];
      *array = room;
      room += count;
    }
    part.mask = nullptr;
    part.gradient = room;
    GRPO_SIMD_CALL(policy_tokens, part, plan, kind, count, sums);
    std::fill(tokens_.gradient + first_, tokens_.gradient + last_, T{0});
    for (int64_t i = 0; i < count; ++i) tokens_.gradient[places[i]] = room[i];
  }

  PolicyTokens<T> tokens_;
  const int64_t count_;
  int64_t first_ = 0, last_ = 0;
};

template <typename T>
void run_tokens(const PolicyTokens<T>& tokens, const PolicyPlan& plan, WalkKind kind, int64_t count, PolicySums& sums) {
  if (tokens.mask == nullptr) {
    GRPO_SIMD_CALL(policy_tokens, tokens, plan, kind, count, sums);
  } else {
    SparseTokens<T>(tokens, count).run(plan, kind, sums);
  }
}

// visit(row) for every row, on several threads.
template <typename T, typename Visit>
void for_each_row(const PolicyBatch<T>& in, Visit visit) {
  const int64_t mean = in.tokens / std::max<int64_t>(in.rows, 1);
  torch::stable::parallel_for(0, in.rows, kTokensPerTask / std::max<int64_t>(mean, 1) + 1,
                              [&](int64_t begin, int64_t end) {
                                for (int64_t row = begin; row < end; ++row) visit(row);
                              });
}

template <typename T>
void compute(const PolicyBatch<T>& in, T* gradient, T* by_entropy, double* metrics) {
  std::vector<Counts> counts(in.rows);
  for_each_row(in, [&](int64_t row) { counts[row] = count_row(in, row); });
  Counts batch;
  for (const Counts& row : counts) batch.add(row);
  const auto shares = [&](int64_t row) { return in.shares(batch, counts[row]); };

  std::vector<PolicySums> sums(in.rows);
  if (in.by_row()) {
    for_each_row(in, [&](int64_t row) { WholeRow<T>(in, row, counts[row], shares(row), gradient).run(sums[row]); });
  } else {
    struct Task {
      int64_t row, first, count;
    };
    std::vector<Task> tasks;
    for (int64_t row = 0; row < in.rows; ++row) {
      for (int64_t k = 0; k < in.length(row); k += kTokensPerTask) {
        tasks.push_back({row, in.start(row) + k, std::min(kTokensPerTask, in.length(row) - k)});
      }
    }
    std::vector<PolicySums> parts(tasks.size());
    const int64_t tasks_count = static_cast<int64_t>(tasks.size());
    const int64_t grain = kTokensPerTask * tasks_count / std::max<int64_t>(in.tokens, 1) + 1;
    torch::stable::parallel_for(0, tasks_count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const PolicyTokens<T> tokens = tokens_of(in, tasks[i].row, tasks[i].first, shares(tasks[i].row), gradient);
        run_tokens(tokens, in.plan, in.kind(), tasks[i].count, parts[i]);
      }
    });
    for (size_t i = 0; i < tasks.size(); ++i) sums[tasks[i].row].merge(parts[i]);
    if (in.is_by_row) {
      for (int64_t row = 0; row < in.rows; ++row) {
        if (counts[row].tokens > 0) sums[row].add_is(in.is_weights[row]);
      }
    }
  }
  if (by_entropy != nullptr) {
    for_each_row(in, [&](int64_t row) {
      const int64_t last = in.start(row) + in.length(row);
      for (int64_t t = in.start(row); t < last; ++t) by_entropy[t] = in.entropy_gradient(t, shares(row));
    });
  }
  PolicySums all;
  RowExtremes extremes;
  for (int64_t row = 0; row < in.rows; ++row) {
    all.merge(sums[row]);
    extremes.add(counts[row], sums[row], in.plan);
  }
  write_metrics(in.plan, batch, all, extremes, metrics);
}

}  // namespace

PolicyLossTensors policy_loss_cpu(Tensor logprobs, std::optional<Tensor> old, Tensor advantages,
                                  std::optional<Tensor> mask, std::optional<Tensor> cu_seqlens,
                                  std::optional<Tensor> segments, std::optional<Tensor> ref,
                                  std::optional<Tensor> sampling, std::optional<Tensor> is_weights,
                                  std::optional<Tensor> entropy, std::optional<Tensor> entropy_floor,
                                  std::optional<Tensor> weights, std::optional<Tensor> normalizers,
                                  std::vector<double> counts, std::vector<int64_t> modes,
                                  std::vector<double> coefficients, bool needs_entropy_gradient) {
  if (normalizers) {
    const double* given = static_cast<const double*>(normalizers->const_data_ptr());
    for (int i = 0; i < 3; ++i) counts[i] = std::isnan(given[i]) ? counts[i] : given[i];
  }
  const PolicyInputs inputs =
      policy_inputs(logprobs, old, advantages, mask, cu_seqlens, segments, ref, sampling, is_weights, entropy,
                    entropy_floor, weights, normalizers, counts, modes, coefficients);
  const int64_t tokens = inputs.tokens;
  const int64_t* starts = optional_data<int64_t>(cu_seqlens);
  if (starts != nullptr) check_packed_bounds(kOp, starts, inputs.rows, tokens);

  const int32_t float_code = dtype_of(logprobs);
  const Tensor loss = empty_tensor(logprobs, nullptr, 0, float_code);
  const Tensor metrics = empty_vector(logprobs, kPolicyMetrics, aoti_torch_dtype_float64());
  const Tensor gradient = empty_vector(logprobs, tokens, float_code);
  const Tensor by_entropy = empty_vector(logprobs, needs_entropy_gradient ? tokens : 0, float_code);
  auto run = [&](auto zero) {
    using T = decltype(zero);
    PolicyBatch<T> in = inputs.batch<T>();
    if (entropy_floor) in.entropy_floor = *optional_data<T>(entropy_floor);
    T* const out = static_cast<T*>(gradient.mutable_data_ptr());
    T* const entropy_out = needs_entropy_gradient ? static_cast<T*>(by_entropy.mutable_data_ptr()) : nullptr;
    // what lies behind the last row is of none
    const int64_t used = starts == nullptr ? tokens : starts[inputs.rows];
    std::fill(out + used, out + tokens, T{0});
    if (entropy_out != nullptr) std::fill(entropy_out + used, entropy_out + tokens, T{0});
    double* const measured = static_cast<double*>(metrics.mutable_data_ptr());
    compute(in, out, entropy_out, measured);
    *static_cast<T*>(loss.mutable_data_ptr()) = static_cast<T>(measured[0]);
  };
  inputs.is_double() ? run(double{}) : run(float{});
  return {loss, metrics, gradient, by_entropy};
}

}  // namespace grpo_kernels
