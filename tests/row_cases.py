"""Cases of tests/kernel_cases.py for the ops that walk along rows of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import grpo_kernels as gk

Put = Callable[[Tensor], Tensor]  # moves a tensor to the device of the backend
Results = Iterator[Tensor]

WRONG_BOUNDS = ([0, 9000], [0, 40, 101], [9, 41, 60, 73], [-9, 50, 20, 900], [0, 2**63 - 1, -(2**63), 60], [5])


def segments(backend: str, put: Put) -> Results:
    """Padded rows with and without a critic, for each normalisation; long rows have blocks of more threads."""
    for rows, width in ((6, 70), (2, 2100)):
        for norm in ("none", "batch", "prompt"):
            for has_critic in (False, True):
                shape, groups = (rows, width), put(torch.tensor([3, 0, 3, 3, 0, -1][:rows]))
                start = -torch.rand(shape)
                old, values = put(start + 0.1 * torch.randn(shape)), put(torch.randn(shape))
                yield from gk.endpoint_segments(
                    put(torch.randn(shape)),
                    put(start),
                    old,
                    put(torch.rand(shape) > 0.1),
                    values=values if has_critic else None,
                    groups=groups if norm == "prompt" or not has_critic else None,
                    config={"norm": norm, "group_variance_threshold": 2.0},
                    backend=backend,
                )


def outside_segments(backend: str, put: Put) -> Results:
    """Invalid `cu_seqlens`: a GPU reports them only after the kernels have run, so the assertion is disabled and the
    kernels must not touch memory outside. Only the shape of the results is defined."""
    for bounds in ([0, 40, 40, 73], *WRONG_BOUNDS):
        if backend == "reference":
            yield from [torch.tensor([73])] * 2
            continue
        groups, tokens = torch.arange(len(bounds) - 1) % 2, put(torch.randn(3, 73))
        for values in (put(torch.randn(73)), None):
            with mock.patch("torch._assert_async"):
                result = gk.endpoint_segments(
                    *tokens,
                    put(torch.rand(73) < 0.9),
                    values=values,
                    groups=put(groups),
                    cu_seqlens=put(torch.tensor(bounds)),
                    config={"norm": "prompt", "credit": "broadcast"},
                    backend=backend,
                )
            yield torch.tensor(result.advantages.shape)


def smoke_segments(backend: str, put: Put) -> Results:
    old, mask = -torch.rand(4, 70), torch.rand(4, 70) > 0.1
    logprobs = old + 0.1 * torch.randn(4, 70)
    rewards, values = put(torch.randn(4, 70)), put(torch.randn(4, 70))
    yield from gk.endpoint_segments(rewards, put(logprobs), put(old), put(mask), values=values, backend=backend)


def token_advantages(backend: str, put: Put) -> Results:
    """Padded rows of tokens and of turns, with and without a critic; few long rows are cut into chunks."""
    for rows, width in ((6, 70), (2, 2100), (1, 6000)):
        for by_turn in (False, True):
            for estimator in gk.TokenAdvantageConfig.names():
                rewards, turns = torch.randn(rows, width), torch.randint(-1, 3, (rows, width)).cumsum(1) // 4
                rewards[0, 7] = float("nan") if estimator == "reinforce" else 1.0
                yield from gk.token_advantages(
                    put(rewards),
                    put(torch.randn(rows, width)) if estimator == "gae" else None,
                    mask=put(torch.rand(rows, width) > 0.1),
                    turns=put(turns) if by_turn else None,
                    config=gk.TokenAdvantageConfig(estimator, gamma=0.99),
                    backend=backend,
                )


def outside_token_advantages(backend: str, put: Put) -> Results:
    """Invalid `cu_seqlens`, as in outside_segments."""
    for bounds in ([0, 40, 40, 73], *WRONG_BOUNDS):
        for turns in (None, torch.randint(-(2**31), 2**31, (73,))):
            if backend == "reference":
                yield torch.tensor([73])
                continue
            with mock.patch("torch._assert_async"):
                result = gk.token_advantages(
                    *put(torch.randn(2, 73)),
                    mask=put(torch.rand(73) < 0.9),
                    turns=None if turns is None else put(turns),
                    cu_seqlens=put(torch.tensor(bounds)),
                    backend=backend,
                )
            yield torch.tensor(result.advantages.shape)


def smoke_token_advantages(backend: str, put: Put) -> Results:
    rewards, values, mask = put(torch.randn(4, 70)), put(torch.randn(4, 70)), put(torch.rand(4, 70) > 0.1)
    yield from gk.token_advantages(rewards, values, mask=mask, backend=backend)
