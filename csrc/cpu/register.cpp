#include <torch/csrc/stable/library.h>

#include "cpu_ops.h"

// Every CPU kernel that torch can call, in one place. The schemas are defined in grpo_kernels/ops.
STABLE_TORCH_LIBRARY_IMPL(grpo_kernels, CPU, library) {
  library.impl("group_advantages_cpu", TORCH_BOX(&grpo_kernels::group_advantages_cpu));
  library.impl("token_logprobs_cpu", TORCH_BOX(&grpo_kernels::token_logprobs_cpu));
  library.impl("token_logprobs_backward_cpu", TORCH_BOX(&grpo_kernels::token_logprobs_backward_cpu));
  library.impl("token_logprobs_backward_inplace_cpu", TORCH_BOX(&grpo_kernels::token_logprobs_backward_inplace_cpu));
  library.impl("policy_loss_cpu", TORCH_BOX(&grpo_kernels::policy_loss_cpu));
  library.impl("similarity_groups_cpu", TORCH_BOX(&grpo_kernels::similarity_groups_cpu));
  library.impl("pairwise_cosine_cpu", TORCH_BOX(&grpo_kernels::pairwise_cosine_cpu));
  library.impl("cluster_distances_cpu", TORCH_BOX(&grpo_kernels::cluster_distances_cpu));
  library.impl("agglomerate_cpu", TORCH_BOX(&grpo_kernels::agglomerate_cpu));
  library.impl("silhouette_cpu", TORCH_BOX(&grpo_kernels::silhouette_cpu));
  library.impl("endpoint_segments_cpu", TORCH_BOX(&grpo_kernels::endpoint_segments_cpu));
  library.impl("_expect_large_tensor_cpu", TORCH_BOX(&grpo_kernels::expect_large_tensor_cpu));
}
