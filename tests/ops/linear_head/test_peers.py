"""The ops of the head against the installed TRL, verl, PEFT and torch.

Faults that this is for: a head that a trainer could not replace its own with; another divergence, direction or tail
than theirs, in this or in a new version of them; terms of a tree of samples at other positions than theirs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_within_budget
from tests.ops.linear_head import distillation_cases as distillation
from tests.ops.linear_head import heads
from tests.ops.linear_head.heads import EXACT, F64
from tests.ops.promises import Inputs, run

# all backends compute the same products and differ in the row kernel alone, which has tests of its own
on_exact = pytest.mark.parametrize("backend", EXACT)
ROWS, WIDTH, HIDDEN, VOCABULARY = 3, 9, 16, 517
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"temperature": 0.6, "logit_scale": 0.3},
    "capped": {"temperature": 1.4, "softcap": 5.0, "logit_scale": 0.8},
}
Head = dict[str, Tensor]


def head(dtype: torch.dtype, with_bias: bool = True) -> Head:
    """Leaves whose values are exact in bfloat16, so that every dtype gets the same inputs."""
    random = torch.Generator().manual_seed(8)
    arguments = {"hidden": torch.randn(ROWS, WIDTH, HIDDEN, generator=random)}
    arguments["weight"] = torch.randn(VOCABULARY, HIDDEN, generator=random)
    if with_bias:
        arguments["bias"] = torch.randn(VOCABULARY, generator=random)
    return {name: value.bfloat16().to(dtype).requires_grad_() for name, value in arguments.items()}


def labels() -> Tensor:
    result = torch.randint(VOCABULARY, (ROWS, WIDTH), generator=torch.Generator().manual_seed(9))
    result[0, 2:5] = result[2, -1] = -100
    return result


def naive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The computation of a trainer with the full logits, differentiated by torch."""
    logits = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    ignored = labels() == -100
    logprobs = log_p.gather(-1, labels().clamp(min=0)[..., None])[..., 0].masked_fill(ignored, 0)
    return logprobs, -(log_p.exp() * log_p).sum(-1).masked_fill(ignored, 0)


def gradients(results: tuple[Tensor, ...], leaves: Head) -> Head:
    """Gradients of the leaves, for random upstream gradients of both results."""
    random = torch.Generator().manual_seed(10)
    upstream = [torch.randn(r.shape, generator=random, dtype=F64).to(r) for r in results]
    result = torch.autograd.grad(results, list(leaves.values()), upstream)
    return {f"by {name}": gradient for name, gradient in zip(leaves, result, strict=True)}


def outcome(results: tuple[Tensor, ...], leaves: Head) -> Head:
    return dict(zip(("logprobs", "entropy"), results, strict=False)) | gradients(results, leaves)


def ours(given: Head, backend: str, temperature: float = 1.0, **options: Any) -> tuple[Tensor, Tensor]:
    head = gk.LMHead(given["weight"], given.get("bias"), **options)
    got = gk.linear_logprobs(
        given["hidden"], head, labels(), temperature=temperature, return_entropy=True, backend=backend
    )
    assert got.entropy is not None
    return got.logprobs, got.entropy


# torch


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@on_exact
def test_linear_cross_entropy(backend: str, dtype: torch.dtype, reduction: str) -> None:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has none")

    def theirs(given: Head) -> Head:
        rows = given["hidden"].flatten(0, 1)
        loss = F.linear_cross_entropy(
            rows, given["weight"], labels().flatten(), linear_bias=given["bias"], reduction=reduction, ignore_index=-100
        )
        return {"loss": loss} | gradients((loss,), given)

    given = head(dtype)
    lm_head = gk.LMHead(given["weight"], given["bias"])
    logprobs = gk.linear_logprobs(given["hidden"], lm_head, labels(), backend=backend, chunk_size=10).logprobs
    loss = -logprobs.sum() / ((labels() != -100).sum() if reduction == "mean" else 1)
    got = {"loss": loss} | gradients((loss,), given)
    working, gold = theirs(head(dtype)), theirs(head(F64))
    for name, value in got.items():
        if dtype == F64:
            torch.testing.assert_close(value, gold[name], rtol=1e-11, atol=1e-12, msg=name)
        else:
            assert_within_budget(value, working[name], gold[name], name)


# TRL, whose path without Triton computes the same as the one with it


def trl_function() -> Any:
    return pytest.importorskip("trl.kernels").ChunkedLogProbFunction


def chunked(
    given: Head, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0
) -> tuple[Tensor, ...]:
    """TRL's function as add_fused_lm_head calls it without Triton, with tiles that do not divide the vocabulary."""
    hidden, targets = given["hidden"].flatten(0, 1), labels().clamp(min=0).flatten()
    results = trl_function().apply(
        hidden, given["weight"], given.get("bias"), targets, temperature, 200, softcap, logit_scale, ("entropy",)
    )
    return tuple(result.view(ROWS, WIDTH).masked_fill(labels() == -100, 0) for result in results[:2])


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_exact
def test_chunked_logprob_function(backend: str, options: dict[str, Any], dtype: torch.dtype, with_bias: bool) -> None:
    """Ours is no further from float64 than theirs, which rounds bfloat16 logits."""
    arguments, other, exact = head(dtype, with_bias), head(dtype, with_bias), head(F64, with_bias)
    got = outcome(ours(arguments, backend, **options), arguments)
    theirs = outcome(chunked(other, **options), other)
    gold = outcome(naive(**exact, **options), exact)
    for name, value in got.items():
        assert value.dtype == theirs[name].dtype
        assert_within_budget(value, theirs[name], gold[name], name)


def test_a_model_with_the_fused_head_of_trl() -> None:
    """Compares the gradients of all parameters, computed from token ids; the head shares the embedding's weight."""
    trl_function()
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer import utils

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, initializer_range=0.5, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    utils.add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    targets = labels()
    ids = targets.clamp(min=0)

    theirs = model(input_ids=ids, labels=targets, fused_lm_head=True)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    weight = model.get_output_embeddings().weight
    mine = gk.linear_logprobs(hidden, weight, targets[:, 1:], temperature=0.8, return_entropy=True)
    torch.testing.assert_close(mine.logprobs, theirs.log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.entropy, theirs.entropy, rtol=1e-5, atol=1e-5)
    leaves = dict(model.named_parameters())
    assert model.get_input_embeddings().weight is weight
    result = gradients((mine.logprobs, mine.entropy), leaves)
    for name, value in gradients((theirs.log_probs, theirs.entropy), leaves).items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


# PEFT


def test_an_adapter_of_the_head_from_peft() -> None:
    peft = pytest.importorskip("peft")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=F64)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.lm_head(hidden)

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(Model(), config, autocast_adapter_dtype=False).double()
    layer, hidden = model.base_model.model.lm_head, head(F64)["hidden"].detach()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    base = layer.base_layer.weight
    adapted = gk.LMHead(base, lora=(a, b, layer.scaling["default"]))
    merged = base + layer.get_delta_weight("default")
    results = [gk.linear_logprobs(hidden, each, labels(), chunk_size=7).logprobs for each in (adapted, merged)]
    results.append(gk.token_logprobs(model(hidden), labels()).logprobs)
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
    theirs = losses.kl_divergence(log_q=student, log_p=inputs["teacher_logprobs"])
    (want,) = torch.autograd.grad(theirs.mean(), leaf)
    got = run(distillation.op_of(inputs), inputs, backend, F64)
    # sums of five terms below 10
    torch.testing.assert_close(got["divergence"].float(), theirs.detach().float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got["d_hidden"].float(), want.float(), rtol=1e-5, atol=1e-6)


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
