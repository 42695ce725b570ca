"""Heads in half precision on a GPU, or on a CPU that multiplies it.

The gradient by the logits is rounded once and waits for larger products.

Faults that this is for: a gradient that is rounded twice, or accumulated in half precision; tokens that wait for a
product and are lost, or multiplied with the hidden states of others; a padding column that is multiplied; rows of
matrices that are not aligned; a product that does not fit its memory.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.linear_head import products, sizes
from tests.harness import assert_close_to_rounding, device_of, needs_cpu_kernels, runnable_backends
from tests.ops.linear_head import cases, distillation_cases, heads
from tests.ops.linear_head.heads import BF16, F32, F64, IGNORED, LEAVES, SUPPORTS
from tests.ops.promises import Inputs, Results, evaluated, placed

BACKENDS = [
    name
    for name in runnable_backends(SUPPORTS, BF16)
    if name == "triton" or (name == "cpu" and registry.HAS_HALF_PRODUCTS)
]
WIDTH, COLUMNS = 32, 77

on_backends = pytest.mark.parametrize("backend", BACKENDS)
on_halves = pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)


def batch(dtype: torch.dtype, *features: str) -> Inputs:
    """Numbers that this dtype has, as float64, with an ignored target."""
    inputs = heads.draw_head((4, 10), "bias", *features, columns=COLUMNS, width=WIDTH)
    inputs["targets"][:1, 3] = IGNORED
    inputs |= {"hidden": inputs["hidden"] / 2, "weight": inputs["weight"] / 2, "by_logprobs": heads.noise(4, 10)}
    inputs["advantages"] = torch.tensor([1.0, -0.5, 0.0, 0.7]).double()
    inputs["old_logprobs"] = -torch.rand(4, 10).double() - 3
    return heads.rounded(inputs, dtype)


def call(op: str, inputs: Inputs, **options: Any) -> Tensor:
    """The loss, or a sum of the log-probs."""
    tokens = inputs["hidden"], heads.head_of(inputs), inputs["targets"]
    if op == "linear_logprobs":
        return (gk.linear_logprobs(*tokens, **options).logprobs * inputs["by_logprobs"]).sum()
    return gk.linear_policy_loss(*tokens, inputs["old_logprobs"].float(), inputs["advantages"].float(), **options).loss


def by_logits_of(op: str, inputs: Inputs, takes_part: Tensor | None) -> Tensor:
    """The gradient of `call` by the logits of its tokens, in float64."""
    logits = (inputs["hidden"] @ inputs["weight"].T + inputs["bias"]).requires_grad_()
    logprobs = gk.token_logprobs(logits, inputs["targets"], backend="reference").logprobs
    if op == "linear_logprobs":
        result = (logprobs * inputs["by_logprobs"]).sum()
    else:
        mask = inputs["targets"] != IGNORED
        mask = mask if takes_part is None else mask & takes_part
        result = gk.policy_loss(logprobs, inputs["old_logprobs"], inputs["advantages"], mask=mask).loss
    return torch.autograd.grad(result, logits)[0].flatten(0, -2)


def cuts_off(backend: str, dtype: torch.dtype) -> bool:
    """Triton's interpreter cuts bfloat16 off instead of rounding it, which doubles the error of what it computes."""
    return dtype == BF16 and backend == "triton" and not torch.cuda.is_available()


def moved(inputs: Inputs, backend: str, dtype: torch.dtype) -> Inputs:
    """On the backend's device, in this dtype, with a gradient by hidden states, weight and bias."""
    device = device_of(backend)
    return placed(cases.op_of(inputs, "lora_a", "lora_b"), inputs, dtype, lambda value: value.to(device))


def assert_rounded_once(
    op: str, inputs: Inputs, backend: str, dtype: torch.dtype, takes_part: Tensor | None = None, **options: Any
) -> None:
    """Bounds the error by one rounding of each gradient by a logit and one of the result.

    Besides, a logit is a sum of products in float32, and an error of a logit is a relative error of a probability.
    Hidden states of other tokens than those that take part are NaN.
    """
    rows, weight = inputs["hidden"].flatten(0, -2), inputs["weight"]
    by_logits = by_logits_of(op, inputs, takes_part)
    if takes_part is not None:
        inputs = inputs | {"hidden": inputs["hidden"].masked_fill(~takes_part[..., None], math.nan)}
    given = moved(inputs, backend, dtype)
    found = torch.autograd.grad(call(op, given, backend=backend, **options), [given[name] for name in LEAVES[:3]])
    rounding = torch.finfo(dtype).eps / 2
    largest = float((rows.abs() @ weight.abs().T + 1).max())
    relative = rounding * (1 + cuts_off(backend, dtype)) + 2 * (WIDTH + 2) * 2**-24 * largest + 2**-18
    size = by_logits.abs() + torch.finfo(dtype).tiny
    bounds = [
        (by_logits @ weight, size @ weight.abs()),
        (by_logits.T @ rows, size.T @ rows.abs()),
        (by_logits.sum(0), size.sum(0)),
    ]
    for name, gradient, (gold, terms) in zip(LEAVES, found, bounds, strict=False):
        assert gradient.dtype == dtype
        error = (gradient.cpu().double().reshape(gold.shape) - gold).abs()
        assert (error <= relative * terms + rounding * gold.abs()).all(), (name, float((error / terms).max()))


