"""Heads in half precision on a GPU, whose gradient by the logits is rounded once and waits for larger products.

Faults that this is for: a gradient that is rounded twice, or accumulated in half precision; tokens that wait for a
product and are lost, or multiplied with the hidden states of others; a padding column that is multiplied; rows of
matrices that are not aligned; a product that does not fit its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import chunks, sizes
from tests.harness import device_of, runnable_backends
from tests.ops.linear_head import cases
from tests.ops.linear_head.cases import F32, F64, IGNORED, LEAVES, head_of
from tests.ops.promises import Inputs, Results

BACKENDS = [name for name in runnable_backends(cases.SUPPORTS, torch.bfloat16) if name in ("cuda", "triton")]
HALVES = [torch.bfloat16, torch.float16]
WIDTH, COLUMNS = 32, 77

on_backends = pytest.mark.parametrize("backend", BACKENDS)
on_halves = pytest.mark.parametrize("dtype", HALVES, ids=str)


def batch(dtype: torch.dtype, *shape: int, **options: Any) -> Inputs:
    """Numbers that this dtype has, as float64, with an ignored target."""
    head = cases.draw_head(COLUMNS, WIDTH, bias=True, **options)
    head["weight"] /= 4
    inputs = head | cases.draw_tokens(head, *(shape or (4, 10)), ignored=0.0)
    inputs["targets"][:1, 3] = IGNORED
    inputs["hidden"] /= 2
    inputs["advantages"] = torch.tensor([1.0, -0.5, 0.0, 0.7]).double()[: len(inputs["targets"])]
    inputs["old_logprobs"] = -torch.rand(inputs["targets"].shape).double() - 3
    return cases.rounded(inputs, dtype)


def policy_loss(inputs: Inputs, **options: Any) -> Tensor:
    """In float64 of whole logits, otherwise by the head's op."""
    policy = [inputs["old_logprobs"], inputs["advantages"]]
    if "logits" not in inputs:
        policy = [value.float() for value in policy]
        return gk.linear_policy_loss(inputs["hidden"], head_of(inputs), inputs["targets"], *policy, **options).loss
    mask = (inputs["targets"] != IGNORED) & inputs["takes_part"]
    logprobs = gk.token_logprobs(inputs["logits"], inputs["targets"], backend="reference").logprobs
    return gk.policy_loss(logprobs, *policy, mask=mask, backend="reference").loss


def of_logprobs(inputs: Inputs, **options: Any) -> Tensor:
    if "logits" in inputs:
        logprobs = gk.token_logprobs(inputs["logits"], inputs["targets"], backend="reference").logprobs
    else:
        logprobs = gk.linear_logprobs(inputs["hidden"], head_of(inputs), inputs["targets"], **options).logprobs
    return (logprobs * inputs["by_logprobs"]).sum()


def cuts_off(backend: str, dtype: torch.dtype) -> bool:
    """Triton's interpreter cuts bfloat16 off instead of rounding it, which doubles the error of what it computes."""
    return dtype == torch.bfloat16 and backend == "triton" and not torch.cuda.is_available()


