"""token_advantages and optimal_token_baseline against the installed verl's functions.

Faults that this is for: another discount, variance, weight or tail than verl's, in this or in a new version of it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import grpo_kernels as gk
from tests import peers
from tests.ops.promises import run
from tests.ops.token_advantages.cases import BACKENDS, F64, draw_probabilities, op_of, padded

pytest.importorskip("verl")
PEERS = {"position": "optimal_token_baseline", "rank": "tir_optimal_token_baseline"}


@pytest.mark.parametrize(
    ("estimator", "gamma", "lam"),
    [
        *(("gae", gamma, lam) for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (0.9, 0.0))),
        *(("reinforce_plus_plus", gamma, None) for gamma in (1.0, 0.97)),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_verl_estimators(backend: str, estimator: str, gamma: float, lam: float | None) -> None:
    from verl.trainer.config import AlgoConfig

    batch = padded(11, 6, 40)
    mask = batch["mask"]
    if estimator == "gae":
        want = peers.verl(estimator)(batch["rewards"], batch["values"], mask.double(), gamma, lam)
    else:
        want = peers.verl(estimator)(batch["rewards"], mask.double(), config=AlgoConfig(gamma=gamma))
    config = gk.TokenAdvantageConfig(estimator, gamma=gamma, lam=lam, carry_rewards=False)
    for ours, theirs in zip(run(op_of(config), batch, backend, F64).values(), want, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-9, atol=1e-9)
        assert not ours[~mask].any()


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
