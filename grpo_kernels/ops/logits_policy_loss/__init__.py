"""The policy loss straight from logits, with its gradient in the forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.logits_policy_loss import registration as op
from grpo_kernels.ops.policy_loss import PolicyLoss, compute
from grpo_kernels.ops.policy_loss.arguments import (
    Layout,
    Normalizer,
    check_entropy,
    check_policy,
    check_rows,
    check_units,
    participants,
)
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.metrics import PolicyLossMetrics
from grpo_kernels.ops.token_logprobs import (
    check_logits,
    check_overwritable,
    check_scaling,
    check_targets,
    rows_of,
)
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED

_OP = "logits_policy_loss"


def logits_policy_loss(
    logits: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segments: Tensor | None = None,
    kinds: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    is_weights: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Normalizer | None = None,
    groups: int | Tensor | None = None,
    log_z: Tensor | None = None,
    return_entropy: bool = False,
    config: LossConfig | str = "grpo",
    inplace: bool = False,
    backend: str | None = None,
) -> PolicyLoss:
    """Computes policy_loss(token_logprobs(logits, targets).logprobs, ...) and the gradient of the logits in one call.

    Tokens that take no part are not read, and those without a gradient, such as clipped ones, only once. The gradient
    is stored until backward(), which can run once. float16 logits get theirs in the backward, by the scaled loss.

    Args:
        logits: [B, T, V] with targets [B, T], or packed [M, V] with targets [M] and cu_seqlens
        targets: -100 excludes a token, whatever the mask says
        temperature, softcap, logit_scale, backend: as in token_logprobs
        old_logprobs, advantages, mask, cu_seqlens, segments, kinds, ref_logprobs, sampling_logprobs: as in policy_loss
        is_weights, weights, normalizer, groups, log_z, config: as in policy_loss
        return_entropy: measure the entropy even if the config does not need it
        inplace: overwrite the logits with their gradient, which saves their size in memory. Nothing else may read
            them, and torch.compile is not supported
    """
    config = LossConfig.of(config, _OP)
    check_logits(_OP, logits, targets)
    if logits.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(
            f"{_OP}: logits must have shape [B, T, V], or [M, V] with cu_seqlens, got {list(logits.shape)}"
        )
    scaling = check_scaling(_OP, temperature, softcap, logit_scale, targets, logits.dtype)
    checks.boolean(_OP, return_entropy=return_entropy, inplace=inplace)
    if inplace:
        check_overwritable(_OP, "inplace", logits)
    layout = Layout(_OP, targets.shape, logits.dtype, logits.device, cu_seqlens)
    takes_part = participants(_OP, targets, mask, cu_seqlens, segments)
    policy = check_policy(
        layout,
        config,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=takes_part,
        cu_seqlens=cu_seqlens,
        segments=segments,
        kinds=kinds,
        ref_logprobs=ref_logprobs,
        sampling_logprobs=sampling_logprobs,
        is_weights=is_weights,
        weights=weights,
        normalizer=normalizer,
    )
    rows = check_rows(layout, config, policy, groups=groups, log_z=log_z, normalizer=normalizer)
    want_entropy = return_entropy or config.entropy_coef != 0 or config.top_entropy_quantile < 1
    check_entropy(layout, config, want_entropy)
    check_units(layout, config, policy, normalizer, want_entropy)
    chosen = backends.select(_OP, backend, layout.device.type, logits.dtype, op.SUPPORTS, layout.device.index)
    targets = torch.where(takes_part, targets, IGNORED)
    check_targets(_OP, targets, logits.shape[-1], chosen)
    logit_rows = rows_of(logits, targets, scaling)
    if not _is_fused(logits, config, chosen):
        logprobs, entropy, _ = token_logprobs.FORWARD[chosen](*logit_rows, want_entropy, inplace)
        measured = entropy.view(targets.shape) if want_entropy else None
        return compute(layout, config, logprobs.view(targets.shape), measured, None, policy, rows, chosen)
    one_pass = chosen == "cuda" and logits.dtype == torch.bfloat16 and not config.couples_tokens and segments is None
    settings = op.Settings(want_entropy, config.entropy_coef != 0, one_pass)
    loss, metrics = op.apply(chosen, logit_rows, policy, settings, inplace)
    by_row = policy.advantages.shape != layout.shape
    return PolicyLoss(loss, PolicyLossMetrics(metrics, config, by_row, want_entropy))


def _is_fused(logits: Tensor, config: LossConfig, backend: str) -> bool:
    """Whether the forward computes the gradient. Otherwise token_logprobs and policy_loss run one after the other."""
    # a choice among all tokens lies between the two; and float16 needs the scale of the loss before the gradient is
    # rounded, or values below 6e-8 are lost
    is_possible = not config.ranks_tokens and logits.dtype != torch.float16
    return is_possible and backend != "reference" and torch.is_grad_enabled() and logits.requires_grad
