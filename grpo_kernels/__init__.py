"""Fused CPU, Triton and CUDA kernels for GRPO-style reinforcement learning of language models."""

from grpo_kernels.config import AdvantageConfig
from grpo_kernels.dispatch import available_backends, use_backend
from grpo_kernels.functional.group_advantages import GroupAdvantages, group_advantages, group_ids

__version__ = "0.1.0"

__all__ = [
    "AdvantageConfig",
    "GroupAdvantages",
    "__version__",
    "available_backends",
    "group_advantages",
    "group_ids",
    "use_backend",
]
