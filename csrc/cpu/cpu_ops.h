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

std::tuple<Tensor, Tensor, Tensor> token_logprobs_cpu(Tensor logits, Tensor targets,
                                                      std::optional<Tensor> row_temperature, double temperature,
                                                      std::optional<double> softcap, double logit_scale,
                                                      bool want_entropy, bool inplace_backward);
Tensor token_logprobs_backward_cpu(std::optional<Tensor> grad_logprobs, std::optional<Tensor> grad_entropy,
                                   Tensor logits, Tensor targets, Tensor normalizer, std::optional<Tensor> entropy,
                                   std::optional<Tensor> row_temperature, double temperature,
                                   std::optional<double> softcap, double logit_scale);
void token_logprobs_backward_inplace_cpu(Tensor logits, std::optional<Tensor> grad_logprobs,
                                         std::optional<Tensor> grad_entropy, Tensor targets, Tensor normalizer,
                                         std::optional<Tensor> entropy, std::optional<Tensor> row_temperature,
                                         double temperature, std::optional<double> softcap, double logit_scale);

using PolicyLossTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

PolicyLossTensors policy_loss_cpu(Tensor logprobs, std::optional<Tensor> old, Tensor advantages,
                                  std::optional<Tensor> mask, std::optional<Tensor> cu_seqlens,
                                  std::optional<Tensor> segments, std::optional<Tensor> ref,
                                  std::optional<Tensor> sampling, std::optional<Tensor> is_weights,
                                  std::optional<Tensor> entropy, std::optional<Tensor> entropy_floor,
                                  std::optional<Tensor> weights, std::optional<Tensor> normalizers,
                                  std::vector<double> counts, std::vector<int64_t> modes,
                                  std::vector<double> coefficients, bool needs_entropy_gradient);

// labels, group_ids, num_groups, silhouette, best_k, verdict, status
using SimilarityTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
// labels, num_groups, silhouette, best_k, verdict
using ClusterTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

SimilarityTensors similarity_groups_cpu(Tensor embeddings, std::optional<Tensor> order, std::optional<Tensor> offsets,
                                        int64_t num_groups, int64_t size, std::optional<Tensor> valid,
                                        std::vector<int64_t> modes, std::vector<double> coefficients);
std::tuple<Tensor, Tensor> pairwise_cosine_cpu(Tensor embeddings, std::optional<Tensor> order,
                                               std::optional<Tensor> offsets, int64_t num_groups, int64_t size,
                                               std::optional<Tensor> valid);
ClusterTensors cluster_distances_cpu(Tensor distances, std::vector<int64_t> modes, std::vector<double> coefficients);
std::tuple<Tensor, Tensor> agglomerate_cpu(Tensor distances, int64_t linkage);
std::tuple<Tensor, Tensor> silhouette_cpu(Tensor distances, Tensor labels);

// advantages, returns, endpoint_mask, segment_ids, num_segments
using SegmentTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

SegmentTensors endpoint_segments_cpu(Tensor rewards, Tensor logprobs, Tensor old_logprobs, Tensor mask,
                                     std::optional<Tensor> values, std::optional<Tensor> cu_seqlens,
                                     std::optional<Tensor> groups, Tensor threshold, std::vector<int64_t> modes,
                                     std::vector<double> coefficients);

// Advice about memory that nobody has written yet.
void expect_large_tensor_cpu(Tensor tensor);

}  // namespace grpo_kernels
