"""token_advantages and optimal_token_baseline against the installed verl's functions.

Faults that this is for: another discount, variance, weight or tail than verl's, in this or in a new version of it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests import peers
from tests.ops.promises import run
from tests.ops.token_advantages.cases import BACKENDS, F64, draw_probabilities, op_of, padded

pytest.importorskip("verl")
PEERS = {"position": "optimal_token_baseline", "rank": "tir_optimal_token_baseline"}
on_backends = pytest.mark.parametrize("backend", BACKENDS)


def assert_close(got: dict[str, Tensor], want: tuple[Tensor, Tensor], mask: Tensor) -> None:
    """Equality where tokens count, and zeros elsewhere."""
    for ours, theirs in zip(got.values(), want, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask].to(ours.dtype), rtol=1e-9, atol=1e-9)
        assert not ours[~mask].any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
@on_backends
def test_verl_gae(backend: str, gamma: float, lam: float) -> None:
    batch = padded(11, 6, 40)
    want = peers.verl("gae")(batch["rewards"], batch["values"], batch["mask"].double(), gamma, lam)
    config = gk.TokenAdvantageConfig(gamma=gamma, lam=lam, carry_rewards=False)
    assert_close(run(op_of(config), batch, backend, F64), want, batch["mask"])


@pytest.mark.parametrize("gamma", [1.0, 0.97])
@on_backends
def test_verl_reinforce_plus_plus(backend: str, gamma: float) -> None:
    from verl.trainer.config import AlgoConfig

    batch = padded(12, 6, 40)
    want = peers.verl("reinforce_plus_plus")(batch["rewards"], batch["mask"].double(), config=AlgoConfig(gamma=gamma))
    config = gk.TokenAdvantageConfig("reinforce_plus_plus", gamma=gamma, carry_rewards=False)
    assert_close(run(op_of(config), batch, backend, F64), want, batch["mask"])


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("places", PEERS)
def test_verl_optimal_token_baseline(places: str, weighted: bool, zero_tail: bool) -> None:
    for _ in range(4):
        batch = draw_probabilities(places)
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
