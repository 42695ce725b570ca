"""The float64 reference of group_advantages against the papers' formulas in plain Python."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.group_advantages.registration import SUPPORTS
from tests.harness import device_of, runnable_backends
from tests.strategies import NAN, Batch, batches

BACKENDS = runnable_backends(SUPPORTS)


def mean(values: Sequence[float]) -> float:
    """The mean, exact up to the final rounding."""
    return float(sum(map(Fraction, values)) / len(values))


def deviation(values: Sequence[float], ddof: int = 1) -> float:
    """The standard deviation; 0 for a single value."""
    centre = sum(map(Fraction, values)) / len(values)
    squares = sum((Fraction(v) - centre) ** 2 for v in values)
    return math.sqrt(squares / (len(values) - ddof)) if len(values) > ddof else 0.0


class Formulas:
    """Advantages of one batch by each estimator's formula; groups of equal rewards and unscored rows give 0."""

    def __init__(self, batch: Batch) -> None:
        columns = batch.rewards.double().view(len(batch.groups), -1).tolist()
        self.ids, self.n = batch.groups.tolist(), len(columns)
        self.scored = [ok and any(x == x for x in row) for ok, row in zip(batch.valid.tolist(), columns, strict=True)]
        self.columns = [[NAN] * len(row) if not ok else row for ok, row in zip(self.scored, columns, strict=True)]
        self.total = [float(sum(Fraction(x) for x in row if x == x)) for row in self.columns]
        self.length, self.baseline = batch.lengths.tolist(), batch.baselines.double().tolist()
        self.divisor = 1.0  # the smallest late divisor, which amplifies earlier rounding errors
        self.rows = [i for i in range(self.n) if self.scored[i]]

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        result = defaultdict(list)
        for i in rows:
            result[self.ids[i]].append(i)
        return list(result.values())

    def per_group(self, formula: Callable[[list[int], list[float]], list[float]], single: str = "zero") -> list[float]:
        out = [0.0] * self.n
        for group in self.groups(self.rows):
            rewards = [self.total[i] for i in group]
            if len(group) == 1:
                out[group[0]] = rewards[0] if single == "raw" else 0.0
            elif min(rewards) != max(rewards):
                for i, value in zip(group, formula(group, rewards), strict=True):
                    out[i] = value
        return out

    def grpo(self) -> list[float]:
        return self.per_group(lambda _, r: [(x - mean(r)) / (deviation(r) + 1e-6) for x in r])

    def dr_grpo(self) -> list[float]:
        return self.per_group(lambda _, r: [x - mean(r) for x in r])

    def rloo(self) -> list[float]:
        return self.per_group(lambda _, r: [x - mean(r[:k] + r[k + 1 :]) for k, x in enumerate(r)])

    def opo(self) -> list[float]:
        def formula(group: list[int], r: list[float]) -> list[float]:
            weighted = sum(self.length[i] * Fraction(x) for i, x in zip(group, r, strict=True))
            return [x - float(weighted / sum(self.length[i] for i in group)) for x in r]

        return self.per_group(formula)

    def maxrl(self) -> list[float]:
        def formula(_: list[int], r: list[float]) -> list[float]:
            if mean(r) <= 0:  # no signal without a positive divisor
                return [0.0] * len(r)
            self.divisor = min(self.divisor, mean(r))
            return [(x - mean(r)) / (mean(r) + 1e-6) for x in r]

        return self.per_group(formula)

    def grpo_passk(self) -> list[float]:
        def formula(_: list[int], r: list[float]) -> list[float]:
            second, best = sorted(r)[-2:]
            return [(best - second) / (deviation(r) + 1e-6) if x == best else 0.0 for x in r]

        return self.per_group(formula)

    def gpg(self) -> list[float]:
        gain = len(self.rows) / max(1, sum(self.total[i] != 0 for i in self.rows))
        return [gain * x for x in self.dr_grpo()]

    def remax(self) -> list[float]:
        return [self.total[i] - self.baseline[i] if self.scored[i] else 0.0 for i in range(self.n)]

    def spo(self) -> list[float]:
        scored = [self.remax()[i] for i in self.rows]
        if len(scored) < 2 or min(scored) == max(scored):
            return [0.0] * self.n
        self.divisor = deviation(scored) + 1e-8
        return [(x - mean(scored)) / self.divisor if self.scored[i] else 0.0 for i, x in enumerate(self.remax())]

    def batch_std(self) -> list[float]:
        std = deviation([self.total[i] for i in self.rows]) if self.rows else 0.0
        return [x / (std + 1e-6) for x in self.dr_grpo()]

    def flat(self, i: int) -> bool:
        """Whether the row's group has several rows with equal rewards, which stay 0 in a whitened batch."""
        group = [self.total[j] for j in self.rows if self.ids[j] == self.ids[i]]
        return len(group) > 1 and min(group) == max(group)

    def reinforce_plus_plus_baseline(self) -> list[float]:
        centred = self.per_group(lambda _, r: [x - mean(r) for x in r], single="raw")
        tokens = sum(self.length[i] for i in self.rows)
        if tokens < 2:
            return [0.0] * self.n
        centre = sum(self.length[i] * Fraction(centred[i]) for i in self.rows) / tokens
        variance = sum(self.length[i] * (Fraction(centred[i]) - centre) ** 2 for i in self.rows) / (tokens - 1)
        self.divisor = math.sqrt(variance + Fraction(1e-8))
        live = [self.scored[i] and not self.flat(i) for i in range(self.n)]
        return [float(Fraction(centred[i]) - centre) / self.divisor if live[i] else 0.0 for i in range(self.n)]

    def gdpo(self) -> list[float]:
        total = [0.0] * self.n
        informed = set()
        for column in range(len(self.columns[0])):
            rows = [i for i in self.rows if self.columns[i][column] == self.columns[i][column]]
            for group in self.groups(rows):
                r = [self.columns[i][column] for i in group]
                if min(r) != max(r):
                    informed |= {self.ids[i] for i in group}
                    for i, x in zip(group, r, strict=True):
                        total[i] += (x - mean(r)) / (deviation(r) + 1e-6)
        if not self.rows:
            return total
        scored = [total[i] for i in self.rows]
        centre, self.divisor = mean(scored), deviation(scored) + 1e-6
        live = [self.scored[i] and self.ids[i] in informed for i in range(self.n)]
        return [(total[i] - centre) / self.divisor if live[i] else 0.0 for i in range(self.n)]


