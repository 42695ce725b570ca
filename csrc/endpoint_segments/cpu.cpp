#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/allocate.h"
#include "common/op_namespace.h"
#include "common/parallel.h"
#include "common/row_groups.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "common/tensors.h"
#include "endpoint_segments/simd.h"

namespace grpo_kernels {

// advantages, returns, endpoint_mask, segment_ids, num_segments
using SegmentTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
namespace {

constexpr const char* kOp = "endpoint_segments";
constexpr int64_t kMaxKept = 1 << 22;  // doubles of working memory that a thread keeps for the next call
// Nanoseconds a token of the three walks along a row, on one thread.
constexpr double kScanCost = 2, kCutCost = 6, kWriteCost = 1;

template <typename T>
struct SegmentBatch {
  const T *rewards, *logprobs, *old, *values;
  const bool* mask;
  int64_t rows, width;
  const int64_t* bounds;         // of packed rows; null: rows of `width`
  std::vector<double> baseline;  // of each row, used without values

  int64_t begin(int64_t row) const { return bounds == nullptr ? row * width : bounds[row]; }
  int64_t length(int64_t row) const { return begin(row + 1) - begin(row); }
  int64_t tokens() const { return rows == 0 ? 0 : begin(rows) - begin(0); }

  SegmentRow<T> row(int64_t r) const {
    const int64_t at = begin(r);
    return {rewards + at, values == nullptr ? nullptr : values + at, values == nullptr ? baseline[r] : 0, mask + at,
            length(r)};
  }

