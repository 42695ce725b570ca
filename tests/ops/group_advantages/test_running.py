"""States that go on from batch to batch, against loops over the rows: prime-rl's and ROLL's rules, our reading of SPO.

Faults that this is for: rows of a key in another order than theirs, or of a batch that see each other; a NaN reward
that moves a state; a resumed state that differs; equal rewards whose rounded mean is normalised.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk

KINDS = {
    "ema": lambda: gk.EmaBaseline(0.9),
    "tracker": lambda: gk.ValueTracker(0.06, 0.875, 0.96, prior=0.25),
    "norm": lambda: gk.RunningNorm(),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def batches() -> list[tuple[Tensor, list[int], Tensor]]:
    """Rewards, keys and drifts; keys come back, in one batch and later, and some rows were not scored."""
    made = []
    for rows in (7, 1, 40, 0, 13):
        rewards = (torch.rand(rows, dtype=torch.float64) * 4).round() / 4
        rewards[torch.rand(rows) < 0.15] = torch.nan
        keys = torch.randint(0, 5 + rows // 4, (rows,)).tolist()
        made.append((rewards, keys, 0.02 * torch.rand(rows, dtype=torch.float64)))
    return made


def step(state: Any, rewards: Tensor, keys: Any, drift: Tensor) -> Tensor:
    more = (drift,) if isinstance(state, gk.ValueTracker) else ()
    result: Tensor = state.step(rewards, keys, *more)
    return result


def normalised(rewards: list[float], keys: list[int], seen: dict[int, list[float]]) -> list[float]:
    for reward, key in zip(rewards, keys, strict=True):
        seen.setdefault(key, []).extend([] if math.isnan(reward) else [reward])
    results = []
    for reward, key in zip(rewards, keys, strict=True):
        past = torch.tensor(seen[key], dtype=torch.float64)
        is_flat = len(past) < 2 or past.min() == past.max()
        results.append(0 * reward if is_flat else (reward - past.mean().item()) / (past.std().item() + 1e-6))
    return results


def of_loop(kind: str, rewards: list[float], keys: list[int], drift: list[float], state: dict[Any, Any]) -> list[float]:
    if kind == "norm":
        return normalised(rewards, keys, state)
    results = []
    for reward, key, moved in zip(rewards, keys, drift, strict=True):
        is_missing = math.isnan(reward)
        if kind == "ema":
            before = state.get(key, 0.0)
            results.append(before)
            state[key] = before if is_missing else 0.9 * before + 0.1 * reward
        else:
            alpha, beta = state.get(key, (8 * 0.25, 8 * 0.75))
            results.append(alpha / (alpha + beta))
            rho = min(max(2 ** (-moved / 0.06), 0.875), 0.96)
            state[key] = (alpha, beta) if is_missing else (rho * alpha + reward, rho * beta + 1 - reward)
    return results


@every_kind
def test_as_a_loop_over_the_rows(kind: str) -> None:
    state, expected = KINDS[kind](), dict[Any, Any]()
    for rewards, keys, drift in batches():
        want = torch.tensor(of_loop(kind, rewards.tolist(), keys, drift.tolist(), expected), dtype=torch.float64)
        resumed = KINDS[kind]()
        resumed.load_state_dict(state.state_dict())
        got = step(state, rewards, keys, drift)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14, equal_nan=True)
        again = step(resumed, rewards, torch.tensor(keys), drift)  # keys may be a tensor
        torch.testing.assert_close(again, got, rtol=0, atol=0, equal_nan=True)
    assert len(expected) > 5 and state.state_dict()["keys"] == [*expected]


@every_kind
def test_float32_rewards_have_float32_results(kind: str) -> None:
    rewards, keys, drift = batches()[0]
    assert step(KINDS[kind](), rewards.float(), keys, drift.float()).dtype == torch.float32


def test_equal_rewards_are_exactly_0() -> None:
    norm = gk.RunningNorm(eps=0.0)
    for rows in (3, 7):
        assert not norm.step(torch.full((rows,), 0.1), ["a"] * rows).any()


def test_advantages_from_baselines() -> None:
    rewards, agents = torch.tensor([1.0, 0.0, 1.0, 0.5]), ["a", "b", "a", "a"]
    baselines = gk.EmaBaseline(0.5).step(rewards, agents)
    result = gk.group_advantages(rewards, 1, baselines=baselines, config="remax").advantages
    assert baselines.tolist() == [0, 0, 0.5, 0.75] and result.tolist() == [1, 0, 0.5, -0.25]