ESTIMATORS = [name for name in vars(Formulas) if name in gk.AdvantageConfig.names()]


def reference(batch: Batch, config: str | gk.AdvantageConfig, **changes: Any) -> gk.GroupAdvantages:
    config = gk.AdvantageConfig.of(config)
    options = batch.options(config, torch.device("cpu")) | changes
    return gk.group_advantages(batch.rewards, batch.groups, config=config, backend="reference", **options)


def test_every_estimator_of_the_design_has_a_formula_here() -> None:
    peers = {name for name in gk.AdvantageConfig.names() if name.startswith(("trl-", "verl-", "nemo-"))}
    assert set(ESTIMATORS) == set(gk.AdvantageConfig.names()) - peers


@pytest.mark.parametrize("name", ESTIMATORS)
def test_reference_is_the_formula(name: str) -> None:
    # Rewards of similar magnitude, so that no rounding error exceeds 1e-12: 1000.1 + 1e-7 would lose half its digits.
    one = batches(max_rows=20, dtype=torch.float64, kinds=("normal", "binary", "grid", "tiny", "equal"))
    several = batches(max_rows=20, columns=2, dtype=torch.float64, kinds=("normal", "binary", "grid"))

    @given(one | several)
    def check(batch: Batch) -> None:
        formulas = Formulas(batch)
        expected = torch.tensor(getattr(formulas, name)(), dtype=torch.float64)
        got = reference(batch, name).advantages
        tolerance = 1e-12 * max(1.0, float(expected.abs().max())) / min(1.0, formulas.divisor)
        assert float((got - expected).abs().max()) <= tolerance, (got, expected)

    check()


# Fields of the result


