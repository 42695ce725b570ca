#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/allocate.h"
#include "common/op_namespace.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "policy_loss/flags.h"
#include "policy_loss/simd.h"
#include "policy_loss/tensors.h"

namespace grpo_kernels {

using PolicyLossTensors = std::tuple<Tensor, Tensor, Tensor>;
namespace {

constexpr const char* kOp = PolicyInputs::kOp;
constexpr int64_t kTokensPerTask = 4096;  // a multiple of the tokens that the kernel sums before it turns to double
// Nanoseconds a token on one thread with AVX2: counting, terms of PPO's clip and of any loss, terms that need their
// row, the gradient of the entropy.
constexpr double kCountCost = 0.2, kClipCost = 2, kTermCost = 4, kRowTermCost = 4, kEntropyCost = 1;

template <typename T>
Counts count_row(const PolicyBatch<T>& in, int64_t row) {
  const int64_t first = in.start(row), last = first + in.length(row);
  Counts counts;
  int64_t tokens = 0;
  if (in.segments == nullptr) {
    tokens = last - first;
    if (in.mask != nullptr) tokens = count_true(in.mask + first, last - first);
  } else {
    for (int64_t t = first; t < last; ++t) tokens += in.is_valid(t);
  }
  int64_t terms = tokens;
  if (in.plan.loss == Loss::kGeoMean) terms = tokens > 0;
  if (in.plan.by_segment()) {
    terms = 0;
    int32_t previous = -1;
    for (int64_t t = first; t < last; ++t) {
      if (!in.is_valid(t)) continue;
      const int32_t segment = in.segments[t];
      GRPO_CHECK(segment >= previous && segment < in.length(row), kOp,
                 ": segments must ascend from 0 along each row, got ", segment, " after ", previous, " in row ", row);
      terms += segment != previous;
      previous = segment;
    }
  }
  counts.rows = 1;
  counts.active_rows = tokens > 0;
  counts.tokens = static_cast<double>(tokens);
  counts.terms = static_cast<double>(terms);
  return counts;
}

template <typename T>
bool has_all_tokens(const PolicyBatch<T>& in, int64_t row, const Counts& counts) {
  return counts.tokens == static_cast<double>(in.length(row));
}

// Tokens whose terms do not depend on a neighbour's. Skips the masked tokens before the first and after the last valid
// one, so that padding costs next to nothing and changes no bit; where few of the others are valid, packs those.
template <typename T>
class SparseTokens {
 public:
  SparseTokens(const PolicyTokens<T>& tokens, int64_t count) : tokens_(tokens), count_(count) {
    while (first_ + 8 <= count && eight_masked(first_)) first_ += 8;
    while (first_ < count && !tokens.mask[first_]) ++first_;
    last_ = count;
    while (last_ - 8 >= first_ && eight_masked(last_ - 8)) last_ -= 8;
    while (last_ > first_ && !tokens.mask[last_ - 1]) --last_;
  }

  void run(const PolicyPlan& plan, WalkKind kind, PolicySums& sums) {
    constexpr int64_t kSparse = 4;  // packing a token and unpacking its gradient costs a quarter of computing it
    std::fill(tokens_.gradient, tokens_.gradient + first_, T{0});
    std::fill(tokens_.gradient + last_, tokens_.gradient + count_, T{0});
    const int64_t span = last_ - first_;
    if (span == 0) return;
    const int64_t valid = count_true(tokens_.mask + first_, span);
    if (valid * kSparse > span) {
      PolicyTokens<T> part = tokens_;
      for (const T** array : arrays(part)) *array = offset_or_null(*array, first_);
      part.policy_mask = offset_or_null(part.policy_mask, first_);
      part.mask = valid == span ? nullptr : part.mask + first_;
      part.gradient += first_;
      GRPO_SIMD_CALL(policy_tokens, part, plan, kind, span, sums);
    } else {
      run_packed(plan, kind, sums);
    }
  }

