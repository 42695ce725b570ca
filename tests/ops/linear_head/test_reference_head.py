"""linear_policy_loss with the reference model's head instead of its log-probs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.chunks import Products
from tests.harness import INDUCTOR, assert_raises, device_of
from tests.ops.linear_head.test_policy_loss_edges import (
    CONFIGS,
    F64,
    HIDDEN,
    KERNELS,
    NAN,
    ROWS,
    VOCABULARY,
    WIDTH,
    assert_close,
    batch,
    leaves_of,
    noise,
    pytestmark,
    run,
)

__all__ = ["pytestmark"]
REF_HIDDEN = 3
WITH_KL = ("dapo", "cispo", "sequence")


def with_reference(name: str, scaling: dict[str, Any], shares_weight: bool = False) -> tuple[dict[str, Any], Any]:
    """Arguments with the reference model's log-probs, and the same with its head."""
    given = batch(name) | scaling
    width = HIDDEN if shares_weight else REF_HIDDEN
    reference = {"ref_hidden": noise(ROWS, WIDTH, width)}
    if not shares_weight:
        reference |= {"ref_weight": noise(VOCABULARY, width), "ref_bias": noise(VOCABULARY)}
    weight, bias = reference.get("ref_weight", given["weight"]), reference.get("ref_bias", given["bias"])
    of_reference = gk.linear_logprobs(
        reference["ref_hidden"], weight, given["targets"], bias=bias, **scaling, backend="reference"
    )
    plain = given | {"ref_logprobs": of_reference.logprobs}
    del given["ref_logprobs"]
    return plain, given | reference


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 8, 100])
@pytest.mark.parametrize("compact", [None, False])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", WITH_KL)
def test_it_is_as_with_the_log_probs(name: str, memory: str, compact: bool | None, chunk_size: int | None) -> None:
    for scaling in ({}, {"temperature": 0.7, "softcap": 4.0, "logit_scale": 0.9}):
        plain, with_head = with_reference(name, scaling)
        options = {"config": CONFIGS[name], "memory": memory, "compact": compact, "chunk_size": chunk_size}
        assert_close(run(with_head, **options), run(plain, **options))


@pytest.mark.parametrize("name", WITH_KL)
def test_the_policys_weight_is_the_default(name: str) -> None:
    plain, with_head = with_reference(name, {}, shares_weight=True)
    assert_close(run(with_head, config=CONFIGS[name]), run(plain, config=CONFIGS[name]))


def test_packed_rows_and_positions() -> None:
    plain, with_head = with_reference("dapo", {})
    bounds = torch.arange(ROWS + 1) * WIDTH
    flat = ("hidden", "targets", "old_logprobs", "mask", "ref_logprobs", "ref_hidden")
    results = []
    for given in (plain, with_head):
        packed = {k: v.flatten(0, 1) if k in flat else v for k, v in given.items()} | {"cu_seqlens": bounds}
        positions = torch.tensor([0, 3, 9, 20, 21])
        results.append(run(packed, config=CONFIGS["dapo"], positions=positions, chunk_size=3))
    assert_close(*results)


