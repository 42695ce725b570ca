"""The specification of endpoint_segments, token by token in float64."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from grpo_kernels.groups import packed_bounds
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.endpoint_segments.config import (
    BOUNDED,
    BROADCAST,
    COHERENT,
    LITERAL,
    NORM_BATCH,
    NORM_NONE,
    UNCORRELATED,
    Plan,
)
from grpo_kernels.plans import read

_MOST_LOG_RATIO = 20.0


@op_inputs
class SegmentInputs:
    """Checked arguments of endpoint_segments: one entry per token, all contiguous; `groups` are ids of rows.

    `threshold` is a scalar. `settings` are a SegmentConfig's.
    """

    rewards: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor
    values: Tensor | None
    cu_seqlens: Tensor | None
    groups: Tensor | None
    threshold: Tensor
    settings: list[float]


def forward(inputs: SegmentInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Advantages, returns, endpoint mask and segment ids like the tokens, number of segments of each row."""
    rewards, values, groups = inputs.rewards, inputs.values, inputs.groups
    rule, proxy, credit, norm, max_size, epsilon, gamma, lam = read(Plan, inputs.settings)
    tau = float(inputs.threshold)
    shape, rows = rewards.shape, _rows(rewards, inputs.cu_seqlens)
    flat = [t.reshape(-1).double().tolist() for t in (rewards, inputs.logprobs, inputs.old_logprobs)]
    r, lp, old = flat
    valid = inputs.mask.reshape(-1).tolist()
    tokens = [[i for i in range(*row) if valid[i]] for row in rows]
    flat_values = None if values is None else values.reshape(-1).double().tolist()
    _check_finite(tokens, flat if flat_values is None else [*flat, flat_values])
    if flat_values is None:
        v = _baseline(r, tokens, groups, gamma)
    else:
        v = {i: flat_values[i] for row in tokens for i in row}

    advantage: dict[int, float] = {}
    for row in tokens:
        following, next_value = 0.0, 0.0
        for i in reversed(row):
            following = r[i] + gamma * next_value - v[i] + gamma * lam * following
            advantage[i], next_value = following, v[i]
    count = len(advantage)
    scale = math.sqrt(sum(a * a for a in advantage.values()) / count) if count else 0.0
    scale = max(scale, epsilon)

    total = math.prod(shape)
    advantages, returns = [0.0] * total, [0.0] * total
    ends, ids = [False] * total, [-1] * total
    of_rows: list[list[list[int]]] = []
    for row in tokens:
        weight = {i: _weight(lp[i], old[i]) for i in row}
        segments = [
            segment
            for run in _runs(row)
            for segment in _cut(run, advantage, weight, scale, len(row), tau, epsilon, rule, proxy, max_size)
        ]
        following, next_value = 0.0, 0.0
        for number, segment in reversed(list(enumerate(segments))):
            first, last = segment[0], segment[-1]
            gained = sum(gamma**k * r[i] for k, i in enumerate(segment))
            length = gamma ** len(segment)
            following = gained + length * next_value - v[first] + length * lam * following
            next_value, advantages[last], ends[last] = v[first], following, True
            for i in segment:
                ids[i] = number
        of_rows.append(segments)
        for i in row:
            returns[i] = advantage[i] + v[i]
    _normalize(advantages, of_rows, groups, norm, epsilon)
    if credit == BROADCAST:
        for segments in of_rows:
            for segment in segments:
                for i in segment:
                    advantages[i] = advantages[segment[-1]]

    def like(data: list[float] | list[bool] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(data, dtype=dtype, device=rewards.device).view(shape)

    numbers = torch.tensor([len(s) for s in of_rows], dtype=torch.int32, device=rewards.device)
    return (
        like(advantages, rewards.dtype),
        like(returns, rewards.dtype),
        like(ends, torch.bool),
        like(ids, torch.int32),
        numbers,
    )


def _rows(rewards: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, int]]:
    if cu_seqlens is not None:
        bounds = packed_bounds("endpoint_segments", cu_seqlens, rewards.numel())
        return list(itertools.pairwise(bounds.tolist()))
    width = rewards.shape[1]
    return [(b * width, (b + 1) * width) for b in range(rewards.shape[0])]