 private:
  bool eight_masked(int64_t k) const {
    uint64_t eight;
    std::memcpy(&eight, tokens_.mask + k, 8);
    return eight == 0;
  }

  static auto arrays(PolicyTokens<T>& tokens) {
#define GRPO_NUMBERS(name) , &tokens.name
#define GRPO_NONE(name)
    return std::array{&tokens.logprobs, &tokens.advantages,
                      &tokens.is_weights GRPO_POLICY_TOKENS(GRPO_NUMBERS, GRPO_NONE, GRPO_NONE)};
#undef GRPO_NUMBERS
#undef GRPO_NONE
  }

  void run_packed(const PolicyPlan& plan, WalkKind kind, PolicySums& sums) {
    static thread_local std::vector<int32_t> indices;
    static thread_local std::vector<T> memory;
    static thread_local std::vector<char> flags;
    indices.resize(last_ - first_ + 8);
    const int64_t count = find_true(tokens_.mask, first_, last_, indices.data());
    PolicyTokens<T> part = tokens_;
    memory.resize((arrays(part).size() + 1) * count);  // and the gradient
    T* packed = memory.data();
    for (const T** array : arrays(part)) {
      if (*array == nullptr) continue;
      for (int64_t i = 0; i < count; ++i) packed[i] = (*array)[indices[i]];
      *array = packed;
      packed += count;
    }
    if (part.policy_mask != nullptr) {
      flags.resize(count);
      for (int64_t i = 0; i < count; ++i) flags[i] = part.policy_mask[indices[i]];
      part.policy_mask = reinterpret_cast<const bool*>(flags.data());
    }
    part.mask = nullptr;
    part.gradient = packed;
    GRPO_SIMD_CALL(policy_tokens, part, plan, kind, count, sums);
    std::fill(tokens_.gradient + first_, tokens_.gradient + last_, T{0});
    for (int64_t i = 0; i < count; ++i) tokens_.gradient[indices[i]] = packed[i];
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

// Working memory for a row, which each thread keeps.
template <typename T>
struct RowScratch {
  std::vector<char> terms;
  std::vector<T> log_ratios, scores, term_gradient;
};

// A row whose terms depend on the whole row.
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
    PolicyBatch<T> in = in_;  // without a mask where it says nothing
    if (has_all_tokens(in_, row_, counts_)) in.mask = tokens_.mask = nullptr;
    const RowStatistics statistics = GRPO_SIMD_CALL(row_statistics, in, row_);
    statistics.finish(in_, row_, counts_, tokens_, sums);
    if (plan_.by_segment() || plan_.loss == Loss::kGeoMean) {
      scratch.terms.assign(last_ - first_, 0);
      tokens_.terms = reinterpret_cast<const bool*>(scratch.terms.data());
    }
    if (plan_.by_segment()) gather_segments(scratch);
    if (plan_.loss == Loss::kGeoMean) mark_last_token(scratch);
    const WalkKind kind = in_.walk_kind();
    PolicySums row_sums;
    if (tokens_.terms == nullptr && tokens_.segments == nullptr) {
      run_tokens(tokens_, plan_, kind, last_ - first_, row_sums);
    } else {
      GRPO_SIMD_CALL(policy_tokens, tokens_, plan_, WalkKind::kAny, last_ - first_, row_sums);
    }
    if (plan_.by_segment()) spread_over_segments(scratch);
    if (plan_.spreads_over_row() && kind != WalkKind::kPlainSequence) {
      const T share = static_cast<T>(row_sums.ratio_gradient / std::max(counts_.tokens, 1.0));
      GRPO_SIMD_CALL(add_row_share, in, row_, share, tokens_.gradient - first_);
    }
    sums.merge(row_sums);
  }

 private:
  // GMPO has one term per row, held by the last token that counts.
  void mark_last_token(RowScratch<T>& scratch) const {
    for (int64_t t = last_ - 1; t >= first_; --t) {
      if (!in_.is_valid(t)) continue;
      scratch.terms[t - first_] = 1;
      return;
    }
  }