@pytest.mark.parametrize("compact", [None, False])
def test_tokens_that_take_no_part_may_be_nan(compact: bool | None) -> None:
    _, with_head = with_reference("dapo", {})
    expected = run(with_head, config=CONFIGS["dapo"], compact=compact, chunk_size=8)
    out = ~with_head["mask"] | (with_head["targets"] == -100)
    with_head["ref_hidden"][out] = NAN
    assert_close(run(with_head, config=CONFIGS["dapo"], compact=compact, chunk_size=8), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_every_backend(backend: str, dtype: torch.dtype) -> None:
    """Both calls run the same kernels on the same chunks; only the products may add in another order."""
    _, with_head = with_reference("dapo", {})
    with_head = {k: v.to(dtype) if v.dtype == F64 else v for k, v in with_head.items()}
    device = device_of(backend)
    moved = {k: v.to(device) for k, v in with_head.items()}
    of_reference = gk.linear_logprobs(
        moved["ref_hidden"], moved["ref_weight"], moved["targets"], bias=moved["ref_bias"], backend=backend
    )
    plain = {k: v for k, v in with_head.items() if not k.startswith("ref_")}
    plain["ref_logprobs"] = of_reference.logprobs
    options = {"config": CONFIGS["dapo"], "chunk_size": 8}
    got, expected = run(with_head, backend, **options), run(plain, backend, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert_close(got, expected, rtol=tolerance, atol=tolerance * 1e-2)


def test_both_heads_share_the_memory_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, with_head = with_reference("dapo", {})
    allocated: list[int] = []
    once = Products.matrix

    def recorded(self: Products, rows: int, dtype: torch.dtype) -> Tensor:
        allocated.append(rows)
        return once(self, rows, dtype)

    monkeypatch.setattr(Products, "matrix", recorded)
    run(with_head, config=CONFIGS["dapo"], chunk_size=8)
    assert allocated == [8]


def test_the_reference_gets_no_gradient() -> None:
    _, with_head = with_reference("dapo", {})
    reference = {k: v.requires_grad_() for k, v in with_head.items() if k.startswith("ref_")}
    for memory in ("fast", "low"):
        leaves = leaves_of(with_head)
        gk.linear_policy_loss(**with_head | leaves, config=CONFIGS["dapo"], memory=memory).loss.backward()
        assert all(leaf.grad is not None for leaf in leaves.values())
        assert all(value.grad is None for value in reference.values())


def test_compiles_into_one_graph() -> None:
    torch.compiler.reset()
    _, with_head = with_reference("dapo", {})

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, **others: Tensor) -> Tensor:
        return gk.linear_policy_loss(hidden * 2, weight, bias=bias, **others, config=CONFIGS["dapo"], chunk_size=8).loss

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=INDUCTOR)):
        leaves = leaves_of(with_head)
        value = function(**with_head | leaves)
        value.backward()
        results.append({"loss": value.detach()} | {k: leaf.grad for k, leaf in leaves.items()})
    assert_close(*results)


def refused(error: type[Exception], *parts: str, **changes: Any) -> None:
    _, with_head = with_reference("dapo", {})
    call = functools.partial(gk.linear_policy_loss, **with_head | changes, config=CONFIGS["dapo"])
    assert_raises(error, f"linear_policy_loss: {parts[0]}", parts[1:], call)


def test_errors() -> None:
    _, with_head = with_reference("dapo", {})
    call = functools.partial(gk.linear_policy_loss, **with_head, config="dapo")
    assert_raises(ValueError, "linear_policy_loss: ref_hidden must be left out with kl='none'", ["choose a kl"], call)
    shape = f"[{ROWS}, {WIDTH}, {REF_HIDDEN}]"
    refused(ValueError, "ref_logprobs must be None with ref_hidden", ref_logprobs=noise(ROWS, WIDTH))
    refused(ValueError, "ref_hidden must have shape " + shape, "[4, 7, 5]", ref_hidden=noise(ROWS, WIDTH, 5))
    refused(ValueError, "ref_hidden must have shape " + shape, "[28, 3]", ref_hidden=noise(ROWS * WIDTH, REF_HIDDEN))
    refused(ValueError, "ref_weight must have shape [31, H]", "[30, 3]", ref_weight=noise(30, REF_HIDDEN))
    refused(ValueError, "ref_weight must have shape [31, H]", "[31]", ref_weight=noise(31))
    refused(ValueError, "ref_bias must have shape [31]", "[3]", ref_bias=noise(3))
    refused(TypeError, "ref_hidden must be of dtype torch.float64 like hidden", ref_hidden=noise(4, 7, 3).float())
    refused(TypeError, "ref_weight must be a tensor", "list", ref_weight=[1.0])
    refused(ValueError, "ref_weight must be on cpu", "meta", ref_weight=noise(31, 3).to("meta"))
    refused(ValueError, "ref_weight must be None without ref_hidden", ref_hidden=None)
    refused(ValueError, "ref_bias must be None without ref_weight", ref_weight=None)
    refused(ValueError, "ref_bias must be None without ref_hidden", ref_hidden=None, ref_weight=None)
    refused(ValueError, "ref_logprobs must be given for kl_coef=0.05", ref_hidden=None, ref_weight=None, ref_bias=None)
