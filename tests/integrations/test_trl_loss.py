"""The loss of a micro-batch, with each head: against GRPOTrainer's, a formula, or the other head.

The faults to notice: a token of a tool or of padding in the loss, a term with another token's value, a change of the
logits after the head that is left out, a term or filter of TRL that is missing, another mean; logits in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl import GRPOTrainer

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer, composed
from grpo_kernels.integrations.trl import head as _head
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests.harness import assert_close_to_rounding
from tests.integrations import tiny_models
from tests.integrations.tiny_trl import micro_batch
from tests.integrations.tiny_trl import trainer as made

on_heads = pytest.mark.parametrize("head", _head.HEADS)


def step(trainer: Any, kind: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """The loss of a kind of trainer, its gradients, and what it logs."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    loss = kind._compute_loss(trainer, trainer.model, dict(inputs))
    loss.backward()
    weights = trainer.model.named_parameters()
    gradients = {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}
    return loss.detach(), gradients, {name: value[0] for name, value in trainer._metrics["train"].items()}


FILTERS = {"off_policy_mask_threshold": 0.2, "top_entropy_quantile": 0.4, "entropy_coef": 0.02}


@pytest.mark.pairs
@pytest.mark.parametrize("changes", [{}, FILTERS], ids=["plain", "filters"])
@pytest.mark.parametrize("by_row", [False, True], ids=["token", "row"])
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
@on_heads
def test_a_micro_batch_from_vllm_with_tools(
    tmp_path: Path, head: str, loss_type: str, by_row: bool, changes: dict[str, Any]
) -> None:
    """The loss does not need vLLM; the same trainer computes it in both ways."""
    if loss_type == "vespo" and by_row:
        pytest.skip("TRL refuses it")
    trainer = made(tmp_path, changes={"loss_type": loss_type} | changes, head=head)
    trainer.use_vllm = True
    inputs = micro_batch(trainer, by_row)

    def theirs() -> Any:
        return step(trainer, GRPOTrainer, inputs)

    assert_close_to_rounding(step(trainer, FusedGRPOTrainer, inputs), theirs(), theirs)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lengths", [[2, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 3, 0, 0]])
def test_few_tokens(tmp_path: Path, lengths: list[int], level: str) -> None:
    """As many tokens as rows must not make advantages of rows those of tokens; no token must not stop a backward."""
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    calls = []
    for head in ("fused", "logprobs"):
        trainer = made(tmp_path, changes={"importance_sampling_level": level}, head=head)
        inputs = micro_batch(trainer) | {"completion_mask": mask, "num_items_in_batch": mask.sum() * 4}
        del inputs["tool_mask"]
        calls.append(functools.partial(step, trainer, FusedGRPOTrainer, inputs))
    assert_close_to_rounding(calls[0](), calls[1](), calls[1])


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "moe", "images"])
def test_models_that_change_their_logits_have_experts_or_see_images(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = micro_batch(made(tmp_path))
    if name == "images":
        inputs = tiny_models.with_images(inputs)
    calls = []
    for head in _head.HEADS:
        lm = tiny_models.vision_model() if name == "images" else tiny_models.model(name)
        trainer = made(tmp_path, changes={"beta": 0.0}, model=lm, head=head)
        for kind in (GRPOTrainer, FusedGRPOTrainer):
            calls.append(functools.partial(step, trainer, kind, inputs))
    want = calls[0]()
    for call in calls[1:]:
        assert_close_to_rounding(call(), want, calls[0])
    _, gradients, metrics = want
    assert (name == "moe") == ("aux_loss" in metrics)
    part = {"moe": "gate", "images": "patch_embed"}.get(name, "layers")
    assert any(part in each and gradient.any() for each, gradient in gradients.items())
    if name == "moe":
        assert metrics["aux_loss"] > 0.1
    elif name != "images":  # what the head would do without the change matters

        def without(head: Any, *rest: Any, **options: Any) -> Any:
            lm_head = dataclasses.replace(head.lm_head, softcap=None, logit_scale=1.0)
            return original(head._replace(lm_head=lm_head), *rest, **options)

        original = _head.packed_policy_loss
        monkeypatch.setattr(_head, "packed_policy_loss", without)
        assert abs(step(trainer, FusedGRPOTrainer, inputs)[2]["entropy"] - metrics["entropy"]) > 0.05


def test_the_head_gets_no_padding_and_the_loss_three_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(tmp_path, head="fused")
    inputs = micro_batch(trainer)
    calls: list[tuple[tuple[int, ...], str]] = []
    original = gk.linear_policy_loss

    def noted(hidden: Tensor, *arguments: Any, **options: Any) -> gk.PolicyLoss:
        calls.append((tuple(hidden.shape), options.get("memory", "fast")))
        return original(hidden, *arguments, **options)

    monkeypatch.setattr(gk, "linear_policy_loss", noted)
    monkeypatch.delattr(gk, "policy_loss")
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model.train(), inputs)
    assert calls == [((int(inputs["completion_mask"].sum()), 16), "fast")]
    nodes = [loss.grad_fn]
    for node in nodes:
        nodes += [other for other, _ in node.next_functions if other is not None and other not in nodes]
    assert "PrecomputedBackward" in {node.name() for node in nodes}