  // Calls visit(first, last, divisor) with the first and last token of every segment, and its size where the ratio is a
  // mean, else 1.
  template <typename Visit>
  void for_each_segment(Visit visit) const {
    int64_t first = -1, last = -1, size = 0;
    const auto close = [&] {
      if (size > 0) visit(first, last, plan_.ratio == Ratio::kSegmentMean ? size : 1);
      size = 0;
    };
    for (int64_t t = first_; t < last_; ++t) {
      if (!in_.is_valid(t)) continue;
      if (size > 0 && in_.segments[t] != in_.segments[last]) close();
      if (size == 0) first = t;
      last = t;
      ++size;
    }
    close();
  }

  // Writes the joint log ratio and log-prob of every segment at its last token, which holds the term.
  void gather_segments(RowScratch<T>& scratch) {
    for (auto* values : {&scratch.log_ratios, &scratch.scores, &scratch.term_gradient}) values->resize(last_ - first_);
    for_each_segment([&](int64_t first, int64_t last, int64_t divisor) {
      double log_ratio = 0, score = 0;
      for (int64_t t = first; t <= last; ++t) {
        if (!in_.is_valid(t)) continue;
        log_ratio += in_.log_ratio(t);
        score += static_cast<double>(in_.logprobs[t]);
      }
      scratch.log_ratios[last - first_] = static_cast<T>(log_ratio / static_cast<double>(divisor));
      scratch.scores[last - first_] = static_cast<T>(score / static_cast<double>(divisor));
      scratch.terms[last - first_] = 1;
    });
    tokens_.log_ratios = scratch.log_ratios.data();
    tokens_.scores = scratch.scores.data();
    tokens_.term_gradient = scratch.term_gradient.data();
  }

  // Adds the gradient of a segment's term, computed at its last token, to all of its tokens.
  void spread_over_segments(const RowScratch<T>& scratch) {
    for_each_segment([&](int64_t first, int64_t last, int64_t divisor) {
      const T share = scratch.term_gradient[last - first_] / static_cast<T>(divisor);
      for (int64_t t = first; t <= last; ++t) {
        if (in_.is_valid(t)) tokens_.gradient[t - first_] += share;
      }
    });
  }

  const PolicyBatch<T>& in_;
  const PolicyPlan plan_;
  const int64_t row_, first_, last_;
  const Counts counts_;
  PolicyTokens<T> tokens_;
};

// Calls visit(row) for every row, on several threads.
template <typename T, typename Visit>
void for_each_row(const PolicyBatch<T>& in, double nanoseconds_per_token, Visit visit) {
  divide(in.rows, threads_for(nanoseconds_per_token * static_cast<double>(in.tokens)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) visit(row);
  });
}

template <typename T>
void compute(const PolicyBatch<T>& in, T* gradient, T* entropy_gradient, double* metrics) {
  std::vector<Counts> counts(in.rows);
  for_each_row(in, in.segments == nullptr ? kCountCost : kEntropyCost,
               [&](int64_t row) { counts[row] = count_row(in, row); });
  Counts batch;
  for (const Counts& row : counts) batch.add(row);
  const auto shares = [&](int64_t row) { return in.shares(batch, counts[row]); };

  std::vector<PolicySums> sums(in.rows);
  if (in.needs_whole_rows()) {
    for_each_row(in, kRowTermCost,
                 [&](int64_t row) { WholeRow<T>(in, row, counts[row], shares(row), gradient).run(sums[row]); });
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
    const int64_t count = static_cast<int64_t>(tasks.size());
    const WalkKind kind = in.walk_kind();
    const double cost = (in.plan.loss == Loss::kClip ? kClipCost : kTermCost) * (sizeof(T) / sizeof(float));
    divide(count, threads_for(cost * static_cast<double>(in.tokens)), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = tasks[i].row;
        PolicyTokens<T> tokens = tokens_of(in, row, tasks[i].first, shares(row), gradient);
        if (has_all_tokens(in, row, counts[row])) tokens.mask = nullptr;
        run_tokens(tokens, in.plan, kind, tasks[i].count, parts[i]);
      }
    });
    for (size_t i = 0; i < tasks.size(); ++i) sums[tasks[i].row].merge(parts[i]);
    if (in.is_weights_by_row) {
      for (int64_t row = 0; row < in.rows; ++row) {
        if (counts[row].tokens > 0) sums[row].add_is_weight(in.is_weights[row]);
      }
    }
  }
  if (entropy_gradient != nullptr) {
    for_each_row(in, kEntropyCost, [&](int64_t row) {
      const int64_t last = in.start(row) + in.length(row);
      for (int64_t t = in.start(row); t < last; ++t) entropy_gradient[t] = in.entropy_gradient(t, shares(row));
    });
  }
  PolicySums all;
  RowMetrics row_metrics;
  for (int64_t row = 0; row < in.rows; ++row) {
    all.merge(sums[row]);
    row_metrics.add(counts[row], sums[row], in.plan);
  }
  write_metrics(in.plan, batch, all, row_metrics, in.policy_mask != nullptr, metrics);
}

