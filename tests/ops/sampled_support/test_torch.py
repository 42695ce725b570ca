"""A support with other parts of torch: gradcheck, opcheck, compile, accumulated gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.sampled_support import check_support, reference
from grpo_kernels.ops.sampled_support import registration as op
from tests.harness import INDUCTOR, assert_raises, device_of, needs_cpu_kernels
from tests.ops.sampled_support.batches import ADDING, BACKENDS, F64, HEAD, OF_LOSSES, Batch, batch, cast, run
from tests.ops.sampled_support.test_policy_loss import CONFIGS, arguments_of
from tests.ops.sampled_support.test_policy_loss import run as run_loss


def test_gradcheck() -> None:
    given = batch(5, hidden=3, columns=9)
    temperature = torch.rand(5, dtype=F64) + 0.5

    def results(*head: Tensor) -> tuple[Tensor, Tensor]:
        arguments = given | dict(zip(HEAD, head, strict=True)) | {"temperature": temperature, "softcap": 9.0}
        return tuple(gk.linear_logprobs(**arguments, return_entropy=True, backend="reference"))

    assert torch.autograd.gradcheck(results, [given[name].requires_grad_() for name in HEAD])


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str) -> None:
    given = cast(batch(5, hidden=3, columns=9), torch.float32, str(device_of(backend)))
    entries = check_support("test", given["support"], given["targets"], 9)
    indices = op._indices(entries)
    head = [given[name].requires_grad_() for name in HEAD]
    torch.library.opcheck(registry.overload("sampled_support_logits", backend), (*head, *indices))
    head = [value.detach() for value in head]
    logits = op.LOGITS[backend](*head, *indices)
    torch.library.opcheck(registry.overload("sampled_support_to_hidden", backend), (logits, head[1], *indices[::2]))
    totals = torch.zeros_like(head[1]), torch.zeros_like(head[2])
    added = (logits, head[0], *indices[:2], indices[3], *totals)
    torch.library.opcheck(registry.overload("sampled_support_add_weight", backend), added)
    backward = registry.overload("sampled_support_backward", backend)
    torch.library.opcheck(backward, (logits, *head[:2], *indices, [True, False, True]))
    scaling = (torch.rand(5, device=logits.device) + 0.5, 0.7, 9.0, 0.5)
    rows = (logits.detach().requires_grad_(), entries.places, entries.bounds)
    torch.library.opcheck(registry.overload("sampled_support_logprobs", backend), (*rows, *scaling, True))
    rows = (logits.detach(), *rows[1:])
    logprobs, entropy, normalizer = op.LOGPROBS[backend](*rows, *scaling, True)
    saved = (torch.randn_like(logprobs), torch.randn_like(entropy), *rows, normalizer, entropy, *scaling)
    torch.library.opcheck(registry.overload("sampled_support_logprobs_backward", backend), saved)


@pytest.mark.parametrize("backend", [None, *OF_LOSSES])
def test_compiles_into_one_graph(backend: str | None) -> None:
    torch.compiler.reset()
    given = cast(batch(dtype=torch.float32), torch.float32, str(device_of(backend or "cuda")))

    def loss(head: list[Tensor], targets: Tensor, support: tuple[Tensor, Tensor]) -> Tensor:
        arguments: Any = dict(zip(HEAD, head, strict=True))
        arguments["hidden"] = arguments["hidden"] * 2
        result = gk.linear_logprobs(**arguments, targets=targets, support=support, return_entropy=True, backend=backend)
        return (result.logprobs - 0.1 * result.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR)
    results = []
    for function in (loss, compiled):
        leaves = [given[name].clone().requires_grad_() for name in HEAD]
        value = function(leaves, given["targets"], given["support"])
        value.backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused(backend: str) -> None:
    given = cast(batch(dtype=torch.float32), torch.float32, str(device_of(backend)))
    hidden = given["hidden"].requires_grad_()
    logprobs = gk.linear_logprobs(**given, backend=backend).logprobs
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="sampled_support: a second derivative"):
        gradient.square().sum().backward()


def test_autocast_is_casting_by_hand() -> None:
    given = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gk.linear_logprobs(**given).logprobs
    by_hand = gk.linear_logprobs(**given | {name: given[name].bfloat16() for name in HEAD}).logprobs
    assert torch.equal(inside, by_hand)


# The reference's chunks, its two ways to sum, and threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_and_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows and ids whose entries are in several chunks."""
    given = batch(60, hidden=21, columns=40)
    expected, before = run(given, "reference", dtype), torch.get_num_threads()
    for numbers, threads in ((21, 1), (5 * 21, 2), (reference._GATHERED, 3)):
        monkeypatch.setattr(reference, "_GATHERED", numbers)
        torch.set_num_threads(threads)
        got = run(given, "reference", dtype)
        torch.set_num_threads(before)
        assert all(torch.equal(got[name], expected[name]) for name in expected), numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