def test_no_logits(tmp_path: Path) -> None:
    """The largest allocation of a step, beside the logits of the scored tokens."""
    columns = 4096
    ids = torch.randint(3, columns, (8, 100), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(96) < torch.tensor([96, 96, 90, 80, 96, 70, 96, 96])[:, None]).long()
    inputs = {"prompt_ids": ids[:, :4], "prompt_mask": torch.ones(8, 4, dtype=torch.long)}
    inputs |= {"completion_ids": ids[:, 4:], "completion_mask": mask}
    inputs |= {"num_items_in_batch": mask.sum() * 4, "advantages": torch.linspace(-1, 1, 8)}
    largest = {}
    for head in _head.HEADS:
        lm = tiny_models.model("llama", columns)
        trainer = made(tmp_path, changes={"beta": 0.0}, model=lm, head=head)
        largest[head] = tiny_models.largest_allocation(lambda of=trainer: step(of, FusedGRPOTrainer, inputs))
    logits = 4 * int(mask.sum()) * columns
    assert largest["logprobs"] >= logits  # on the CPU TRL scores all positions at once
    assert largest["fused"] <= 0.4 * logits  # a third of the rows at a time


def test_a_policy_that_has_not_changed_has_ratios_of_one(tmp_path: Path) -> None:
    """In bfloat16: the old log-probs come from the head that the loss has."""
    trainer = made(tmp_path, head="fused")
    trainer.model.bfloat16()
    inputs = micro_batch(trainer)
    with torch.no_grad():
        inputs["old_per_token_logps"], _, _ = trainer._forward(trainer.model, inputs)
    seen: list[Any] = []
    original = trainer._record
    trainer._record = lambda metrics, aux: seen.append(metrics) or original(metrics, aux)
    step(trainer, FusedGRPOTrainer, inputs)
    # the sum over 15 tokens of (ratio - 1)**2, with log-probs of about 10 rounded to float32
    assert 0 <= seen[0].to_dict()["ratio_spread_sum"] < 15 * (10 * 2**-22) ** 2


COLLECTIVES = ("gather", "reduce", "gather_for_metrics")


def test_one_collective_a_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for kind in (FusedGRPOTrainer, GRPOTrainer):
        trainer = made(tmp_path, changes={"use_adaptive_entropy": True, "entropy_coef": 0.01})
        spies = [mock.Mock(wraps=getattr(trainer.accelerator, name)) for name in COLLECTIVES]
        for name, spy in zip(COLLECTIVES, spies, strict=True):
            monkeypatch.setattr(trainer.accelerator, name, spy)
        step(trainer, kind, micro_batch(trainer, True))
        counts[kind] = sum(spy.call_count for spy in spies)
    assert counts[FusedGRPOTrainer] == 1 and counts[GRPOTrainer] >= 9


# ----------------------------------------------------------------------------------------- terms that TRL does not have


def clip_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, mask: Tensor, is_weights: Tensor, **others: Any
) -> gk.PolicyLoss:
    weights = gk.variants.clip_cov_weights(logprobs, old_logprobs, advantages, ratio=0.5, bounds=(0.0, 5.0), mask=mask)
    return gk.policy_loss(logprobs, old_logprobs, advantages, mask=mask, is_weights=weights * is_weights, **others)


TERMS = {
    "icepop": gk.LossConfig(loss="icepop", clip_high=0.1),
    "topr": gk.LossConfig(loss="topr"),
    "sequence": gk.LossConfig(ratio="sequence", dual_clip=3.0),
    "a function": clip_cov,
}


@on_heads
@pytest.mark.parametrize("name", TERMS)
def test_a_policy_term_that_trl_does_not_have(tmp_path: Path, name: str, head: str) -> None:
    """Beside the KL, the correction and the mean of GRPOConfig."""
    changes = {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}
    term: Any = TERMS[name]
    trainer = made(tmp_path, changes=changes, head=head, loss=term)
    trainer.use_vllm = True
    inputs = micro_batch(trainer)
    loss, _, _ = step(trainer, FusedGRPOTrainer, inputs)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    config, function = (gk.LossConfig(), term) if callable(term) else (term, gk.policy_loss)

    logprobs, _, _ = trainer._forward(trainer.model, inputs)

    def by_hand() -> Tensor:
        is_fixed = term is clip_cov  # it draws tokens by the bits of their log-probs
        return function(
            logprobs if is_fixed else trainer._forward(trainer.model, inputs)[0],
            inputs["old_per_token_logps"],
            inputs["advantages"],
            mask=mask,
            ref_logprobs=inputs["ref_per_token_logps"],
            is_weights=inputs["importance_sampling_ratio"],
            normalizer=float(mask.sum()) * 4 * 2 / trainer.args.steps_per_generation,
            config=dataclasses.replace(config, kl="k3", kl_coef=0.1),
        ).loss.detach()

    assert_close_to_rounding(loss, by_hand(), by_hand)
    trainer.policy_term = trainer.loss_function = None
    assert float(step(trainer, FusedGRPOTrainer, inputs)[0]) != pytest.approx(float(loss), rel=1e-4)


def test_entropy_floor_without_tokens(tmp_path: Path) -> None:
    trainer = made(tmp_path, changes={"top_entropy_quantile": 0.5})
    floor = composed.entropy_floor(trainer, torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert floor.isinf()
