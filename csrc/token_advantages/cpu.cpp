#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "common/allocate.h"
#include "common/op_namespace.h"
#include "common/parallel.h"
#include "common/scratch.h"
#include "common/simd/levels.h"
#include "common/tensors.h"
#include "token_advantages/simd.h"

namespace grpo_kernels {

using TokenAdvantageTensors = std::tuple<Tensor, Tensor>;  // advantages, returns
namespace {

constexpr const char* kOp = "token_advantages";
// Nanoseconds a token on one thread: of the walk along a row with its moments, and of the whitening.
constexpr double kWalkCost = 3, kWhitenCost = 0.5;

template <typename T>
struct TokenBatch {
  const T *rewards, *values;
  const bool* mask;
  const int32_t* turns;
  int64_t rows, width;
  const int64_t* bounds;  // of packed rows; null: rows of `width`
  T *advantages, *returns;

  int64_t begin(int64_t row) const { return bounds == nullptr ? row * width : bounds[row]; }
  int64_t length(int64_t row) const { return begin(row + 1) - begin(row); }

  template <typename Visit>
  void for_each_row(double nanoseconds_per_token, Visit visit) const {
    const double tokens = rows == 0 ? 0 : static_cast<double>(begin(rows) - begin(0));
    divide(rows, threads_for(nanoseconds_per_token * tokens), [&](int64_t first, int64_t end) {
      for (int64_t r = first; r < end; ++r) visit(r);
    });
  }
};

// Writes the advantages and returns of a row with turns, as if each token were the first of its turn; returns whether
// every reward is a number.
template <typename T>
bool walk_turns(const TokenAdvantageSettings& settings, const TokenBatch<T>& batch, int64_t row) {
  double entering = 0, next_return = 0;
  int32_t next_turn = -1;
  bool is_scored = true;
  const int64_t first = batch.begin(row);
  for (int64_t t = first + batch.length(row) - 1; t >= first; --t) {
    if (!batch.mask[t]) {
      batch.advantages[t] = batch.returns[t] = 0;
      const double carried = carried_reward(settings, batch.rewards[t]);
      entering += carried, next_return += carried;
      continue;
    }
    const double reward = static_cast<double>(batch.rewards[t]);
    const double value = batch.values == nullptr ? 0 : static_cast<double>(batch.values[t]);
    const double after = batch.turns[t] == next_turn ? next_return : entering;
    next_return = reward + after;
    entering = step_map(settings, reward, value)(after);
    next_turn = batch.turns[t];
    is_scored &= reward == reward;
    batch.advantages[t] = static_cast<T>(next_return - value);
    batch.returns[t] = static_cast<T>(next_return);
  }
  return is_scored;
}

template <typename T>
bool walk_row(const TokenAdvantageSettings& settings, const TokenBatch<T>& batch, int64_t row) {
  const int64_t at = batch.begin(row);
  const T* const values = batch.values == nullptr ? nullptr : batch.values + at;
  return GRPO_SIMD_CALL(walk_tokens, settings, batch.rewards + at, values, batch.mask + at, batch.length(row),
                        batch.advantages + at, batch.returns + at);
}

// A row that is not scored has no advantages and keeps its values.
template <typename T>
void reset_row(const TokenBatch<T>& batch, int64_t row) {
  for (int64_t t = batch.begin(row); t < batch.begin(row + 1); ++t) {
    batch.advantages[t] = 0;
    batch.returns[t] = batch.mask[t] && batch.values != nullptr ? batch.values[t] : T{0};
  }
}

// Gives every token of a turn what its first token has.
template <typename T>
void spread_turns(const TokenBatch<T>& batch, int64_t row) {
  int64_t first = -1;
  for (int64_t t = batch.begin(row); t < batch.begin(row + 1); ++t) {
    if (!batch.mask[t]) continue;
    if (first < 0 || batch.turns[t] != batch.turns[first]) first = t;
    batch.advantages[t] = batch.advantages[first];
    batch.returns[t] = batch.returns[first];
  }
}

template <typename T>
void find_advantages(const TokenAdvantageSettings& settings, const TokenBatch<T>& batch) {
  const bool is_whitened = settings.whiten == TokenWhiten::kTokens;
  std::vector<RangedMoments> moments(batch.rows);
  std::vector<char> is_scored(batch.rows);
  batch.for_each_row(kWalkCost, [&](int64_t r) {
    is_scored[r] = batch.turns != nullptr ? walk_turns(settings, batch, r) : walk_row(settings, batch, r);
    if (!is_scored[r]) reset_row(batch, r);
    if (batch.turns != nullptr) spread_turns(batch, r);
    if (!is_whitened || !is_scored[r]) return;
    const int64_t at = batch.begin(r);
    moments[r] = GRPO_SIMD_CALL(advantage_moments, batch.advantages + at, batch.mask + at, batch.length(r));
  });
  if (!is_whitened) return;
  RangedMoments merged;
  for (const RangedMoments& own : moments) merged.merge(own);
  const TokenNorm norm(settings, merged);
  batch.for_each_row(kWhitenCost, [&](int64_t r) {
    const int64_t at = batch.begin(r);
    if (is_scored[r]) GRPO_SIMD_CALL(whiten_advantages, norm, batch.mask + at, batch.length(r), batch.advantages + at);
  });
}

template <typename T>
TokenAdvantageTensors run(const Tensor& rewards, const std::optional<Tensor>& values, const Tensor& mask,
                          const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& turns,
                          const TokenAdvantageSettings& settings) {
  const int64_t total = rewards.numel();
  const auto dtype = rewards.scalar_type();
  check_array(kOp, "rewards", rewards, total, dtype);
  check_array(kOp, "values", values, total, dtype);
  check_array(kOp, "mask", mask, total, ScalarType::Bool);
  check_array(kOp, "turns", turns, total, ScalarType::Int);
  if (cu_seqlens) check_array(kOp, "cu_seqlens", *cu_seqlens, cu_seqlens->numel(), ScalarType::Long);
  const int64_t shape[2] = {rewards.size(0), rewards.dim() == 2 ? rewards.size(1) : 0};
  const auto like = [&] {
    Tensor tensor = empty_tensor(rewards, shape, rewards.dim(), dtype_of(rewards));
    advise_huge_pages(tensor.mutable_data_ptr(), total * tensor.element_size());
    return tensor;
  };
  const TokenAdvantageTensors results{like(), like()};
  const TokenBatch<T> batch{data_of<const T>(rewards),
                            optional_data<T>(values),
                            data_of<const bool>(mask),
                            optional_data<int32_t>(turns),
                            cu_seqlens ? cu_seqlens->numel() - 1 : shape[0],
                            shape[1],
                            optional_data<int64_t>(cu_seqlens),
                            data_of<T>(std::get<0>(results)),
                            data_of<T>(std::get<1>(results))};
  if (cu_seqlens) check_packed_bounds(kOp, batch.bounds, batch.rows, total);
  // packed tensors may have tokens after the last row
  const int64_t used = batch.begin(batch.rows);
  std::fill(batch.advantages + used, batch.advantages + total, T{});
  std::fill(batch.returns + used, batch.returns + total, T{});
  if (used > 0) find_advantages(settings, batch);
  return results;
}

}  // namespace

TokenAdvantageTensors token_advantages_cpu(Tensor rewards, std::optional<Tensor> values, Tensor mask,
                                           std::optional<Tensor> cu_seqlens, std::optional<Tensor> turns,
                                           std::vector<double> numbers) {
  const auto settings = check_settings<TokenAdvantageSettings>(kOp, numbers);
  GRPO_CHECK(rewards.dim() == (cu_seqlens ? 1 : 2), kOp, ": rewards must have shape [B, T], or [M] with cu_seqlens");
  GRPO_CHECK(!cu_seqlens || cu_seqlens->numel() > 0, kOp, ": cu_seqlens must have shape [B + 1], got [0]");
  check_float_or_double(kOp, "rewards", rewards);
  return rewards.scalar_type() == ScalarType::Double ? run<double>(rewards, values, mask, cu_seqlens, turns, settings)
                                                     : run<float>(rewards, values, mask, cu_seqlens, turns, settings);
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, CPU, library) {
  library.impl("token_advantages", TORCH_BOX(&grpo_kernels::token_advantages_cpu));
}
