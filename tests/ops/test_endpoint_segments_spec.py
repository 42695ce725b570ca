"""What the specification of segments promises: how tokens are cut, what segments are worth, what a threshold does."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.segment_batches import (
    BACKENDS,
    CREDITS,
    F64,
    FAST,
    NAN,
    NORMS,
    PROXIES,
    RULES,
    TIE,
    Batch,
    assert_same,
    batch_of,
    batches,
    config_of,
    lengths_of,
    plan,
)

rules = pytest.mark.parametrize("rule", RULES)
proxies = pytest.mark.parametrize("proxy", PROXIES)
on_backends = pytest.mark.parametrize("backend", BACKENDS)
DISCOUNTS = ((1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.5, 1.0))


def width_for(backend: str, width: int) -> int:
    return width if backend in FAST else min(width, 24)


def cuts_of(batch: Batch, backend: str, **fields: Any) -> list[list[int]]:
    """The lengths of each row's segments, without looking past a token's own reward unless told otherwise."""
    ids = batch.run(config_of(**{"lam": 0.0} | fields), backend).segment_ids
    return [lengths_of(row) for row in ids]


def runs_of(mask: Tensor) -> list[int]:
    """The lengths of one row's maximal spans of valid tokens."""
    spans = "".join("x" if counts else " " for counts in mask.tolist()).split()
    return [len(span) for span in spans]


def recursive_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """From right to left with torch's numbers, one row at a time."""
    found = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        advantage, following = 0.0, 0.0
        for t in reversed(mask[row].nonzero()[:, 0].tolist()):
            value = float(values[row, t])
            advantage = float(rewards[row, t]) + gamma * following - value + gamma * lam * advantage
            found[row, t], following = advantage, value
    return found


# What segments are worth