# Tokens of a chunk, which are also those of a product, or a product that takes one, two or all chunks.
@pytest.mark.parametrize(("chunk", "product"), [(None, None), (16, 16), (9, 9), (16, 32), (16, 16 * 9)])
@pytest.mark.parametrize("compact", [True, False])
@on_halves
@on_backends
def test_linear_policy_loss(
    backend: str, dtype: torch.dtype, compact: bool, chunk: int | None, product: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"compact": compact, "chunk_size": chunk}
    if product != chunk:
        monkeypatch.setattr("grpo_kernels.ops.linear_head.plan.tokens_per_chunk", lambda *_: chunk)
        monkeypatch.setattr(products, "tokens_per_product", lambda *_: product)
        options["chunk_size"] = None
    assert_rounded_once("linear_policy_loss", batch(dtype), backend, dtype, **options)


@pytest.mark.parametrize("unsplit", [1, 2**24])
@pytest.mark.parametrize("chunk_size", [None, 16])
@on_halves
@on_backends
def test_linear_logprobs(
    backend: str, dtype: torch.dtype, chunk_size: int | None, unsplit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the weight written in half precision at once, or accumulated in float32 first."""
    monkeypatch.setattr(products, "UNSPLIT", unsplit)
    assert_rounded_once("linear_logprobs", batch(dtype), backend, dtype, chunk_size=chunk_size)


@pytest.mark.usefixtures("alone")
@on_backends
def test_a_split_vocabulary(backend: str) -> None:
    """Its logits have one more column than the weight has rows."""
    assert_rounded_once("linear_logprobs", batch(BF16) | {"vocab_start": 0}, backend, BF16, chunk_size=16)


@on_backends
def test_positions_are_the_only_tokens(backend: str) -> None:
    """In any order, one of them masked."""
    places, mask = torch.randperm(40)[:17], torch.ones(4, 10, dtype=torch.bool)
    mask.view(-1)[places[5]] = False
    takes_part = torch.zeros(40, dtype=torch.bool).index_fill(0, places, True).view(4, 10) & mask
    given = {name: value.to(device_of(backend)) for name, value in (("positions", places), ("mask", mask))}
    assert_rounded_once("linear_policy_loss", batch(BF16), backend, BF16, takes_part, **given)


@on_backends
def test_an_adapter_in_float32(backend: str) -> None:
    inputs = batch(BF16, "lora") | {"is_wide": True, "chunk_size": 8}
    inputs = {name: value for name, value in inputs.items() if name not in ("old_logprobs", "advantages")}
    op = cases.op_of(inputs)

    def reference() -> Results:
        return evaluated(op, placed(op, inputs, F64, lambda value: value), "reference")

    gold = reference()
    given = moved(inputs, backend, BF16)
    for name in ("lora_a", "lora_b"):
        given[name] = inputs[name].to(device_of(backend), F32).requires_grad_()
    got = evaluated(op, given, backend)
    logprobs = got["logprobs"], gold["logprobs"]
    assert_close_to_rounding(*logprobs, lambda: reference()["logprobs"], F64)
    for name in LEAVES:
        by, want = got[f"d_{name}"].cpu(), gold[f"d_{name}"]
        assert by.dtype == (F32 if name.startswith("lora") else BF16)
        # gradients by logits are rounded, and those of the head, too
        assert (by.double() - want).norm() < 2**-8 * (1 + cuts_off(backend, BF16)) * want.norm(), name


@pytest.mark.parametrize("of_total", [F32, BF16], ids=str)
@on_backends
def test_weight_grad_is_added_to(backend: str, of_total: torch.dtype) -> None:
    """In float32 or in the dtype of the weight, over several products."""
    given = moved(batch(BF16), backend, BF16)
    options = {"chunk_size": 16, "backend": backend}
    (before,) = torch.autograd.grad(call("linear_policy_loss", given, **options), given["weight"])
    total = torch.ones_like(given["weight"], dtype=of_total, requires_grad=False)
    call("linear_policy_loss", given, weight_grad=total, **options).backward()
    assert given["weight"].grad is None
    # One rounding of `before`; of the sum with 1 one in float32, or one in half precision for each of three products.
    of_result, of_sum = torch.finfo(BF16).eps / 2, torch.finfo(of_total).eps * 2
    torch.testing.assert_close(total.float() - 1, before.float(), rtol=of_result, atol=of_sum)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
def test_rows_of_matrices_are_aligned(backend: str, pad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and kernels read 16 bytes at a time; with the column for targets of other ranks, too."""
    made: list[Tensor] = []
    matrix = products.Products.matrix

    def recorded(self: products.Products, tokens: int, dtype: torch.dtype) -> Tensor:
        self.logit_columns = self.columns + pad
        made.append(matrix(self, tokens, dtype))
        return made[-1]

    monkeypatch.setattr(products.Products, "matrix", recorded)
    assert_rounded_once("linear_logprobs", batch(BF16), backend, BF16, chunk_size=8)
    assert {value.dtype for value in made} == {F32, BF16}
    for value in made:
        assert value.shape[1] == COLUMNS + pad and value.stride() == (80, 1) and value.data_ptr() % 16 == 0


# Sizes

H100 = 132  # multiprocessors


@pytest.mark.parametrize(
    ("expected", "tokens", "shape", "needs_weight", "processors"),
    [
        (8192, 8192, (151_936, 4096), True, H100),  # no more than the accumulator and 2 GiB
        (752, 8192, (151_936, 4096), False, H100),
        (2048, 2048, (32_000, 1024), True, None),  # on a CPU no more than the accumulator
        (752, 2049, (32_000, 1024), True, None),
    ],
)
def test_one_product_or_one_for_each_chunk(
    expected: int, tokens: int, shape: tuple[int, int], needs_weight: bool, processors: int | None
) -> None:
    assert sizes.tokens_per_product(tokens, 752, shape, needs_weight, processors) == expected


@pytest.mark.parametrize("tokens", [16_384, 65_536, 262_144])
@pytest.mark.parametrize("shape", [(151_936, 4096), (128_256, 2048), (1_000_000, 512)])
def test_several_products_stay_within_the_memory(tokens: int, shape: tuple[int, int]) -> None:
    chunk = sizes.tokens_per_chunk(tokens, shape[0], "cuda", BF16)
    size = sizes.tokens_per_product(tokens, chunk, shape, True, H100)
    assert size < tokens and size % 128 == 0
    assert 2 * size * shape[0] + 4 * chunk * shape[0] <= 2**31


def test_tiles_of_several_products_fill_their_waves() -> None:
    """Tiles of 128 x 256: 16 tiles a block of 128 tokens, so 33 blocks would fill 4 waves."""
    waves = sizes.tokens_per_product(65_536, 752, (151_936, 4096), True, H100) // 128 * 16 / H100
    assert waves / math.ceil(waves) > 0.9


@pytest.mark.parametrize("what", ["policy loss", "with a teacher", "distillation", "from hidden states"])
@pytest.mark.parametrize("backend", heads.KERNELS)
def test_a_scaled_loss_keeps_small_gradients_in_float16(backend: str, what: str) -> None:
    """A loss scaler multiplies the loss of one call among thousands, whose own gradients float16 does not have."""
    tokens, scale = 2.0**18, 2.0**20
    inputs = batch(torch.float16)
    features = ("whole",) if what == "from hidden states" else ()
    fields = distillation_cases.draw_teacher(inputs, *features) | {"teacher_normalizer": tokens}

    def loss_of(given: Inputs, backend: str) -> Tensor:
        teacher = distillation_cases.teacher_of(given) if what != "policy loss" else None
        head = gk.LMHead(given["weight"], given["bias"])
        if what in ("distillation", "from hidden states"):
            return gk.linear_distillation_loss(given["hidden"], head, teacher, backend=backend).loss
        own = given["hidden"], head, given["targets"], None, given["advantages"].to(given["hidden"].dtype).float()
        return gk.linear_policy_loss(*own, teacher=teacher, normalizer={"rows": tokens}, backend=backend).loss

    found = {}
    for chosen, dtype in ((backend, torch.float16), ("reference", F64)):
        given = moved(inputs | fields, chosen, dtype)
        loss = loss_of(given, chosen)
        gradients = torch.autograd.grad(loss * scale, [given[name] for name in LEAVES[:3]])
        found[dtype] = [gradient.cpu().double() / scale for gradient in gradients]
    for got, gold in zip(found[torch.float16], found[F64], strict=True):
        assert float(gold.abs().max()) < torch.finfo(torch.float16).tiny
        assert float((got - gold).norm()) <= 2 * torch.finfo(torch.float16).eps * float(gold.norm())


@needs_cpu_kernels
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_distillation_in_float16_frees_its_hidden_states(is_whole: bool) -> None:
    """Although its backward computes the loss again."""
    leaf, weight = torch.randn(4, 8).half().requires_grad_(), torch.randn(30, 8).half()
    hidden = leaf * 1
    alive = weakref.ref(hidden)
    ids, logprobs = torch.arange(2).expand(4, 2), torch.full((4, 2), -2.0)
    teacher = gk.Teacher(hidden=torch.randn(4, 8).half(), head=weight) if is_whole else gk.Teacher(ids, logprobs)
    loss = gk.linear_distillation_loss(hidden, weight, teacher).loss
    del hidden
    loss.backward()
    assert loss.isfinite() and leaf.grad is not None and alive() is None