@pytest.mark.parametrize("backend", BACKENDS)
def test_mean_std_and_size_are_those_of_the_scored_rows(backend: str) -> None:
    rewards = [[1.0, 2.0], [4.0, NAN], [NAN, NAN], [0.5, 0.5], [9.0, 9.0], [3.0, 0.25]]
    batch = vector(*rewards, backend=backend)
    groups = torch.tensor([7, 7, 7, 7, 7, -2], device=batch.device)
    valid = torch.tensor([True, True, True, True, False, True], device=batch.device)
    for name in ("grpo", "gdpo", "rloo", "dr_grpo"):
        config = gk.AdvantageConfig(name, reward_weights=(1.0, 0.5))
        result = gk.group_advantages(batch, groups, valid=valid, config=config, backend=backend)
        totals = [2.0, 4.0, 0.75]
        assert result.size.tolist() == [3, 3, 3, 3, 3, 1]
        assert result.mean.tolist() == pytest.approx([mean(totals)] * 5 + [3.125], rel=1e-14)
        assert result.std.tolist() == pytest.approx([deviation(totals)] * 5 + [0.0], rel=1e-14)
        assert result.degenerate.tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_std_reports_the_deviation_of_the_batch(backend: str) -> None:
    rewards = [1.0, 2.0, 5.0, -3.0]
    result = gk.group_advantages(vector(*rewards, backend=backend), 2, config="batch_std", backend=backend)
    assert result.std.tolist() == pytest.approx([deviation(rewards)] * 4, rel=1e-14)
    assert result.mean.tolist() == [1.5, 1.5, 1.0, 1.0]


# Several rewards


def vector(*values: Any, backend: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device_of(backend))


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk", "verl-gpg"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_summed_rewards_equal_the_weighted_sum_as_one_reward(backend: str, name: str) -> None:
    columns = torch.randn(12, 3, dtype=torch.float64, device=device_of(backend))
    columns[2, 1] = columns[5, 0] = columns[5, 2] = NAN  # partly scored rows: the other rewards still count
    columns[7] = NAN
    weights = (0.5, -2.0, 0.3)
    total = (columns * torch.tensor(weights, dtype=torch.float64, device=columns.device)).nansum(1)
    total[7] = NAN
    config = gk.AdvantageConfig(name, reward_weights=weights)
    got = gk.group_advantages(columns, 4, config=config, backend=backend)
    expected = gk.group_advantages(total, 4, config=name, backend=backend)
    torch.testing.assert_close(got.advantages, expected.advantages, rtol=1e-12, atol=1e-12)
    assert got.size.tolist() == expected.size.tolist() == [4] * 4 + [3] * 4 + [4] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_column_equals_a_vector_and_a_weight_scales_it(backend: str) -> None:
    rewards = torch.randn(12, device=device_of(backend))
    flat = gk.group_advantages(rewards, 4, config="dr_grpo", backend=backend)
    column = gk.group_advantages(rewards[:, None], 4, config="dr_grpo", backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(flat, column, strict=True))
    doubled = gk.AdvantageConfig("dr_grpo", reward_weights=(2.0,))
    weighted = gk.group_advantages(rewards, 4, config=doubled, backend=backend)
    assert torch.equal(weighted.advantages, 2 * flat.advantages)


@pytest.mark.parametrize("backend", BACKENDS)
def test_normalize_then_sum_is_the_weighted_sum_of_the_normalized_columns(backend: str) -> None:
    columns = torch.randn(12, 3, dtype=torch.float64, device=device_of(backend))
    columns *= vector(1.0, 100.0, 0.01, backend=backend)
    columns[4:8, 1] = 0.7  # one flat column does not silence its group
    columns[1, 2] = NAN
    weights = (1.0, 0.5, -3.0)
    config = gk.AdvantageConfig(combine="normalize_then_sum", reward_weights=weights)
    got = gk.group_advantages(columns, 4, config=config, backend=backend)
    parts = [gk.group_advantages(columns[:, c], 4, backend=backend).advantages for c in range(3)]
    expected = sum(w * part for w, part in zip(weights, parts, strict=True))
    torch.testing.assert_close(got.advantages, expected, rtol=1e-12, atol=1e-12)
    assert not got.degenerate.any()


