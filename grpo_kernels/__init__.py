"""Fused CPU, Triton and CUDA kernels for GRPO-style reinforcement learning of language models."""

from grpo_kernels import variants
from grpo_kernels.backends import available_kernels, use_backend
from grpo_kernels.dealing import deal_by_length
from grpo_kernels.ops.endpoint_segments import EndpointSegments, SegmentThreshold, endpoint_segments
from grpo_kernels.ops.endpoint_segments.config import SegmentConfig
from grpo_kernels.ops.endpoint_segments.metrics import segment_metrics
from grpo_kernels.ops.group_advantages import GroupAdvantages, group_advantages, group_ids
from grpo_kernels.ops.group_advantages.config import AdvantageConfig
from grpo_kernels.ops.group_advantages.gigpo import gigpo_advantages
from grpo_kernels.ops.group_advantages.running import EmaBaseline, RunningNorm, ValueTracker
from grpo_kernels.ops.linear_head import (
    DistillationLoss,
    LMHead,
    Teacher,
    linear_distillation_loss,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.ops.policy_loss import PolicyLoss, policy_loss
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.metrics import PolicyLossMetrics
from grpo_kernels.ops.policy_loss.rollouts import rollout_logprobs
from grpo_kernels.ops.policy_loss.shares import token_shares
from grpo_kernels.ops.sampling_correction import SamplingCorrection, sampling_correction
from grpo_kernels.ops.sampling_correction.config import CorrectionConfig
from grpo_kernels.ops.sampling_correction.metrics import CorrectionMetrics
from grpo_kernels.ops.similarity_groups import (
    RowStatus,
    SimilarityGroups,
    Verdict,
    cluster_distances,
    diversity,
    similarity_groups,
)
from grpo_kernels.ops.similarity_groups.config import SimilarityConfig
from grpo_kernels.ops.similarity_groups.metrics import SimilarityAdvantages, similarity_advantages, similarity_metrics
from grpo_kernels.ops.similarity_groups.parts import Dendrogram, Silhouette, agglomerate, pairwise_cosine, silhouette
from grpo_kernels.ops.token_advantages import TokenAdvantages, token_advantages
from grpo_kernels.ops.token_advantages.config import TokenAdvantageConfig
from grpo_kernels.ops.token_advantages.optimal_baseline import optimal_token_baseline
from grpo_kernels.ops.token_logprobs import TokenLogprobs, token_logprobs

__version__ = "0.2.0"


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "AdvantageConfig",
    "CorrectionConfig",
    "CorrectionMetrics",
    "Dendrogram",
    "DistillationLoss",
    "EmaBaseline",
    "EndpointSegments",
    "GroupAdvantages",
    "LMHead",
    "LossConfig",
    "PolicyLoss",
    "PolicyLossMetrics",
    "RowStatus",
    "RunningNorm",
    "SamplingCorrection",
    "SegmentConfig",
    "SegmentThreshold",
    "Silhouette",
    "SimilarityAdvantages",
    "SimilarityConfig",
    "SimilarityGroups",
    "Teacher",
    "TokenAdvantageConfig",
    "TokenAdvantages",
    "TokenLogprobs",
    "ValueTracker",
    "Verdict",
    "__version__",
    "agglomerate",
    "available_kernels",
    "cluster_distances",
    "deal_by_length",
    "diversity",
    "endpoint_segments",
    "gigpo_advantages",
    "group_advantages",
    "group_ids",
    "linear_distillation_loss",
    "linear_logprobs",
    "linear_policy_loss",
    "optimal_token_baseline",
    "pairwise_cosine",
    "policy_loss",
    "rollout_logprobs",
    "sampling_correction",
    "segment_metrics",
    "silhouette",
    "similarity_advantages",
    "similarity_groups",
    "similarity_metrics",
    "token_advantages",
    "token_logprobs",
    "token_shares",
    "use_backend",
    "variants",
]
