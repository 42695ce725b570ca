"""The reference of group_advantages against the formulas of the papers and numbers; kernels are compared with it.

Faults that this is for: an estimator's name that stands for other settings; a setting that is ignored, or applied in
another order; the wrong ddof, denominator or center; a subgroup label that is compared across groups; an unscored row
that votes; equal rewards, or a batch without spread, whose rounding noise is divided by eps; a single row or a tie for
the first place that is treated as any other; an infinite reward that hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.group_advantages import cases
from tests.ops.group_advantages.cases import F64, INF, NAN, PRESETS, call

# The formulas of the papers, for a group's rewards, tokens and baselines


def deviation(values: Any, ddof: float = 1) -> float:
    return float(np.std(values, ddof=ddof)) if len(values) > ddof else 0.0


def of_others(formula: Callable[[Any], float], rewards: np.ndarray) -> np.ndarray:
    return np.array([formula(np.delete(rewards, row)) for row in range(len(rewards))])


PAPERS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "grpo": lambda r, t, b: (r - r.mean()) / (deviation(r) + 1e-6),
    "dr_grpo": lambda r, t, b: r - r.mean(),
    "rloo": lambda r, t, b: r - of_others(np.mean, r),
    "opo": lambda r, t, b: r - (t * r).sum() / t.sum(),
    "maxrl": lambda r, t, b: (r - r.mean()) / (r.mean() + 1e-6),
    "grpo_passk": lambda r, t, b: np.where(r == r.max(), r.max() - np.sort(r)[-2], 0) / (deviation(r) + 1e-6),
    "remax": lambda r, t, b: r - b,
    "nemo-grpo": lambda r, t, b: (r - of_others(np.mean, r)) / (of_others(deviation, r) + 1e-6),
}
# those that look at the whole batch: its rewards less the means of their groups or their baselines, rewards, tokens
OF_BATCH: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "gpg": lambda a, r, t: a * len(r) / np.count_nonzero(r),
    "batch_std": lambda a, r, t: a / (deviation(r) + 1e-6),
    "spo": lambda a, r, t: (a - a.mean()) / (deviation(a) + 1e-8),
    "reinforce_plus_plus_baseline": lambda a, r, t: (
        (a - np.average(a, weights=t)) / np.sqrt(np.repeat(a, t).var(ddof=1) + 1e-8)
    ),
}
GROUPS = [[1.0, 0.5, 0.0, 2.5], [3.0, 1.0, 0.0], [1.0, 1.25, 0.25, 0.0, 7.0]]


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith(("trl-", "verl-"))])
def test_estimators_are_the_formulas_of_the_papers(name: str) -> None:
    r, tokens, baselines = np.concatenate(GROUPS), np.arange(1, 13), np.linspace(-1, 2, 12)
    ids = np.repeat(np.arange(3), [len(group) for group in GROUPS])

    def of_groups(paper: str, rewards: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [PAPERS[paper](*(x[ids == group] for x in (rewards, tokens, baselines))) for group in range(3)]
        )

    rewards = r
    if name == "gdpo":
        rewards = np.stack([r, np.arange(12.0) ** 2], 1)
        both = of_groups("grpo", r) + of_groups("grpo", rewards[:, 1])
        want = (both - both.mean()) / (deviation(both) + 1e-6)
    elif name in OF_BATCH:
        want = OF_BATCH[name](of_groups("remax" if name == "spo" else "dr_grpo", r), r, tokens)
    else:
        want = of_groups(name, r)
    inputs = {"rewards": rewards, "groups": ids, "lengths": tokens, "baselines": baselines}
    got = call({key: torch.tensor(value) for key, value in inputs.items()}, "reference", name)["advantages"]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)


# Settings, for two groups of two rewards, with means of 2 and 4


R = np.array([1.0, 3.0, 0.0, 8.0])
A = np.array([-1.0, 1.0, -4.0, 4.0])  # less the means
STD = np.sqrt([2.0, 2.0, 32.0, 32.0])
TOKENS = np.array([3, 1, 2, 5])
TWO = np.stack([R, [0.0, 0.0, 5.0, 1.0]], 1)
NONE = {"scale": "none"}
SETTINGS: list[tuple[dict[str, Any], Any, Any]] = [  # settings, rewards, advantages
    ({"eps": 0.25}, R, A / (STD + 0.25)),
    ({"eps": 0.0, "ddof": 0}, R, np.sign(A)),
    ({"eps": 0.5, "std_floor": 2.0}, R, A / (np.maximum(STD, 2) + 0.5)),
    ({"scale": "batch_std", "eps": 0.0, "ddof": 0}, R, A / R.std()),
    ({"scale": "batch_std", "eps": 0.5, "std_floor": 9.0}, R, A / 9.5),
    ({"scale": "mean", "center": "none", "eps": 0.5}, R, R / np.repeat([2.5, 4.5], 2)),
    ({"scale": "none", "clip": 2.0}, R, A.clip(-2, 2)),
    ({"scale": "none", "whiten": "rows", "whiten_eps": 0.5, "clip": 1.0}, R, (A / (A.std(ddof=1) + 0.5)).clip(-1, 1)),
    (
        {"scale": "none", "whiten": "tokens", "whiten_eps": 0.5, "ddof": 0},
        R,
        (A - np.average(A, weights=TOKENS)) / np.sqrt(np.repeat(A, TOKENS).var() + 0.5),
    ),
    ({"scale": "none", "gain": "nonzero"}, R, A * 4 / 3),
    ({"scale": "none", "reward_weights": (2.0, -1.0)}, TWO, 2 * A - [0, 0, 2, -2]),
    ({"eps": 0.0, "ddof": 0, "combine": "normalize_then_sum", "reward_weights": (2, -1)}, TWO, [-2, 2, -3, 3]),
    ({"scale": "none"}, np.stack([R, [NAN, NAN, 5, 1]], 1), np.add(A, [0, 0, 2, -2])),
    ({"scale": "none"}, [NAN, 3.0, 0.0, 8.0], [0, 0, -4, 4]),
    ({"eps": 0.5, "singleton": "raw"}, [NAN, 3.0, NAN, NAN], [0, 2, 0, 0]),
    ({"estimator": "remax", "eps": 0.5}, [NAN, 3.0, 0.0, 8.0], [0, 2, -1, 7]),
    (
        {"estimator": "trl-rloo-normalized", "whiten_eps": 0},
        [NAN, 3.0, 0.0, 8.0],
        np.array([0, 0, -1, 1]) / math.sqrt(2),
    ),
    (
        {"estimator": "trl-rloo-normalized", "whiten_eps": 0, "singleton": "raw"},
        [NAN, 3.0, 0.0, 8.0],
        np.array([0, 2, -9, 7]) / math.sqrt(67),
    ),
    ({"estimator": "grpo_passk"}, [1.0, 1.0, 0.0, -1.0], [0, 0, 1 / (math.sqrt(0.5) + 1e-6), 0]),
    ({"estimator": "maxrl"}, [1.0, -1.0, 0.0, -1.0], [0, 0, 0, 0]),
]


@pytest.mark.parametrize(("fields", "rewards", "want"), SETTINGS, ids=str)
def test_settings_in_numbers(fields: dict[str, Any], rewards: Any, want: Any) -> None:
    inputs = {"rewards": torch.tensor(rewards, dtype=F64), "groups": 2, "lengths": torch.tensor(TOKENS)}
    got = call(inputs | {"baselines": torch.ones(4)}, "reference", gk.AdvantageConfig(**fields))
    np.testing.assert_allclose(got["advantages"].numpy(), want, rtol=1e-14, atol=1e-14)


def test_the_deviation_of_the_others_has_a_floor() -> None:
    config = gk.AdvantageConfig("nemo-grpo", eps=0.5, std_floor=2.0)
    got = call({"rewards": torch.tensor(R), "groups": 4}, "reference", config)["advantages"]
    want = (R - of_others(np.mean, R)) / (np.maximum(of_others(deviation, R), 2) + 0.5)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-14)


# Promises of the page


def test_a_group_of_subgroups_in_numbers() -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0, 9.0, 5.0, 100.0], dtype=F64)
    labels = torch.tensor([0, 1, 1, 1, 3, -1])  # two singletons, three rows together, one row left out
    config = gk.AdvantageConfig(eps=0.5, singleton="parent", shrinkage=1.0)
    result = gk.group_advantages(rewards, 6, subgroups=labels, config=config, backend="reference")
    whole = 4.2, math.sqrt(38.8 / 4)
    mean, std = 0.75 * 5 + 0.25 * whole[0], 0.75 * math.sqrt(13) + 0.25 * whole[1]
    want = [(x - mean) / (std + 0.5) for x in (2.0, 4.0, 9.0)]
    alone = [(x - whole[0]) / (whole[1] + 0.5) for x in (1.0, 5.0)]
    assert result.advantages.tolist() == pytest.approx([alone[0], *want, alone[1], 0.0], rel=1e-14)
    assert result.mean.tolist() == pytest.approx([4.2, mean, mean, mean, 4.2, 0.0], rel=1e-14)
    assert result.std.tolist() == pytest.approx([whole[1], std, std, std, whole[1], 0.0], rel=1e-14)
    assert result.size.tolist() == [1, 3, 3, 3, 1, 0] and result.degenerate.tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in cases.OF_BATCH])
def test_an_infinite_reward_shows_in_its_group_alone(name: str) -> None:
    inputs = {"rewards": torch.tensor([1.0, INF, 2.0, 5.0, 6.0]), "groups": torch.tensor([0, 0, 0, 1, 1])}
    inputs |= {"lengths": torch.ones(5), "baselines": torch.ones(5)}
    result = call(inputs, "reference", name)["advantages"]
    others = call({key: value[3:] for key, value in inputs.items()}, "reference", name)["advantages"]
    assert not result[1].isfinite() and torch.equal(result[3:], others)


@pytest.mark.parametrize("wrong", [-1.0, NAN, INF])
@pytest.mark.parametrize("backend", [name for name in cases.BACKENDS if name in ("cpu", "reference")])
def test_lengths_that_are_none(backend: str, wrong: float) -> None:
    """Only rows that take part are checked; a GPU is not waited for."""
    given = {"rewards": torch.randn(6), "groups": 3, "lengths": torch.tensor([4.0, 2.0, wrong, 1.0, 1.0, 1.0])}
    rule = f"^group_advantages: lengths must be finite and not negative, got {wrong:g} in row 2"
    with pytest.raises(RuntimeError, match=rule):
        call(given, backend, "opo")
    for left_out in ({"valid": torch.arange(6) != 2}, {"subgroups": -(torch.arange(6) == 2).long()}):
        advantages = call(given | left_out, backend, "opo")["advantages"]
        assert advantages.isfinite().all() and advantages[2] == 0


# values whose rounded mean is another number
@pytest.mark.parametrize("reward", [0.1, 0.35, 0.7, 1000.1])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_a_batch_without_spread_gives_exact_zeros(backend: str, size: int, reward: float) -> None:
    for dtype in (torch.float32, F64):
        rewards = torch.full((3 * size,), reward, dtype=dtype, device=device_of(backend))
        inputs = {"rewards": rewards, "groups": size, "lengths": torch.arange(1, 3 * size + 1, device=rewards.device)}
        for name in ("batch_std", "gdpo", "reinforce_plus_plus_baseline", "trl-rloo-normalized"):
            centers = ("mean", "none") if name == "batch_std" else (PRESETS[name].center,)
            for config in [gk.AdvantageConfig(name, center=center, singleton="raw") for center in centers]:
                result = call(inputs, backend, config)
                assert not result["advantages"].any() and torch.equal(result["mean"], inputs["rewards"]), config


# GiGPO


def normalised(scores: Tensor, keys: list[Any]) -> Tensor:
    result = torch.zeros_like(scores)
    for key in set(keys):
        rows = [row for row, other in enumerate(keys) if other == key and not scores[row].isnan()]
        own = scores[rows]
        if len(rows) > 1 and own.min() < own.max():
            result[rows] = (own - own.mean()) / (own.std() + 1e-6)
    return result


def test_steps_have_the_advantages_of_their_episode_and_of_their_state() -> None:
    """A step that is alone in its state, or has a NaN return or a negative state, has only the first."""
    steps = cases.draw_steps()
    steps["states"][5], steps["step_returns"][7] = 99, NAN
    groups, states = steps["groups"].tolist(), steps["states"].tolist()
    keys = [
        (group, state if state >= 0 else (row,)) for row, (group, state) in enumerate(zip(groups, states, strict=True))
    ]
    want = 0.7 * normalised(steps["episode_rewards"], groups) + 1.5 * normalised(steps["step_returns"], keys)
    got = gk.gigpo_advantages(**steps, episode_weight=0.7, step_weight=1.5, backend="reference")
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_an_episode_may_count_once_and_a_step_alone_in_its_state_has_no_advantage() -> None:
    rewards, episodes = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 1, 1, 1])
    alone = {"step_returns": torch.arange(4.0), "groups": 4, "states": torch.arange(4)}
    for name in ("dr_grpo", "verl-grpo"):  # the latter gives a group of one row its reward
        by_step = gk.gigpo_advantages(rewards, **alone, config=name)
        torch.testing.assert_close(by_step, gk.group_advantages(rewards, 4, config=name).advantages)
        got = gk.gigpo_advantages(rewards, **alone, rollouts=episodes, config=name)
        torch.testing.assert_close(got, gk.group_advantages(rewards, 4, rollouts=episodes, config=name).advantages)
        assert not torch.equal(got, by_step)


def test_keys_are_numbered_by_first_appearance() -> None:
    keys = ["b", "a", "b", ("a", 1), 3, 3.0, "a", None, "1_10", "11_0"]
    got = gk.group_ids(keys)
    assert got.tolist() == gk.group_ids(iter(keys)).tolist() == [0, 1, 0, 2, 3, 3, 1, 4, 5, 6]
    assert gk.group_ids(torch.tensor([7, 7, 9, 7])).tolist() == [0, 0, 1, 0]
    assert got.dtype == gk.group_ids([]).dtype == torch.int64 and gk.group_ids([]).shape == (0,)
    assert gk.group_ids(["a"], device="meta").device.type == "meta"


@pytest.mark.parametrize("rewards", [[0.7, 0.7, 0.7, 0.1], [0.1] * 5 + [0.9]])
def test_equal_others_divide_by_nothing_in_float32(rewards: list[float]) -> None:
    result = gk.group_advantages(torch.tensor(rewards), len(rewards), config="nemo-grpo", backend="reference")
    assert float(result.advantages[-1]) == pytest.approx(rewards[-1] - rewards[0], rel=1e-5)
    assert result.advantages.dtype == result.mean.dtype == result.std.dtype == torch.float32