  template <typename Visit>
  void for_each_row(double nanoseconds_per_token, Visit visit) const {
    divide(rows, threads_for(nanoseconds_per_token * static_cast<double>(tokens())), [&](int64_t first, int64_t end) {
      for (int64_t r = first; r < end; ++r) visit(r);
    });
  }
};

// Calls run(for_each_row) for each group; for_each_row(visit) calls visit(row) for the rows of the group, ascending.
// Without ids all rows are one group.
template <typename Run>
void for_each_group(const int64_t* ids, int64_t rows, Run run) {
  if (ids == nullptr) {
    run([&](auto visit) {
      for (int64_t r = 0; r < rows; ++r) visit(r);
    });
    return;
  }
  const RowGroups groups = groups_from_ids(ids, rows);
  for (int64_t s = 0; s < groups.size(); ++s) {
    run([&](auto visit) {
      for (int64_t i = groups.starts[s]; i < groups.starts[s + 1]; ++i) {
        visit(groups.order.empty() ? i : int64_t{groups.order[i]});
      }
    });
  }
}

// `sum` is not finite if an input of the row is not.
void check_finite(double sum, int64_t row) {
  GRPO_CHECK(std::isfinite(sum), kOp,
             ": rewards, values and log-probs must be finite where the mask is True, got infinity or NaN in row ", row);
}

// Baselines for use without a critic: the mean return of the group's rows that have tokens.
template <typename T>
void find_baselines(SegmentBatch<T>& batch, const SegmentSettings& settings, const int64_t* ids) {
  std::vector<double> returns(batch.rows);
  std::vector<char> has_tokens(batch.rows);
  batch.for_each_row(kScanCost, [&](int64_t r) {
    const int64_t at = batch.begin(r);
    double discounted = 0;
    for (int64_t t = at + batch.length(r) - 1; t >= at; --t) {
      if (!batch.mask[t]) continue;
      has_tokens[r] = 1;
      discounted = static_cast<double>(batch.rewards[t]) + settings.gamma * discounted;
    }
    returns[r] = discounted;
  });
  for (int64_t r = 0; r < batch.rows; ++r) check_finite(returns[r], r);
  for_each_group(ids, batch.rows, [&](auto for_each_row) {
    double sum = 0, count = 0;
    for_each_row([&](int64_t r) { sum += has_tokens[r] ? returns[r] : 0, count += has_tokens[r]; });
    for_each_row([&](int64_t r) { batch.baseline[r] = count > 0 ? sum / count : 0; });
  });
}

template <typename T>
struct SegmentResults {
  T *advantages, *returns;
  bool* endpoint_mask;
  int32_t *segment_ids, *num_segments;
};

// Cuts a row and writes the advantages of its segments to `credits`. Computes the advantages of tokens again, which is
// faster than keeping those of all rows from the pass that computes their scale.
template <typename T>
RowCuts cut_and_credit(const SegmentSettings& settings, const SegmentRow<T>& row, const T* logprobs, const T* old,
                       double scale, double tau, T* returns, int32_t* ids, bool* ends, double* credits,
                       RangedMoments* moments) {
  static thread_local Scratch<double> kept_advantages;
  static thread_local Scratch<T> kept_weights;
  static thread_local Scratch<Segment> kept_segments;
  const int64_t capacity = std::max<int64_t>(row.length, 1);
  double* const advantages = kept_advantages.get(capacity);
  T* const weights = kept_weights.get(capacity);
  Segment* const segments = kept_segments.get(capacity);
  token_advantages(settings, row, [&](int64_t t, double advantage, double token_return) {
    advantages[t] = advantage;
    returns[t] = static_cast<T>(token_return);
  });
  GRPO_SIMD_CALL(segment_weights, logprobs, old, row.length, weights);
  const auto cut = [&](auto is_bounded, auto is_coherent) {
    return cut_row<is_bounded, is_coherent>(settings, row, advantages, weights, scale, tau, ids, segments);
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  const bool is_coherent = settings.proxy == SegmentProxy::kCoherent;
  const RowCuts cuts = settings.rule == SegmentRule::kBounded ? is_coherent ? cut(yes, yes) : cut(yes, no)
                       : is_coherent                          ? cut(no, yes)
                                                              : cut(no, no);
  *moments = credit_segments(settings, segments, cuts.segments);
  std::fill(ends, ends + row.length, false);
  for (int32_t j = 0; j < cuts.segments; ++j) {
    ends[segments[j].last] = true;
    credits[j] = segments[j].credit;
  }
  return cuts;
}

template <typename T>
void write_row(const SegmentSettings& settings, const RangedMoments& moments, const bool* ends, const int32_t* ids,
               const double* credits, int32_t num_segments, int64_t length, T* advantages) {
  std::fill(advantages, advantages + length, T{});
  const EndpointNorm norm =
      settings.norm == SegmentNorm::kNone ? EndpointNorm{} : EndpointNorm(moments, settings.group_epsilon);
  int64_t next = 0;
  for (int32_t j = 0; j < num_segments; ++j) {
    const int64_t last = static_cast<const bool*>(std::memchr(ends + next, true, length - next)) - ends;
    const double credit = norm(credits[j]);
    advantages[last] = static_cast<T>(credit);
    if (settings.credit == SegmentCredit::kBroadcast) {
      for (int64_t t = last; t >= next && ids[t] == j; --t) advantages[t] = static_cast<T>(credit);
    }
    next = last + 1;
  }
}

template <typename T>
void find_segments(const SegmentBatch<T>& batch, const SegmentSettings& settings, double tau, const int64_t* ids,
                   const SegmentResults<T>& out) {
  static thread_local Scratch<double> kept;
  double* const credits =
      kept.get(batch.rows == 0 ? 1 : batch.begin(batch.rows) + 1);  // those of a row start at its first token
  std::vector<TokenSums> sums(batch.rows);
  batch.for_each_row(kScanCost, [&](int64_t r) {
    sums[r] = token_advantages(settings, batch.row(r), [](int64_t, double, double) {});
  });
  double squares = 0, tokens = 0;
  for (int64_t r = 0; r < batch.rows; ++r) {
    check_finite(sums[r].squares, r);
    squares += sums[r].squares, tokens += static_cast<double>(sums[r].tokens);
  }
  const double scale = std::max(tokens > 0 ? std::sqrt(squares / tokens) : 0.0, settings.group_epsilon);

  std::vector<RangedMoments> moments(batch.rows);
  std::vector<RowCuts> cuts(batch.rows);
  batch.for_each_row(kCutCost, [&](int64_t r) {
    const int64_t at = batch.begin(r);
    cuts[r] = cut_and_credit(settings, batch.row(r), batch.logprobs + at, batch.old + at, scale, tau, out.returns + at,
                             out.segment_ids + at, out.endpoint_mask + at, credits + at, &moments[r]);
    out.num_segments[r] = cuts[r].segments;
  });
  for (int64_t r = 0; r < batch.rows; ++r) check_finite(cuts[r].weights, r);
  for_each_group(ids, batch.rows, [&](auto for_each_row) {
    RangedMoments merged;
    for_each_row([&](int64_t r) { merged.merge(moments[r]); });
    for_each_row([&](int64_t r) { moments[r] = merged; });
  });
  batch.for_each_row(kWriteCost, [&](int64_t r) {
    const int64_t at = batch.begin(r);
    write_row(settings, moments[r], out.endpoint_mask + at, out.segment_ids + at, credits + at, out.num_segments[r],
              batch.length(r), out.advantages + at);
  });
  kept.keep_at_most(kMaxKept);
}

template <typename T>
SegmentTensors run(const Tensor& rewards, const Tensor& logprobs, const Tensor& old, const Tensor& mask,
                   const std::optional<Tensor>& values, const std::optional<Tensor>& cu_seqlens,
                   const std::optional<Tensor>& ids, double tau, const SegmentSettings& settings) {
  const int64_t total = rewards.numel();
  const auto dtype = rewards.scalar_type();
  for (const auto& [name, tensor] : {std::pair{"rewards", &rewards}, {"logprobs", &logprobs}, {"old_logprobs", &old}}) {
    check_array(kOp, name, *tensor, total, dtype);
  }
  check_array(kOp, "values", values, total, dtype);
  check_array(kOp, "mask", mask, total, ScalarType::Bool);
  SegmentBatch<T> batch{data_of<const T>(rewards),
                        data_of<const T>(logprobs),
                        data_of<const T>(old),
                        optional_data<T>(values),
                        data_of<const bool>(mask),
                        cu_seqlens ? cu_seqlens->numel() - 1 : rewards.size(0),
                        cu_seqlens ? 0 : rewards.size(1),
                        optional_data<int64_t>(cu_seqlens),
                        {}};
  if (cu_seqlens) check_packed_bounds(kOp, batch.bounds, batch.rows, total);
  check_array(kOp, "groups", ids, batch.rows, ScalarType::Long);
  const int64_t shape[2] = {rewards.size(0), rewards.dim() == 2 ? rewards.size(1) : 0};
  const auto like = [&](int32_t code) {
    Tensor tensor = empty_tensor(rewards, shape, rewards.dim(), code);
    advise_huge_pages(tensor.mutable_data_ptr(), total * tensor.element_size());
    return tensor;
  };
  const SegmentTensors results{like(dtype_of(rewards)), like(dtype_of(rewards)), like(aoti_torch_dtype_bool()),
                               like(aoti_torch_dtype_int32()),
                               empty_vector(rewards, batch.rows, aoti_torch_dtype_int32())};
  const auto& [advantages, returns, endpoint_mask, segment_ids, num_segments] = results;
  const SegmentResults<T> out{data_of<T>(advantages), data_of<T>(returns), data_of<bool>(endpoint_mask),
                              data_of<int32_t>(segment_ids), data_of<int32_t>(num_segments)};
  // packed tensors may have tokens after the last row
  const int64_t used = batch.begin(batch.rows);
  std::fill(out.advantages + used, out.advantages + total, T{});
  std::fill(out.returns + used, out.returns + total, T{});
  std::fill(out.endpoint_mask + used, out.endpoint_mask + total, false);
  std::fill(out.segment_ids + used, out.segment_ids + total, -1);
  const int64_t* const row_ids = optional_data<int64_t>(ids);
  batch.baseline.assign(batch.rows, 0);  // also with values: an empty tensor's data is null
  if (!values) find_baselines(batch, settings, row_ids);
  find_segments(batch, settings, tau, settings.norm == SegmentNorm::kPrompt ? row_ids : nullptr, out);
  return results;
}

}  // namespace

SegmentTensors endpoint_segments_cpu(Tensor rewards, Tensor logprobs, Tensor old_logprobs, Tensor mask,
                                     std::optional<Tensor> values, std::optional<Tensor> cu_seqlens,
                                     std::optional<Tensor> groups, Tensor threshold, std::vector<double> numbers) {
  const SegmentSettings settings = check_settings<SegmentSettings>(kOp, numbers);
  GRPO_CHECK(rewards.dim() == (cu_seqlens ? 1 : 2), kOp, ": rewards must have shape [B, T], or [M] with cu_seqlens");
  GRPO_CHECK(groups || (values && settings.norm != SegmentNorm::kPrompt), kOp,
             ": groups must be given without values or with norm='prompt', got none");
  check_float_or_double(kOp, "rewards", rewards);
  check_array(kOp, "threshold", threshold, 1, ScalarType::Double);
  const double tau = *static_cast<const double*>(threshold.const_data_ptr());
  const bool is_double = rewards.scalar_type() == ScalarType::Double;
  return is_double ? run<double>(rewards, logprobs, old_logprobs, mask, values, cu_seqlens, groups, tau, settings)
                   : run<float>(rewards, logprobs, old_logprobs, mask, values, cu_seqlens, groups, tau, settings);
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("endpoint_segments", TORCH_BOX(&grpo_kernels::endpoint_segments_cpu));
}
