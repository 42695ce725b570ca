"""The policy-gradient loss of GRPO and its relatives, from log-probs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks, shared_positions
from grpo_kernels.ops.policy_loss import registration as op
from grpo_kernels.ops.policy_loss.arguments import (
    Layout,
    Normalizer,
    check_entropy,
    check_policy,
    check_units,
    check_values,
    needs_entropy_gradient,
    participants,
)
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.metrics import PolicyLossMetrics
from grpo_kernels.ops.policy_loss.reference import Policy, PolicyInputs
from grpo_kernels.ops.token_logprobs.config import IGNORED

_OP = "policy_loss"


class PolicyLoss(NamedTuple):
    """The result of policy_loss.

    Attributes:
        loss: scalar to call backward() on
        metrics: measurements of this call, copied to the host only when one is read
    """

    loss: Tensor
    metrics: PolicyLossMetrics


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    policy_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segments: Tensor | None = None,
    term_index: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
    entropy: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Normalizer | None = None,
    config: LossConfig | str = "grpo",
    backend: str | None = None,
) -> PolicyLoss:
    """Computes the policy loss and its gradient in one pass over the tokens.

    Args:
        logprobs: log-probs of the policy, padded [B, T] or packed [M] with `cu_seqlens`; differentiable
        old_logprobs: log-probs of the policy that the ratio refers to; None means on-policy, the detached log-probs
        advantages: one per row, [B] or [B, 1], or one per token; packed [M] with M = B is one per token
        mask: tokens that take part, bools or 0 and 1; None means all. Masked slots may hold NaN
        policy_mask: tokens whose policy term counts; None means all. The means' divisors, KL, entropy bonus, clip
            metrics and statistics of is_weights do not see it. With ratios of segments it is read at the last token of
            each; not for geo_mean. gk.variants has functions that make one
        cu_seqlens: int32 or int64 [B + 1], bounds of the rows of packed input; tokens after the last row must be masked
        term_index: integers [B, T], or [M] with cu_seqlens: the flattened position in logprobs and entropy, then of any
            shape, of each token; several may share one. All other arguments have the shape of term_index; -1 is padding
        segments: integers ascending from 0 along each row, -1 outside; for ratio="segment"
        ref_logprobs: log-probs of the reference policy, for the KL term
        is_weights: importance weights of the policy term, one per token, [B, 1] or [B], for example those of
            gk.sampling_correction
        entropy: per token, for the entropy bonus (differentiable) and the metrics
        weights: one per token; the loss is the weighted sum of the terms instead of the aggregation's mean
        normalizer: what the aggregation divides by instead of counting: a dict with any of "tokens", "rows",
            "segments", or a number or tensor of tokens alone. The global count makes the loss independent of how a
            batch is split into micro-batches and ranks
        config: a LossConfig or a TRL loss_type; LossConfig() is none of these: its loss is the mean over all tokens
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        PolicyLoss: the scalar loss to call backward() on, and its metrics
    """
    config = LossConfig.of(config)
    if term_index is not None:
        logprobs, entropy, mask = _at_terms(logprobs, entropy, mask, term_index)
    layout = Layout.of(_OP, logprobs, cu_seqlens, "logprobs" if term_index is None else "term_index")
    policy = check_policy(
        layout,
        config,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        policy_mask=policy_mask,
        cu_seqlens=cu_seqlens,
        segments=segments,
        ref_logprobs=ref_logprobs,
        is_weights=is_weights,
        weights=weights,
        normalizer=normalizer,
        with_values=False,
    )
    entropy = layout.floats("entropy", entropy, detach=False)
    check_entropy(layout, config, entropy is not None)
    check_units(layout, config, policy, normalizer, entropy is not None)
    logprobs = layout.number(logprobs)
    chosen = backends.select(_OP, backend, layout.device.type, logprobs.dtype, op.SUPPORTS, layout.device.index)
    if chosen != "cpu":
        check_values(layout, policy, logprobs)
    try:
        return compute(layout, config, logprobs, entropy, policy, chosen, chosen == "cpu")
    except RuntimeError:
        check_values(layout, policy, logprobs)  # words what the kernel refused
        raise


def _at_terms(
    logprobs: Tensor, entropy: Tensor | None, mask: Tensor | None, term_index: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probs and entropies of the terms, and which terms there are."""
    checks.tensor(_OP, "logprobs", logprobs, checks.FLOATS)
    if entropy is not None:
        checks.shaped(_OP, "entropy", entropy, checks.FLOATS, logprobs.device, logprobs.shape, "logprobs")
    index = shared_positions.check_term_index(_OP, term_index, logprobs.numel(), logprobs.device)
    targets = torch.where(index == shared_positions.ABSENT, IGNORED, 0)
    takes_part = participants(_OP, targets, mask, None, None, "term_index")

    # widened first, as the sum of a position's gradients would stop growing in half precision
    def gathered(values: Tensor) -> Tensor:
        return shared_positions.gather(values.to(torch.promote_types(values.dtype, torch.float32)), index)

    return gathered(logprobs), None if entropy is None else gathered(entropy), takes_part


def compute(
    layout: Layout,
    config: LossConfig,
    logprobs: Tensor,
    entropy: Tensor | None,
    policy: Policy,
    backend: str,
    checks_values: bool = False,
) -> PolicyLoss:
    """The loss of checked arguments by an implementation; `checks_values` leaves the values to the CPU kernel."""
    inputs = PolicyInputs(logprobs, entropy, policy, needs_entropy_gradient(entropy, config), checks_values)
    loss, metrics = op.apply(backend, inputs)
    by_row = policy.advantages.shape != layout.shape
    return PolicyLoss(loss, PolicyLossMetrics(metrics, config, by_row, entropy is not None))
