"""linear_distillation_loss from a teacher's hidden states: divergences over the whole vocabulary.

Faults that this is for: the teacher's scale, cap, adapter or bans left out; a sum that the gradient of a kind needs and
does not get; a log-sum-exp rounded to float32; columns beyond the last vector; a row that does not count; a chunk that
meets the teacher's rows of another; a gradient by the teacher.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import whole_distillation_op
from tests.harness import cpu_threads, needs_cpu_kernels, runnable_backends
from tests.ops.linear_head.heads import SUPPORTS

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
KINDS = ("forward_kl", "reverse_kl", "jsd")
BACKENDS = [name for name in runnable_backends(SUPPORTS, F32) if name != "triton"]
SHAPE, WIDTH, ITS_WIDTH = (3, 7), 24, 16
DTYPES = [(name, dtype) for name in BACKENDS for dtype in (F64, F32, BF16) if dtype in SUPPORTS[name]]


def draw(columns: int = 53, **options: Any) -> dict[str, Any]:
    """Numbers that bfloat16 has, in float64: a student's head with options, and a teacher's of another width."""
    torch.manual_seed(columns)
    rounded = lambda *size: torch.randn(*size).bfloat16().double()  # noqa: E731
    return {
        "hidden": rounded(*SHAPE, WIDTH),
        "weight": rounded(columns, WIDTH) / 4,
        "bias": rounded(columns) / 4,
        "its_hidden": rounded(*SHAPE, ITS_WIDTH),
        "its_weight": rounded(columns, ITS_WIDTH) / 2,
        "its_bias": rounded(columns) / 4,
        "own": {"softcap": 8.0, "logit_scale": 1.5},
        "its": {"softcap": 20.0, "logit_scale": 0.75},
        "temperature": 0.75,
        "bans": (torch.tensor([3]), torch.tensor([3, 20])),
    } | options


def definition(i: dict[str, Any], kind: str, beta: float = 0.3) -> Tensor:
    """Divergence of every token, from whole distributions."""

    def log_probs(hidden: Tensor, weight: Tensor, bias: Tensor, options: dict[str, float]) -> Tensor:
        x = options.get("logit_scale", 1) * (hidden @ weight.T + bias)
        if (cap := options.get("softcap")) is not None:
            x = cap * torch.tanh(x / cap)
        temperature = i["temperature"]
        x = x / (temperature[..., None] if isinstance(temperature, Tensor) else temperature)
        for ids in i["bans"]:
            x = x.index_fill(-1, ids, -math.inf)
        return x.log_softmax(-1)

    log_q = log_probs(i["hidden"], i["weight"], i["bias"], i["own"])
    log_p = log_probs(i["its_hidden"], i["its_weight"], i["its_bias"], i["its"])
    kept = (log_p[0, 0] > -math.inf).nonzero()[:, 0]
    log_q, log_p = log_q[..., kept], log_p[..., kept]
    forward, reverse = (
        F.kl_div(a, b, log_target=True, reduction="none").sum(-1) for a, b in ((log_q, log_p), (log_p, log_q))
    )
    if kind != "jsd":
        return forward if kind == "forward_kl" else reverse
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    parts = (F.kl_div(log_m, of, log_target=True, reduction="none").sum(-1) for of in (log_p, log_q))
    return beta * next(parts) + (1 - beta) * next(parts)


def call(i: dict[str, Any], kind: str, dtype: torch.dtype, backend: str | None = None, **options: Any) -> Any:
    """The result, and the leaves that get a gradient."""
    cast = lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value  # noqa: E731
    leaves = [cast(i[name]).requires_grad_() for name in ("hidden", "weight", "bias")]
    own, its = (ids if len(ids) else None for ids in i["bans"])
    head = gk.LMHead(leaves[1], leaves[2], banned=own, **i["own"])
    its_head = gk.LMHead(cast(i["its_weight"]), cast(i["its_bias"]), banned=its, **i["its"])
    fields = {name: options.pop(name) for name in ("mask", "weights", "normalizer", "coef") if name in options}
    beta = 0.3 if kind == "jsd" else None
    teacher = gk.Teacher(hidden=cast(i["its_hidden"]), head=its_head, kind=kind, beta=beta, **fields)
    temperature = i["temperature"]
    temperature = temperature.to(F32) if isinstance(temperature, Tensor) and dtype != F64 else temperature
    got = gk.linear_distillation_loss(leaves[0], head, teacher, temperature=temperature, backend=backend, **options)
    return got, leaves


def gold_of(i: dict[str, Any], kind: str, shares: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = {name: i[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    values = definition(i | leaves, kind)
    return values.detach(), torch.autograd.grad((shares * values).sum(), list(leaves.values()))


def close(got: Tensor, gold: Tensor, dtype: torch.dtype) -> None:
    """Logits of about 10 in float32 are off by 1e-6; a gradient in bfloat16 is rounded by logit, and as a whole."""
    relative = {F64: 1e-12, F32: 2e-5, BF16: 2**-7}[dtype]
    assert (got.double() - gold).norm() <= relative * gold.norm() + 1e-12


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "dtype"), DTYPES, ids=str)
def test_it_is_the_definition(backend: str, kind: str, dtype: torch.dtype, chunk_size: int | None) -> None:
    i = draw()
    values, gradients = gold_of(i, kind, torch.full(SHAPE, 1 / 21, dtype=F64))
    got, leaves = call(i, kind, dtype, backend, chunk_size=chunk_size)
    wide = F64 if dtype == F64 else F32
    close(got.divergence, values, wide)
    close(got.loss, values.mean(), wide)
    assert (got.mass == 1).all()
    for found, gold in zip(torch.autograd.grad(got.loss, leaves), gradients, strict=True):
        close(found, gold, dtype)


@pytest.mark.pairs  # every divergence has sums of its own over the blocks of 2048 columns
@pytest.mark.parametrize("columns", [1, 7, 16, 33, 2049, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_columns(kind: str, columns: int) -> None:
    i = draw(columns, bans=(torch.tensor([]).long(),) * 2)
    values, gradients = gold_of(i, kind, torch.full(SHAPE, 1 / 21, dtype=F64))
    with cpu_threads(2):
        got, leaves = call(i, kind, F32)
        found = torch.autograd.grad(got.loss, leaves)
        with torch.no_grad():
            alone, _ = call(i, kind, F32)
    for result in (got, alone):
        assert (result.divergence.double() - values).abs().max() <= 1e-5 * values.abs().max() + 1e-6
    for each, gold in zip(found, gradients, strict=True):
        assert (each.double() - gold).norm() <= 2e-5 * gold.norm() + 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_heads_have_no_divergence(backend: str, kind: str) -> None:
    i = draw(300)
    same = {"its_hidden": i["hidden"], "its_weight": i["weight"], "its_bias": i["bias"], "its": i["own"]}
    got, leaves = call(i | same, kind, F32, backend)
    assert got.divergence.abs().max() < 2e-7
    assert torch.autograd.grad(got.loss, leaves)[0].abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_certain_distributions(backend: str, kind: str) -> None:
    """A student and a teacher that are certain of different ids, beyond what float32 has of a probability."""
    i = draw(40, bans=(torch.tensor([]).long(),) * 2, own={}, its={}, temperature=1.0)
    i["bias"], i["its_bias"] = i["bias"].clone(), i["its_bias"].clone()
    i["bias"][2] += 150
    i["its_bias"][5] += 150
    values, gradients = gold_of(i, kind, torch.full(SHAPE, 1 / 21, dtype=F64))
    got, leaves = call(i, kind, F32, backend)
    close(got.divergence, values, F32)
    for found, gold in zip(torch.autograd.grad(got.loss, leaves), gradients, strict=True):
        close(found, gold, F32)


@needs_cpu_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_large_logits(kind: str) -> None:
    """Logits near 2**14 that float32 has exactly: the log-sum-exp as the reference rounds it is off by up to 1e-3."""
    i = draw(bans=(torch.tensor([]).long(),) * 2, own={}, its={}, temperature=1.0)
    for name in ("hidden", "weight", "bias", "its_hidden", "its_weight", "its_bias"):
        i[name] = (4 * i[name]).round() / 4
    i["bias"], i["its_bias"] = i["bias"] + 2.0**14, i["its_bias"] - 2.0**14
    values, gradients = gold_of(i, kind, torch.full(SHAPE, 1 / 21, dtype=F64))
    got, leaves = call(i, kind, F32, "cpu")
    close(got.divergence, values, F32)
    for found, gold in zip(torch.autograd.grad(got.loss, leaves), gradients, strict=True):
        close(found, gold, F32)


@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_do_not_count_may_hold_anything(backend: str, kind: str, chunk_size: int | None) -> None:
    i = draw(temperature=torch.rand(SHAPE).double() + 0.5)
    counts = torch.rand(SHAPE) < 0.6
    weights = torch.randn(SHAPE, dtype=F64)
    values, gradients = gold_of(i, kind, torch.where(counts, -0.5 * weights / 3, 0))
    filled = {name: i[name].masked_fill(~counts[..., None], math.nan) for name in ("hidden", "its_hidden")}
    filled["temperature"] = i["temperature"].masked_fill(~counts, math.nan)
    options = {"mask": counts, "weights": weights, "normalizer": 3.0, "coef": -0.5, "chunk_size": chunk_size}
    got, leaves = call(i | filled, kind, F32, backend, **options)
    close(got.divergence, torch.where(counts, values, 0), F32)
    assert torch.equal(got.mass, counts.float())
    for found, gold in zip(torch.autograd.grad(got.loss, leaves), gradients, strict=True):
        close(found, gold, F32)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_takes_some_rows_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    i = draw(temperature=torch.rand(SHAPE).double() + 0.5)
    results = []
    for block in (2**23, 4 * 53):
        monkeypatch.setattr(whole_distillation_op, "_BLOCK", block)
        got, leaves = call(i, kind, F64, "cpu", mask=torch.arange(21).view(SHAPE) % 4 > 0)
        results.append([got.divergence, *torch.autograd.grad(got.loss, leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_without_a_gradient() -> None:
    i = draw()
    with torch.no_grad():
        got, _ = call(i, "jsd", F32)
    close(got.divergence, definition(i, "jsd"), F32)
    assert not got.loss.requires_grad


def test_an_adapter_and_weight_grad() -> None:
    i = draw(own={}, its={})
    a, b = torch.randn(2, WIDTH, requires_grad=True), torch.randn(53, 2, requires_grad=True)
    hidden, weight = i["hidden"].float(), i["weight"].float().requires_grad_()
    teacher = gk.Teacher(hidden=i["its_hidden"].float(), head=gk.LMHead(i["its_weight"].float()))
    results = []
    for backend in ("cpu", "reference"):
        got = gk.linear_distillation_loss(hidden, gk.LMHead(weight, lora=(a, b, 0.5)), teacher, backend=backend)
        results.append([got.loss.detach(), *torch.autograd.grad(got.loss, (weight, a, b))])
    for found, gold in zip(*results, strict=True):
        close(found, gold.double(), F32)
    total = torch.ones_like(weight, requires_grad=False)
    plain = gk.LMHead(weight)
    gk.linear_distillation_loss(hidden, plain, teacher, weight_grad=total).loss.backward()
    (alone,) = torch.autograd.grad(gk.linear_distillation_loss(hidden, plain, teacher).loss, weight)
    torch.testing.assert_close(total - 1, alone, rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head": [1.0]}, "teacher.head must be an LMHead or its weight, a tensor, got list"),
        ({"hidden": [1.0]}, "teacher.hidden must be a tensor"),
        ({"ids": torch.zeros(3, 7, 1).long()}, "teacher.ids must be None beside teacher.hidden"),
        ({"tail": "ignore"}, "teacher.tail must be left out beside teacher.hidden"),
        ({"head": torch.ones(52, ITS_WIDTH)}, "teacher.head must have the 53 ids of the student's, got 52"),
        ({"hidden": torch.ones(3, 7, 9)}, r"teacher.hidden must have shape \[3, 7, 16\]"),
        (
            {"hidden": torch.ones(3, 7, ITS_WIDTH).double(), "head": torch.ones(53, ITS_WIDTH).double()},
            "float32 like hidden",
        ),
        ({"kind": "kl"}, "teacher.kind must be one of"),
    ],
)
def test_errors(fields: dict[str, Any], message: str) -> None:
    given = {"hidden": torch.ones(3, 7, ITS_WIDTH), "head": torch.ones(53, ITS_WIDTH)} | fields
    with pytest.raises((TypeError, ValueError), match=f"linear_distillation_loss: .*{message}"):
        gk.linear_distillation_loss(torch.ones(3, 7, WIDTH), torch.ones(53, WIDTH), gk.Teacher(**given))
