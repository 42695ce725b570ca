"""Adapters of the head: against the merged weight in float64, in every form of the op, and what they must not form."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import assert_raises, assert_within_budget, device_of, needs_cpu_kernels, runnable_backends
from tests.ops.linear_head import test_policy_loss_edges as edges
from tests.ops.linear_head import test_policy_loss_kernels as kernels

KERNELS = [name for name in runnable_backends(SUPPORTS) if name != "reference"]
F64 = torch.float64
RANK, SCALE = 2, 0.7
NAMES = ("hidden", "weight", "bias", "a", "b")


def adapter(seed: int = 5) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(RANK, kernels.HIDDEN, generator=random, dtype=F64)
    return {"a": a, "b": torch.randn(kernels.VOCABULARY, RANK, generator=random, dtype=F64)}


def run(
    function: Any, arguments: dict[str, Any], backend: str, dtype: torch.dtype, frozen: tuple[str, ...], **options: Any
) -> dict[str, Tensor]:
    """Loss, gradients of the leaves, and whatever else the function gives."""
    device = device_of(backend)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    values = {name: moved(value) for name, value in arguments.items()}
    leaves = {name: values[name].detach().requires_grad_(name not in frozen) for name in NAMES}
    others = {name: value for name, value in values.items() if name not in NAMES}
    loss = function(leaves, others, backend=backend, **options)
    (loss * 1.5).backward()
    gradients = {name: leaf.grad.cpu() for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": loss.detach().cpu()} | gradients


def with_adapter(leaves: dict[str, Tensor], others: dict[str, Any], **options: Any) -> Tensor:
    lora = leaves["a"], leaves["b"], SCALE
    head = {name: leaves[name] for name in ("hidden", "weight", "bias")}
    return gk.linear_policy_loss(**head, **others, lora=lora, **options).loss


def with_merged_weight(leaves: dict[str, Tensor], others: dict[str, Any], **options: Any) -> Tensor:
    weight = leaves["weight"] + SCALE * leaves["b"] @ leaves["a"]
    if "ref_hidden" in others:
        others = others | {"ref_weight": leaves["weight"].detach(), "ref_bias": leaves["bias"].detach()}
    return gk.linear_policy_loss(leaves["hidden"], weight, bias=leaves["bias"], **others, **options).loss


@needs_cpu_kernels
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("weight", "bias", "hidden"), ("a",), ("b", "hidden")])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", ["grpo", "entropy", "sequence", "masked"])
def test_gradients_are_those_of_the_merged_weight(name: str, memory: str, frozen: tuple[str, ...]) -> None:
    for extra in kernels.EXTRAS:
        arguments = kernels.batch(name, extra) | adapter()
        options = {"config": gk.LossConfig(**kernels.CONFIGS[name]), "chunk_size": 7, "memory": memory}
        want = run(with_merged_weight, arguments, "reference", F64, (), config=options["config"])
        for backend in ("cpu", "reference"):
            got = run(with_adapter, arguments, backend, F64, frozen, **options)
            assert set(got) == {"loss", *NAMES} - {*frozen}
            for what in got:
                torch.testing.assert_close(got[what], want[what], rtol=1e-9, atol=1e-11, msg=f"{extra}, {what}")


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("extra", ["mask", "scaled"])
def test_float32_loses_no_more_than_torch_does(backend: str, extra: str) -> None:
    arguments = {
        name: value.float().double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in (kernels.batch("entropy", extra) | adapter()).items()
    }
    options = {"config": gk.LossConfig(**kernels.CONFIGS["entropy"])}
    got = run(with_adapter, arguments, backend, torch.float32, (), chunk_size=8, **options)
    working = run(with_adapter, arguments, "reference", torch.float32, (), **options)
    gold = run(with_adapter, arguments, "reference", F64, (), **options)
    for what in gold:
        assert_within_budget(got[what], working[what], gold[what], what)


@pytest.mark.parametrize("backend", KERNELS)
def test_adapter_in_float32_of_a_head_in_bfloat16(backend: str) -> None:
    arguments = kernels.batch("grpo") | adapter()
    device = device_of(backend)
    leaves = {name: arguments[name].bfloat16().to(device) for name in ("hidden", "weight", "bias")}
    leaves |= {name: arguments[name].float().to(device) for name in ("a", "b")}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    targets = arguments["targets"].to(device)

    def logprobs(leaves: dict[str, Tensor], backend: str) -> Tensor:
        head = (leaves["hidden"], leaves["weight"], targets)
        lora = leaves["a"], leaves["b"], SCALE
        result = gk.linear_logprobs(*head, bias=leaves["bias"], lora=lora, chunk_size=8, backend=backend).logprobs
        result.sum().backward()
        return result

    got, gold = logprobs(leaves, backend), logprobs(wide, "reference")
    # float32 sums of products of bfloat16 and float32 numbers: a few roundings of logits of about 10
    torch.testing.assert_close(got.double(), gold, rtol=0, atol=1e-5)
    for name, leaf in leaves.items():
        assert leaf.grad is not None and wide[name].grad is not None
        assert leaf.grad.dtype == leaf.dtype
        # one rounding of a result in bfloat16; on a GPU gradients by logits are rounded, too
        error = (leaf.grad.double() - wide[name].grad).norm() / wide[name].grad.norm()
        assert error < (2**-8 if leaf.dtype == torch.bfloat16 or backend != "cpu" else 1e-6), name


@needs_cpu_kernels
def test_reference_model_without_a_weight_is_the_policy_without_its_adapter() -> None:
    arguments = kernels.batch("kl") | adapter()
    del arguments["ref_logprobs"]
    arguments["ref_hidden"] = arguments["hidden"] * 0.9
    for memory in ("fast", "low"):
        config = gk.LossConfig(**kernels.CONFIGS["kl"])
        got = run(with_adapter, arguments, "cpu", F64, (), config=config, memory=memory, chunk_size=8)
        want = run(with_merged_weight, arguments, "reference", F64, (), config=config)
        for what in want:
            torch.testing.assert_close(got[what], want[what], rtol=1e-9, atol=1e-11, msg=what)


@needs_cpu_kernels
def test_masked_rows_may_hold_nan() -> None:
    arguments = kernels.batch("grpo", "mask") | adapter()
    poisoned = dict(arguments)
    poisoned["hidden"] = torch.where(arguments["mask"][..., None], arguments["hidden"], torch.nan)
    for options in ({}, {"compact": False}, {"memory": "low"}):
        want = run(with_adapter, arguments, "cpu", F64, (), **options)
        got = run(with_adapter, poisoned, "cpu", F64, (), **options)
        assert all(torch.equal(got[what], want[what]) for what in want)


@needs_cpu_kernels
@pytest.mark.parametrize("frozen", [(), ("weight", "bias")])
def test_distillation(frozen: tuple[str, ...]) -> None:
    arguments = kernels.batch("grpo") | adapter()
    random = torch.Generator().manual_seed(1)
    scores = torch.randn(kernels.ROWS, kernels.WIDTH, kernels.VOCABULARY, generator=random, dtype=F64)
    logprobs, ids = scores.log_softmax(-1).topk(4)
    others = {"teacher_ids": ids, "teacher_logprobs": logprobs}
    arguments = {name: arguments[name] for name in NAMES} | others

    def adapted(leaves: dict[str, Tensor], others: dict[str, Any], **options: Any) -> Tensor:
        head = {name: leaves[name] for name in ("hidden", "weight", "bias")}
        return gk.linear_distillation_loss(**head, **others, lora=(leaves["a"], leaves["b"], SCALE), **options).loss

    def merged(leaves: dict[str, Tensor], others: dict[str, Any], **options: Any) -> Tensor:
        weight = leaves["weight"] + SCALE * leaves["b"] @ leaves["a"]
        return gk.linear_distillation_loss(leaves["hidden"], weight, bias=leaves["bias"], **others, **options).loss

    want = run(merged, arguments, "reference", F64, ())
    for backend in ("cpu", "reference"):
        got = run(adapted, arguments, backend, F64, frozen, chunk_size=5)
        for what in got:
            torch.testing.assert_close(got[what], want[what], rtol=1e-9, atol=1e-11, msg=what)


class _Largest(TorchDispatchMode):
    """Elements of the largest result of any torch op."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() >= value.nbytes:
                self.elements = max(self.elements, value.numel())
        return result


