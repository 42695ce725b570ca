"""The expected result of endpoint_segments: its formulas in float64 NumPy, with windows in place of recurrences."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import grpo_kernels as gk

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
CLAMP = 20.0


@dataclasses.dataclass(frozen=True)
class Gold:
    """Like EndpointSegments; `margin` is the distance of the closest cut test from a tie, relative to its terms."""

    advantages: Tensor
    returns: Tensor
    endpoint_mask: Tensor
    segment_ids: Tensor
    num_segments: Tensor
    margin: float


def discounts(gamma: float, count: int) -> Numbers:
    """The [n, n] matrix with gamma^(j - i) on and above the diagonal and 0 below it."""
    ahead = np.arange(count)[None] - np.arange(count)[:, None]
    return np.where(ahead >= 0, gamma ** np.maximum(ahead, 0.0), 0.0)


def token_advantages(rewards: Numbers, values: Numbers, gamma: float, lam: float) -> Numbers:
    """GAE of consecutive tokens."""
    following = np.append(values[1:], 0.0)[: len(values)]
    result: Numbers = discounts(gamma * lam, len(rewards)) @ (rewards + gamma * following - values)
    return result


def segment_advantages(rewards: Numbers, values: Numbers, starts: Places, gamma: float, lam: float) -> Numbers:
    """GAE of segments; each begins at an entry of `starts` and ends before the next one."""
    powers = gamma ** np.arange(len(rewards) + 1.0)
    ends = np.append(starts[1:], len(rewards))
    within = [rewards[a:b] @ powers[: b - a] for a, b in zip(starts, ends, strict=True)]
    bootstrap = powers[ends - starts] * np.append(values, 0.0)[ends]
    delta = np.array(within) + bootstrap - values[starts]
    result: Numbers = (discounts(lam, len(starts)) * powers[np.maximum(starts[None] - starts[:, None], 0)]) @ delta
    return result


def first_cut(weights: Numbers, advantages: Numbers, config: gk.SegmentConfig, tau: float) -> tuple[int, float]:
    """Length of the first segment of these tokens, and the smallest margin of the cut tests it took."""
    a, w = advantages[: config.group_max_size + 1], weights[: config.group_max_size + 1]
    n = np.arange(1, len(a) + 1)
    if config.proxy == "coherent":
        own, shared = np.cumsum(w * a) ** 2, (np.cumsum(w) * a) ** 2
        size = np.cumsum(w * np.abs(a)) ** 2
    else:
        own, shared = np.cumsum(w**2 * a**2), np.cumsum(w**2) * a**2
        size = own
    eps = config.group_epsilon
    if config.rule == "bounded":
        left, right, scale = shared, tau * own + eps, shared + tau * size + eps
        cuts, kept = left > right, 0
    else:
        left, right, scale = n * tau * (own + eps), shared, n * tau * (size + eps) + shared
        cuts, kept = left >= right, 1
    tested = (n > 1) & (n <= config.group_max_size)
    hits = np.flatnonzero(cuts & tested)
    last = hits[0] if len(hits) else len(a) - 1
    outputs = tested & (n <= last + 1)
    margin = float((np.abs(left - right) / scale)[outputs].min()) if outputs.any() else 1.0
    length = int(hits[0]) + kept if len(hits) else min(len(a), config.group_max_size)
    return length, margin


def places_of(mask: NDArray[np.bool_], bounds: Places) -> list[Places]:
    """Indices of each row's valid tokens in the flat arrays."""
    return [a + np.flatnonzero(mask[a:b]) for a, b in itertools.pairwise(bounds.tolist())]


def baselines(rewards: Numbers, rows: list[Places], groups: list[int], gamma: float) -> Numbers:
    """Per-token baseline: the mean return of the prompt's rows that have tokens."""
    returns: dict[int, list[float]] = {}
    for group, places in zip(groups, rows, strict=True):
        if len(places):
            returns.setdefault(group, []).append(float(rewards[places] @ gamma ** np.arange(float(len(places)))))
    result = np.zeros(len(rewards))
    for group, places in zip(groups, rows, strict=True):
        result[places] = np.mean(returns[group]) if len(places) else 0.0
    return result


