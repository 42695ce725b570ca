"""The settings of every algorithm of the trainer, as a dry run shows them, and what its metrics divide by.

Faults that this is for: an algorithm with a number or a loss of another one; a clip fraction of a
number other than that of the ratios. Runs of most algorithms are not compared with anything.
"""

from __future__ import annotations

import pytest
import torch
from grpo_trainer.algorithm import ALGORITHMS, Plan
from grpo_trainer.metrics import loss_metrics
from grpo_trainer.recipe import Algorithm, Rl

import grpo_kernels as gk

PLAIN = "advantages: the defaults"
KL = "kl=k3, kl_coef=0.01"
DESCRIBED = {
    "grpo": f"{PLAIN}; loss: {KL}",
    "dr_grpo": "advantages: estimator=dr_grpo, scale=none; loss: aggregation=seq-mean-token-sum-norm, max_length=32",
    "dapo": f"{PLAIN}; loss: clip_high=0.28",
    "rloo": "advantages: estimator=rloo, center=leave_one_out, scale=none; loss: the defaults",
    "reinforce": "advantages: estimator=rloo, center=leave_one_out, scale=none; loss: loss=reinforce",
    "reinforce_plus_plus": "advantages: estimator=reinforce_plus_plus_baseline, scale=none, singleton=raw, "
    "whiten=tokens, whiten_eps=1e-08; loss: kl=k2, kl_coef=0.01",
    "opo": "advantages: estimator=opo, center=length, scale=none; loss: the defaults",
    "maxrl": "advantages: estimator=maxrl, scale=mean; loss: the defaults",
    "gpg": "advantages: estimator=gpg, scale=none; loss: loss=reinforce",
    "pass_k": "advantages: estimator=grpo_passk, center=runner_up; loss: the defaults",
    "gdpo": "advantages: estimator=gdpo, combine=normalize_then_sum, whiten=rows, whiten_eps=1e-06; loss: the defaults",
    "gspo": f"{PLAIN}; loss: ratio=sequence, clip_low=0.0003, clip_high=0.0004, aggregation=seq-mean-token-mean",
    "gmpo": f"{PLAIN}; loss: loss=geo_mean, clip_low=0.4, clip_high=0.4, aggregation=seq-mean-token-sum",
    "cispo": f"{PLAIN}; loss: loss=cispo, clip_low=None, clip_high=4.0",
    "sapo": f"{PLAIN}; loss: loss=sapo, aggregation=seq-mean-token-mean",
    "similarity_group_grpo": f"advantages: shrinkage=4.0; loss: {KL}",
    "polychromic": f"loss: {KL}",
    "ppo": "segments: group_max_size=1; loss: the defaults",
    "group_ppo": "segments: the defaults; loss: ratio=segment",
}


def test_settings_of_algorithms() -> None:
    assert {name: Plan.of(Rl(algorithm=Algorithm(name=name))).described() for name in ALGORITHMS} == DESCRIBED


@pytest.mark.parametrize(("name", "low", "high"), [("grpo", 1 / 12, 3 / 12), ("group_ppo", 1 / 5, 2 / 5)])
def test_clip_fractions_are_of_ratios(name: str, low: float, high: float) -> None:
    """Twelve tokens in five segments; a segment has the product of its tokens' ratios."""
    plan = Plan.of(Rl(algorithm=Algorithm(name=name)))
    moved = torch.tensor([[0.3, 0.0, 0.0, 0.1, 0.15, 0.3], [0.3, 0.0, 0.0, 0.0, 0.0, -0.3]])
    segments = torch.tensor([[0, 0, 1, 2, 2, 2], [0, 0, 0, 1, 1, 1]])
    advantages = torch.tensor([[1.0] * 6, [1.0, 1.0, -1.0, -1.0, -1.0, -1.0]])
    more = {"segments": segments} if plan.loss.ratio == "segment" else {}
    more |= {"ref_logprobs": moved} if plan.loss.kl != "none" else {}
    result = gk.policy_loss(moved, torch.zeros(2, 6), advantages, config=plan.loss, **more)
    metrics = loss_metrics([result.metrics.tensor], [0.0], [0.0], plan)
    assert (metrics["train/clip_low"], metrics["train/clip_high"]) == pytest.approx((low, high))
