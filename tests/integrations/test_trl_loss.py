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