# Subgroups


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "opo", "maxrl", "grpo_passk", "remax", "verl-grpo", "trl-gdpo", "gpg"]
)
def test_subgroups_equal_groups_made_by_hand_without_the_left_out_rows(name: str) -> None:
    @given(batches(max_rows=40, dtype=torch.float64))
    def check(batch: Batch) -> None:
        pairs = gk.group_ids(list(zip(batch.groups.tolist(), batch.subgroups.tolist(), strict=True)))
        kept = batch.subgroups >= 0
        by_hand = Batch(**{**vars(batch), "groups": pairs, "valid": batch.valid & kept})
        for backend in ("reference", "cpu") if "cpu" in BACKENDS else ("reference",):
            config = gk.AdvantageConfig(name)
            options = {"config": config, "backend": backend} | batch.options(config, torch.device("cpu"))
            got = gk.group_advantages(batch.rewards, batch.groups, subgroups=batch.subgroups, **options)
            expected = gk.group_advantages(batch.rewards, pairs, **options | {"valid": by_hand.valid})
            assert torch.equal(got.advantages, expected.advantages)
            assert torch.equal(got.size[kept], expected.size[kept])
            assert not got.advantages[~kept].any() and got.degenerate[~kept].all()

    check()


ROWS = [1.0, 2.0, 4.0, 9.0, 5.0, 100.0]
LABELS = [0, 1, 1, 1, 3, -1]  # two singletons, three rows together, one row left out
KEPT = ROWS[:5]


