"""Cuts responses into segments and computes their advantages: the grouping of GROUP-PPO, in linear time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.endpoint_segments import registration as op
from grpo_kernels.ops.endpoint_segments.config import BAND, SegmentConfig, check_threshold
from grpo_kernels.ops.endpoint_segments.reference import SegmentInputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OP = "endpoint_segments"
_DEFAULT = SegmentConfig()
_MASKS = (torch.bool, *checks.INTEGERS, *checks.FLOATS)


class EndpointSegments(NamedTuple):
    """Result of endpoint_segments; tensors have the shape of the tokens unless stated otherwise.

    Attributes:
        advantages: at the last token of every segment, 0 elsewhere; with credit="broadcast" at all of its tokens
        returns: lambda-return of every token, the target of a critic
        endpoint_mask: bool, the last token of every segment
        segment_ids: int32, counted from 0 in each row; -1 where the mask is 0
        num_segments: int32 [B]
        threshold: float64 scalar, the tau that was used
    """

    advantages: Tensor
    returns: Tensor
    endpoint_mask: Tensor
    segment_ids: Tensor
    num_segments: Tensor
    threshold: Tensor


class SegmentThreshold:
    """An adaptive threshold: use `value` for the next batch, and call `update` once after each.

    The target is a share of 5 % to 20 % endpoints among the tokens. Below that band segments are too long, above it too
    short, and tau moves towards the middle of the band by at most threshold_lr, relatively. With a process group the
    share is that of all ranks, which therefore agree.
    """

    def __init__(self, config: SegmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = SegmentConfig.of(SegmentConfig() if config is None else config, "SegmentThreshold")
        self.value = float(self.config.group_variance_threshold)

    def update(self, result: EndpointSegments, process_group: ProcessGroup | None = None) -> float:
        """Adapts and returns the value. Waits for the device once; does nothing if adaptive_threshold is False."""
        if not isinstance(result, EndpointSegments):
            raise TypeError(f"SegmentThreshold.update: result must be EndpointSegments, got {type(result).__name__}")
        if not self.config.adaptive_threshold:
            return self.value
        counts = torch.stack((result.num_segments.sum(), (result.segment_ids >= 0).sum())).double()
        if process_group is not None:
            torch.distributed.all_reduce(counts, group=process_group)
        segments, tokens = counts.tolist()
        if tokens == 0 or BAND[0] <= segments / tokens <= BAND[1]:
            return self.value
        middle = sum(BAND) / 2
        error = min(max((segments / tokens - middle) / middle, -1.0), 1.0)
        # a larger tau lengthens segments under "bounded", and shortens them under "literal"
        sign = 1.0 if self.config.rule == "bounded" else -1.0
        moved = self.value * math.exp(sign * self.config.threshold_lr * error)
        self.value = min(max(moved, self.config.min_threshold), self.config.max_threshold)
        return self.value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        where = "SegmentThreshold.load_state_dict"
        if set(state) != {"value"}:
            raise ValueError(f"{where}: state must have the key 'value' alone, got {sorted(state)}")
        value = state["value"]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{where}: value must be a number, got {type(value).__name__} {value!r}")
        check_threshold(self.config, where, "value", value)
        self.value = float(value)


def endpoint_segments(
    rewards: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    values: Tensor | None = None,
    groups: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    threshold: float | SegmentThreshold | None = None,
    config: SegmentConfig | Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> EndpointSegments:
    """Cuts each response into segments whose tokens can share one advantage, and computes it.

    The result feeds policy_loss: segments=result.segment_ids with ratio="segment", or mask=result.endpoint_mask. It has
    no gradient. A value that is not finite at a token that counts is an error on the CPU. Nothing waits for a GPU that
    has the CUDA kernels; without them the CPU kernel takes copies, for which it waits.

    Args:
        rewards: per token, [B, T] or packed [M] with `cu_seqlens`
        logprobs, old_logprobs: log-probs of the current policy and of the sampling policy, in the shape of rewards
        mask: in the shape of rewards; nonzero tokens count, None means all. Other slots are not read, and no segment
            spans a gap
        values: the critic's value before each token, in the shape of rewards; None means the mean return of the
            responses to the same prompt, which needs `groups`
        groups: prompt of each row, as an int (that many consecutive rows) or integer ids [B]; also for norm="prompt"
        cu_seqlens: int32 or int64 [B + 1], bounds of the rows of packed input
        threshold: tau to use instead of the config's: a number, or a SegmentThreshold whose value is used
        config: a SegmentConfig, or a mapping with its fields, as a trainer's `group_params`; None means that of a
            SegmentThreshold, or else the defaults
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        EndpointSegments: advantages and returns of the tokens, the segments' ends, ids and number, and the
        threshold used
    """
    if config is None:
        config = threshold.config if isinstance(threshold, SegmentThreshold) else _DEFAULT
    settings = SegmentConfig.of(config, _OP)
    rewards, logprobs, old_logprobs, values = _tokens(rewards, logprobs, old_logprobs, values, cu_seqlens)
    device = rewards.device
    rows = rewards.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    mask = _mask(mask, rewards)
    if cu_seqlens is not None:
        checks.no_token_left_out(_OP, cu_seqlens, len(rewards), mask)
    group_ids = _row_groups(groups, rows, device, needed=values is None or settings.norm == "prompt")
    tau = torch.full((), _threshold(threshold, settings), dtype=torch.float64, device=device)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.long().contiguous()
    chosen = backends.select(_OP, backend, device.type, rewards.dtype, op.SUPPORTS, device.index)
    inputs = SegmentInputs(
        rewards,
        logprobs,
        old_logprobs,
        mask,
        values,
        cu_seqlens,
        group_ids,
        tau,
        settings.settings,
    )
    advantages, returns, endpoint_mask, segment_ids, num_segments = op.OP(chosen, inputs)
    return EndpointSegments(advantages, returns, endpoint_mask, segment_ids, num_segments, tau)


def _tokens(
    rewards: Tensor, logprobs: Tensor, old: Tensor, values: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    checks.tensor(_OP, "rewards", rewards, checks.FLOATS)
    if rewards.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError(f"{_OP}: rewards must have shape [B, T], or [M] with cu_seqlens, got {list(rewards.shape)}")
    wide = torch.float64 if rewards.dtype == torch.float64 else torch.float32

    def checked(name: str, value: Tensor) -> Tensor:
        checks.shaped(_OP, name, value, checks.FLOATS, rewards.device, rewards.shape, "rewards")
        return value.detach().to(wide).contiguous()

    if cu_seqlens is not None:
        checks.tensor(_OP, "cu_seqlens", cu_seqlens, (torch.int64, torch.int32))
        checks.same_device(_OP, "cu_seqlens", cu_seqlens, rewards.device)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
            raise ValueError(f"{_OP}: cu_seqlens must have shape [B + 1], got {list(cu_seqlens.shape)}")
    return (
        checked("rewards", rewards),
        checked("logprobs", logprobs),
        checked("old_logprobs", old),
        None if values is None else checked("values", values),
    )


def _mask(mask: Tensor | None, rewards: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    checks.shaped(_OP, "mask", mask, _MASKS, rewards.device, rewards.shape, "rewards")
    return checks.flags(_OP, "mask", mask).contiguous()


def _row_groups(groups: int | Tensor | None, rows: int, device: torch.device, needed: bool) -> Tensor | None:
    if groups is None:
        if needed:
            raise ValueError(f"{_OP}: groups must be given without values and for norm='prompt', got None")
        return None
    if not needed:
        raise ValueError(
            f"{_OP}: groups must be left out, as neither values nor norm uses them, got {type(groups).__name__}"
        )
    if isinstance(groups, Tensor):
        return checks.shaped(_OP, "groups", groups, checks.INTEGERS, device, [rows]).long().contiguous()
    return torch.arange(rows, device=device) // checks.group_size(_OP, groups, rows)


def _threshold(threshold: float | SegmentThreshold | None, settings: SegmentConfig) -> float:
    if threshold is None:
        return float(settings.group_variance_threshold)
    if isinstance(threshold, SegmentThreshold):
        if threshold.config.rule != settings.rule:  # by which it moves up or down
            rule = f"threshold must have the rule of config, {settings.rule!r}"
            raise ValueError(f"{_OP}: {rule}, got {threshold.config.rule!r}")
        threshold = threshold.value
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise TypeError(f"{_OP}: threshold must be a number or a SegmentThreshold, got {type(threshold).__name__}")
    check_threshold(settings, _OP, "threshold", threshold)
    return float(threshold)
