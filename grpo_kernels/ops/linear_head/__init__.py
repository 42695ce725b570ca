"""The LM head in chunks of tokens: log-probs, the policy loss and distillation straight from hidden states."""

from grpo_kernels.ops.linear_head.distillation import linear_distillation_loss
from grpo_kernels.ops.linear_head.head import LMHead
from grpo_kernels.ops.linear_head.logprobs import linear_logprobs
from grpo_kernels.ops.linear_head.policy_loss import linear_policy_loss
from grpo_kernels.ops.linear_head.teacher import DistillationLoss, Teacher

__all__ = [
    "DistillationLoss",
    "LMHead",
    "Teacher",
    "linear_distillation_loss",
    "linear_logprobs",
    "linear_policy_loss",
]
