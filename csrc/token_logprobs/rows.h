#pragma once

#include <algorithm>

#include "common/check.h"
#include "common/parallel.h"
#include "common/simd/levels.h"
#include "token_logprobs/simd.h"

// Both passes over rows of logits on several threads: log-probs and entropies, and the gradient of the logits.
namespace grpo_kernels {

constexpr const char* kLogprobsOp = "token_logprobs";

template <typename T>
struct LogitRows {
  const T* logits;
  LogitLayout layout;
  const int64_t* targets;
  const Wide<T>* temperatures;  // null: scaling.temperature for all rows
  LogitScaling scaling;

  LogitMap<Wide<T>> map(int64_t row) const {
    const double temperature = temperatures == nullptr ? scaling.temperature : temperatures[row];
    return make_logit_map<Wide<T>>(temperature, scaling.softcap, scaling.logit_scale);
  }
  bool ignored(int64_t row) const { return targets[row] == kIgnoredTarget; }
  bool has_target(int64_t row) const { return targets[row] >= 0 && targets[row] < layout.columns; }
};

// Calls visit(row) for every row, on several threads.
template <typename T, typename Visit>
void for_each_row(const LogitRows<T>& in, Visit visit) {
  // nanoseconds a logit, forward or backward
  const double cost = (std::is_same_v<T, double> ? 1.8 : 0.3) * (in.scaling.softcap > 0 ? 3 : 1);
  parallel_for(in.layout.rows, cost * static_cast<double>(in.layout.columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) visit(row);
  });
}

template <typename T>
void forward_rows(const LogitRows<T>& in, Wide<T>* logprobs, Wide<T>* entropy, double* normalizer) {
  for_each_row(in, [&](int64_t row) {
    RowResult result{0, 0, 0};
    GRPO_CHECK(in.has_target(row) || in.ignored(row), kLogprobsOp, ": targets must be in [0, ", in.layout.columns,
               ") or ", kIgnoredTarget, ", got ", in.targets[row], " in row ", row);
    if (in.has_target(row)) {
      const RowSums sums = GRPO_SIMD_CALL(row_sums, in.logits + in.layout.offset(row), in.layout.columns,
                                          in.targets[row], in.map(row), entropy != nullptr);
      result = finish_row(sums.softmax, sums.target_z);
    }
    logprobs[row] = static_cast<Wide<T>>(result.logprob);
    if (entropy != nullptr) entropy[row] = static_cast<Wide<T>>(result.entropy);
    normalizer[row] = result.normalizer;
  });
}

template <typename T>
struct Upstream {
  const Wide<T>*grad_logprobs, *grad_entropy, *entropy;  // each may be null
  const double* normalizer;

  RowGradient<Wide<T>> row(int64_t row) const {
    return {normalizer[row], grad_logprobs == nullptr ? 0.0 : static_cast<double>(grad_logprobs[row]),
            grad_entropy == nullptr ? 0.0 : static_cast<double>(grad_entropy[row]),
            entropy == nullptr ? 0.0 : static_cast<double>(entropy[row])};
  }
};

template <typename T, typename G>
void backward_rows(const LogitRows<T>& in, const Upstream<T>& upstream, G* gradient, const LogitLayout& layout) {
  for_each_row(in, [&](int64_t row) {
    G* const to = gradient + layout.offset(row);
    const RowGradient<Wide<T>> row_upstream = upstream.row(row);
    if (!in.has_target(row) || row_upstream.is_zero()) {
      std::fill_n(to, layout.columns, G{});
      return;
    }
    GRPO_SIMD_CALL(row_gradient, in.logits + in.layout.offset(row), to, layout.columns, in.targets[row], in.map(row),
                   row_upstream);
  });
}

}  // namespace grpo_kernels
