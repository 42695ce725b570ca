"""Fused CPU, Triton and CUDA kernels for GRPO-style reinforcement learning of language models."""

from grpo_kernels.config import AdvantageConfig, LossConfig, SegmentConfig, SimilarityConfig
from grpo_kernels.dispatch import available_backends, use_backend
from grpo_kernels.functional import diversity
from grpo_kernels.functional.endpoint_segments import EndpointSegments, SegmentThreshold, endpoint_segments
from grpo_kernels.functional.group_advantages import GroupAdvantages, group_advantages, group_ids
from grpo_kernels.functional.linear_logprobs import linear_logprobs
from grpo_kernels.functional.linear_policy_loss import linear_policy_loss
from grpo_kernels.functional.policy_loss import PolicyLoss, policy_loss
from grpo_kernels.functional.policy_loss_metrics import PolicyLossMetrics
from grpo_kernels.functional.segment_metrics import segment_metrics
from grpo_kernels.functional.similarity_groups import (
    RowStatus,
    SimilarityGroups,
    Verdict,
    cluster_distances,
    similarity_groups,
)
from grpo_kernels.functional.similarity_metrics import SimilarityAdvantages, similarity_advantages, similarity_metrics
from grpo_kernels.functional.similarity_parts import Dendrogram, Silhouette, agglomerate, pairwise_cosine, silhouette
from grpo_kernels.functional.token_logprobs import TokenLogprobs, token_logprobs

__version__ = "0.1.0"

__all__ = [
    "AdvantageConfig",
    "Dendrogram",
    "EndpointSegments",
    "GroupAdvantages",
    "LossConfig",
    "PolicyLoss",
    "PolicyLossMetrics",
    "RowStatus",
    "SegmentConfig",
    "SegmentThreshold",
    "Silhouette",
    "SimilarityAdvantages",
    "SimilarityConfig",
    "SimilarityGroups",
    "TokenLogprobs",
    "Verdict",
    "__version__",
    "agglomerate",
    "available_backends",
    "cluster_distances",
    "diversity",
    "endpoint_segments",
    "group_advantages",
    "group_ids",
    "linear_logprobs",
    "linear_policy_loss",
    "pairwise_cosine",
    "policy_loss",
    "segment_metrics",
    "silhouette",
    "similarity_advantages",
    "similarity_groups",
    "similarity_metrics",
    "token_logprobs",
    "use_backend",
]
