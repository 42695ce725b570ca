#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace grpo_kernels {

using torch::stable::Tensor;
using AdvantageTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

AdvantageTensors group_advantages_cuda(Tensor rewards, std::optional<Tensor> order, std::optional<Tensor> starts,
                                       std::optional<Tensor> parent, std::optional<Tensor> parent_starts,
                                       int64_t group_size, std::optional<Tensor> subgroups, std::optional<Tensor> valid,
                                       std::optional<Tensor> lengths, std::optional<Tensor> baselines,
                                       std::vector<double> weights, std::vector<int64_t> modes,
                                       std::vector<double> coefficients);

std::tuple<Tensor, Tensor, Tensor> token_logprobs_cuda(Tensor logits, Tensor targets,
                                                       std::optional<Tensor> row_temperature, double temperature,
                                                       std::optional<double> softcap, double logit_scale,
                                                       bool want_entropy);
// The gradient is written into the first argument, which may be the logits.
void token_logprobs_backward_cuda(Tensor gradient, std::optional<Tensor> grad_logprobs,
                                  std::optional<Tensor> grad_entropy, Tensor logits, Tensor targets, Tensor normalizer,
                                  std::optional<Tensor> entropy, std::optional<Tensor> row_temperature,
                                  double temperature, std::optional<double> softcap, double logit_scale);

using PolicyLossTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

PolicyLossTensors policy_loss_cuda(Tensor logprobs, std::optional<Tensor> old, Tensor advantages,
                                   std::optional<Tensor> mask, std::optional<Tensor> cu_seqlens,
                                   std::optional<Tensor> segments, std::optional<Tensor> ref,
                                   std::optional<Tensor> sampling, std::optional<Tensor> is_weights,
                                   std::optional<Tensor> entropy, std::optional<Tensor> entropy_floor,
                                   std::optional<Tensor> weights, std::optional<Tensor> normalizers,
                                   std::vector<double> counts, std::vector<int64_t> modes,
                                   std::vector<double> coefficients, bool needs_entropy_gradient);

// labels, group_ids, num_groups, silhouette, best_k, verdict
using ClusteredRows = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

std::tuple<Tensor, Tensor> pairwise_cosine_cuda(Tensor embeddings, std::optional<Tensor> order,
                                                std::optional<Tensor> offsets, int64_t num_groups, int64_t size,
                                                std::optional<Tensor> valid);
ClusteredRows cluster_distances_cuda(Tensor distances, std::optional<Tensor> order, std::optional<Tensor> offsets,
                                     int64_t rows, std::vector<int64_t> modes, std::vector<double> coefficients);
std::tuple<Tensor, Tensor> agglomerate_cuda(Tensor distances, int64_t linkage);
std::tuple<Tensor, Tensor> silhouette_cuda(Tensor distances, Tensor labels);

// advantages, returns, endpoint_mask, segment_ids, num_segments; bounds are cu_seqlens made to ascend
using SegmentTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

SegmentTensors endpoint_segments_cuda(Tensor rewards, Tensor logprobs, Tensor old_logprobs, Tensor mask,
                                      std::optional<Tensor> values, std::optional<Tensor> bounds,
                                      std::optional<Tensor> order, std::optional<Tensor> starts, Tensor threshold,
                                      std::vector<int64_t> modes, std::vector<double> coefficients);

}  // namespace grpo_kernels