@needs_cpu_kernels
def test_nothing_of_the_size_of_the_weight_is_formed() -> None:
    rows, columns, width, rank = 64, 512, 256, 4
    hidden, weight = torch.randn(rows, width), torch.randn(columns, width)
    a, b = torch.randn(rank, width, requires_grad=True), torch.zeros(columns, rank, requires_grad=True)
    targets = torch.randint(columns, (rows,))
    with _Largest() as seen:
        gk.linear_logprobs(hidden, weight, targets, lora=(a, b, 1.0), chunk_size=16).logprobs.sum().backward()
    assert 0 < seen.elements < columns * width // 4
    assert b.grad is not None and b.grad.any()
    weight.requires_grad_()
    with _Largest() as seen:
        gk.linear_logprobs(hidden, weight, targets, lora=(a, b, 1.0), chunk_size=16).logprobs.sum().backward()
    assert seen.elements >= columns * width  # the check sees the gradient of the weight


def test_errors() -> None:
    hidden, weight, targets = torch.randn(3, 5), torch.randn(7, 5), torch.tensor([0, 1, 2])
    a, b = torch.randn(2, 5), torch.randn(7, 2)
    cases: list[tuple[Any, type[Exception], str]] = [
        ((a, b), TypeError, "lora must be a tuple of A [r, H], B [V, r] and a scale, got tuple of 2"),
        ((a, b, "1"), TypeError, "the scale of lora must be a number, got str '1'"),
        ((a, b, float("inf")), ValueError, "the scale of lora must be a finite number, got inf"),
        ((a.t(), b, 1.0), ValueError, "A of lora must have shape [r, 5] with r > 0, got [5, 2]"),
        ((a, b[:6], 1.0), ValueError, "B of lora must have shape [7, 2], got [6, 2]"),
        ((a, b.double(), 1.0), TypeError, "B of lora must be"),
    ]
    for lora, kind, message in cases:
        call = functools.partial(gk.linear_logprobs, hidden, weight, targets, lora=lora)
        assert_raises(kind, f"linear_logprobs: {message}", (), call)
    support = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3])
    with pytest.raises(ValueError, match="lora must be None with support, got tuple"):
        gk.linear_logprobs(hidden, weight, targets, lora=(a, b, 1.0), support=support)


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("compact", [None, False])
def test_masked_tokens_reach_no_gradient_of_the_reference(memory: str, compact: bool | None) -> None:
    """Nor that of an adapter: 0 times NaN is NaN."""
    given = edges.batch()
    factors = [torch.randn(RANK, edges.HIDDEN, dtype=F64), torch.randn(edges.VOCABULARY, RANK, dtype=F64)]

    def gradients() -> dict[str, Tensor]:
        adapter = [factor.clone().requires_grad_() for factor in factors]
        options = {"config": "grpo", "memory": memory, "compact": compact, "lora": (*adapter, SCALE)}
        got = edges.run(given, backend="reference", **options)
        return got | {f"by factor {i}": factor.grad for i, factor in enumerate(adapter)}

    expected = gradients()
    given["hidden"][~given["mask"]] = torch.nan
    given["hidden"][0, 2] = torch.inf  # its target is ignored
    edges.assert_same(gradients(), expected)
