"""Heads in half precision on a GPU, or on a CPU that multiplies it.

The gradient by the logits is rounded once and waits for larger products.

Faults that this is for: a gradient that is rounded twice, or accumulated in half precision; tokens that wait for a
product and are lost, or multiplied with the hidden states of others; a padding column that is multiplied; rows of
matrices that are not aligned; a product that does not fit its memory; small gradients of float16 that are rounded
before they are scaled.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.linear_head import products, sizes
from tests.harness import device_of, needs_cpu_kernels, runnable_backends
from tests.ops.linear_head import heads
from tests.ops.linear_head.cases import Problem, call, problem
from tests.ops.linear_head.heads import BF16, F32, F64, KERNELS, LORA_SCALE, SUPPORTS
from tests.ops.linear_head.terms import CONFIGS, tokens_read
from tests.ops.promises import placed, run

BACKENDS = [
    name
    for name in runnable_backends(SUPPORTS, BF16)
    if name == "triton" or (name == "cpu" and registry.HAS_HALF_PRODUCTS)
]
COLUMNS = 77

on_backends = pytest.mark.parametrize("backend", BACKENDS)
on_halves = pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)


def assert_rounded_once(case: Problem, backend: str, dtype: torch.dtype, **options: Any) -> None:
    """Bounds the error by one rounding of each gradient by a logit and one of the result.

    Where Triton writes exponentials of the logits for a policy loss, sums over tokens have one more: the hidden states,
    or the ones of a bias, are multiplied by their rows' factors. Besides, a logit is a sum of products in float32, and
    an error of a logit is a relative error of a probability.
    """
    case = case.rounded(dtype)
    inputs, read = case.inputs, tokens_read(case.inputs)
    rows = torch.where(read[..., None], inputs["hidden"], 0)
    weight, bias = inputs["weight"], inputs["bias"]
    if "lora_a" in inputs:
        weight = weight + LORA_SCALE * inputs["lora_b"] @ inputs["lora_a"]
    # a head of the logits themselves, whose hidden states have their gradient
    of_logits = {"hidden": rows @ weight.T + bias, "weight": torch.eye(COLUMNS).double(), "bias": 0 * bias}
    kept = {name: value for name, value in inputs.items() if not name.startswith("lora")}
    by_logits = Problem(case.of, kept | of_logits).run("reference")["d_hidden"].flatten(0, -2)
    gold, got = case.run("reference"), case.with_garbage().run(backend, dtype, **options)
    rows, size = rows.flatten(0, -2), by_logits.abs() + torch.finfo(dtype).tiny
    # Triton's interpreter cuts bfloat16 off instead of rounding it, which doubles the error of what it computes
    cuts_off = dtype == BF16 and backend == "triton" and not torch.cuda.is_available()
    rounding, largest = torch.finfo(dtype).eps / 2, float((rows.abs() @ weight.abs().T + bias.abs()).max())
    relative = rounding * (1 + cuts_off) + 2 * (rows.shape[1] + 2) * 2**-24 * largest + 2**-18
    has_factors = backend == "triton" and dtype == BF16 and case.of in CONFIGS and "teacher_kind" not in inputs
    of_factors = 1 + rounding * has_factors / relative
    bounds = {"d_hidden": size @ weight.abs(), "d_weight": of_factors * size.T @ rows.abs()}
    bounds["d_bias"] = of_factors * size.sum(0)
    for name, terms in bounds.items():
        assert got[name].dtype == dtype
        error = (got[name].double() - gold[name]).abs().reshape(terms.shape)
        allowed = relative * terms + rounding * gold[name].abs().reshape(terms.shape)
        assert (error <= allowed).all(), (name, float((error / allowed).max()))
    for name in gold.keys() & {"d_lora_a", "d_lora_b"}:
        assert (got[name] - gold[name]).norm() < 2**-8 * (1 + cuts_off) * gold[name].norm(), name


def batch(of: str, *features: str, **options: Any) -> Problem:
    case = problem(of, "bias", "ignored", *features, rows=4, width=10, columns=COLUMNS, **options)
    case.inputs["hidden"] /= 2
    return case


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
    assert_rounded_once(batch("grpo", "zeros"), backend, dtype, **options)


@pytest.mark.parametrize("unsplit", [1, 2**24])
@pytest.mark.parametrize("chunk_size", [None, 16])
@on_halves
@on_backends
def test_linear_logprobs(
    backend: str, dtype: torch.dtype, chunk_size: int | None, unsplit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the weight written in half precision at once, or accumulated in float32 first."""
    monkeypatch.setattr(products, "UNSPLIT", unsplit)
    assert_rounded_once(batch("logprobs", "no entropy"), backend, dtype, chunk_size=chunk_size)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("features", "options"),
    [
        (("dapo", "gaps", "positions"), {}),  # in any order
        (("dapo", "teacher"), {"chunk_size": 16}),
        (("logprobs", "no entropy", "lora"), {"is_wide": True, "chunk_size": 8}),
        (("distillation",), {"chunk_size": 16}),
        (("distillation", "whole"), {"chunk_size": 16}),
    ],
    ids=str,
)
@on_backends
def test_one_rounding(backend: str, features: tuple[str, ...], options: dict[str, Any]) -> None:
    assert_rounded_once(batch(*features, **options), backend, BF16)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("of", ["logprobs, no entropy", "grpo"])