def assert_rounded_once(function: Any, inputs: Inputs, backend: str, dtype: torch.dtype, **options: Any) -> Results:
    """Bounds the error by one rounding of each gradient by a logit and one of the result.

    Besides, a logit is a sum of products in float32, and an error of a logit is a relative error of a probability.
    """
    rows, weight = inputs["hidden"].flatten(0, -2), inputs["weight"]
    logits = (inputs["hidden"] @ weight.T + inputs["bias"]).requires_grad_()
    (by_logits,) = torch.autograd.grad(
        function({"takes_part": torch.tensor(True)} | inputs | {"logits": logits}), logits
    )
    by_logits = by_logits.flatten(0, -2)
    device = device_of(backend)
    moved = {
        name: value.to(device, dtype if value.dtype == F64 else None) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    leaves = {name: moved[name].requires_grad_() for name in LEAVES[:3]}
    found = torch.autograd.grad(function(moved, backend=backend, **options), list(leaves.values()))
    rounding = torch.finfo(dtype).eps / 2
    largest = max((rows.nan_to_num().abs() @ weight.abs().T + 1).flatten().tolist(), default=0.0)
    of_logits = (WIDTH + 2) * 2**-24 * largest
    relative, size = (
        rounding * (1 + cuts_off(backend, dtype)) + 2 * of_logits + 2**-18,
        by_logits.abs() + torch.finfo(dtype).tiny,
    )
    bounds = [
        (by_logits @ weight, size @ weight.abs()),
        (by_logits.T @ rows.nan_to_num(), size.T @ rows.nan_to_num().abs()),
        (by_logits.sum(0), size.sum(0)),
    ]
    for name, gradient, (gold, terms) in zip(leaves, found, bounds, strict=True):
        assert gradient.dtype == dtype
        error = (gradient.cpu().double().reshape(gold.shape) - gold).abs()
        assert (error <= relative * terms + rounding * gold.abs()).all(), (name, float((error / terms).max()))
    return dict(zip(leaves, found, strict=True))


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
        monkeypatch.setattr("grpo_kernels.ops.linear_head.chunking.tokens_per_chunk", lambda *_: chunk)
        monkeypatch.setattr(chunks, "tokens_per_product", lambda *_: product)
        options["chunk_size"] = None
    assert_rounded_once(policy_loss, batch(dtype), backend, dtype, **options)


@pytest.mark.parametrize("unsplit", [1, 2**24])
@pytest.mark.parametrize("chunk_size", [None, 16])
@on_halves
@on_backends
def test_linear_logprobs(
    backend: str, dtype: torch.dtype, chunk_size: int | None, unsplit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the weight written in half precision at once, or accumulated in float32 first."""
    monkeypatch.setattr(chunks, "UNSPLIT", unsplit)
    assert_rounded_once(of_logprobs, batch(dtype), backend, dtype, chunk_size=chunk_size)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process, which holds all columns of a split vocabulary."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@on_backends
def test_a_split_vocabulary(backend: str) -> None:
    """Its logits have one more column than the weight has rows."""
    inputs = batch(torch.bfloat16) | {"vocab_start": 0}
    assert_rounded_once(of_logprobs, inputs, backend, torch.bfloat16, chunk_size=16)


@on_backends
def test_positions_are_the_only_tokens(backend: str) -> None:
    """In any order, one of them masked; hidden states elsewhere are NaN."""
    inputs, places = batch(torch.bfloat16), torch.randperm(40)[:17]
    mask = torch.ones(4, 10, dtype=torch.bool)
    mask.view(-1)[places[5]] = False
    inputs["takes_part"] = torch.zeros(40, dtype=torch.bool).index_fill(0, places, True).view(4, 10) & mask

    def loss(given: Inputs, **options: Any) -> Tensor:
        hidden = given["hidden"].masked_fill(~given["takes_part"][..., None], math.nan)
        return policy_loss(given | {"hidden": hidden}, **options)

    device = device_of(backend)
    given = {"positions": places.to(device), "mask": mask.to(device)}
    assert_rounded_once(loss, inputs, backend, torch.bfloat16, **given)


@on_backends
def test_an_adapter_in_float32(backend: str) -> None:
    inputs = batch(torch.bfloat16, adapter=2) | {"is_wide": True}
    device = device_of(backend)

    def gradients(backend: str, dtype: torch.dtype, of_adapter: torch.dtype) -> list[Tensor]:
        dtypes = {name: of_adapter if name.startswith("lora") else dtype for name in LEAVES}
        leaves = {name: inputs[name].to(device, dtypes[name]).requires_grad_() for name in LEAVES}
        head = gk.LMHead(leaves["weight"], leaves["bias"], lora=(leaves["lora_a"], leaves["lora_b"], 0.7))
        targets = inputs["targets"].to(device)
        got = gk.linear_logprobs(leaves["hidden"], head, targets, chunk_size=8, backend=backend).logprobs
        found = torch.autograd.grad((got * inputs["by_logprobs"].to(got)).sum(), list(leaves.values()))
        assert [value.dtype for value in found] == list(dtypes.values())
        return [got, *found]

    gold = gradients("reference", F64, F64)
    got = gradients(backend, torch.bfloat16, F32)
    # float32 sums of products of bfloat16 and float32 numbers: a few roundings of logits of about 10
    torch.testing.assert_close(got[0].double(), gold[0], rtol=0, atol=1e-5)
    for value, want in zip(got[1:], gold[1:], strict=True):
        # gradients by logits are rounded, and those of the head, too
        assert (value.double() - want).norm() < 2**-8 * (1 + cuts_off(backend, torch.bfloat16)) * want.norm()


@pytest.mark.parametrize("of_total", [F32, torch.bfloat16], ids=str)
@on_backends
def test_weight_grad_is_added_to(backend: str, of_total: torch.dtype) -> None:
    """In float32 or in the dtype of the weight, over several products."""
    inputs, device = batch(torch.bfloat16), device_of(backend)
    given = {name: v.to(device, torch.bfloat16 if v.dtype == F64 else None) for name, v in inputs.items()}
    weight = given["weight"].requires_grad_()
    (before,) = torch.autograd.grad(policy_loss(given, chunk_size=16, backend=backend), weight)
    total = torch.ones(COLUMNS, WIDTH, dtype=of_total, device=device)
    policy_loss(given, chunk_size=16, weight_grad=total, backend=backend).backward()
    assert weight.grad is None
    # One rounding of `before`; of the sum with 1 one in float32, or one in half precision for each of three products.
    of_result, of_sum = torch.finfo(torch.bfloat16).eps / 2, torch.finfo(of_total).eps * 2
    torch.testing.assert_close(total.float() - 1, before.float(), rtol=of_result, atol=of_sum)


@pytest.mark.parametrize("pad", [False, True])
@on_backends
def test_rows_of_matrices_are_aligned(backend: str, pad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and kernels read 16 bytes at a time; with the column for targets of other ranks, too."""
    made: list[Tensor] = []
    matrix = chunks.Products.matrix

    def recorded(self: chunks.Products, tokens: int, dtype: torch.dtype) -> Tensor:
        self.logit_columns = self.columns + pad
        made.append(matrix(self, tokens, dtype))
        return made[-1]

    monkeypatch.setattr(chunks.Products, "matrix", recorded)
    inputs = batch(torch.bfloat16)
    assert_rounded_once(of_logprobs, inputs, backend, torch.bfloat16, chunk_size=8)
    assert {value.dtype for value in made} == {F32, torch.bfloat16}
    for value in made:
        assert value.shape[1] == COLUMNS + pad and value.stride() == (80, 1) and value.data_ptr() % 16 == 0


@pytest.mark.parametrize("compact", [None, False])
@on_backends
def test_no_tokens(backend: str, compact: bool | None) -> None:
    inputs = batch(torch.bfloat16, 0, 10)
    got = assert_rounded_once(policy_loss, inputs, backend, torch.bfloat16, compact=compact)
    assert not any(value.any() for value in got.values())


# Sizes

H100 = 132  # multiprocessors


def test_one_product_if_its_tokens_take_no_more_than_the_accumulator() -> None:
    assert sizes.tokens_per_product(8192, 752, (151_936, 4096), True, H100) == 8192
    assert 2 * 8192 * 151_936 + 4 * 752 * 151_936 <= 4 * 151_936 * 4096 + 2**31


@pytest.mark.parametrize("tokens", [16_384, 65_536, 262_144])
@pytest.mark.parametrize("shape", [(151_936, 4096), (128_256, 2048), (1_000_000, 512)])
def test_several_products_stay_within_the_memory(tokens: int, shape: tuple[int, int]) -> None:
    chunk = sizes.tokens_per_chunk(tokens, shape[0], "cuda", torch.bfloat16)
    size = sizes.tokens_per_product(tokens, chunk, shape, True, H100)
    assert size < tokens and size % 128 == 0
    assert 2 * size * shape[0] + 4 * chunk * shape[0] <= 2**31


def test_tiles_of_several_products_fill_their_waves() -> None:
    """Tiles of 128 x 256: 16 tiles a block of 128 tokens, so 33 blocks would fill 4 waves."""
    waves = sizes.tokens_per_product(65_536, 752, (151_936, 4096), True, H100) // 128 * 16 / H100
    assert waves / math.ceil(waves) > 0.9


def test_a_product_for_each_chunk_without_a_gradient_of_the_weight() -> None:
    assert sizes.tokens_per_product(8192, 752, (151_936, 4096), False, H100) == 752
