"""States that go on from batch to batch, against loops: prime-rl's and ROLL's rules, and our reading of SPO."""

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


def batches() -> list[tuple[Tensor, list[str], Tensor]]:
    """Rewards, keys and drifts; keys come back, in one batch and later, and some rows were not scored."""
    random = torch.Generator().manual_seed(0)
    made = []
    for rows in (7, 1, 40, 0, 13):
        rewards = (torch.rand(rows, generator=random, dtype=torch.float64) * 4).round() / 4
        rewards[torch.rand(rows, generator=random) < 0.15] = torch.nan
        keys = [f"k{int(k)}" for k in torch.randint(0, 5 + rows // 4, (rows,), generator=random)]
        made.append((rewards, keys, 0.02 * torch.rand(rows, generator=random, dtype=torch.float64)))
    return made


def of_loop(kind: str, rewards: Tensor, keys: list[str], drift: Tensor, state: dict[str, Any]) -> list[float]:
    results = []
    if kind == "norm":
        for reward, key in zip(rewards.tolist(), keys, strict=True):
            if not math.isnan(reward):
                state.setdefault(key, []).append(reward)
        for reward, key in zip(rewards.tolist(), keys, strict=True):
            seen = torch.tensor(state.get(key, []), dtype=torch.float64)
            flat = len(seen) < 2 or seen.min() == seen.max()
            of_row = reward - seen.mean().item() if len(seen) else reward
            results.append(0 * reward if flat else of_row / (seen.std().item() + 1e-6))
        return results
    for reward, key, moved in zip(rewards.tolist(), keys, drift.tolist(), strict=True):
        if kind == "ema":
            before = state.get(key, 0.0)
            results.append(before)
            state[key] = before if math.isnan(reward) else 0.9 * before + 0.1 * reward
        else:
            alpha, beta = state.get(key, (8 * 0.25, 8 * 0.75))
            results.append(alpha / (alpha + beta))
            rho = min(max(2 ** (-moved / 0.06), 0.875), 0.96)
            state[key] = (alpha, beta) if math.isnan(reward) else (rho * alpha + reward, rho * beta + 1 - reward)
    return results


def step(kind: str, state: Any, rewards: Tensor, keys: list[str], drift: Tensor) -> Tensor:
    result: Tensor = state.step(rewards, keys, drift) if kind == "tracker" else state.step(rewards, keys)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_as_a_loop_over_the_rows(kind: str) -> None:
    state, expected = KINDS[kind](), dict[str, Any]()
    for rewards, keys, drift in batches():
        want = torch.tensor(of_loop(kind, rewards, keys, drift, expected), dtype=torch.float64)
        got = step(kind, state, rewards, keys, drift)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14, equal_nan=True)
    assert len(expected) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_from_its_state(kind: str) -> None:
    *first, last = batches()
    whole, resumed = KINDS[kind](), KINDS[kind]()
    for rewards, keys, drift in first:
        step(kind, whole, rewards, keys, drift)
    resumed.load_state_dict(whole.state_dict())
    torch.testing.assert_close(step(kind, resumed, *last), step(kind, whole, *last), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_rewards_have_float32_results(kind: str) -> None:
    rewards, keys, drift = batches()[0]
    assert step(kind, KINDS[kind](), rewards.float(), keys, drift.float()).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_keys_may_be_a_tensor(kind: str) -> None:
    keys, drift = torch.tensor([5, 5, 3, 5]), torch.zeros(4)
    states = [KINDS[kind](), KINDS[kind]()]
    for rewards in (torch.rand(4), torch.rand(4)):
        got, want = (
            step(kind, state, rewards, of, drift) for state, of in zip(states, (keys, keys.tolist()), strict=True)
        )
        assert torch.equal(got, want)
    assert states[0].state_dict()["keys"] == [5, 3]


def test_equal_rewards_are_exactly_0() -> None:
    norm = gk.RunningNorm(eps=0.0)
    for rows in (3, 7):
        assert not norm.step(torch.full((rows,), 0.1), ["a"] * rows).any()


def test_advantages_from_baselines() -> None:
    rewards, agents = torch.tensor([1.0, 0.0, 1.0, 0.5]), ["a", "b", "a", "a"]
    baselines = gk.EmaBaseline(0.5).step(rewards, agents)
    assert baselines.tolist() == [0, 0, 0.5, 0.75]
    result = gk.group_advantages(rewards, 1, baselines=baselines, config="remax").advantages
    assert result.tolist() == [1, 0, 0.5, -0.25]
    of_batch = gk.group_advantages(rewards, 1, baselines=baselines, config="spo").advantages
    differences = rewards - baselines
    want = (differences - differences.mean()) / (differences.std() + 1e-8)
    torch.testing.assert_close(of_batch, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gk.EmaBaseline(1.0), ValueError, "EmaBaseline: decay must be below 1, got 1.0"),
        (lambda: gk.EmaBaseline("a"), TypeError, "EmaBaseline: decay must be a number, got str 'a'"),
        (lambda: gk.ValueTracker(0.0, 0.1, 0.2), ValueError, "half_life must be a finite number above 0, got 0.0"),
        (lambda: gk.ValueTracker(0.1, 0.3, 0.2), ValueError, "rho_min must be at most rho_max, .* got rho_min=0.3"),
        (
            lambda: gk.EmaBaseline().step(torch.ones(2, 2), ["a", "b"]),
            ValueError,
            r"rewards must have shape \[N\], got",
        ),
        (lambda: gk.EmaBaseline().step(torch.ones(2), [*"abc"]), ValueError, "keys must have 2 entries, .* got 3"),
        (lambda: gk.EmaBaseline().step(torch.ones(2), [[], []]), TypeError, r"keys must be hashable, got list \[\]"),
        (lambda: gk.EmaBaseline().step(torch.ones(2), "ab"), TypeError, "keys must be an iterable .*, got str 'ab'"),
        (
            lambda: gk.ValueTracker(0.1, 0.1, 0.2).step(torch.ones(2), [*"ab"], torch.ones(3)),
            ValueError,
            r"drift must have shape \[2\], got \[3\]",
        ),
        (
            lambda: gk.ValueTracker(0.1, 0.1, 0.2).step(torch.tensor([1.0, -1.0]), [*"ab"]),
            ValueError,
            r"rewards must be within \[0, 1\], or NaN, got -1.0 at \[1\]",
        ),
        (lambda: gk.RunningNorm().load_state_dict({}), ValueError, "RunningNorm.load_state_dict: state must have"),
        (
            lambda: gk.RunningNorm().load_state_dict({"keys": ["a"], "state": torch.ones(1, 2)}),
            ValueError,
            r"state must have shape \[1, 5\], got \[1, 2\]",
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