def test_the_sums_of_a_gpu_are_those_of_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = batch(60, hidden=21, columns=40)
    expected = run(given, "reference", dtype)
    monkeypatch.setattr(reference, "_on_cpu", lambda tensor: False)
    got, eps = run(given, "reference", dtype), torch.finfo(dtype).eps
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=eps, atol=8 * eps * float(value.abs().max()))


# Accumulation over micro-batches


def accumulated(given: Batch, backend: str, dtype: torch.dtype, into: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    arguments = cast(given, dtype, str(device_of(backend)))
    leaves = {name: arguments[name].detach().requires_grad_() for name in HEAD}
    options = {"config": CONFIGS["dapo"], "weight_grad": into, "backend": backend}
    loss = gk.linear_policy_loss(**arguments | leaves, **options).loss
    (scale * loss).backward()
    assert leaves["weight"].grad is None
    return {f"by {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ADDING)
def test_the_gradient_of_the_weight_is_added(backend: str, dtype: torch.dtype) -> None:
    given = arguments_of("dapo", dtype)
    device = device_of(backend)
    for of_total in {dtype, torch.float32}:
        start = torch.randn(31, 6, device=device).to(of_total)
        into = start.clone()
        accumulated(given, backend, dtype, into)
        alone = torch.zeros(31, 6, device=device)
        others = accumulated(given, backend, dtype, alone)
        assert others.keys() == {"by hidden", "by bias"} and alone.any()
        returned = run_loss(given, backend, config=CONFIGS["dapo"])
        assert all(torch.equal(others[name], returned[name]) for name in others)
        # one rounding to the dtype of the sum; Triton's interpreter truncates instead
        rtol = torch.finfo(of_total).eps if backend == "triton" else 0.0
        torch.testing.assert_close(into, (start.float() + alone).to(of_total), rtol=rtol, atol=0)
        untouched = ~alone.any(1)
        assert torch.equal(into[untouched], start[untouched])
    scaled = torch.zeros(31, 6, device=device)
    accumulated(given, backend, dtype, scaled, scale=4.0)
    torch.testing.assert_close(scaled, 4 * alone, rtol=1e-6, atol=1e-6)


@needs_cpu_kernels
def test_weight_grad_is_checked() -> None:
    given = cast(arguments_of("dapo", torch.float32), torch.float32)
    arguments = given | {"weight": given["weight"].requires_grad_(), "config": CONFIGS["dapo"]}
    strided = torch.zeros(6, 31).t()

    def refused(*parts: str, **changes: Any) -> None:
        call = lambda: gk.linear_policy_loss(**arguments | changes)  # noqa: E731
        assert_raises(ValueError, f"linear_policy_loss: {parts[0]}", parts[1:], call)

    refused("weight_grad must be contiguous with support", "[1, 31]", weight_grad=strided)
    refused("weight_grad must have the shape of weight", "[30, 6]", weight_grad=torch.zeros(30, 6))
    refused("weight_grad must be None with the reference backend", weight_grad=torch.zeros(31, 6), backend="reference")


@pytest.mark.parametrize("backend", ADDING)
def test_backward_can_run_twice(backend: str) -> None:
    given = batch(dtype=torch.float32)
    arguments = cast(given, torch.float32, str(device_of(backend)))
    weight = arguments["weight"].detach().requires_grad_()
    total = gk.linear_logprobs(**arguments | {"weight": weight}, backend=backend).logprobs.sum()
    (first,) = torch.autograd.grad(total, weight, retain_graph=True)
    (second,) = torch.autograd.grad(total, weight)
    assert torch.equal(first, second)
    assert run(given, backend, torch.float32)["by weight"].any()