def _check_finite(tokens: list[list[int]], inputs: list[list[float]]) -> None:
    for number, row in enumerate(tokens):
        if not all(math.isfinite(of_tokens[i]) for of_tokens in inputs for i in row):
            raise RuntimeError(
                "endpoint_segments: rewards, values and log-probs must be finite where the mask is True, got infinity "
                f"or NaN in row {number}"
            )


def _baseline(r: list[float], tokens: list[list[int]], groups: Tensor | None, gamma: float) -> dict[int, float]:
    """Without a critic: at every token the mean return of the rows of the prompt that have tokens."""
    assert groups is not None
    returns = [sum(gamma**k * r[i] for k, i in enumerate(row)) for row in tokens]
    of_group: dict[int, list[float]] = {}
    for row, group, value in zip(tokens, groups.tolist(), returns, strict=True):
        if row:
            of_group.setdefault(group, []).append(value)
    means = {group: sum(returns) / len(returns) for group, returns in of_group.items()}
    return {i: means[group] for row, group in zip(tokens, groups.tolist(), strict=True) for i in row}


def _weight(logprob: float, old: float) -> float:
    """A stand-in for the length of the token's score gradient: the ratio times how far from certain the token is."""
    ratio = math.exp(min(max(logprob - old, -_MOST_LOG_RATIO), _MOST_LOG_RATIO))
    return ratio * -math.expm1(min(logprob, 0.0))


def _runs(row: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for i in row:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _cut(
    run: list[int],
    advantage: dict[int, float],
    weight: dict[int, float],
    scale: float,
    valid: int,
    tau: float,
    epsilon: float,
    rule: int,
    proxy: int,
    max_size: int,
) -> list[list[int]]:
    segments: list[list[int]] = []
    here: list[int] = []
    moved = seen = 0.0  # P and Q of Algorithm 2
    for i in run:
        a, w = advantage[i] / scale, weight[i]
        if proxy == UNCORRELATED:
            w = w * w
        plus = w * a if proxy == COHERENT else w * a * a

        def ratios(p: float, q: float, a: float = a) -> tuple[float, float]:
            if proxy == COHERENT:
                return p * p / valid, (q * a) * (q * a) / valid
            return p / valid, q * a * a / valid

        ppo, grpo = ratios(moved + plus, seen + w)
        if rule == BOUNDED and here and grpo > tau * ppo + epsilon / valid:
            segments.append(here)
            here, moved, seen = [], 0.0, 0.0
        here.append(i)
        moved, seen = moved + plus, seen + w
        reached = rule == LITERAL and len(here) >= 2 and len(here) * tau * (ppo + epsilon / valid) >= grpo
        if reached or len(here) == max_size:
            segments.append(here)
            here, moved, seen = [], 0.0, 0.0
    return [*segments, here] if here else segments


def _normalize(
    advantages: list[float], of_rows: list[list[list[int]]], groups: Tensor | None, norm: int, epsilon: float
) -> None:
    """Normalises over endpoints only. One endpoint, or several equal ones, give 0."""
    if norm == NORM_NONE:
        return
    keys = [0] * len(of_rows) if norm == NORM_BATCH or groups is None else groups.tolist()
    of_key: dict[int, list[int]] = {}
    for key, segments in zip(keys, of_rows, strict=True):
        of_key.setdefault(key, []).extend(segment[-1] for segment in segments)
    for ends in of_key.values():
        values = [advantages[i] for i in ends]
        if len(values) < 2 or max(values) == min(values):
            for i in ends:
                advantages[i] = 0.0
            continue
        mean = sum(values) / len(values)
        std = math.sqrt(sum((a - mean) ** 2 for a in values) / (len(values) - 1))
        for i in ends:
            advantages[i] = (advantages[i] - mean) / (std + epsilon)
