"""No result depends on how a rollout is split into rows.

Faults: a rollout that counts once for each of its rows, in a mean, a standard deviation, a batch or a length; siblings
that do not get what their rollout gets; a masked row, or one without a reward, that decides for its rollout; siblings
that contradict each other; a scan that stops at the end of a row, or goes on into the next rollout; pieces in the wrong
order; tokens of no row, and ids without a row, that are counted; a divisor of rows instead of rollouts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.group_advantages.cases import BACKENDS, FAST, PRESETS, batches, call, configs, takes
from tests.ops.promises import Inputs
from tests.ops.rollouts import Rows, rows
from tests.ops.sampling_correction.cases import by_token

F64 = torch.float64
SEEDS = st.integers(0, 2**32 - 1)


def split(inputs: Inputs, seed: int) -> Inputs:
    """The rows of a batch, split into one to three each and shuffled.

    Not every part states the rewards, masked ones state others, and each has a length of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(inputs["groups"])
    source = torch.arange(count).repeat_interleave(torch.randint(1, 4, (count,), generator=generator))
    source = source[torch.randperm(len(source), generator=generator)]
    if seed % 3 == 0:  # neighbours, all of which state the rewards
        source = source.sort().values
        return {name: value[source] for name, value in inputs.items()} | {"rollouts": 5 * source - 11}
    inputs = {name: value[source].clone() for name, value in inputs.items()}
    # the last row of each rollout stays as it was
    last = torch.zeros(count, dtype=torch.int64).scatter_reduce(0, source, torch.arange(len(source)), "amax")
    is_last = torch.zeros(len(source), dtype=torch.bool).index_fill(0, last, True)
    rewards, number = inputs["rewards"], torch.rand(len(source), generator=generator)
    rewards[~is_last & (number < 0.3)] = torch.nan
    is_masked = ~is_last & (number > 0.7)
    valid = inputs.get("valid", torch.ones_like(is_last)) & ~is_masked
    rewards[~valid] = -123.0
    if "subgroups" in inputs:
        inputs["subgroups"][is_masked] = -1
    if "lengths" in inputs:
        inputs["lengths"] = torch.randint(0, 9, (len(source),), generator=generator).double()
    names = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    if seed % 2:  # numbers near each other, some of which are left out
        names = torch.randperm(2 * count, generator=generator)[:count]
    return inputs | {"valid": valid, "rollouts": names[source]}


def participants(inputs: Inputs) -> Tensor:
    valid = inputs.get("valid", torch.ones(len(inputs["groups"]), dtype=torch.bool))
    return valid & (inputs["subgroups"] >= 0) if "subgroups" in inputs else valid


def folded(inputs: Inputs) -> tuple[Inputs, Tensor]:
    """Rollouts as rows, by a loop over them, and the rollout of each row."""
    valid = participants(inputs)
    inputs = inputs | {"valid": valid}
    names, of_row = inputs["rollouts"].unique(return_inverse=True)
    columns = inputs["rewards"].view(len(of_row), -1)
    table: dict[str, list[Tensor]] = {name: [] for name in inputs if name != "rollouts"}
    for rollout in range(len(names)):
        own = (of_row == rollout).nonzero()[:, 0]
        taken = own[valid[own]]
        leader = (taken if len(taken) else own)[0]
        for name in table:
            table[name].append(inputs[name][leader])
        table["valid"][-1] = torch.tensor(len(taken) > 0)
        stated = [column[~column.isnan()] for column in columns[taken].T]
        rewards = torch.stack([column[0] if len(column) else torch.tensor(torch.nan, dtype=F64) for column in stated])
        table["rewards"][-1] = rewards.view(inputs["rewards"].shape[1:])
        if "lengths" in inputs:
            table["lengths"][-1] = inputs["lengths"][taken].sum()
    return {name: torch.stack(values) for name, values in table.items()}, of_row


def assert_folds(inputs: Inputs, seed: int, config: gk.AdvantageConfig, backend: str) -> None:
    if not takes(inputs, config):
        return
    inputs = split(inputs, seed)
    rollouts, of_row = folded(inputs)
    want = {name: values[of_row] for name, values in call(rollouts, "reference", config).items()}
    want["advantages"] = torch.where(participants(inputs), want["advantages"], 0)
    device = device_of(backend)
    got = call({name: value.to(device) for name, value in inputs.items()}, backend, config)
    for name, values in want.items():
        torch.testing.assert_close(got[name].cpu(), values, rtol=1e-9, atol=1e-12, msg=lambda m, of=name: f"{of}: {m}")


MODEST = ("normal", "binary", "grid", "equal")