def split(backend: str, **settings: Any) -> list[float]:
    labels = torch.tensor(LABELS, device=device_of(backend))
    config = gk.AdvantageConfig(**settings)
    rewards = vector(*ROWS, backend=backend)
    return gk.group_advantages(rewards, 6, subgroups=labels, config=config, backend=backend).advantages.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_singletons_are_zero_raw_or_measured_by_their_parent(backend: str) -> None:
    own, std = ROWS[1:4], deviation(ROWS[1:4])
    together = [(x - mean(own)) / (std + 0.5) for x in own]
    zero = split(backend, eps=0.5)
    raw = split(backend, eps=0.5, singleton="raw")
    parent = split(backend, eps=0.5, singleton="parent")
    borrowed = [(x - mean(KEPT)) / (deviation(KEPT) + 0.5) for x in KEPT]
    assert zero == pytest.approx([0.0, *together, 0.0, 0.0], rel=1e-14)
    assert raw == pytest.approx([1 / 1.5, *together, 5 / 1.5, 0.0], rel=1e-14)
    assert split(backend, scale="none", singleton="raw")[4] == 5.0
    assert parent == pytest.approx([borrowed[0], *together, borrowed[4], 0.0], rel=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_singleton_that_is_its_whole_group_has_no_parent_to_learn_from(backend: str) -> None:
    rewards = vector(3.0, 1.0, 2.0, backend=backend)
    groups = torch.tensor([4, 5, 5], device=rewards.device)
    config = gk.AdvantageConfig(singleton="parent")
    result = gk.group_advantages(rewards, groups, subgroups=groups * 0, config=config, backend=backend)
    assert result.advantages[0] == 0 and result.degenerate.tolist() == [True, False, False]


@pytest.mark.parametrize("kappa", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shrinkage_blends_mean_and_deviation_by_n_over_n_plus_kappa(backend: str, kappa: float) -> None:
    own, n = ROWS[1:4], 3
    w = n / (n + kappa)
    centre = w * mean(own) + (1 - w) * mean(KEPT)
    std = w * deviation(own) + (1 - w) * deviation(KEPT)
    got = split(backend, eps=0.5, shrinkage=kappa)
    assert got == pytest.approx([0.0, *((x - centre) / (std + 0.5) for x in own), 0.0, 0.0], rel=1e-14)
    unscaled = split(backend, scale="none", shrinkage=kappa)
    assert unscaled[1:4] == pytest.approx([x - centre for x in own], rel=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_shrinkage_gives_the_statistics_of_the_parent(backend: str) -> None:
    got = split(backend, shrinkage=1e15, singleton="parent")
    expected = gk.group_advantages(vector(*KEPT, backend=backend), 5, backend=backend).advantages.tolist()
    assert got == pytest.approx([*expected, 0.0], rel=1e-12)


# Settings


@pytest.mark.parametrize("backend", BACKENDS)
def test_clip_limits_both_signs_of_the_final_advantage(backend: str) -> None:
    rewards = vector(*ROWS, backend=backend)
    for name in ("grpo", "rloo", "gdpo", "batch_std", "gpg"):
        free = gk.group_advantages(rewards, 3, config=name, backend=backend).advantages
        limited = gk.group_advantages(rewards, 3, config=gk.AdvantageConfig(name, clip=0.7), backend=backend)
        assert torch.equal(limited.advantages, free.clamp(-0.7, 0.7)) and free.abs().max() > 0.7


@pytest.mark.parametrize("scale", ["std", "batch_std"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_divisor_is_the_larger_of_std_and_floor_plus_eps(backend: str, scale: str) -> None:
    rewards = [1.0, 3.0]
    for floor in (0.0, 1.0, 5.0):
        config = gk.AdvantageConfig(scale=scale, std_floor=floor, eps=0.25)
        result = gk.group_advantages(vector(*rewards, backend=backend), 2, config=config, backend=backend)
        divisor = max(deviation(rewards), floor) + 0.25
        assert result.advantages.tolist() == pytest.approx([-1 / divisor, 1 / divisor], rel=1e-14)
        assert result.std.tolist() == pytest.approx([deviation(rewards)] * 2, rel=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ddof_is_that_of_every_deviation(backend: str) -> None:
    rewards = [1.0, 2.0, 6.0, 4.0]
    for ddof in (0, 1):
        for scale, expected in (("std", deviation(rewards[:2], ddof)), ("batch_std", deviation(rewards, ddof))):
            config = gk.AdvantageConfig(scale=scale, ddof=ddof, eps=0.0)
            result = gk.group_advantages(vector(*rewards, backend=backend), 2, config=config, backend=backend)
            assert float(result.std[0]) == pytest.approx(expected, rel=1e-14)
        config = gk.AdvantageConfig("gdpo", ddof=ddof, whiten_eps=0.0)
        whitened = gk.group_advantages(vector(*rewards, backend=backend), 4, config=config, backend=backend)
        assert deviation(whitened.advantages.tolist(), ddof) == pytest.approx(1.0, rel=1e-12)


# For each field, two settings that must give different results for ROWS in two groups with LABELS.
FLIPS: dict[str, tuple[dict[str, Any], Any]] = {
    "estimator": ({}, "rloo"),
    "center": ({}, "leave_one_out"),
    "scale": ({}, "none"),
    "ddof": ({}, 0),
    "eps": ({}, 0.1),
    "std_floor": ({}, 20.0),
    "singleton": ({}, "raw"),
    "shrinkage": ({}, 1.0),
    "clip": ({}, 0.5),
    "reward_weights": ({}, (1.0, 3.0)),
    "combine": ({}, "normalize_then_sum"),
    "whiten": ({}, "rows"),
    "whiten_eps": ({"whiten": "rows"}, 0.1),
    "gain": ({}, "nonzero"),
}


def test_flips_cover_every_field() -> None:
    assert set(FLIPS) == {field.name for field in dataclasses.fields(gk.AdvantageConfig) if field.init}


@pytest.mark.parametrize("field", FLIPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_setting_changes_the_result(backend: str, field: str) -> None:
    base, other = FLIPS[field]
    rewards = torch.tensor([[x, 1 / x] for x in [*ROWS, 3.0, 8.0]], device=device_of(backend))
    rewards[6] = 0.0
    labels = torch.tensor([*LABELS, 1, 1], device=rewards.device)
    results = [
        gk.group_advantages(rewards, 8, subgroups=labels, config=gk.AdvantageConfig(**settings), backend=backend)
        for settings in (base, base | {field: other})
    ]
    assert not torch.equal(results[0].advantages, results[1].advantages)
