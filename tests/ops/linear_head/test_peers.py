"""The ops of the head against the installed TRL, verl, PEFT and torch.

Faults that this is for: a head that a trainer could not replace its own with; another divergence, direction or tail
than theirs, in this or in a new version of them; terms of a tree of samples at other positions than theirs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_close_to_rounding, assert_within_budget
from tests.ops.linear_head import heads
from tests.ops.linear_head.cases import NAMES, Problem, problem, with_loss
from tests.ops.linear_head.heads import BF16, EXACT, F32, F64, IGNORED
from tests.ops.promises import Inputs, Results, run

# all backends compute the same products and differ in the row kernel alone, which has tests of its own
on_exact = pytest.mark.parametrize("backend", EXACT)


def of_torch(given: Inputs) -> Results:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has none")
    rows, targets = given["hidden"].flatten(0, 1), given["targets"].flatten()
    sums = {"reduction": "sum", "ignore_index": IGNORED}
    return {"loss": -F.linear_cross_entropy(rows, given["weight"], targets, linear_bias=given.get("bias"), **sums)}


def of_trl(given: Inputs) -> Results:
    """TRL's function as add_fused_lm_head calls it without Triton, with tiles that do not divide the vocabulary.

    Its path without Triton computes the same as the one with it.
    """
    function = pytest.importorskip("trl.kernels").ChunkedLogProbFunction
    targets, scaling = given["targets"], (given.get("softcap"), given.get("logit_scale", 1.0))
    rows = given["hidden"].flatten(0, 1), given["weight"], given.get("bias"), targets.clamp(min=0).flatten()
    results = function.apply(*rows, given.get("temperature", 1.0), 200, *scaling, ("entropy",))
    named = zip(NAMES, (value.view(targets.shape) * (targets != IGNORED) for value in results[:2]), strict=True)
    return with_loss(dict(named), given)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("features", [(), ("bias",), ("bias", "scaled")], ids=str)
@pytest.mark.parametrize("peer", [of_torch, of_trl], ids=lambda peer: peer.__name__)
@on_exact
def test_another_head(backend: str, peer: Callable[[Inputs], Results], features: tuple[str, ...], dtype: Any) -> None:
    """Ours is no further from float64 than theirs; TRL's rounds bfloat16 logits."""
    case = problem("logprobs", "ignored", *features, rows=3, width=9, columns=517).rounded(BF16)
    if peer is of_torch:
        if dtype == BF16 or "scaled" in features:
            pytest.skip("it has no scaling, and rounds its sums to bfloat16")
        del case.inputs["by_entropy"]
        case.inputs["by_logprobs"] = torch.ones(3, 9).double()
    op = dataclasses.replace(case.op, call=lambda given, _: peer(given))
    theirs, got, gold = (
        run(op, case.inputs, "reference", dtype),
        case.run(backend, dtype, chunk_size=10),
        case.defined(),
    )
    torch.testing.assert_close(theirs["loss"].double(), gold["loss"], rtol=1e-2, atol=1e-2)
    for name in theirs.keys() - {"loss"}:
        assert got[name].dtype == theirs[name].dtype
        assert_within_budget(got[name], theirs[name], gold[name], name)


# PEFT


