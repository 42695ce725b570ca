"""The ops of the head against the installed TRL, verl, PEFT and torch.

Faults that this is for: a head that a trainer could not replace its own with; another divergence, direction or tail
than theirs, in this or in a new version of them; terms of a tree of samples at other positions than theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_close_to_rounding, assert_within_budget
from tests.ops.linear_head import cases, heads
from tests.ops.linear_head import distillation_cases as distillation
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
    named = {
        name: result.view(targets.shape).masked_fill(targets == IGNORED, 0)
        for name, result in zip(cases.NAMES, results, strict=False)
    }
    return cases.with_loss(named, {name: given[f"by_{name}"] for name in cases.NAMES}, given)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("features", [(), ("bias",), ("bias", "scaled")], ids=str)
@pytest.mark.parametrize("peer", [of_torch, of_trl], ids=lambda peer: peer.__name__)
@on_exact
def test_another_head(backend: str, peer: Callable[[Inputs], Results], features: tuple[str, ...], dtype: Any) -> None:
    """Ours is no further from float64 than theirs; TRL's rounds bfloat16 logits."""
    inputs = heads.rounded(cases.draw((3, 9), "ignored", *features, columns=517, width=16), BF16)
    if peer is of_torch:
        if dtype == BF16 or "scaled" in features:
            pytest.skip("it has no scaling, and rounds its sums to bfloat16")
        inputs["by_logprobs"] = torch.ones(3, 9).double()
        del inputs["by_entropy"]
    op = cases.op_of(inputs)
    theirs = run(dataclasses.replace(op, call=lambda given, _: peer(given)), inputs, "reference", dtype)
    got, gold = run(op, inputs | {"chunk_size": 10}, backend, dtype), cases.defined(inputs)
    torch.testing.assert_close(theirs["loss"].double(), gold["loss"], rtol=1e-2, atol=1e-2)
    for name in theirs.keys() - {"loss"}:
        assert got[name].dtype == theirs[name].dtype
        assert_within_budget(got[name], theirs[name], gold[name], name)


# PEFT


def test_an_adapter_of_the_head_from_peft() -> None:
    peft = pytest.importorskip("peft")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(16, 31, bias=False, dtype=F64)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.lm_head(hidden)

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(Model(), config, autocast_adapter_dtype=False).double()
    layer, hidden, targets = model.base_model.model.lm_head, heads.noise(3, 9, 16), torch.randint(31, (3, 9))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    base = layer.base_layer.weight
    adapted = gk.LMHead(base, lora=(a, b, layer.scaling["default"]))
    merged = base + layer.get_delta_weight("default")
    results = [gk.linear_logprobs(hidden, each, targets, chunk_size=7).logprobs for each in (adapted, merged)]
    results.append(gk.token_logprobs(model(hidden), targets).logprobs)
    gradients = [torch.autograd.grad(result.square().sum(), [a, b]) for result in results]
    assert not base.requires_grad and results[0].any() and gradients[0][1].any()
    for other, by_other in zip(results[1:], gradients[1:], strict=True):
        torch.testing.assert_close(results[0], other, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradients[0], by_other, rtol=1e-9, atol=1e-12)


# Distillation in TRL and verl


def student_of(kind: str, tail: str) -> tuple[Inputs, Tensor, Tensor]:
    """A batch, and the student's log-probs of the teacher's ids, as peers take them, with the leaf they depend on."""
    inputs = distillation.draw("bias", shape=(11,), columns=40, kind=kind, tail=tail) | {"teacher_coef": 1.0}
    leaf = inputs["hidden"].clone().requires_grad_()
    log_q = heads.distribution(inputs | {"hidden": leaf}, torch.ones(11, dtype=torch.bool))
    return inputs, leaf, log_q.gather(1, inputs["teacher_ids"])


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize(("kind", "alpha"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
@on_exact
def test_divergences_of_trl(backend: str, kind: str, alpha: float, tail: str) -> None:
    pytest.importorskip("trl")
    from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

    inputs, leaf, student = student_of(kind, tail)
    teacher = inputs["teacher_logprobs"]
    if tail == "bucket":
        student, teacher = add_tail_bucket(student), add_tail_bucket(teacher)
    else:
        student, teacher = student.log_softmax(1), teacher.log_softmax(1)
    theirs = compute_divergence(student, teacher, alpha)
    (want,) = torch.autograd.grad(theirs.mean(), leaf)
    got = run(distillation.op_of(inputs), inputs, backend, F64)
    torch.testing.assert_close(got["divergence"], theirs.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got["d_hidden"], want, rtol=1e-8, atol=1e-11)


@on_exact
def test_the_divergence_of_verl(backend: str) -> None:
    """Verl's forward KL over the teacher's top k leaves the tail out. It computes in float32."""
    losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")
    inputs, leaf, student = student_of("forward_kl", "ignore")

    def theirs() -> dict[str, Tensor]:
        divergence = losses.kl_divergence(log_q=student, log_p=inputs["teacher_logprobs"])
        (gradient,) = torch.autograd.grad(divergence.mean(), leaf, retain_graph=True)
        return {"divergence": divergence, "d_hidden": gradient}

    want = theirs()
    got = run(distillation.op_of(inputs), inputs, backend, F64)
    assert_close_to_rounding({name: got[name] for name in want}, want, theirs)


# Trees of samples that share positions


def test_trees_of_trl() -> None:
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    row, random, samples = packing.TreeRow(), torch.Generator().manual_seed(1), []
    for tokens, advantage in (([3, 1, 4, 1, 5], 1.0), ([3, 1, 4, 1, 6, 2], -0.5), ([3, 1, 7], 0.25)):
        sample = {
            "input_ids": torch.tensor(tokens),
            "completion_mask": torch.tensor([0] + [1] * (len(tokens) - 1)),
            "old_log_probs": -torch.rand(len(tokens), generator=random),
            "advantage": advantage,
            "group_id": 0,
        }
        row.add(sample)
        samples.append(sample)
    fields = row.pack()
    scores = torch.randn(13, 13, generator=random, dtype=F64)  # a model that sees the last token alone
    hidden, targets = torch.eye(13, dtype=F64)[fields["input_ids"]], fields["shift_labels"]
    terms = {
        "old_logprobs": fields["old_log_probs"].double(),
        "advantages": fields["advantages"].double(),
        "cu_seqlens": F.pad(fields["segment_id"].bincount().cumsum(0), (1, 0)),
    }
    assert len(fields["token_index"]) == 11 > (targets != -100).sum()
    weight, plain = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    shared = gk.linear_policy_loss(hidden, weight, targets, **terms, term_index=fields["token_index"]).loss
    inputs = torch.cat([sample["input_ids"][:-1] for sample in samples])
    logprobs = plain.T[inputs].log_softmax(-1).gather(1, torch.cat([s["input_ids"][1:] for s in samples])[:, None])
    expected = gk.policy_loss(logprobs.squeeze(1), **terms).loss
    torch.testing.assert_close(shared, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, leaf)[0] for loss, leaf in ((shared, weight), (expected, plain)))
    )
