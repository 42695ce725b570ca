#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "common/tensors.h"
#include "policy_loss/flags.h"
#include "policy_loss/simd.h"
#include "policy_loss/tensors.h"

// The CPU's passes over the rows before the terms of losses that look beyond a token.
namespace grpo_kernels {

// Rows of tokens for the passes before the terms, checked like the inputs of the loss.
struct PolicyRows {
  int64_t rows, tokens, width;
  const int64_t* bounds;  // of packed rows; null: rows of `width`

  PolicyRows(const Tensor& logprobs, const Tensor& base, const std::optional<Tensor>& mask,
             const std::optional<Tensor>& cu_seqlens)
      : rows(cu_seqlens ? cu_seqlens->numel() - 1 : logprobs.size(0)),
        tokens(logprobs.numel()),
        width(cu_seqlens ? 0 : logprobs.size(1)),
        bounds(optional_data<int64_t>(cu_seqlens)) {
    GRPO_CHECK(logprobs.dim() == (cu_seqlens ? 1 : 2), PolicyInputs::kOp,
               ": logprobs must have shape [B, T], or [M] with cu_seqlens, got ", logprobs.dim(), " dimensions");
    check_float_or_double(PolicyInputs::kOp, "logprobs", logprobs);
    check_array(PolicyInputs::kOp, "logprobs", logprobs, tokens, logprobs.scalar_type());
    check_array(PolicyInputs::kOp, "old_logprobs", base, tokens, logprobs.scalar_type());
    check_array(PolicyInputs::kOp, "mask", mask, tokens, ScalarType::Bool);
    check_array(PolicyInputs::kOp, "cu_seqlens", cu_seqlens, rows + 1, ScalarType::Long);
    if (bounds != nullptr) check_packed_bounds(PolicyInputs::kOp, bounds, rows, tokens);
  }

  int64_t start(int64_t row) const { return bounds == nullptr ? row * width : bounds[row]; }

  // Calls visit(row, first token, count) for every row, on several threads.
  template <typename Visit>
  void for_each(double nanoseconds_per_token, Visit visit) const {
    divide(rows, threads_for(nanoseconds_per_token * static_cast<double>(tokens)), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) visit(row, start(row), start(row + 1) - start(row));
    });
  }
};

// Nanoseconds a token on one thread.
constexpr double kDifferenceCost = 0.3, kFutureKlCost = 1;

inline std::tuple<Tensor, Tensor> policy_row_sums_cpu(Tensor logprobs, Tensor base, std::optional<Tensor> mask,
                                                      std::optional<Tensor> cu_seqlens) {
  const PolicyRows in(logprobs, base, mask, cu_seqlens);
  const Tensor sums = empty_vector(logprobs, in.rows, aoti_torch_dtype_float64());
  const Tensor counts = empty_vector(logprobs, in.rows, aoti_torch_dtype_float64());
  const bool* flags = optional_data<bool>(mask);
  const auto run = [&](auto type) {
    using T = decltype(type);
    in.for_each(kDifferenceCost, [&](int64_t row, int64_t first, int64_t count) {
      const bool* own = offset_or_null(flags, first);
      data_of<double>(counts)[row] = static_cast<double>(own == nullptr ? count : count_true(own, count));
      data_of<double>(sums)[row] = GRPO_SIMD_CALL(difference_sum, data_of<const T>(logprobs) + first,
                                                  data_of<const T>(base) + first, own, count);
    });
  };
  logprobs.scalar_type() == ScalarType::Double ? run(double{}) : run(float{});
  return {sums, counts};
}

inline Tensor policy_future_kl_cpu(Tensor logprobs, Tensor old_logprobs, Tensor advantages, std::optional<Tensor> mask,
                                   std::optional<Tensor> cu_seqlens, std::vector<double> settings) {
  const PolicyRows in(logprobs, old_logprobs, mask, cu_seqlens);
  GRPO_CHECK(settings.size() == 7, PolicyInputs::kOp, ": settings must have 7 numbers, got ", settings.size());
  const bool by_row = advantages.dim() != logprobs.dim() || advantages.numel() != in.tokens;
  check_array(PolicyInputs::kOp, "advantages", advantages, by_row ? in.rows : in.tokens, logprobs.scalar_type());
  Tensor weights = empty_tensor(logprobs, logprobs.sizes().data(), logprobs.dim(), dtype_of(logprobs));
  advise_huge_pages(weights.mutable_data_ptr(), in.tokens * weights.element_size());
  const auto run = [&](auto type) {
    using T = decltype(type);
    const auto at = [&](int i) { return static_cast<T>(settings[i]); };
    const T* values = data_of<const T>(advantages);
    // packed tensors may have tokens behind the last row
    std::fill(data_of<T>(weights) + in.start(in.rows), data_of<T>(weights) + in.tokens, T{1});
    in.for_each(kFutureKlCost, [&](int64_t row, int64_t first, int64_t count) {
      const FutureKl<T> tokens{data_of<const T>(logprobs) + first,
                               data_of<const T>(old_logprobs) + first,
                               offset_or_null(optional_data<bool>(mask), first),
                               by_row ? nullptr : values + first,
                               by_row ? values[row] : T{0},
                               settings[0],
                               at(1),
                               at(2),
                               at(3),
                               at(4),
                               at(5),
                               at(6)};
      GRPO_SIMD_CALL(future_kl, tokens, count, data_of<T>(weights) + first);
    });
  };
  logprobs.scalar_type() == ScalarType::Double ? run(double{}) : run(float{});
  return weights;
}

}  // namespace grpo_kernels