def test_an_adapter_of_the_head_from_peft() -> None:
    """Its factors have the gradients of its own forward pass, and the frozen weight none."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"], init_lora_weights=False)
    plain = torch.nn.Sequential(torch.nn.Linear(16, 31, bias=False, dtype=F64))
    model = peft.get_peft_model(plain, config, autocast_adapter_dtype=False).double()
    layer, hidden, targets = model.base_model.model[0], heads.noise(3, 9, 16), torch.randint(31, (3, 9))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    head = gk.LMHead(layer.base_layer.weight, lora=(a, b, layer.scaling["default"]))
    got, want = gk.linear_logprobs(hidden, head, targets), gk.token_logprobs(model(hidden), targets)
    gradients = [torch.autograd.grad(each.logprobs.square().sum(), [a, b]) for each in (got, want)]
    assert not head.weight.requires_grad and gradients[0][1].any()
    torch.testing.assert_close((got.logprobs, *gradients[0]), (want.logprobs, *gradients[1]), rtol=1e-9, atol=1e-12)


# Distillation in TRL and verl


def student_of(kind: str, tail: str) -> tuple[Problem, Tensor, Tensor]:
    """A batch, and the student's log-probs of the teacher's ids, as peers take them, with the leaf they depend on."""
    case = problem("distillation", "bias", shape=(11,), teacher={"kind": kind, "tail": tail}).but(teacher_coef=1.0)
    leaf = case.inputs["hidden"].clone().requires_grad_()
    log_q = heads.distribution(case.inputs | {"hidden": leaf}, torch.ones(11, dtype=torch.bool))
    return case, leaf, log_q.gather(1, case.inputs["teacher_ids"])


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize(("kind", "alpha"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
@on_exact
def test_divergences_of_trl(backend: str, kind: str, alpha: float, tail: str) -> None:
    pytest.importorskip("trl")
    from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

    case, leaf, student = student_of(kind, tail)
    bounded = add_tail_bucket if tail == "bucket" else functools.partial(torch.log_softmax, dim=1)
    theirs = compute_divergence(bounded(student), bounded(case.inputs["teacher_logprobs"]), alpha)
    (want,) = torch.autograd.grad(theirs.mean(), leaf)
    got = case.run(backend)
    torch.testing.assert_close(got["divergence"], theirs.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got["d_hidden"], want, rtol=1e-8, atol=1e-11)


@on_exact
def test_the_divergence_of_verl(backend: str) -> None:
    """Verl's forward KL over the teacher's top k leaves the tail out. It computes in float32."""
    losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")
    case, leaf, student = student_of("forward_kl", "ignore")

    def theirs() -> dict[str, Tensor]:
        divergence = losses.kl_divergence(log_q=student, log_p=case.inputs["teacher_logprobs"])
        (gradient,) = torch.autograd.grad(divergence.mean(), leaf, retain_graph=True)
        return {"divergence": divergence, "d_hidden": gradient}

    want, got = theirs(), case.run(backend)
    assert_close_to_rounding({name: got[name] for name in want}, want, theirs)


# Trees of samples that share positions


def test_trees_of_trl() -> None:
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    row, samples = packing.TreeRow(), [[3, 1, 4, 1, 5], [3, 1, 4, 1, 6, 2], [3, 1, 7]]
    for tokens, advantage in zip(samples, (1.0, -0.5, 0.25), strict=True):
        sample = {"input_ids": torch.tensor(tokens), "old_log_probs": -torch.rand(len(tokens))}
        mask = torch.tensor([0] + [1] * (len(tokens) - 1))
        row.add(sample | {"completion_mask": mask, "advantage": advantage, "group_id": 0})
    fields = row.pack()
    assert len(fields["token_index"]) == 11 > (fields["shift_labels"] != -100).sum()
    weight = torch.randn(13, 13, dtype=F64).requires_grad_()  # a model that sees the last token alone
    hidden, targets = torch.eye(13, dtype=F64)[fields["input_ids"]], fields["shift_labels"]
    terms = {
        "old_logprobs": fields["old_log_probs"].double(),
        "advantages": fields["advantages"].double(),
        "cu_seqlens": F.pad(fields["segment_id"].bincount().cumsum(0), (1, 0)),
    }
    shared = gk.linear_policy_loss(hidden, weight, targets, **terms, term_index=fields["token_index"]).loss
    inputs, labels = (
        torch.tensor([i for sample in samples for i in sample[part]]) for part in (slice(-1), slice(1, None))
    )
    logprobs = weight.T[inputs].log_softmax(-1).gather(1, labels[:, None])
    expected = gk.policy_loss(logprobs.squeeze(1), **terms).loss
    torch.testing.assert_close(shared, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (shared, expected)))
