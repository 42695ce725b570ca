#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/cuda/torch_stream.h"
#include "common/op_namespace.h"
#include "common/tensors.h"
#include "token_advantages/cuda.h"

namespace grpo_kernels {

using TokenAdvantageTensors = std::tuple<Tensor, Tensor>;  // advantages, returns
namespace {

constexpr const char* kOp = "token_advantages";

}  // namespace

TokenAdvantageTensors token_advantages_cuda(Tensor rewards, std::optional<Tensor> values, Tensor mask,
                                            std::optional<Tensor> bounds, std::optional<Tensor> turns,
                                            std::vector<int64_t> modes, std::vector<double> coefficients) {
  const auto settings = check_settings<TokenAdvantageSettings>(kOp, modes, coefficients);
  GRPO_CHECK(rewards.dim() == (bounds ? 1 : 2), kOp, ": rewards must have shape [B, T], or [M] with cu_seqlens");
  const int64_t total = rewards.numel(), rows = bounds ? bounds->numel() - 1 : rewards.size(0);
  const auto dtype = rewards.scalar_type();
  check_float_or_double(kOp, "rewards", rewards);
  check_array(kOp, "rewards", rewards, total, dtype);
  check_array(kOp, "values", values, total, dtype);
  check_array(kOp, "mask", mask, total, ScalarType::Bool);
  check_array(kOp, "turns", turns, total, ScalarType::Int);
  check_array(kOp, "cu_seqlens", bounds, rows + 1, ScalarType::Long);

  const int64_t shape[2] = {rewards.size(0), rewards.dim() == 2 ? rewards.size(1) : 0};
  const auto like = [&] { return empty_tensor(rewards, shape, rewards.dim(), dtype_of(rewards)); };
  const TokenAdvantageTensors results{like(), like()};
  if (rows <= 0 || total == 0) return results;
  const DeviceGuard guard(rewards.get_device_index());
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    std::optional<Tensor> roles, chunks, moments, norm;
    TokenArrays<T> arrays{};
    arrays.rewards = data_of<const T>(rewards);
    arrays.values = optional_data<T>(values);
    arrays.mask = data_of<const bool>(mask);
    arrays.turns = optional_data<int32_t>(turns);
    arrays.bounds = optional_data<int64_t>(bounds);
    arrays.rows = rows;
    arrays.width = shape[1];
    arrays.total = total;
    arrays.has_values = values.has_value();
    arrays.settings = settings;
    if (turns) arrays.roles = reinterpret_cast<unsigned char*>(allocate_records<double>(roles, rewards, total / 8 + 1));
    const int64_t num_records = rows * arrays.num_chunks();
    arrays.chunks = allocate_records<TokenChunk>(chunks, rewards, num_records);
    arrays.moments = allocate_records<RangedMoments>(moments, rewards, num_records);
    arrays.norm = allocate_records<TokenNorm>(norm, rewards, 1);
    arrays.advantages = data_of<T>(std::get<0>(results));
    arrays.returns = data_of<T>(std::get<1>(results));
    launch_token_advantages(arrays, current_stream(rewards.get_device_index()));
  };
  dtype == ScalarType::Double ? run(double{}) : run(float{});
  return results;
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, GRPO_CUDA_DEVICE, library) {
  library.impl("_token_advantages_cuda", TORCH_BOX(&grpo_kernels::token_advantages_cuda));
}