@pytest.mark.parametrize("discounts", DISCOUNTS, ids=str)
@pytest.mark.parametrize("credit", CREDITS)
@rules
@on_backends
def test_segments_of_one_token_are_ppo(backend: str, rule: str, credit: str, discounts: tuple[float, float]) -> None:
    gamma, lam = discounts
    batch = batch_of(1, 4, width_for(backend, 60), gaps=0.1)
    assert batch.values is not None
    got = batch.run(config_of(group_max_size=1, rule=rule, credit=credit, gamma=gamma, lam=lam), backend)
    wanted = recursive_gae(batch.rewards, batch.values, batch.mask, gamma, lam)
    torch.testing.assert_close(got.advantages.cpu(), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(got.endpoint_mask.cpu(), batch.mask)
    assert got.num_segments.tolist() == batch.mask.sum(1).tolist()


@pytest.mark.parametrize("discounts", DISCOUNTS, ids=str)
@on_backends
def test_one_segment_is_monte_carlo(backend: str, discounts: tuple[float, float]) -> None:
    gamma, lam = discounts
    width = width_for(backend, 60)
    batch = batch_of(1, 4, width, gaps=0.0, empty=0.0)
    assert batch.values is not None
    one = {"group_max_size": width + 5, "group_variance_threshold": 1e9, "gamma": gamma, "lam": lam}
    for credit in CREDITS:
        got = batch.run(config_of(credit=credit, **one), backend)
        assert got.num_segments.tolist() == batch.mask.any(1).int().tolist()
        for row, length in enumerate(batch.mask.sum(1).tolist()):
            powers = gamma ** torch.arange(length, dtype=F64)
            worth = (batch.rewards[row, :length] * powers).sum() - (batch.values[row, 0] if length else 0)
            places = slice(length) if credit == "broadcast" else slice(max(length - 1, 0), length)
            wanted = torch.zeros(width, dtype=F64)
            wanted[places] = worth
            torch.testing.assert_close(got.advantages[row].cpu(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("discounts", DISCOUNTS, ids=str)
@on_backends
def test_returns_are_dense_and_of_tokens(backend: str, discounts: tuple[float, float]) -> None:
    """Whatever the segments, whatever the norm."""
    gamma, lam = discounts
    batch = batch_of(2, 4, width_for(backend, 60), gaps=0.2)
    assert batch.values is not None
    dense = recursive_gae(batch.rewards, batch.values, batch.mask, gamma, lam) + batch.values
    wanted = torch.where(batch.mask, dense, 0)
    for norm in NORMS:
        for size in (1, 16):
            got = batch.run(config_of(norm=norm, group_max_size=size, gamma=gamma, lam=lam), backend)
            torch.testing.assert_close(got.returns.cpu(), wanted, rtol=1e-12, atol=1e-12)


@on_backends
def test_without_values_the_baseline_is_the_prompts_mean_return(backend: str) -> None:
    """Rows without tokens have no return to take part with."""
    rewards = torch.tensor([[1.0, NAN, 2.0], [0.0, 0.0, 4.0], [NAN, NAN, NAN], [7.0, NAN, NAN]], dtype=F64)
    logprobs, mask = torch.full_like(rewards, -1), ~rewards.isnan()
    batch = Batch(rewards, logprobs, logprobs, mask, None, torch.tensor([5, 5, 5, 9]))
    got = batch.run(config_of(gamma=0.5, group_max_size=1), backend)
    baseline = (2.0 + 1.0) / 2  # of 1 + 2 / 2 and 4 / 4
    values = torch.tensor([[baseline] * 3, [baseline] * 3, [0.0] * 3, [7.0] * 3], dtype=F64)
    wanted = recursive_gae(rewards, values, mask, 0.5, 1.0)
    torch.testing.assert_close(got.advantages.cpu(), wanted, rtol=1e-12, atol=1e-12)
    assert got.advantages[3].tolist() == [0.0] * 3 and got.num_segments.tolist() == [2, 3, 0, 1]
    returns = torch.where(mask, wanted + values, 0)
    torch.testing.assert_close(got.returns.cpu(), returns, rtol=1e-12, atol=1e-12)


@on_backends
def test_segments_bootstrap_from_the_next_ones_first_value(backend: str) -> None:
    """By hand: segments of two and of one token, a gap between them, gamma 1/2 and lam 1/4."""
    rewards = torch.tensor([[1.0, 2.0, NAN, 3.0]], dtype=F64)
    values = torch.tensor([[10.0, 20.0, NAN, 40.0]], dtype=F64)
    logprobs, mask = torch.full_like(rewards, -1), ~rewards.isnan()
    batch = Batch(rewards, logprobs, logprobs, mask, values, torch.zeros(1, dtype=torch.int64))
    config = config_of(gamma=0.5, lam=0.25, group_variance_threshold=1e9)
    last = 3.0 - 40.0
    first = (1.0 + 0.5 * 2.0) + 0.25 * 40.0 - 10.0 + 0.25 * 0.25 * last
    got = batch.run(config, backend)
    assert got.segment_ids.tolist() == [[0, 0, -1, 1]]
    assert got.advantages.tolist() == [[0.0, first, 0.0, last]]
    spread = batch.run(dataclasses.replace(config, credit="broadcast"), backend)
    assert spread.advantages.tolist() == [[first, first, 0.0, last]]
    second = (2.0 + 0.5 * 40.0 - 20.0) + 0.125 * last
    of_tokens = [(1.0 + 0.5 * 20.0 - 10.0) + 0.125 * second + 10.0, second + 20.0, 0.0, 3.0]
    assert got.returns.tolist() == spread.returns.tolist() == [of_tokens]


@pytest.mark.parametrize("credit", CREDITS)
@on_backends
def test_norms_are_of_endpoints(backend: str, credit: str) -> None:
    for seed in range(4):
        batch = batch_of(seed, 8, width_for(backend, 50), gaps=0.05, empty=0.2)
        own = batch.run(config_of(credit=credit, group_epsilon=1e-3), backend)
        ends = own.endpoint_mask
        worth = own.advantages[ends]
        whole = batch.run(config_of(credit=credit, norm="batch", group_epsilon=1e-3), backend)
        assert torch.equal(whole.segment_ids, own.segment_ids)
        wanted = (worth - worth.mean()) / (worth.std(correction=1) + 1e-3)
        torch.testing.assert_close(whole.advantages[ends], wanted, rtol=1e-10, atol=1e-12)
        by_prompt = batch.run(config_of(credit=credit, norm="prompt", group_epsilon=1e-3), backend)
        prompts = batch.groups.to(worth.device)[ends.nonzero()[:, 0]]
        for prompt in set(prompts.tolist()):
            mine = worth[prompts == prompt]
            wanted = (mine - mine.mean()) / (mine.std(correction=1) + 1e-3) if len(mine) > 1 else 0 * mine
            torch.testing.assert_close(by_prompt.advantages[ends][prompts == prompt], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
@on_backends
def test_broadcast_gives_each_token_what_its_endpoint_has(backend: str, norm: str) -> None:
    batch = batch_of(3, 5, width_for(backend, 50))
    at_ends = batch.run(config_of(norm=norm), backend)
    spread = batch.run(config_of(norm=norm, credit="broadcast"), backend)
    assert not at_ends.advantages[~at_ends.endpoint_mask].any()
    for row in range(5):
        ids = spread.segment_ids[row]
        worth = at_ends.advantages[row][at_ends.endpoint_mask[row]]
        assert torch.equal(spread.advantages[row][ids >= 0], worth[ids[ids >= 0].long()])
    for field in ("returns", "endpoint_mask", "segment_ids", "num_segments"):
        assert torch.equal(getattr(spread, field), getattr(at_ends, field))


# Where tokens are cut


def assert_well_formed(got: gk.EndpointSegments, mask: Tensor, size: int) -> None:
    ids, ends = got.segment_ids.cpu(), got.endpoint_mask.cpu()
    assert torch.equal(ids >= 0, mask) and not (ends & ~mask).any()
    for row in range(len(mask)):
        places = mask[row].nonzero()[:, 0]
        own = ids[row, places]
        assert own.tolist() == sorted(own.tolist()) and set(own.tolist()) == set(range(got.num_segments[row]))
        assert ends[row].sum() == got.num_segments[row]
        for segment in range(got.num_segments[row]):
            tokens = places[own == segment]
            assert len(tokens) <= size
            assert tokens.tolist() == list(range(tokens[0], tokens[-1] + 1)), "a gap inside a segment"
            assert ends[row, tokens].tolist() == [False] * (len(tokens) - 1) + [True]


@proxies
@rules
@on_backends
def test_segments_are_consecutive_within_runs_and_limited(backend: str, rule: str, proxy: str) -> None:
    def check(batch: Batch, size: int, tau: float) -> None:
        config = config_of(rule=rule, proxy=proxy, group_max_size=size, group_variance_threshold=tau)
        assert_well_formed(batch.run(config, backend), batch.mask, size)

    sizes, taus = st.sampled_from((1, 2, 3, 16, 500)), st.sampled_from((0.3, 1.0, 3.0, 1e6))
    batch = batches() if backend in FAST else batches(max_rows=2, max_width=12)
    settings(max_examples=15 if backend in FAST else 2)(given(batch, sizes, taus)(check))()


@on_backends
def test_a_gap_always_ends_a_segment(backend: str) -> None:
    """Whose tokens would else all be in one."""
    mask = [True] * 3 + [False] + [True] * 2 + [False] * 3 + [True] + [False]
    batch = plan([1.0] * len(mask), mask=mask)
    got = batch.with_garbage().run(config_of(group_variance_threshold=1e9), backend)
    assert got.segment_ids.tolist() == [[0, 0, 0, -1, 1, 1, -1, -1, -1, 2, -1]]


@on_backends
def test_coherent_rule_cuts_at_each_sign_flip(backend: str) -> None:
    """And nowhere else, where magnitudes are equal; a flip to next to nothing is within the bound."""
    for seed in range(10 if backend in FAST else 1):
        random = torch.Generator().manual_seed(seed)
        positive = torch.rand(width_for(backend, 80), generator=random) < 0.7
        weights = torch.rand(len(positive), generator=random, dtype=F64) * 0.9 + 0.05
        batch = plan(1.5 * (2.0 * positive - 1), weights=weights)
        lengths = torch.unique_consecutive(positive, return_counts=True)[1].tolist()
        assert cuts_of(batch, backend, group_max_size=100) == [lengths] and len(lengths) > 3
    falling = torch.tensor([1.0, 1, 1, -1, -1, 1, -1, -1, -1, -1, 1, 1]) * torch.linspace(2.0, 1.9, 12)
    for tau in (0.999, 1.0):
        assert cuts_of(plan(falling), backend, group_variance_threshold=tau) == [[3, 2, 1, 4, 2]]
    assert cuts_of(plan([2.0, 2.0, 2.0, -0.1]), backend) == [[4]]


@pytest.mark.parametrize("tau", [0.5, 1.0])
@on_backends
def test_alternating_signs_give_singletons(backend: str, tau: float) -> None:
    batch = plan(torch.tensor([1.0, -1.0]).repeat(10))
    assert cuts_of(batch, backend, group_variance_threshold=tau) == [[1] * 20]


@rules
@on_backends
def test_uncorrelated_proxy_ignores_signs(backend: str, rule: str) -> None:
    for seed in range(6 if backend in FAST else 1):
        batch = batch_of(seed, 3, width_for(backend, 60))
        assert batch.values is not None
        positive = dataclasses.replace(batch, rewards=(batch.rewards - batch.values).abs() + batch.values)
        of_one = {"rule": rule, "lam": 0.0, "gamma": 0.0}
        mixed, other = cuts_of(batch, backend, proxy="uncorrelated", **of_one), cuts_of(
            positive, backend, proxy="uncorrelated", **of_one
        )  # fmt: skip
        assert mixed == other
        assert cuts_of(batch, backend, **of_one) != cuts_of(positive, backend, **of_one), "coherent does not"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 40])
@proxies
@on_backends
def test_constant_advantages_are_cut_by_size_alone(backend: str, proxy: str, size: int) -> None:
    mask = torch.ones(75, dtype=torch.bool)
    mask[[7, 8, 30, 70]] = False
    batch = plan([-0.3] * 75, weights=torch.linspace(0.05, 0.95, 75), mask=mask)
    for tau in (1.0, 4.0):
        (lengths,) = cuts_of(batch, backend, proxy=proxy, group_max_size=size, group_variance_threshold=tau)
        full = [[size] * (run // size) + [run % size] * (run % size > 0) for run in runs_of(mask)]
        assert lengths == list(itertools.chain(*full)) and len(lengths) == sum(-(-run // size) for run in runs_of(mask))


# (seed, rows, tokens, gaps, rewards): short and long, without and with gaps, dense, sparse and terminal rewards. Of the
# seeds of a shape the first that is not used yet and for which this holds; of 40 it does for 20 to 40.
SHAPES = [
    (0, 4, 64, 0.0, "normal"),
    (1, 4, 64, 0.1, "normal"),
    (4, 2, 256, 0.0, "sparse"),
    (3, 2, 256, 0.02, "terminal"),
    (2, 8, 33, 0.5, "normal"),
    (6, 3, 100, 0.0, "terminal"),
    (5, 1, 500, 0.01, "sparse"),
    (7, 16, 17, 0.05, "equal"),
]
RISING = (0.1, 0.3, 0.7, 0.99, 1.01, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 1e3, 1e6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@proxies
@on_backends
def test_threshold_moves_the_two_rules_in_opposite_ways(backend: str, proxy: str, shape: tuple[Any, ...]) -> None:
    """Of these shapes; no greedy cut proves it of all."""
    seed, rows, width, gaps, kind = shape
    batch = batch_of(seed, rows, width_for(backend, width), gaps=gaps, rewards=kind, empty=0.0)
    taus = RISING if backend in FAST else RISING[1::4]

    def count(rule: str, tau: float) -> int:
        config = config_of(rule=rule, proxy=proxy, group_variance_threshold=tau)
        return int(batch.run(config, backend).num_segments.sum())

    counts = {rule: [count(rule, tau) for tau in taus] for rule in RULES}
    assert counts["bounded"] == sorted(counts["bounded"], reverse=True)
    assert counts["literal"] == sorted(counts["literal"])
    assert counts["bounded"][0] > counts["bounded"][-1] and counts["literal"][0] < counts["literal"][-1]


@proxies
@on_backends
def test_threshold_below_one_gives_singletons_for_equal_advantages(backend: str, proxy: str) -> None:
    batch = plan([0.7] * 20)
    assert cuts_of(batch, backend, proxy=proxy, group_variance_threshold=0.99) == [[1] * 20]
    assert cuts_of(batch, backend, proxy=proxy, group_variance_threshold=1.01) == [[16, 4]]


@proxies
@on_backends
def test_literal_rule_closes_no_segment_of_one_token(backend: str, proxy: str) -> None:
    """But at the end of a run, and with a size of 1."""

    def check(batch: Batch, tau: float) -> None:
        config = config_of(rule="literal", proxy=proxy, group_variance_threshold=tau)
        ids = batch.run(config, backend).segment_ids
        for row, mask in zip(ids, batch.mask, strict=True):
            lengths, runs = lengths_of(row), runs_of(mask)
            for run in runs:
                taken: list[int] = []
                while sum(taken) < run:
                    taken.append(lengths.pop(0))
                assert 1 not in taken[:-1]
            assert not lengths

    batch = batches() if backend in FAST else batches(max_rows=2, max_width=12)
    taus = st.sampled_from((0.5, 1.0, 30.0, 1e6))
    settings(max_examples=15 if backend in FAST else 2)(given(batch, taus)(check))()
    assert cuts_of(plan([1.0] * 7), backend, rule="literal", proxy=proxy, group_variance_threshold=1e6) == [
        [2, 2, 2, 1]
    ]
    assert cuts_of(plan([1.0] * 3), backend, rule="literal", proxy=proxy, group_max_size=1) == [[1, 1, 1]]


@on_backends
def test_literal_rule_closes_where_the_length_reaches_the_ratio(backend: str) -> None:
    """By hand: weights of 1/2, advantages 1 and then 3. P = 2, Q = 1: the ratio is (3 / 2)^2, over tau 2.25 / tau."""
    batch = plan([1.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    lengths = {tau: cuts_of(batch, backend, rule="literal", group_variance_threshold=tau) for tau in (1.2, 0.9, 0.4)}
    # after two tokens 2.25, after three (1.5 * 3 / 3.5)^2 = 1.65, after four (2 * 3 / 5)^2 = 1.44, after five 1.33
    assert lengths == {1.2: [[2, 2, 2]], 0.9: [[3, 2, 1]], 0.4: [[4, 2]]}


@on_backends
def test_bounded_rule_opens_a_segment_where_the_ratio_would_exceed_tau(backend: str) -> None:
    """The same tokens; the one that is too much is the first of the next segment."""
    batch = plan([1.0, 3.0, 3.0, 3.0])
    lengths = {tau: cuts_of(batch, backend, group_variance_threshold=tau) for tau in (2.2, 2.3)}
    assert lengths == {2.2: [[1, 3]], 2.3: [[4]]}
    uncorrelated = {"proxy": "uncorrelated"}  # 2 * 9 / (1 + 9)
    lengths = {tau: cuts_of(batch, backend, group_variance_threshold=tau, **uncorrelated) for tau in (1.7, 1.9)}
    assert lengths == {1.7: [[1, 3]], 1.9: [[4]]}


@on_backends
def test_tokens_weigh_by_ratio_and_probability(backend: str) -> None:
    """Weights w and 1 with advantages 1 and 3: the ratio is ((w + 1) * 3 / (w + 3))^2."""
    for now, old in ((0.5, 0.5), (0.5, 0.1), (0.9, 0.9), (0.1, 0.4)):
        weight = now / old * (1 - now)
        ratio = ((weight + 1) * 3 / (weight + 3)) ** 2
        batch = plan([1.0, 3.0])
        logprobs = torch.tensor([[now, 1e-30]], dtype=F64).log()
        batch = dataclasses.replace(
            batch, logprobs=logprobs, old_logprobs=torch.tensor([[old, 1e-30]], dtype=F64).log()
        )
        assert cuts_of(batch, backend, group_variance_threshold=ratio * 1.0001) == [[2]]
        assert cuts_of(batch, backend, group_variance_threshold=ratio * 0.9999) == [[1, 1]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@on_backends
def test_log_ratio_is_limited_to_20_either_way(backend: str, sign: float) -> None:
    """The first token's to 20, that of the second is 19.5: the weights differ by a factor of exp(0.5)."""
    weight = torch.tensor(0.5 * sign, dtype=F64).exp().item()
    ratio = ((weight + 1) * 3 / (weight + 3)) ** 2
    batch = plan([1.0, 3.0])
    now = torch.tensor([[-1e3, -1e3]], dtype=F64)
    for far in (20.0, 25.0, 700.0):
        old = now - sign * torch.tensor([[far, 19.5]], dtype=F64)
        far_off = dataclasses.replace(batch, logprobs=now, old_logprobs=old)
        for tau, lengths in ((ratio * 1.0001, [2]), (ratio * 0.9999, [1, 1])):
            assert cuts_of(far_off, backend, group_variance_threshold=tau, group_epsilon=1e-30) == [lengths]


@on_backends
def test_ties_lengthen_bounded_segments_and_end_literal_ones(backend: str) -> None:
    """Weights of 1 and advantages of 1 and -1, all exact: of two tokens P is 0 and (Q a)^2 is 4."""
    batch = plan([4.0, -4.0, 4.0, -4.0])
    certain = torch.full_like(batch.rewards, -1e3)
    batch = dataclasses.replace(batch, logprobs=certain, old_logprobs=certain)
    assert cuts_of(batch, backend, group_epsilon=4.0) == [[2, 2]]
    assert cuts_of(batch, backend, group_epsilon=3.999) == [[1, 1, 1, 1]]
    literal = {"rule": "literal", "group_epsilon": 4.0}
    assert cuts_of(batch, backend, group_variance_threshold=0.5, **literal) == [[2, 2]]
    assert cuts_of(batch, backend, group_variance_threshold=0.499, **literal) == [[4]]


# What segments do not depend on


@pytest.mark.parametrize("factor", [1e-4, 3.0, 1e6])
@rules
@on_backends
def test_scale_of_rewards_changes_no_cut(backend: str, rule: str, factor: float) -> None:
    """Down to scales of the size of group_epsilon."""
    for seed in range(6 if backend in FAST else 1):
        batch = batch_of(seed, 4, width_for(backend, 60), rewards="normal")
        assert batch.values is not None
        scaled = dataclasses.replace(batch, rewards=batch.rewards * factor, values=batch.values * factor)
        assert batch.gold(config_of(rule=rule)).margin > TIE
        one, other = batch.run(config_of(rule=rule), backend), scaled.run(config_of(rule=rule), backend)
        assert torch.equal(one.segment_ids, other.segment_ids)
        torch.testing.assert_close(other.advantages, one.advantages * factor, rtol=1e-9, atol=1e-9 * factor)


@proxies
@rules
@on_backends
def test_cuts_do_not_look_ahead(backend: str, rule: str, proxy: str) -> None:
    """But through the advantages, which here are tokens' own: a row's beginning is cut without its end as with it."""
    for seed in range(4 if backend in FAST else 1):
        batch = batch_of(seed, 1, width_for(backend, 60), gaps=0.02, empty=0.0)
        config = config_of(rule=rule, proxy=proxy, gamma=0.0)
        ids = batch.run(config, backend).segment_ids[0]
        for end in range(1, batch.mask.shape[1], 7):
            before = torch.arange(batch.mask.shape[1]) < end
            # the end in a row of its own, for the scale to stay as it is
            halves = batch.rows(torch.tensor([0, 0]))
            halves = dataclasses.replace(halves, mask=halves.mask & torch.stack((before, ~before)))
            assert torch.equal(halves.run(config, backend).segment_ids[0, :end], ids[:end])


@on_backends
def test_rewards_far_below_group_epsilon_are_noise(backend: str) -> None:
    """The scale is group_epsilon at least."""
    signs = torch.tensor([1.0, -1.0]).repeat(10)
    for size, eps, wanted in ((1e-4, 1e-6, [1] * 20), (1e-10, 1e-6, [16, 4]), (1e-10, 1e-12, [1] * 20)):
        assert cuts_of(plan(signs * size), backend, group_epsilon=eps) == [wanted]
    assert cuts_of(plan([0.0] * 20), backend) == [[16, 4]]


def picked(result: gk.EndpointSegments, rows: Any) -> gk.EndpointSegments:
    fields: dict[str, Any] = {name: getattr(result, name)[rows] for name in result._fields[:5]}
    return result._replace(**fields)


def assert_close(got: gk.EndpointSegments, wanted: gk.EndpointSegments) -> None:
    for field in ("segment_ids", "endpoint_mask", "num_segments"):
        assert torch.equal(getattr(got, field), getattr(wanted, field)), field
    for field in ("advantages", "returns"):
        torch.testing.assert_close(getattr(got, field), getattr(wanted, field), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_shuffling_the_rows_permutes_the_result(backend: str, with_values: bool, norm: str) -> None:
    for seed in range(5 if backend in FAST else 1):
        batch = batch_of(seed, 7, width_for(backend, 40), values=with_values)
        assert batch.gold(config_of(norm=norm)).margin > TIE
        order = torch.randperm(7)
        whole, shuffled = (part.run(config_of(norm=norm), backend) for part in (batch, batch.rows(order)))
        assert_close(shuffled, picked(whole, order.to(whole.advantages.device)))


def mirrored(batch: Batch) -> Batch:
    """Each row and its negative, so that the mean square of the advantages is that of any share of such pairs."""
    assert batch.values is not None
    both = batch.map(lambda x: x.repeat_interleave(2, 0))
    sign = torch.tensor([1.0, -1.0], dtype=F64).repeat(len(batch.mask))[:, None]
    assert both.values is not None
    groups = batch.groups.repeat_interleave(2)
    return dataclasses.replace(both, rewards=both.rewards * sign, values=both.values * sign, groups=groups)


@rules
@on_backends
def test_rows_do_not_see_each_other_but_for_the_scale(backend: str, rule: str) -> None:
    """Copies of one row with other weights and other signs have one scale, however the batch is split."""
    one = batch_of(0, 1, width_for(backend, 60), gaps=0.1, empty=0.0)
    batch = mirrored(one.rows(torch.zeros(3, dtype=torch.int64)))
    random = torch.Generator().manual_seed(1)
    logprobs = torch.rand(batch.rewards.shape, generator=random, dtype=F64).log()
    batch = dataclasses.replace(batch, logprobs=logprobs, old_logprobs=logprobs)
    config = config_of(rule=rule, lam=0.5)
    assert batch.gold(config).margin > TIE
    whole = batch.run(config, backend)
    assert len({tuple(row) for row in whole.segment_ids.tolist()}) > 2
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6), slice(0, 6, 5)):
        part = batch.rows(torch.arange(6)[rows]).run(config, backend)
        assert_close(part, picked(whole, rows))


@on_backends
def test_scale_is_the_root_mean_square_of_all_tokens_of_the_batch(backend: str) -> None:
    """Only group_epsilon shows it, which (Q a)^2 - tau P^2 is above or below for the advantages 1 and 2."""
    eps = 1e-2
    for loud in (1.0, 8.0, 15.0):
        rewards = torch.tensor([[1.0, 2.0, NAN], [loud, loud, NAN]], dtype=F64)
        scale = float((rewards[:, :2] ** 2).mean().sqrt())
        for surplus in (0.8, 1.25):
            tau = (4.0 - surplus * eps * scale**2) / 2.25
            batch = plan(rewards, mask=~rewards.isnan())
            lengths = cuts_of(batch, backend, group_variance_threshold=tau, group_epsilon=eps)
            assert lengths[0] == ([1, 1] if surplus > 1 else [2]), (loud, tau)
    assert cuts_of(plan([[1.0, 2.0]]), backend, group_variance_threshold=1.77, group_epsilon=1e-6) == [[1, 1]]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_padding_changes_nothing(backend: str, with_values: bool, norm: str) -> None:
    """On either side, and rows of nothing else."""
    for seed in range(5 if backend in FAST else 1):
        batch = batch_of(seed, 5, width_for(backend, 40), values=with_values)
        wanted = batch.run(config_of(norm=norm), backend)

        def padded(x: Tensor) -> Tensor:
            filler = False if x.dtype == torch.bool else NAN
            return torch.nn.functional.pad(x, (3, 4, 0, 2), value=filler)

        more = dataclasses.replace(batch.map(padded), groups=torch.cat((batch.groups, batch.groups[:2])))
        got = more.run(config_of(norm=norm), backend)
        assert not got.advantages[5:].any() and (got.segment_ids[5:] == -1).all()
        inner: dict[str, Any] = {name: getattr(got, name)[:5, 3:-4] for name in got._fields[:4]}
        assert_close(got._replace(**inner, num_segments=got.num_segments[:5]), wanted)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_packed_equals_padded(backend: str, with_values: bool, norm: str) -> None:
    for seed in range(8 if backend in FAST else 1):
        batch = batch_of(seed, 5, width_for(backend, 40), values=with_values, gaps=0.1 * (seed % 3))
        wanted, packed = batch.run(config_of(norm=norm), backend), batch.packed(before=2, after=3)
        got = packed.run(config_of(norm=norm), backend)
        assert packed.cu_seqlens is not None
        assert torch.equal(got.num_segments, wanted.num_segments)
        bounds = packed.cu_seqlens.tolist()
        covered = torch.zeros(len(packed.mask), dtype=torch.bool)
        for row, (start, end) in enumerate(itertools.pairwise(bounds)):
            covered[start:end] = True
            for field in ("advantages", "returns", "endpoint_mask", "segment_ids"):
                one, other = getattr(got, field)[start:end], getattr(wanted, field)[row, : end - start]
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        outside = ~covered.to(got.advantages.device)
        assert outside.sum() >= 5 and (got.segment_ids[outside] == -1).all() and not got.returns[outside].any()
        assert not got.advantages[outside].any() and not got.endpoint_mask[outside].any()


@on_backends
def test_what_masked_tokens_hold_changes_nothing(backend: str) -> None:
    for with_values in (True, False):
        batch = batch_of(7, 6, width_for(backend, 40), values=with_values, gaps=0.3)
        for norm in NORMS:
            config = config_of(norm=norm)
            assert_close(batch.with_garbage().run(config, backend), batch.run(config, backend))


# Every setting matters. On this batch each changes what the op gives.

FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "group_variance_threshold": ({}, {"group_variance_threshold": 3.0}),
    "group_max_size": ({}, {"group_max_size": 4}),
    "group_epsilon": ({}, {"group_epsilon": 1.0}),
    "gamma": ({}, {"gamma": 0.9}),
    "lam": ({}, {"lam": 0.5}),
    "rule": ({}, {"rule": "literal"}),
    "proxy": ({}, {"proxy": "uncorrelated"}),
    "credit": ({}, {"credit": "broadcast"}),
    "norm, batch": ({}, {"norm": "batch"}),
    "norm, prompt": ({"norm": "batch"}, {"norm": "prompt"}),
    "group_epsilon of the norm": (
        {"norm": "batch", "group_max_size": 1},
        {"norm": "batch", "group_max_size": 1, "group_epsilon": 0.1},
    ),
}


@pytest.mark.parametrize("field", FIELDS)
@on_backends
def test_every_field_of_the_config_matters(backend: str, field: str) -> None:
    batch = batch_of(13, 5, width_for(backend, 40), empty=0.0)
    one, other = (batch.run(config_of(**fields), backend) for fields in FIELDS[field])
    assert not torch.equal(one.advantages, other.advantages)
    cuts = ("group_variance_threshold", "group_max_size", "group_epsilon", "gamma", "lam", "rule", "proxy")
    assert torch.equal(one.segment_ids, other.segment_ids) == (field not in cuts)
    assert torch.equal(one.returns, other.returns) == (field not in ("gamma", "lam"))


@on_backends
def test_every_field_of_adaptation_matters(backend: str) -> None:
    """After one update: long segments under singletons' threshold, so that tau rises."""
    fields = {"lam": 0.0, "threshold_lr": 0.5, "min_threshold": 0.1, "max_threshold": 10.0}
    low = plan(torch.tensor([1.0, -1.0]).repeat(20))
    high = plan([1.0] * 40)

    def after(batch: Batch, **changes: Any) -> float:
        config = config_of(**fields | changes)
        threshold = gk.SegmentThreshold(config)
        return threshold.update(batch.run(config, backend, threshold=threshold))

    rises = 2.718281828459045**0.5
    assert after(low) == pytest.approx(rises, rel=1e-15)
    assert after(low, threshold_lr=0.1) == pytest.approx(2.718281828459045**0.1, rel=1e-15)
    assert after(low, threshold_lr=0.0) == 1.0 and after(low, adaptive_threshold=False) == 1.0
    assert after(low, max_threshold=1.25) == 1.25
    assert after(low, rule="literal", group_max_size=1) == pytest.approx(1 / rises, rel=1e-15)
    assert after(low, rule="literal", group_max_size=1, min_threshold=0.9) == 0.9
    # one segment of 40 tokens is 2.5 %, the error (0.025 - 0.125) / 0.125
    falls = 2.718281828459045 ** (-0.5 * 0.8)
    assert after(high, group_max_size=40) == pytest.approx(falls, rel=1e-12)
    assert after(high, group_max_size=40, min_threshold=0.9) == 0.9
    assert after(high, group_max_size=40, group_variance_threshold=0.9) == 0.9 * rises, "singletons"


# The threshold that adapts


def result_of(segments: list[int], tokens: int) -> gk.EndpointSegments:
    """As many segments in as many rows, and so many tokens in all."""
    ids = torch.full((2, tokens + 3), -1, dtype=torch.int32)
    ids.view(-1)[:tokens] = 0
    zeros = torch.zeros(ids.shape)
    counts = torch.tensor(segments, dtype=torch.int32)
    return gk.EndpointSegments(zeros, zeros, zeros > 0, ids, counts, torch.tensor(1.0, dtype=F64))


@pytest.mark.parametrize("segments", [[50, 0], [30, 21], [125, 0], [100, 99], [200, 0]], ids=str)
@rules
def test_threshold_stays_within_the_band(rule: str, segments: list[int]) -> None:
    threshold = gk.SegmentThreshold(config_of(rule=rule, group_variance_threshold=1.5))
    for _ in range(3):
        assert threshold.update(result_of(segments, 1000)) == threshold.value == 1.5


@pytest.mark.parametrize(("segments", "error"), [(0, -1.0), (10, -0.92), (49, -0.608), (201, 0.608), (220, 0.76),
                                                 (250, 1.0), (400, 1.0), (1000, 1.0)])  # fmt: skip
@rules
def test_threshold_moves_by_the_error_outside_of_it(rule: str, segments: int, error: float) -> None:
    threshold = gk.SegmentThreshold(config_of(rule=rule, group_variance_threshold=1.5, threshold_lr=0.2))
    sign = 1 if rule == "bounded" else -1
    moved = threshold.update(result_of([segments - segments // 3, segments // 3], 1000))
    assert moved == threshold.value == pytest.approx(1.5 * 2.718281828459045 ** (sign * 0.2 * error), rel=1e-14)


@rules
def test_threshold_ends_at_its_bounds(rule: str) -> None:
    config = config_of(rule=rule, threshold_lr=0.3, min_threshold=0.5, max_threshold=2.0)
    threshold = gk.SegmentThreshold(config)
    seen = [threshold.update(result_of([900], 1000)) for _ in range(9)]
    assert seen[-1] == (2.0 if rule == "bounded" else 0.5)
    seen = [threshold.update(result_of([1], 1000)) for _ in range(9)]
    assert seen[-1] == (0.5 if rule == "bounded" else 2.0)


def test_no_tokens_move_no_threshold() -> None:
    threshold = gk.SegmentThreshold(config_of(group_variance_threshold=1.5))
    assert threshold.update(result_of([0, 0], 0)) == 1.5
    nothing = torch.zeros(0, 4)
    got = gk.endpoint_segments(nothing, nothing, nothing, values=nothing, config=threshold.config, threshold=threshold)
    assert threshold.update(got) == 1.5


def correlated(backend: str) -> Batch:
    """Positive advantages that wander slowly: 32 tokens share most of theirs, so that ratios are between 1 and 9."""
    random = torch.Generator().manual_seed(5)
    noise = torch.randn(2, 2048 + 31, generator=random, dtype=F64)
    smooth = noise.unfold(1, 32, 1).mean(2) * 32**0.5
    return plan((0.5 * smooth).exp(), weights=torch.rand(2, 2048, generator=random, dtype=F64) * 0.9 + 0.05)


@pytest.mark.parametrize("start", [0.1, 10.0])
@rules
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in FAST])
def test_adaptation_brings_the_share_of_endpoints_into_the_band(backend: str, rule: str, start: float) -> None:
    """It can: neighbours are alike, so that bounded segments of 5 to 16 tokens take a tau somewhat above 1, and literal
    ones, which end where n tau reaches ratios around 1, a tau of 1/16 to 1/5.
    """
    batch = correlated(backend)
    config = config_of(
        rule=rule, group_max_size=16, threshold_lr=0.2, min_threshold=0.01, max_threshold=100.0, lam=0.0,
        group_variance_threshold=start,
    )  # fmt: skip
    threshold = gk.SegmentThreshold(config)
    shares = []
    for _ in range(40):
        got = batch.run(config, backend, threshold=threshold)
        shares.append(float(got.num_segments.sum()) / batch.mask.numel())
        threshold.update(got)
    outside = [share for share in shares if not 0.05 <= share <= 0.20]
    assert len(outside) < 30 and shares[: len(outside)] == outside, "once in, it stays"
    before = threshold.value
    threshold.update(batch.run(config, backend, threshold=threshold))
    assert threshold.value == before


def test_state_survives_json() -> None:
    threshold = gk.SegmentThreshold({"threshold_lr": 0.1})
    threshold.update(result_of([900], 1000))
    state = json.loads(json.dumps(threshold.state_dict()))
    again = gk.SegmentThreshold({"threshold_lr": 0.1})
    assert again.value == 1.0 != threshold.value
    again.load_state_dict(state)
    assert again.value == threshold.value
    assert again.update(result_of([900], 1000)) == threshold.update(result_of([900], 1000))


@pytest.mark.parametrize(("state", "error", "part"), [
    ({}, ValueError, "value"),
    ({"tau": 1.0}, ValueError, "tau"),
    ({"value": 1.0, "step": 3}, ValueError, "step"),
    ({"value": "1.0"}, TypeError, "str"),
    ({"value": None}, TypeError, "NoneType"),
    ({"value": True}, TypeError, "bool"),
    ({"value": 0.09}, ValueError, "0.09"),
    ({"value": 10.1}, ValueError, "10.1"),
    ({"value": NAN}, ValueError, "nan"),
], ids=str)  # fmt: skip
def test_wrong_state_is_refused(state: dict[str, Any], error: type[Exception], part: str) -> None:
    threshold = gk.SegmentThreshold()
    with pytest.raises(error, match=r"^SegmentThreshold\.load_state_dict: ") as caught:
        threshold.load_state_dict(state)
    assert part in str(caught.value) and threshold.value == 1.0


# Ranks

RANKS = 2


def batch_of_rank(rank: int | None) -> Batch:
    """Of unlike sizes: all tokens of one rank are endpoints, 4 of 150 of the other, 44 of 190 together."""
    above, below = plan(torch.tensor([1.0, -1.0]).repeat(20)), plan([1.0] * 150)
    if rank is not None:
        return above if rank == 0 else below
    mask = torch.zeros(2, 150, dtype=torch.bool)
    mask[0, :40] = mask[1] = True
    rewards = torch.cat((torch.nn.functional.pad(above.rewards, (0, 110)), below.rewards))
    return plan(rewards, mask=mask)


SETTINGS = {"lam": 0.0, "threshold_lr": 0.25, "group_max_size": 40}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=limit)
    adapting = (True, True, False)
    configs = [config_of(**SETTINGS, adaptive_threshold=adapts) for adapts in adapting]
    together, alone, still = map(gk.SegmentThreshold, configs)
    found: dict[str, list[float]] = {"together": [], "alone": [], "still": []}
    for _ in range(3):
        got = batch_of_rank(rank).run(together.config, "reference", threshold=together)
        found["together"].append(together.update(got, process_group=dist.group.WORLD))
        found["alone"].append(alone.update(got))
        found["still"].append(still.update(got, process_group=dist.group.WORLD))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_ranks_agree_on_what_their_joined_batch_gives(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    joined = gk.SegmentThreshold(config_of(**SETTINGS))
    wanted = []
    for _ in range(3):
        wanted.append(joined.update(batch_of_rank(None).run(joined.config, "reference", threshold=joined)))
    assert ranks[0]["together"] == ranks[1]["together"] == wanted
    assert ranks[0]["alone"] != ranks[1]["alone"] and wanted not in (ranks[0]["alone"], ranks[1]["alone"])
    assert ranks[0]["still"] == ranks[1]["still"] == [1.0] * 3 and wanted[-1] != 1.0


@on_backends
def test_results_are_on_the_device_of_the_tokens(backend: str) -> None:
    batch = batch_of(0, 2, 5)
    got = batch.run(config_of(), backend)
    assert all(field.device.type == device_of(backend).type for field in got)
    assert_same(got, batch.run(config_of(), backend))
