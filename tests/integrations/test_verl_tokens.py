"""verl's estimators of tokens, replaced by patch_verl, through verl's own compute_advantage."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl")
pytest.importorskip("tensordict")

from tests.integrations import tiny_verl
from tests.ops.group_advantages.test_peers import VerlBatch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos, ray_trainer

    from grpo_kernels.integrations.verl import patch_verl, unpatch_verl

FUNCTIONS = {
    "gae": "compute_gae_advantage_return",
    "reinforce_plus_plus": "compute_reinforce_plus_plus_outcome_advantage",
    "optimal_token_baseline": "compute_optimal_token_baseline_advantage",
    "tir_optimal_token_baseline": "compute_multi_turn_optimal_token_baseline_advantage",
}


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    unpatch_verl()


def results(name: str, batch: VerlBatch, config: Any) -> dict[str, Tensor]:
    rewards = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1)) * batch.mask
    data = tiny_verl.trainer_batch(rewards, batch.mask, batch.uids)
    draw = torch.Generator().manual_seed(3)
    data.batch["old_log_probs"] = -torch.rand(rewards.shape, generator=draw)
    data.batch["sum_pi_squared"] = torch.rand(rewards.shape, generator=draw)
    data.batch["values"] = torch.randn(rewards.shape, generator=torch.Generator().manual_seed(2))
    computed = ray_trainer.compute_advantage(data, name, gamma=config.gamma, lam=config.lam, config=config)
    return {key: computed.batch[key] * batch.mask for key in ("advantages", "returns")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_patched_estimators_of_tokens(name: str, restored: None) -> None:
    batch, config = VerlBatch([4, 1, 6], "normal"), AlgoConfig(gamma=0.97, lam=0.9)
    wanted = results(name, batch, config)
    patch_verl(loss=False)
    got = results(name, batch, config)
    assert any(not torch.equal(got[key], wanted[key]) for key in got)  # other rounding, so ours was called
    for key in got:
        assert got[key].dtype == torch.float32
        torch.testing.assert_close(got[key], wanted[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_patch_and_unpatch_every_way_to_the_function(name: str, restored: None) -> None:
    before = getattr(core_algos, FUNCTIONS[name])
    assert core_algos.get_adv_estimator_fn(name) is before
    patch_verl(loss=False)
    ours = getattr(core_algos, FUNCTIONS[name])
    assert ours is not before and core_algos.get_adv_estimator_fn(name) is ours
    unpatch_verl()
    assert getattr(core_algos, FUNCTIONS[name]) is before and core_algos.get_adv_estimator_fn(name) is before


def test_reinforce_plus_plus_without_a_config_is_refused(restored: None) -> None:
    patch_verl(loss=False)
    with pytest.raises(ValueError, match="reinforce_plus_plus: config must be verl's algorithm section"):
        core_algos.get_adv_estimator_fn("reinforce_plus_plus")(torch.zeros(2, 3), torch.ones(2, 3))