def normalised(advantages: Numbers, pools: Places, eps: float) -> Numbers:
    """Normalizes each advantage by the mean and the deviation of its pool."""
    result = np.zeros_like(advantages)
    for pool in np.unique(pools):
        own = advantages[pools == pool]
        if len(own) > 1 and own.min() < own.max():
            result[pools == pool] = (own - own.mean()) / (own.std(ddof=1) + eps)
    return result


def all_cuts(
    places: Places, weights: Numbers, advantages: Numbers, config: gk.SegmentConfig, threshold: float
) -> tuple[list[int], float]:
    """Start of each segment of a row, counted in valid tokens, and the smallest margin."""
    starts, margin = [], 1.0
    for run in np.split(np.arange(len(places)), np.flatnonzero(np.diff(places) != 1) + 1):
        while len(run):
            starts.append(int(run[0]))
            length, close = first_cut(weights[run], advantages[run], config, threshold)
            margin, run = min(margin, close), run[length:]
    return starts, margin


def expected(
    rewards: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    values: Tensor | None = None,
    groups: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    config: gk.SegmentConfig,
    tau: float | None = None,
) -> Gold:
    """Expected result for the inputs' exact values, whatever their dtype; `groups` are ids."""
    shape = rewards.shape
    if cu_seqlens is None:
        bounds = np.arange(shape[0] + 1, dtype=np.int64) * shape[1]
    else:
        bounds = cu_seqlens.numpy().astype(np.int64)
    counted = np.ones(rewards.numel(), bool) if mask is None else (mask != 0).reshape(-1).numpy()
    rows = places_of(counted, bounds)
    ids = [0] * len(rows) if groups is None else groups.tolist()
    threshold = config.group_variance_threshold if tau is None else tau

    def flat(tensor: Tensor) -> Numbers:
        array: Numbers = tensor.detach().reshape(-1).double().numpy()
        return array

    r, now, old = flat(rewards), flat(logprobs), flat(old_logprobs)
    v = baselines(r, rows, ids, config.gamma) if values is None else flat(values)
    dense, returns, endpoint_values = (np.zeros(len(r)) for _ in range(3))
    numbers = np.full(len(r), -1, np.int32)
    is_end = np.zeros(len(r), bool)
    for places in rows:
        dense[places] = token_advantages(r[places], v[places], config.gamma, config.lam)
        returns[places] = dense[places] + v[places]
    used = np.concatenate([np.zeros(0, np.int64), *rows])
    scale = max(float(np.sqrt(np.mean(dense[used] ** 2))) if len(used) else 0.0, config.group_epsilon)
    margin, pools, values_of, members = 1.0, [], [], []
    counts = []
    for row, places in enumerate(rows):
        weights = np.exp(np.clip(now[places] - old[places], -CLAMP, CLAMP)) * (1 - np.exp(now[places]))
        starts, close = all_cuts(places, weights, dense[places] / scale, config, threshold)
        margin = min(margin, close)
        counts.append(len(starts))
        if not starts:
            continue
        at = np.array(starts, np.int64)
        values_of.append(segment_advantages(r[places], v[places], at, config.gamma, config.lam))
        members += np.split(places, at[1:])
        pools += [ids[row] if config.norm == "prompt" else 0] * len(starts)
        numbers[places] = np.cumsum(np.isin(np.arange(len(places)), at)) - 1
    worth = np.concatenate([np.zeros(0), *values_of])
    if config.norm != "none":
        worth = normalised(worth, np.array(pools, np.int64), config.group_epsilon)
    for value, tokens in zip(worth, members, strict=True):
        is_end[tokens[-1]] = True
        endpoint_values[tokens if config.credit == "broadcast" else tokens[-1:]] = value
    return Gold(
        torch.from_numpy(endpoint_values).view(shape),
        torch.from_numpy(returns).view(shape),
        torch.from_numpy(is_end).view(shape),
        torch.from_numpy(numbers).view(shape),
        torch.tensor(counts, dtype=torch.int32),
        margin,
    )
