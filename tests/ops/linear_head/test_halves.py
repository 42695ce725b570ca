"""Heads in half precision on a GPU: the gradient by the logits is rounded once and waits for larger products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import chunks, sizes
from grpo_kernels.ops.linear_head.head import Head
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = [name for name in runnable_backends(SUPPORTS, torch.bfloat16) if name in ("cuda", "triton")]
ROWS, WIDTH, HIDDEN, VOCABULARY = 4, 10, 32, 77
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

pytestmark = pytest.mark.skipif(not BACKENDS, reason="needs Triton or an emulated or real CUDA backend")


def head(dtype: torch.dtype, rows: int = ROWS, width: int = WIDTH) -> dict[str, Tensor]:
    """Numbers that halves represent, as float64, with an ignored target."""
    random = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=random) / 2).to(dtype).double()

    targets = torch.randint(VOCABULARY, (rows, width), generator=random)
    targets[:1, 3] = -100
    return {
        "hidden": noise(rows, width, HIDDEN),
        "weight": noise(VOCABULARY, HIDDEN),
        "bias": noise(VOCABULARY),
        "targets": targets,
    }


def loss_of_logits(logits: Tensor, targets: Tensor, advantages: Tensor, **options: Any) -> Tensor:
    takes_part = options.pop("mask", True) & (targets != -100)
    logprobs = gk.token_logprobs(logits, targets, backend="reference").logprobs
    return gk.policy_loss(logprobs, options.pop("old", None), advantages, mask=takes_part, backend="reference").loss


def moved(arguments: dict[str, Tensor], backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    device = device_of(backend)
    result = {name: value.to(device, dtype if value.dtype == F64 else None) for name, value in arguments.items()}
    for name in ("hidden", "weight", "bias"):
        result[name].requires_grad_()
    return result


def assert_rounded_once(
    arguments: dict[str, Tensor],
    by_logits: Tensor,
    leaves: dict[str, Tensor],
    backend: str,
) -> None:
    """Bounds the error by one rounding of each gradient by a logit and one of the result.

    Besides, a logit is a sum of H products in float32, and an error of a logit is a relative error of a probability.
    Triton's interpreter cuts bfloat16 off instead of rounding it, which doubles the error of what it computes, the
    gradient by a logit.
    """
    hidden, weight = arguments["hidden"].reshape(-1, HIDDEN), arguments["weight"]
    half = leaves["weight"].dtype
    rounding = torch.finfo(half).eps / 2
    of_logits = (HIDDEN + 2) * 2**-24 * float((hidden.abs() @ weight.abs().T + 1).max())
    cuts_off = half == torch.bfloat16 and not torch.cuda.is_available()
    relative = rounding * (1 + (cuts_off and backend == "triton")) + 2 * of_logits + 2**-18
    size = by_logits.abs() + torch.finfo(half).tiny
    bounds = {
        "hidden": (by_logits @ weight, size @ weight.abs()),
        "weight": (by_logits.T @ hidden, size.T @ hidden.abs()),
        "bias": (by_logits.sum(0), size.sum(0)),
    }
    for name, (gold, terms) in bounds.items():
        gradient = leaves[name].grad
        assert gradient is not None
        assert gradient.dtype == half
        error = (gradient.cpu().double().reshape(gold.shape) - gold).abs()
        assert (error <= relative * terms + rounding * gold.abs()).all(), (name, float((error / terms).max()))


def gold_by_logits(arguments: dict[str, Tensor], loss_of_logits: Any) -> Tensor:
    logits = (arguments["hidden"] @ arguments["weight"].T + arguments["bias"]).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of_logits(logits), logits)
    return gradient.reshape(-1, VOCABULARY)


# Sizes of a chunk, which are also those of a product, or a product that takes one, two or all chunks.
@pytest.mark.parametrize(("chunk_rows", "product_rows"), [(None, None), (16, 16), (9, 9), (16, 32), (16, 16 * 9)])
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_policy_loss(
    backend: str,
    dtype: torch.dtype,
    compact: bool,
    chunk_rows: int | None,
    product_rows: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk_size = chunk_rows
    if product_rows != chunk_rows:
        monkeypatch.setattr("grpo_kernels.ops.linear_head.chunking.rows_per_chunk", lambda *_: chunk_rows)
        monkeypatch.setattr(chunks, "rows_per_product", lambda *_: product_rows)
        chunk_size = None
    arguments = head(dtype)
    old = -torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=F64) - 3
    advantages = torch.tensor([1.0, -0.5, 0.0, 0.7], dtype=F64)
    policy = {"old_logprobs": old.float(), "advantages": advantages.float()}
    by_logits = gold_by_logits(
        arguments,
        lambda logits: loss_of_logits(
            logits, arguments["targets"], advantages.float().double(), old=old.float().double()
        ),
    )
    leaves = moved(arguments, backend, dtype)
    device = device_of(backend)
    result = gk.linear_policy_loss(
        **leaves,
        **{name: value.to(device) for name, value in policy.items()},
        compact=compact,
        chunk_size=chunk_size,
        backend=backend,
    )
    result.loss.backward()
    assert_rounded_once(arguments, by_logits, leaves, backend)


@pytest.mark.parametrize("unsplit", [1, 2**24])
@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_logprobs(backend: str, chunk_size: int | None, unsplit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the weight written in half precision at once, or accumulated in float32 first."""
    monkeypatch.setattr(chunks, "UNSPLIT", unsplit)
    arguments = head(torch.bfloat16)
    upstream = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    targets = arguments["targets"].clamp_min(0)

    def loss(logits: Tensor) -> Tensor:
        of_target = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        return (of_target * upstream)[arguments["targets"] >= 0].sum()

    leaves = moved(arguments, backend, torch.bfloat16)
    logprobs = gk.linear_logprobs(**leaves, chunk_size=chunk_size, backend=backend).logprobs
    logprobs.backward(upstream.float().to(logprobs.device))
    assert_rounded_once(arguments, gold_by_logits(arguments, loss), leaves, backend)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process, which holds all columns of a sharded vocabulary."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("backend", BACKENDS)
