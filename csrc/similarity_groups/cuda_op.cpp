#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/cuda/torch_stream.h"
#include "common/op_namespace.h"
#include "common/tensors.h"
#include "similarity_groups/cuda.h"
#include "similarity_groups/prompts.h"

namespace grpo_kernels {

// labels, group_ids, num_groups, silhouette, best_k, verdict
using ClusteredRows = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
namespace {

// Memory for the matrices of prompts that do not fit into shared memory, else null.
double* allocate_matrices(std::optional<Tensor>& memory, const Tensor& like, const Prompts& prompts) {
  const int64_t doubles = matrix_doubles(prompts);
  return doubles == 0 ? nullptr : allocate_records<double>(memory, like, doubles);
}

Prompts check_distances(const Tensor& distances) {
  GRPO_CHECK(distances.dim() == 3 && distances.size(1) == distances.size(2) && distances.size(1) <= kMaxItems,
             kSimilarityOp, ": distances must have shape [P, K, K] with K at most ", kMaxItems);
  check_array(kSimilarityOp, "distances", distances, distances.numel(), ScalarType::Float);
  return {distances.size(0), distances.size(1), nullptr, nullptr};
}

const float* floats_of(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }

}  // namespace

std::tuple<Tensor, Tensor> pairwise_cosine_cuda(Tensor embeddings, std::optional<Tensor> order,
                                                std::optional<Tensor> offsets, int64_t num_groups, int64_t size,
                                                std::optional<Tensor> valid) {
  const int64_t rows = embeddings.size(0);
  const Prompts prompts = check_prompts(rows, order, offsets, num_groups, size);
  GRPO_CHECK(embeddings.dim() == 2 && embeddings.is_contiguous() && embeddings.size(1) > 0, kSimilarityOp,
             ": embeddings must be contiguous of shape [N, D] with D > 0");
  check_array(kSimilarityOp, "valid", valid, rows, ScalarType::Bool);
  const int64_t shape[3] = {num_groups, size, size};
  const Tensor distances = empty_tensor(embeddings, shape, 3, aoti_torch_dtype_float32());
  const Tensor status = empty_vector(embeddings, rows, aoti_torch_dtype_uint8());
  if (num_groups == 0 || size == 0) return {distances, status};
  const DeviceGuard guard(embeddings.get_device_index());
  void* stream = current_stream(embeddings.get_device_index());
  for_float_dtype<false>(kSimilarityOp, "embeddings", embeddings, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const EmbeddingArrays<T> arrays{static_cast<const T*>(embeddings.const_data_ptr()),
                                    embeddings.size(1),
                                    prompts,
                                    optional_data<bool>(valid),
                                    data_of<float>(distances),
                                    data_of<uint8_t>(status)};
    launch_pairwise_cosine(arrays, stream);
  });
  return {distances, status};
}

ClusteredRows cluster_distances_cuda(Tensor distances, std::optional<Tensor> order, std::optional<Tensor> offsets,
                                     int64_t rows, std::vector<double> numbers) {
  const Prompts shape = check_distances(distances);
  const Prompts prompts = check_prompts(rows, order, offsets, shape.count, shape.size);
  const Tensor labels = empty_vector(distances, rows, aoti_torch_dtype_int32());
  const Tensor ids = empty_vector(distances, rows, aoti_torch_dtype_int64());
  const Tensor groups = empty_vector(distances, prompts.count, aoti_torch_dtype_int32());
  const Tensor silhouette = empty_vector(distances, prompts.count, aoti_torch_dtype_float32());
  const Tensor best_k = empty_vector(distances, prompts.count, aoti_torch_dtype_int32());
  const Tensor verdict = empty_vector(distances, prompts.count, aoti_torch_dtype_uint8());
  if (prompts.count > 0) {
    const DeviceGuard guard(distances.get_device_index());
    std::optional<Tensor> matrices;
    launch_clusters(
        {floats_of(distances), prompts, check_settings<SimilaritySettings>(kSimilarityOp, numbers),
         allocate_matrices(matrices, distances, prompts), data_of<int32_t>(labels), data_of<int64_t>(ids),
         data_of<int32_t>(groups), data_of<float>(silhouette), data_of<int32_t>(best_k), data_of<uint8_t>(verdict)},
        current_stream(distances.get_device_index()));
  }
  return {labels, ids, groups, silhouette, best_k, verdict};
}

std::tuple<Tensor, Tensor> agglomerate_cuda(Tensor distances, int64_t linkage) {
  const Prompts prompts = check_distances(distances);
  const int64_t max_merges = prompts.size > 0 ? prompts.size - 1 : 0, shape[3] = {prompts.count, max_merges, 2};
  const Tensor merges = empty_tensor(distances, shape, 3, aoti_torch_dtype_int32());
  const Tensor heights = empty_tensor(distances, shape, 2, aoti_torch_dtype_float32());
  if (prompts.count > 0 && max_merges > 0) {
    const DeviceGuard guard(distances.get_device_index());
    std::optional<Tensor> matrices;
    launch_trees({floats_of(distances), prompts, static_cast<Linkage>(linkage),
                  allocate_matrices(matrices, distances, prompts), data_of<int32_t>(merges), data_of<float>(heights)},
                 current_stream(distances.get_device_index()));
  }
  return {merges, heights};
}

std::tuple<Tensor, Tensor> silhouette_cuda(Tensor distances, Tensor labels) {
  const Prompts prompts = check_distances(distances);
  check_array(kSimilarityOp, "labels", labels, prompts.count * prompts.size, ScalarType::Long);
  const int64_t shape[2] = {prompts.count, prompts.size};
  const Tensor scores = empty_vector(distances, prompts.count, aoti_torch_dtype_float32());
  const Tensor samples = empty_tensor(distances, shape, 2, aoti_torch_dtype_float32());
  if (prompts.count > 0) {
    const DeviceGuard guard(distances.get_device_index());
    std::optional<Tensor> matrices;
    launch_silhouettes(
        {floats_of(distances), prompts, static_cast<const int64_t*>(labels.const_data_ptr()),
         allocate_matrices(matrices, distances, prompts), data_of<float>(scores), data_of<float>(samples)},
        current_stream(distances.get_device_index()));
  }
  return {scores, samples};
}

}  // namespace grpo_kernels

STABLE_TORCH_LIBRARY_IMPL(GRPO_NAMESPACE, GRPO_CUDA_DEVICE, library) {
  library.impl("_pairwise_cosine_cuda", TORCH_BOX(&grpo_kernels::pairwise_cosine_cuda));
  library.impl("_cluster_distances_cuda", TORCH_BOX(&grpo_kernels::cluster_distances_cuda));
  library.impl("_agglomerate_cuda", TORCH_BOX(&grpo_kernels::agglomerate_cuda));
  library.impl("_silhouette_cuda", TORCH_BOX(&grpo_kernels::silhouette_cuda));
}