@on_backends
def test_a_split_vocabulary(backend: str, of: str) -> None:
    """Its logits have one more column than the weight has rows."""
    assert_rounded_once(batch(*of.split(", ")), backend, BF16, vocab_start=0, chunk_size=16)


@on_backends
def test_an_overflow_that_no_gradient_depends_on_spoils_none(backend: str) -> None:
    case = batch("grpo", "on policy", chunk_size=16, compact=False).rounded(BF16)
    every = torch.ones_like(case.inputs["targets"], dtype=torch.bool)  # so that no token is left out of the products
    policy_mask = every.index_fill(0, torch.tensor(0), False) | (torch.arange(10) > 0)
    case = case.but(targets=torch.full_like(case.inputs["targets"], 3), mask=every)
    clean = case.run(backend, BF16, policy_mask=policy_mask)
    case.inputs["hidden"][0, 0] = 3e38
    got = case.run(backend, BF16, policy_mask=policy_mask)
    for name in ("d_hidden", "d_weight", "d_bias"):
        assert torch.equal(got[name], clean[name]), name


@pytest.mark.parametrize("of_total", [F32, BF16], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_weight_grad_is_added_to(backend: str, of_total: torch.dtype) -> None:
    """In float32 or in the dtype of the weight, of any strides, over several products."""
    case = batch("grpo", chunk_size=16).rounded(BF16)
    expected = case.run(backend, BF16)["d_weight"]
    given = placed(case.op, case.inputs, BF16, lambda value: value.to(device_of(backend)))
    total = torch.ones_like(given["weight"].T, dtype=of_total, requires_grad=False).T
    case.op.call(given | {"weight_grad": total}, backend)["loss"].backward()
    assert given["weight"].grad is None
    # One rounding of `expected`; of the sum with 1 one in float32, or one in half precision for each of three products.
    of_result, of_sum = torch.finfo(BF16).eps / 2, torch.finfo(of_total).eps * 2
    torch.testing.assert_close(total.cpu().float() - 1, expected.float(), rtol=of_result, atol=of_sum)


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
    assert_rounded_once(batch("logprobs", "no entropy"), backend, BF16, chunk_size=8)
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


@pytest.mark.parametrize("tokens", [14_000, 16_384, 65_536, 262_144])
@pytest.mark.parametrize("shape", [(151_936, 4096), (128_256, 2048), (1_000_000, 512)])
def test_several_products_stay_within_the_memory(tokens: int, shape: tuple[int, int]) -> None:
    """Their tiles of 128 x 256 fill the waves: with 4096 columns 33 blocks of 16 tiles would fill 4 of them."""
    chunk = sizes.tokens_per_chunk(tokens, shape[0], "cuda", BF16)
    size = sizes.tokens_per_product(tokens, chunk, shape, True, H100)
    assert size < tokens and size % 128 == 0
    assert 2 * size * shape[0] + 4 * chunk * shape[0] <= 2**31
    if shape == (151_936, 4096) and tokens == 65_536:
        waves = size // 128 * 16 / H100
        assert waves / math.ceil(waves) > 0.9


# float16


@pytest.mark.pairs
@pytest.mark.parametrize("of", ["grpo", "grpo, teacher", "distillation", "distillation, whole"])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_scaled_loss_keeps_small_gradients_in_float16(backend: str, of: str) -> None:
    """A loss scaler multiplies the loss of one call among thousands, whose own gradients float16 does not have."""
    count, scale = 2.0**18, 2.0**20
    divisors = {} if of.startswith("distillation") else {"normalizer": {"rows": count}}
    case = batch(*of.split(", "), "on policy").rounded(torch.float16).but(**divisors)
    if "teacher_kind" in case.inputs:
        case.inputs["teacher_normalizer"] = count
    op = dataclasses.replace(case.op, call=lambda *given: {"loss": scale * case.op.call(*given)["loss"]})
    got = run(op, case.inputs, backend, torch.float16)
    for name, gold in run(op, case.inputs, "reference", F64).items():
        if name != "loss":
            assert float(gold.abs().max()) / scale < torch.finfo(torch.float16).tiny
            assert float((got[name] - gold).norm()) <= 2 * torch.finfo(torch.float16).eps * float(gold.norm()), name


@needs_cpu_kernels
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_distillation_in_float16_frees_its_hidden_states(is_whole: bool) -> None:
    """Although its backward computes the loss again."""
    inputs = heads.cast(batch("distillation", *(["whole"] if is_whole else [])).inputs, torch.float16)
    leaf = inputs["hidden"].requires_grad_()
    inputs["hidden"] = leaf * 1
    alive = weakref.ref(inputs["hidden"])
    loss = call(inputs, "cpu", "distillation")["loss"]
    del inputs
    loss.backward()
    assert loss.isfinite() and leaf.grad is not None and alive() is None
