"""token_logprobs on every backend: values and gradients against float64, every option, torch integration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.token_logprobs import reference as reference
from grpo_kernels.ops.token_logprobs.registration import FORWARD, INPLACE, SUPPORTS
from tests.harness import INDUCTOR, device_of, runnable_backends
from tests.ops.token_logprobs.rows import (
    BACKENDS,
    FAST,
    KERNELS,
    assert_matches,
    assert_same,
    rows_of,
    run,
    upstream_of,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"temperature": 0.7, "logit_scale": 0.25},
    "capped": {"temperature": 1.3, "softcap": 30.0, "logit_scale": 1.5},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# V = 1: one certain token. 31: less than any vector. 1023: a ragged tail. 5008: several tiles, all aligned.
SIZES = [1, 31, 1023, 5008]


# Values and gradients


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("backend", KERNELS)
def test_values_and_gradients_match_float64_reference(
    backend: str, vocabulary: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    if backend not in FAST and vocabulary == SIZES[-1] and options:
        pytest.skip("the options do not look at the size")
    rows = (3, 7) if backend in FAST else (2, 2)
    logits, targets = rows_of((*rows, vocabulary), dtype)
    assert_matches(logits, targets, backend, **options)


@pytest.mark.parametrize("which", ["logprobs", "entropy"])
@pytest.mark.parametrize("backend", KERNELS)
def test_one_result_alone_has_its_gradient(backend: str, which: str) -> None:
    logits, targets = rows_of((4, 515))
    g, h = upstream_of(targets)
    if which == "logprobs":
        assert_matches(logits, targets, backend, (g, None))
    else:
        both = run(logits, targets, backend, (torch.zeros_like(g), h))
        leaf = logits.to(device_of(backend)).requires_grad_()
        result = gk.token_logprobs(leaf, targets.to(leaf.device), return_entropy=True, backend=backend)
        (gradient,) = torch.autograd.grad(result.entropy, leaf, h.to(leaf.device))
        assert torch.equal(gradient, both.gradient)
        assert_matches(logits, targets, backend, (torch.zeros_like(g), h))


# The vocabulary size of a real model.
@pytest.mark.parametrize("backend", [b for b in KERNELS if b in FAST])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vocabulary_of_151936(backend: str, dtype: torch.dtype) -> None:
    logits, targets = rows_of((3, 151936), dtype)
    assert_matches(logits, targets, backend)
    assert_matches(logits, targets, backend, softcap=40.0, temperature=torch.tensor([0.5, 1.0, 2.0]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [b for b in KERNELS if b not in FAST])
def test_vocabulary_of_151936_without_a_gpu(backend: str) -> None:
    logits, targets = rows_of((1, 151936), torch.bfloat16)
    assert_matches(logits, targets, backend)


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float64))
def test_float64_logits(backend: str) -> None:
    if torch.float64 not in SUPPORTS[backend] or backend == "reference":
        pytest.skip("float64 is for the CPU")
    logits, targets = rows_of((5, 1003), torch.float64)
    for options in OPTIONS.values():
        upstream = upstream_of(targets)
        got = run(logits, targets, backend, upstream, **options)
        gold = run(logits, targets, "reference", upstream, **options)
        for one, other in zip(got, gold, strict=True):
            # a float64 sum of 1,003 numbers around 25 in a different order
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", [b for b in ("reference", "cpu") if b in BACKENDS])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(backend: str, options: dict[str, Any]) -> None:
    logits, targets = rows_of((2, 3, 13), torch.float64, spread=1.0)
    targets[0, 1] = -100
    arguments = options | {"temperature": torch.rand(2, 3, dtype=torch.float64) + 0.5}

    def results(logits: Tensor) -> tuple[Tensor, Tensor]:
        scaled = {**arguments, "logit_scale": 0.1} if "softcap" in arguments else arguments
        return tuple(gk.token_logprobs(logits, targets, return_entropy=True, backend=backend, **scaled))

    assert torch.autograd.gradcheck(results, logits.requires_grad_())


# The reference's backward is written by hand; its forward is plain torch, which autograd can differentiate.
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_reference_backward_is_what_autograd_gets_from_its_forward(options: dict[str, Any]) -> None:
    logits, targets = rows_of((1, 6, 40), torch.float64)
    logits[0, 2, :3] = logits[0, 2].max()  # ties
    g, h = torch.randn(2, 1, 6, dtype=torch.float64)
    by_hand = run(logits, targets, "reference", (g, h), **options).gradient
    scaling = reference.Scaling(
        None, *(options.get(k, d) for k, d in (("temperature", 1.0), ("softcap", None), ("logit_scale", 1.0)))
    )
    leaf = logits.requires_grad_()
    logprobs, entropy, _ = reference.distribution(scaling.apply(leaf), targets, True)
    (expected,) = torch.autograd.grad([logprobs, entropy], leaf, [g, h])
    torch.testing.assert_close(by_hand.cpu(), expected, rtol=1e-11, atol=1e-14)


# Options


@pytest.mark.parametrize("shape", [(3, 4), (3,), (3, 1), (1, 4)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_per_row_equals_one_call_for_each(backend: str, shape: tuple[int, ...]) -> None:
    logits, targets = rows_of((3, 4, 77))
    temperature = torch.rand(shape) + 0.5
    upstream = upstream_of(targets)
    got = run(logits, targets, backend, upstream, temperature=temperature)
    full = (temperature[:, None] if len(shape) == 1 else temperature).expand(3, 4)
    for a, b in ((0, 0), (0, 3), (2, 1)) if backend not in FAST else [(a, b) for a in range(3) for b in range(4)]:
        own = tuple(u[a, b] for u in upstream)
        alone = run(logits[a, b], targets[a, b], backend, own, temperature=full[a, b].item())
        for one, other in zip(got, alone, strict=True):
            torch.testing.assert_close(one[a, b], other, rtol=1e-6, atol=1e-6)  # 1 / T is rounded at a different step


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_integer_targets_equal_int64(backend: str, dtype: torch.dtype) -> None:
    logits, targets = rows_of((5, 100))
    assert_same(run(logits, targets.to(dtype), backend), run(logits, targets, backend))


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7), (0, 3, 7)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str, shape: tuple[int, ...]) -> None:
    logits, targets = torch.randn(shape), torch.zeros(shape[:-1], dtype=torch.int64)
    result = run(logits, targets, backend, (torch.ones(shape[:-1]), torch.ones(shape[:-1])))
    assert result.logprobs.shape == result.entropy.shape == targets.shape and result.gradient.shape == shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_of_any_strides_are_overwritten(backend: str) -> None:
    row = torch.zeros(7, device=device_of(backend), requires_grad=True)
    targets = torch.zeros(2, 0, dtype=torch.int64, device=row.device)
    with gk.use_backend(backend):
        loss = gk.token_logprobs(row.expand(2, 0, 7), targets, inplace_backward=True).logprobs.sum()
    loss.backward()
    assert loss == 0 and torch.equal(row.grad, torch.zeros_like(row))


@pytest.mark.parametrize("shape", [(9,), (2, 9), (2, 3, 9), (2, 3, 2, 9)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_dimensions(backend: str, shape: tuple[int, ...]) -> None:
    logits, targets = rows_of(shape)
    upstream = upstream_of(targets)
    got = run(logits, targets, backend, upstream)
    flat = run(logits.view(-1, 9), targets.view(-1), backend, tuple(u.view(-1) for u in upstream))
    assert torch.equal(got.logprobs.view(-1), flat.logprobs) and torch.equal(got.gradient.view(-1, 9), flat.gradient)


# torch


def forward_arguments(backend: str, full: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    device = device_of(backend)
    logits, targets = rows_of((2, 3, 19), dtype)
    temperature = torch.rand(2, 3, device=device) + 0.5 if full else None
    return logits.to(device), targets.to(device), temperature, 1.0, 30.0 if full else None, 1.0, full, False


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str, full: bool) -> None:
    logits, targets, *options = forward_arguments(backend, full)
    torch.library.opcheck(registry.overload("token_logprobs", backend), (logits.requires_grad_(), targets, *options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_of_the_backward(backend: str) -> None:
    logits, targets, temperature, *scaling, _, _ = forward_arguments(backend, True, torch.bfloat16)
    logprobs, entropy, normalizer = FORWARD[backend](logits, targets, temperature, *scaling, True, False)
    saved = (targets, normalizer, entropy, temperature, *scaling)
    g, h = torch.randn_like(logprobs), torch.randn_like(entropy)
    torch.library.opcheck(registry.overload("token_logprobs_backward", backend), (g, h, logits, *saved))
    torch.library.opcheck(registry.overload("token_logprobs_backward", backend), (g, None, logits, *saved))
    torch.library.opcheck(INPLACE[backend], (logits, g, h, *saved))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None) -> None:
    torch.compiler.reset()
    device = device_of(backend or "cuda")
    logits, targets = (t.to(device) for t in rows_of((4, 33)))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        result = gk.token_logprobs(logits * 2, targets, temperature=0.8, return_entropy=True, backend=backend)
        return (result.logprobs - 0.1 * result.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR)
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    values = [function(leaf, targets) for function, leaf in zip((compiled, loss), leaves, strict=True)]
    for value in values:
        value.backward()
    assert torch.equal(*values) and torch.equal(leaves[0].grad, leaves[1].grad) and leaves[0].grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused(backend: str) -> None:
    logits, targets = (t.to(device_of(backend)) for t in rows_of((2, 9)))
    leaf = logits.requires_grad_()
    logprobs = gk.token_logprobs(leaf, targets, backend=backend).logprobs
    (gradient,) = torch.autograd.grad(logprobs.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="token_logprobs: a second derivative"):
        gradient.square().sum().backward()
