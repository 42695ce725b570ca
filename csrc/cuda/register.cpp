#include <torch/csrc/stable/library.h>

#include "cuda_ops.h"

// Every CUDA kernel that torch can call, in one place. Compiled for the host, by tests, the same ops take CPU
// tensors.
#ifdef GRPO_KERNELS_EMULATE
#define GRPO_DEVICE CPU
#else
#define GRPO_DEVICE CUDA
#endif

STABLE_TORCH_LIBRARY_IMPL(grpo_kernels, GRPO_DEVICE, library) {
  library.impl("_group_advantages_cuda", TORCH_BOX(&grpo_kernels::group_advantages_cuda));
  library.impl("_token_logprobs_cuda", TORCH_BOX(&grpo_kernels::token_logprobs_cuda));
  library.impl("_token_logprobs_backward_cuda", TORCH_BOX(&grpo_kernels::token_logprobs_backward_cuda));
  library.impl("_policy_loss_cuda", TORCH_BOX(&grpo_kernels::policy_loss_cuda));
  library.impl("_pairwise_cosine_cuda", TORCH_BOX(&grpo_kernels::pairwise_cosine_cuda));
  library.impl("_cluster_distances_cuda", TORCH_BOX(&grpo_kernels::cluster_distances_cuda));
  library.impl("_agglomerate_cuda", TORCH_BOX(&grpo_kernels::agglomerate_cuda));
  library.impl("_silhouette_cuda", TORCH_BOX(&grpo_kernels::silhouette_cuda));
  library.impl("_endpoint_segments_cuda", TORCH_BOX(&grpo_kernels::endpoint_segments_cuda));
}
