"""A policy term that TRL does not have, beside the KL, the correction and the mean of GRPOConfig."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("datasets")

import grpo_kernels as gk
from grpo_kernels.integrations.trl import composed
from tests.integrations.test_trl_parts import made, micro_batch

TERMS = {
    "icepop": gk.LossConfig(loss="icepop", clip_high=0.1),
    "topr": gk.LossConfig(loss="topr"),
    "sequence": gk.LossConfig(ratio="sequence", dual_clip=3.0),
}


def clip_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, mask: Tensor, is_weights: Tensor, **others: Any
) -> gk.PolicyLoss:
    weights = gk.variants.clip_cov_weights(logprobs, old_logprobs, advantages, ratio=0.5, bounds=(0.0, 5.0), mask=mask)
    return gk.policy_loss(logprobs, old_logprobs, advantages, mask=mask, is_weights=weights * is_weights, **others)


@pytest.mark.parametrize("head", ["logprobs", "fused"])
@pytest.mark.parametrize("name", [*TERMS, "a function"])
def test_a_policy_term_that_trl_does_not_have(tmp_path: Path, name: str, head: str) -> None:
    changes = {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}
    trainer = made(tmp_path, changes=changes, head=head, loss=TERMS.get(name, clip_cov))
    plain = made(tmp_path, changes=changes)
    inputs = micro_batch(trainer, False)
    for each in (trainer, plain):
        each.use_vllm, each.current_gradient_accumulation_steps = True, 2
        each.model.train()
    loss = trainer._compute_loss(trainer.model, dict(inputs))
    logprobs, _, _ = trainer._forward(trainer.model, inputs)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    function = gk.policy_loss if name in TERMS else clip_cov
    want = function(
        logprobs,
        inputs["old_per_token_logps"],
        inputs["advantages"],
        mask=mask,
        ref_logprobs=inputs["ref_per_token_logps"],
        is_weights=inputs["importance_sampling_ratio"],
        normalizer=float(mask.sum()) * 4 * 2 / trainer.args.steps_per_generation,
        config=dataclasses.replace(TERMS.get(name, gk.LossConfig()), kl="k3", kl_coef=0.1),
    ).loss
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-7)
    assert float(plain._compute_loss(trainer.model, dict(inputs))) != pytest.approx(float(loss), rel=1e-4)


def test_a_mean_that_trl_does_not_have_is_refused(tmp_path: Path) -> None:
    term = gk.LossConfig(loss="geo_mean", aggregation="seq-mean-token-sum")
    with pytest.raises(ValueError, match=r"^FusedGRPOTrainer: loss\.loss must not be 'geo_mean'"):
        made(tmp_path, changes={}, loss=term)


def test_entropy_floor_without_tokens(tmp_path: Path) -> None:
    trainer = made(tmp_path, changes={"top_entropy_quantile": 0.5})
    floor = composed.entropy_floor(trainer, torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
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