// The rules of grpo_kernels/checks.py about values, which words them for eager calls.
template <typename T>
void check_log_probs(const char* name, const T* values, const PolicyBatch<T>& in) {
  constexpr double kLargestLogprob = 0.01;
  if (values == nullptr || std::any_of(values, values + in.tokens, [](T value) { return value < 0; })) return;
  for (int64_t t = 0; t < in.tokens; ++t) {
    GRPO_CHECK((in.mask != nullptr && !in.mask[t]) || !(static_cast<double>(values[t]) > kLargestLogprob), kOp, ": ",
               name, " must be log-probs, which are at most 0, got none below 0 and ", values[t], " at ", t);
  }
}

template <typename T>
void check_values(const PolicyBatch<T>& in) {
  check_log_probs("logprobs", in.logprobs, in);
  check_log_probs("old_logprobs", in.old_logprobs, in);
  check_log_probs("ref_logprobs", in.ref_logprobs, in);
  if (in.cu_seqlens == nullptr) return;
  for (int64_t t = in.cu_seqlens[in.rows]; t < in.tokens; ++t) {
    GRPO_CHECK(!in.is_valid(t), kOp, ": cu_seqlens must end at the number of tokens, ", in.tokens, ", got ",
               in.cu_seqlens[in.rows], "; padding after the last row needs a mask that is False there");
  }
}

}  // namespace

PolicyLossTensors policy_loss_cpu(GRPO_POLICY_PARAMETERS) {
  const PolicyInputs inputs(GRPO_POLICY_ARGUMENTS);
  const int64_t* const bounds = optional_data<int64_t>(cu_seqlens);
  if (bounds != nullptr) check_packed_bounds(kOp, bounds, inputs.rows, inputs.tokens);

  const PolicyResults results(inputs);
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    PolicyBatch<T> in = inputs.batch<T>();
    if (normalizers) in.normalizers.read(optional_data<double>(normalizers));
    if (checks_values) check_values(in);
    T* const gradient = results.gradient<T>();
    advise_huge_pages(gradient, inputs.tokens * sizeof(T));
    T* const entropy_gradient = results.entropy_gradient<T>(inputs);
    double* const metrics = data_of<double>(results.metrics);
    // packed tensors may have tokens after the last row
    const int64_t used = bounds == nullptr ? inputs.tokens : bounds[inputs.rows];
    std::fill(gradient + used, gradient + inputs.tokens, T{0});
    if (entropy_gradient != nullptr) std::fill(entropy_gradient + used, entropy_gradient + inputs.tokens, T{0});
    compute(in, gradient, entropy_gradient, metrics);
    *data_of<T>(results.loss) = static_cast<T>(metrics[0]);
  };
  inputs.is_double() ? run(double{}) : run(float{});
  return {results.loss, results.metrics, results.gradients};
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("policy_loss", TORCH_BOX(&grpo_kernels::policy_loss_cpu));
}