@pytest.mark.parametrize("backend", FAST)
@given(batches(16, MODEST), SEEDS, configs() | st.sampled_from(list(PRESETS.values())))
def test_a_rollout_of_several_rows_counts_once(
    backend: str, inputs: Inputs, seed: int, config: gk.AdvantageConfig
) -> None:
    assert_folds(inputs, seed, config, backend)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in FAST])
@pytest.mark.parametrize("name", ["grpo", "verl-gdpo"])
def test_a_rollout_of_several_rows_counts_once_on_a_gpu(backend: str, name: str) -> None:
    torch.manual_seed(0)
    inputs = {"rewards": torch.rand(20).double(), "groups": torch.arange(20) // 5}
    assert_folds(inputs | {"lengths": torch.randint(2, 9, (20,))}, 1, gk.AdvantageConfig(name), backend)


CONTRADICTIONS: dict[str, tuple[list[float], list[float]]] = {
    "rewards": ([1, 1, 0, 1], [1, 1, torch.nan, 1]),
    "groups": ([0, 0, 1, 1], [0, 0, 0, 1]),
    "subgroups": ([0, 0, 1, 0], [0, 0, 0, 1]),
    "baselines": ([0.5, 0.5, 0.25, 1], [0.5, 0.5, 0.5, 1]),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("backend", FAST)
def test_siblings_must_agree(backend: str, name: str) -> None:
    for order in ([0, 1, 2, 3], [3, 0, 1, 2]):  # ids that descend, and that ascend
        assert_must_agree(backend, name, order)


def assert_must_agree(backend: str, name: str, order: list[int]) -> None:
    wrong, right = (torch.tensor(values)[order] for values in CONTRADICTIONS[name])
    numbers = {"groups": torch.zeros(4, dtype=torch.int64), "rewards": torch.tensor([1.0, 1, 1, 0])[order]}
    given = numbers | {
        "rollouts": torch.tensor([7, 7, 7, -4])[order],
        "config": "remax" if name == "baselines" else "grpo",
    }
    if name == "rewards":
        wrong, right = wrong.float(), right.float()
    given |= {key: value.to(device_of(backend)) for key, value in given.items() if key != "config"}
    wrong, right = (values.to(device_of(backend)) for values in (wrong, right))
    gk.group_advantages(**given | {name: right}, backend=backend)
    rule = f"^group_advantages: {name} must be equal in all rows of a rollout, got .* in row .* after .* in rollout 7$"
    if torch.cuda.is_available():
        pytest.skip("a GPU asserts, which ends its context")
    with pytest.raises(RuntimeError, match=rule):
        gk.group_advantages(**given | {name: wrong}, backend=backend)
    masked = given | {name: wrong, "valid": torch.tensor([True, True, False, True])[order]}
    if name != "groups":
        gk.group_advantages(**masked, backend=backend)
        return
    with pytest.raises(RuntimeError, match=rule):  # a masked row says nothing, but has its place
        gk.group_advantages(**masked, backend=backend)


def test_consecutive_rows_as_groups() -> None:
    rewards, rollouts = torch.tensor([1.0, 1, 1, 0, 3, 3, 3, 3]), torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    for backend in FAST:
        result = gk.group_advantages(rewards, 4, rollouts=rollouts, config="dr_grpo", backend=backend)
        torch.testing.assert_close(result.advantages, torch.tensor([0.5, 0.5, 0.5, -0.5, 0, 0, 0, 0]))
        assert result.size.tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match=r"^group_advantages: groups must be equal in all rows of a rollout"):
                gk.group_advantages(torch.ones(8), 4, rollouts=rollouts.roll(1), backend=backend)


def drawn(batch: Rows, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shape = batch.is_token.shape
    old = -torch.rand(shape, dtype=F64)
    return {
        "mask": (torch.rand(shape) < 0.7) & batch.is_token,
        "turns": torch.randint(0, 2, shape).cumsum(1),
        "rewards": torch.where(batch.is_token, torch.randn(shape, dtype=F64), 0),
        "values": torch.randn(shape, dtype=F64),
        "old": old,
        "other": old + 0.3 * torch.randn(shape, dtype=F64),
    }


def layouts(batch: Rows) -> list[tuple[Any, dict[str, Tensor]]]:
    """For each way to write the pieces, how a tensor is written, and what else is given."""
    return [(batch.padded, {}), (batch.packed, {"cu_seqlens": batch.cu_seqlens})]


EXAMPLE = Rows([4, 3], [(1, 0, 1), (0, 0, 2), (1, 1, 0), (1, 1, 2), (0, 2, 2)], torch.tensor([5, 2]))


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("name", ["gae", "reinforce", "reinforce_plus_plus"])
@given(rows(), SEEDS)
@example(EXAMPLE, 0)
def test_advantages_of_tokens_go_on_across_rows(name: str, turns: bool, batch: Rows, seed: int) -> None:
    config, whole = gk.TokenAdvantageConfig(name), drawn(batch, seed)
    names = ["rewards", "mask", *(["values"] if config.needs_values else []), *(["turns"] if turns else [])]
    want = gk.token_advantages(**{name: whole[name] for name in names}, config=config)
    for write, more in layouts(batch):
        tokens = {name: write(whole[name]) for name in names}
        got = gk.token_advantages(**tokens, **more, rollouts=batch.ids, config=config)
        for results, expected in zip(got, want, strict=True):
            torch.testing.assert_close(batch.whole(results), torch.where(batch.is_token, expected, 0))


@pytest.mark.parametrize(
    "config",
    [
        gk.CorrectionConfig(weights="sequence", weight_max=2.0),
        gk.CorrectionConfig(weights="token", weight_max=2.0, batch_normalize=True),
        gk.CorrectionConfig(rejections=(("seq_mean_k1", -0.1, 0.1),)),
    ],
    ids=["rows", "tokens", "rejection"],
)
@given(rows(), SEEDS)
@example(EXAMPLE, 0)
def test_corrections_of_rows_are_of_rollouts(config: gk.CorrectionConfig, batch: Rows, seed: int) -> None:
    whole = drawn(batch, seed)
    tensors = [whole[name] for name in ("old", "other", "mask")]
    want = gk.sampling_correction(*tensors[:2], mask=tensors[2], config=config)
    for write, more in layouts(batch):
        old, other, mask = map(write, tensors)
        got = gk.sampling_correction(old, other, mask=mask, **more, rollouts=batch.ids, config=config)
        if config.weighs_rows:  # a rollout's rows share its weight, but for those of which nothing is left
            of_rollout = want.weights[batch.of_row]
            torch.testing.assert_close(got.weights, torch.where(got.weights == 0, 0, of_rollout))
        torch.testing.assert_close(batch.whole(by_token(got, more.get("cu_seqlens"))), by_token(want))
        assert torch.equal(batch.whole(got.mask), want.mask)
        torch.testing.assert_close(got.metrics.tensor, want.metrics.tensor)


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "group-mean-token-mean"]
)
@given(rows(), SEEDS)
@example(EXAMPLE, 0)
def test_shares_and_ratios_are_of_rollouts(aggregation: str, batch: Rows, seed: int) -> None:
    whole = drawn(batch, seed)
    groups = torch.arange(len(batch.lengths)) // 2
    options: dict[str, Any] = {"aggregation": aggregation}
    by_group = aggregation.startswith("group")
    shares = gk.token_shares(whole["mask"], **options, **({"groups": groups} if by_group else {}))
    other = whole["other"].requires_grad_()
    advantages = torch.randn(len(batch.lengths), dtype=F64)
    want = gk.policy_loss(
        other, whole["old"], advantages, mask=whole["mask"], weights=shares, config=gk.LossConfig(ratio="sequence")
    ).loss
    want_gradient = torch.autograd.grad(want, other)[0]
    of_rows = {"groups": groups[batch.of_row]} if by_group else {}
    for write, more in layouts(batch):
        old, mask, current = (write(value) for value in (whole["old"], whole["mask"], other))
        ids = {"rollouts": batch.ids} if aggregation.startswith("seq-mean") else {}
        own = gk.token_shares(mask, **more, **ids, **options, **of_rows)
        torch.testing.assert_close(batch.whole(own), shares)
        logprobs = gk.rollout_logprobs(current, old, batch.ids, mask=mask, **more)
        loss = gk.policy_loss(
            logprobs, old, advantages[batch.of_row, None], mask=mask, **more, weights=own, config=gk.LossConfig()
        ).loss
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(torch.autograd.grad(loss, other)[0], want_gradient)


def test_a_rollout_that_the_old_policy_could_not_sample_has_a_finite_gradient() -> None:
    logprobs = torch.zeros(3, 2, dtype=F64, requires_grad=True)
    old = torch.tensor([[0.0, -torch.inf], [0.0, 0.0], [-1.0, -1.0]], dtype=F64)
    got = gk.rollout_logprobs(logprobs, old, torch.tensor([0, 0, 1]))
    (gradient,) = torch.autograd.grad(got.sum(), logprobs)
    assert got.isfinite().all() and gradient.isfinite().all() and (got[0, 0] > 1e100).item()
