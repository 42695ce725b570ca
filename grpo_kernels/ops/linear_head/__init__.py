"""The LM head in chunks of rows: linear_logprobs and linear_policy_loss."""

from grpo_kernels.ops.linear_head.logprobs import linear_logprobs
from grpo_kernels.ops.linear_head.policy_loss import linear_policy_loss

__all__ = ["linear_logprobs", "linear_policy_loss"]
