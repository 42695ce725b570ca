"""optimal_token_baseline against verl's two estimators, and its edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests import peers
from tests.harness import INDUCTOR, assert_raises
from tests.ops.token_advantages.batches import F64, NAN

PEERS = {"position": "optimal_token_baseline", "rank": "tir_optimal_token_baseline"}
every_place = pytest.mark.parametrize("places", PEERS)


def batch_of(seed: int, rows: int, width: int, gaps: float = 0.0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(rows, width, generator=draw, dtype=F64)

    lengths = torch.randint(1, width + 1, (rows, 1), generator=draw)
    p = (-0.1 - 3 * uniform()).exp()  # not 1, where the energy is 0
    return {
        "rewards": torch.randn(rows, width, generator=draw, dtype=F64),
        "old_logprobs": p.log(),
        "sum_pi_squared": p**2 + (1 - p) ** 2 * uniform(),
        "groups": torch.randint(0, 3, (rows,), generator=draw),
        "mask": (uniform() >= gaps) & (torch.arange(width) < lengths),
        "is_weights": 0.5 + uniform(),
    }


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("seed", range(4))
@every_place
def test_verl(places: str, seed: int, weighted: bool, zero_tail: bool) -> None:
    batch = batch_of(seed, 11, 17, gaps=0.3 if places == "rank" else 0.0)
    if not weighted:
        del batch["is_weights"]
    mask = batch["mask"].double()
    advantages, returns = peers.verl(PEERS[places])(
        batch["rewards"],
        mask,
        np.array([f"prompt {group}" for group in batch["groups"]], dtype=object),
        batch["old_logprobs"],
        batch["sum_pi_squared"],
        rollout_is_weights=batch.get("is_weights"),
        handle_zero_tail=zero_tail,
    )
    got = gk.optimal_token_baseline(**batch, places=places, zero_tail=zero_tail)
    # a row alone at its place has advantage 0, and in verl its return times eps / (W + eps)
    torch.testing.assert_close(got.advantages, advantages, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(got.returns, returns * mask, rtol=1e-12, atol=1e-12)
    assert got.advantages.any()


@pytest.mark.parametrize("zero_tail", [True, False])
def test_a_tail_begins_after_the_last_token_of_all_others(zero_tail: bool) -> None:
    """Verl's begins at the column that is their number of tokens, which differs where the mask has gaps."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 1, 0]])
    half = torch.full((2, 5), 0.5, dtype=F64)
    rewards = torch.tensor([[0, 0, 0, 1, 2], [0, 0, 0, 4, 0]], dtype=F64)
    got = gk.optimal_token_baseline(rewards, half.log(), half, 2, mask=mask, zero_tail=zero_tail).advantages
    # each token has energy 0.5; column 3: (3 * 2 + 4 * 1) / 3
    wanted = torch.tensor([[-0.5, 0, 0, -1 / 3, 2 if zero_tail else 0], [0.5, 0, 0, 2 / 3, 0]], dtype=F64)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@every_place
def test_equal_returns_have_no_advantage(places: str) -> None:
    batch = batch_of(1, 6, 9)
    batch |= {"rewards": torch.zeros(6, 9), "mask": torch.ones(6, 9), "groups": torch.zeros(6).long()}
    batch["rewards"][:, -1] = 0.7
    assert not gk.optimal_token_baseline(**batch, places=places).advantages.any()


@every_place
def test_a_row_with_a_nan_reward_is_as_if_it_were_not_there(places: str) -> None:
    batch = batch_of(2, 7, 9)
    batch["mask"][3, :5] = True
    without = {name: torch.cat([value[:3], value[4:]]) for name, value in batch.items()}
    batch["rewards"][3, 4] = NAN
    got, wanted = (gk.optimal_token_baseline(**inputs, places=places) for inputs in (batch, without))
    for ours, others in zip(got, wanted, strict=True):
        assert not ours[3].any()
        torch.testing.assert_close(torch.cat([ours[:3], ours[4:]]), others, rtol=0, atol=0)


@every_place
def test_nothing_outside_the_mask_is_read(places: str) -> None:
    batch = batch_of(3, 8, 9, gaps=0.2)
    junk = {
        name: torch.where(batch["mask"], value, NAN) if value.dtype == F64 else value for name, value in batch.items()
    }
    for got, wanted in zip(*(gk.optimal_token_baseline(**x, places=places) for x in (junk, batch)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_prompts_do_not_depend_on_each_other() -> None:
    batch = batch_of(4, 9, 8)
    chosen = batch["groups"] == 1
    alone = {name: value[chosen] for name, value in batch.items()}
    batch["rewards"][~chosen] *= 1e6
    got, wanted = gk.optimal_token_baseline(**batch), gk.optimal_token_baseline(**alone)
    torch.testing.assert_close(got.advantages[chosen], wanted.advantages, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)], ids=str)
@every_place
def test_no_tokens(places: str, shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape)
    got = gk.optimal_token_baseline(nothing, nothing, nothing, 1, places=places)
    assert got.advantages.shape == got.returns.shape == shape


def test_groups_of_one_size() -> None:
    batch = batch_of(5, 8, 6)
    ids = batch.pop("groups") * 0 + torch.arange(8) // 4
    got, wanted = gk.optimal_token_baseline(groups=4, **batch), gk.optimal_token_baseline(groups=ids, **batch)
    torch.testing.assert_close(got.advantages, wanted.advantages, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("error", "part", "changes"),
    [
        (TypeError, "old_logprobs must be a tensor, got list", {"old_logprobs": [1.0]}),
        (ValueError, "sum_pi_squared must have the shape of rewards", {"sum_pi_squared": torch.zeros(3)}),
        (ValueError, "rewards must have shape [B, T], got [6]", {"rewards": torch.zeros(6)}),
        (ValueError, "old_logprobs must be at most 0, got 0.5 at [0, 0]", {"old_logprobs": torch.full((2, 3), 0.5)}),
        (ValueError, "sum_pi_squared must be within [0, 1], got -1.0", {"sum_pi_squared": -torch.ones(2, 3)}),
        (ValueError, "places must be one of position, rank, got 'turn'", {"places": "turn"}),
        (ValueError, "groups must divide the number of rows, 2, got 3", {"groups": 3}),
        (ValueError, "eps must be a finite number of at least 0, got -1", {"eps": -1}),
    ],
    ids=str,
)
def test_errors(error: type[Exception], part: str, changes: dict[str, Any]) -> None:
    tokens = dict.fromkeys(("rewards", "old_logprobs", "sum_pi_squared"), torch.zeros(2, 3))
    arguments = {**tokens, "groups": 2, **changes}
    assert_raises(error, "optimal_token_baseline: ", [part], lambda: gk.optimal_token_baseline(**arguments))


@every_place
def test_compiles_into_one_graph(places: str) -> None:
    torch.compiler.reset()
    batch = batch_of(6, 6, 7)

    def call(batch: dict[str, Tensor]) -> gk.TokenAdvantages:
        return gk.optimal_token_baseline(**batch, places=places)

    compiled = torch.compile(call, fullgraph=True, backend=INDUCTOR)
    for got, wanted in zip(compiled(batch), call(batch), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
