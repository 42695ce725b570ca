"""A policy term that TRL does not have, beside the KL, the correction and the mean of GRPOConfig."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

import grpo_kernels as gk
from tests.integrations.test_trl_parts import made, micro_batch

TERMS = {
    "icepop": gk.LossConfig(loss="icepop", clip_high=0.1),
    "topr": gk.LossConfig(loss="topr"),
    "average": gk.LossConfig(ratio="average"),
    "future_kl": gk.LossConfig(future_kl_half_life=8.0, future_kl_clip=(0.8, 1.2)),
    "clip_cov": gk.LossConfig(loss="clip_cov", cov_ratio=0.5, cov_bounds=(0.0, 5.0)),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_policy_term_that_trl_does_not_have(tmp_path: Path, name: str) -> None:
    changes = {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}
    trainer, plain = made(tmp_path, changes=changes, loss=TERMS[name]), made(tmp_path, changes=changes)
    inputs = micro_batch(trainer, False)
    for each in (trainer, plain):
        each.use_vllm, each.current_gradient_accumulation_steps = True, 2
        each.model.train()
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    logprobs, _, _ = trainer._forward(trainer.model, inputs)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    want = gk.policy_loss(
        logprobs,
        inputs["old_per_token_logps"],
        inputs["advantages"],
        mask=mask,
        ref_logprobs=inputs["ref_per_token_logps"],
        is_weights=inputs["importance_sampling_ratio"],
        normalizer=float(mask.sum()) * 4 * 2 / trainer.args.steps_per_generation,
        config=dataclasses.replace(TERMS[name], kl="k3", kl_coef=0.1),
    ).loss
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-7)
    assert float(plain._compute_loss(trainer.model, dict(inputs))) != pytest.approx(float(loss), rel=1e-4)


@pytest.mark.parametrize("name", ["gvpo", "real", "flowrl"])
def test_losses_of_whole_rows_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^FusedGRPOTrainer: loss\.loss must not be '{name}'"):
        made(tmp_path, changes={}, loss=gk.LossConfig(loss=name))


def test_entropy_floor_without_tokens(tmp_path: Path) -> None:
    trainer = made(tmp_path, changes={"top_entropy_quantile": 0.5})
    floor = trainer._entropy_floor(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert floor.isinf()


@pytest.mark.full
def test_micro_batches_of_segments_add_up_to_the_batch(tmp_path: Path) -> None:
    """With SGD, to which the size of a gradient matters, unlike to Adam."""
    changes = {"scale_rewards": "none", "use_bias_correction_kl": False, "optim": "sgd", "learning_rate": 0.5}
    weights = []
    for rows, steps in ((8, 1), (4, 2), (2, 4)):
        split = {"gradient_accumulation_steps": steps, "steps_per_generation": steps}
        split["per_device_train_batch_size"] = rows
        trainer = made(
            tmp_path, changes=changes | split | {"max_steps": 3}, segments=gk.SegmentConfig(group_max_size=3)
        )
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        weights.append({name: weight.detach() - before[name] for name, weight in trainer.model.named_parameters()})
    assert max(change.abs().max() for change in weights[0].values()) > 1e-3
    for other in weights[1:]:  # float32 sums in another order, over three steps
        torch.testing.assert_close(other, weights[0], rtol=1e-3, atol=1e-6)