def test_sharded_vocabulary(backend: str) -> None:
    """Its logits have one more column than the weight has rows."""
    arguments = head(torch.bfloat16)
    targets = arguments["targets"]
    leaves = moved(arguments, backend, torch.bfloat16)
    logprobs = gk.linear_logprobs(**leaves, vocab_start=0, chunk_size=16, backend=backend).logprobs
    logprobs.sum().backward()

    def loss(logits: Tensor) -> Tensor:
        of_target = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None]).squeeze(-1)
        return of_target[targets >= 0].sum()

    assert_rounded_once(arguments, gold_by_logits(arguments, loss), leaves, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_grad_is_added_to(backend: str, dtype: torch.dtype) -> None:
    """In float32 or in the dtype of the weight, over several products."""
    arguments = head(torch.bfloat16)
    leaves = moved(arguments, backend, torch.bfloat16)
    policy = {"old_logprobs": None, "advantages": torch.ones(ROWS, device=leaves["weight"].device)}
    plain = gk.linear_policy_loss(**leaves, **policy, chunk_size=16, backend=backend)
    plain.loss.backward()
    start = torch.ones(VOCABULARY, HIDDEN, dtype=dtype, device=leaves["weight"].device)
    total, before = start.clone(), leaves["weight"].grad.clone()
    gk.linear_policy_loss(**leaves, **policy, chunk_size=16, weight_grad=total, backend=backend).loss.backward()
    assert torch.equal(leaves["weight"].grad, before)
    # one rounding of the result beside the sum, and in the dtype of the weight one for each of the three products
    # One rounding of `before`; of the sum with 1 one in float32, or one in half precision for each of three products.
    of_result, of_sum = torch.finfo(torch.bfloat16).eps / 2, torch.finfo(dtype).eps * 2
    torch.testing.assert_close(total.float() - 1, before.float(), rtol=of_result, atol=of_sum)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_aligned(backend: str, pad: bool) -> None:
    """Products and kernels read 16 bytes at a time; with the column for targets of other ranks, too."""
    leaves = moved(head(torch.bfloat16), backend, torch.bfloat16)
    targets = leaves["targets"].reshape(-1)
    flat = Head(leaves["hidden"].reshape(-1, HIDDEN), leaves["weight"], *[None] * 3, targets, None, 1.0, None, 1.0, 1.0)
    products = chunks.Products(backend, flat, 8, pad_column=pad)
    gradients = chunks.Gradients(products, [True, True, False, False, False], len(targets), 0)
    for matrix in (products.tile, gradients.staged):
        assert matrix is not None
        assert matrix.shape[1] == VOCABULARY + pad
        assert matrix.stride() == (80, 1)
        assert matrix.data_ptr() % 16 == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_are_the_only_rows(backend: str) -> None:
    """Unsorted, one of them masked; hidden states elsewhere are NaN."""
    arguments = head(torch.bfloat16)
    places = torch.randperm(ROWS * WIDTH, generator=torch.Generator().manual_seed(3))[:17]
    chosen = torch.zeros(ROWS * WIDTH, dtype=torch.bool).index_fill(0, places, True).view(ROWS, WIDTH)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask.view(-1)[places[5]] = False
    advantages = torch.randn(ROWS, generator=torch.Generator().manual_seed(4))
    by_logits = gold_by_logits(
        arguments,
        lambda logits: loss_of_logits(logits, arguments["targets"], advantages.double(), mask=mask & chosen),
    )
    device = device_of(backend)
    leaves = moved(arguments, backend, torch.bfloat16)
    with torch.no_grad():
        leaves["hidden"][~(mask & chosen)] = math.nan
    result = gk.linear_policy_loss(
        **leaves,
        old_logprobs=None,
        advantages=advantages.to(device),
        mask=mask.to(device),
        positions=places.to(device),
        backend=backend,
    )
    result.loss.backward()
    assert_rounded_once(arguments, by_logits, leaves, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str) -> None:
    arguments = head(torch.bfloat16, rows=0)
    leaves = moved(arguments, backend, torch.bfloat16)
    advantages = torch.zeros(0, device=leaves["weight"].device)
    for compact in (None, False):
        loss = gk.linear_policy_loss(
            **leaves, old_logprobs=None, advantages=advantages, compact=compact, backend=backend
        ).loss
        gradients = torch.autograd.grad(loss, [leaves[name] for name in ("hidden", "weight", "bias")])
        assert not any(gradient.any() for gradient in gradients)


H100 = 132  # multiprocessors


def test_one_product_if_its_rows_take_no_more_than_the_accumulator() -> None:
    assert sizes.rows_per_product(8192, 752, (151_936, 4096), True, H100) == 8192
    assert 2 * 8192 * 151_936 + 4 * 752 * 151_936 <= 4 * 151_936 * 4096 + 2**31


@pytest.mark.parametrize("rows", [16_384, 65_536, 262_144])
@pytest.mark.parametrize("shape", [(151_936, 4096), (128_256, 2048), (1_000_000, 512)])
def test_several_products_stay_within_the_memory(rows: int, shape: tuple[int, int]) -> None:
    chunk = sizes.rows_per_chunk(rows, shape[0], "cuda", torch.bfloat16)
    size = sizes.rows_per_product(rows, chunk, shape, True, H100)
    assert size < rows
    assert size % 128 == 0
    assert 2 * size * shape[0] + 4 * chunk * shape[0] <= 2**31


def test_tiles_of_several_products_fill_their_waves() -> None:
    """Tiles of 128 x 256: 16 tiles a block of 128 rows, so 33 blocks would fill 4 waves."""
    waves = sizes.rows_per_product(65_536, 752, (151_936, 4096), True, H100) // 128 * 16 / H100
    assert waves / math.ceil(waves) > 0.9


def test_a_product_for_each_chunk_without_a_gradient_of_the_weight() -> None:
    assert sizes.rows_per_product(8192, 752, (151_936, 4096), False, H100) == 752
