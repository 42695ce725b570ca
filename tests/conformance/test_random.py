"""Our ops and integrations against the plain trainer, on random batches that are dealt to micro-batches and ranks.

The faults to notice: rows of a rollout that are counted one by one, a share that depends on how rows are dealt, a
masked row that votes, another row's advantage or ratio. Settings that trainers read in other ways are not drawn.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from grpo_conformance.adapters import load
from grpo_conformance.batch import Batch, make, part
from grpo_conformance.run import Asked
from hypothesis import example, given
from hypothesis import strategies as st

from tests.conformance.plain import Plain

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    pytest.importorskip("verl")

ROWS, WIDTH = 6, 4
PLAIN = Asked(Plain())
# added to the standard deviation
EPSILONS = {"grpo_kernels": 1e-6, "fused_trl": 1e-4, "fused_verl": 1e-6}
on_ours = pytest.mark.parametrize("name", EPSILONS)
seeds = st.integers(0, 10**6)


def drawn(seed: int, has_rollouts: bool, **fields: Any) -> Batch:
    """Two groups of three rows, in which every rollout has a token, the same reward in its rows, and one advantage."""
    torch.manual_seed(seed)
    rollouts = torch.arange(ROWS)
    if has_rollouts:  # of the rows of a group
        rollouts = torch.cat([torch.randint(2, (3,)), 2 + torch.randint(2, (3,))])
    mask = torch.rand(ROWS, WIDTH) < 0.6
    for rollout in rollouts.unique():
        mask[(rollouts == rollout).nonzero()[-1], torch.randint(WIDTH, ())] = True
    is_last = torch.tensor([rollouts[row] not in rollouts[row + 1 :] for row in range(ROWS)])
    token_rewards = torch.where(is_last[:, None], torch.randn(ROWS, WIDTH), 0)  # verl copies the others
    own = {"token_rewards": token_rewards.tolist(), "values": torch.randn(ROWS, WIDTH).tolist()}
    own |= {"advantages": torch.randn(ROWS)[rollouts].tolist()}
    rewards = torch.randn(ROWS)[rollouts].tolist()
    groups = [0, 0, 0, 1, 1, 1]
    batch = make(mask.long().tolist(), rewards, groups, rollouts.tolist(), **own | fields)
    return batch.replace(rewards=batch.rewards.double())


def assert_same(got: torch.Tensor, want: torch.Tensor, allowed: float = 0.0) -> None:
    """Both compute in float64."""
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 + allowed)


@on_ours
@given(seeds, st.booleans(), st.sampled_from(["mean", "mean-std", "leave-one-out"]))
@example(352143, True, "mean-std")  # a deviation of 0.007, which TRL's epsilon increases by 1.5%
def test_advantages(name: str, seed: int, has_rollouts: bool, estimator: str) -> None:
    """The CPU kernels compute in float64, so that dividing by a small deviation loses no digits."""
    batch = drawn(seed, has_rollouts, estimator=estimator)
    if not has_rollouts:  # rows without a token do not vote
        batch = batch.replace(mask=batch.mask & (torch.rand(ROWS, 1) < 0.8))
    rows = batch.mask.any(1)
    for group in (batch.groups == 0, batch.groups == 1):  # an answer that is alone is a convention
        if len(batch.rollouts[rows & group].unique()) < 2:
            rows = rows & ~group
    plain = Plain()
    plain.epsilon = EPSILONS[name]
    assert_same(Asked(load(name)).advantages(batch)[rows], Asked(plain).advantages(batch)[rows])


@pytest.mark.parametrize("name", ["grpo_kernels", "fused_verl"])
@given(seeds, st.booleans(), st.sampled_from([1.0, 0.7]), st.sampled_from([1.0, 0.9]))
def test_advantages_of_tokens(name: str, seed: int, has_rollouts: bool, gamma: float, lam: float) -> None:
    batch = drawn(seed, has_rollouts, gamma=gamma, lam=lam)
    assert_same(Asked(load(name)).token_advantages(batch), PLAIN.token_advantages(batch))


@on_ours
@given(
    seeds,
    st.booleans(),
    st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
    st.sampled_from([{}, {"steps": 2}, {"ranks": 2}, {"ratio": "sequence"}]),
    st.booleans(),
)
def test_losses(
    name: str, seed: int, has_rollouts: bool, aggregation: str, dealt: dict[str, Any], has_bonus: bool
) -> None:
    """And their gradients.

    TRL's bonus is a mean over tokens, and its rollouts are of one process, without a
    ratio.
    """
    fields: dict[str, Any] = {"aggregation": aggregation, "kl_coef": 0.0 if name == "fused_trl" else 0.1}
    fields |= {"entropy_coef": 0.2} if has_bonus and aggregation == "token-mean" else {}
    is_whole = not dealt or "ratio" in dealt
    if "ratio" in dealt:
        fields = dealt | {"clip": 10.0, "aggregation": "seq-mean-token-mean"}
    if name == "fused_trl" and ("ratio" in dealt or "ranks" in dealt):
        has_rollouts = False
    batch = drawn(seed, has_rollouts, **fields).replace(groups=torch.zeros(ROWS))
    order = torch.randperm(ROWS).tolist()
    parts = [batch] if is_whole else [part(batch, rows, **dealt) for rows in (order[:3], order[3:])]
    # ours for TRL rounds the weights of terms to float32; ratios are at most exp(0.4)
    terms = 1.5 * float((batch.advantages.abs()[:, None] * Plain()._shares(batch))[batch.mask].sum())
    assert_same(Asked(load(name)).loss(*parts), PLAIN.loss(batch), 2**-24 * terms if name == "fused_trl" else 0.0)
