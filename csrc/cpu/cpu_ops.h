#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace grpo_kernels {

using torch::stable::Tensor;
using AdvantageTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

AdvantageTensors group_advantages_cpu(Tensor rewards, std::optional<Tensor> groups, int64_t group_size,
                                      std::optional<Tensor> subgroups, std::optional<Tensor> valid,
                                      std::optional<Tensor> lengths, std::optional<Tensor> baselines,
                                      std::vector<double> weights, std::vector<int64_t> modes,
                                      std::vector<double> coefficients);

}  // namespace grpo_kernels
