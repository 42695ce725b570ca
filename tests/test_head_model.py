"""The bytes that tools/head_model.py predicts are those that a call moves, counted as torch dispatches it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import chunks
from tests.harness import device_of
from tools import head_model

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent
ROWS, WIDTH, VOCABULARY = 64, 32, 4096
# Share of the logits that a few numbers a row and the hidden states may take.
SMALL = 0.02
MULTIPLY = chunks.multiply


def size(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, Tensor))


class Bytes(TorchDispatchMode):
    """Counts bytes read and written by op; a product counts as one op, whatever stands in for it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_new = name.startswith(("new_", "zeros", "ones", "full", "empty")) or name.endswith("_like")
        if func.is_view or "empty" in name:
            return results
        if name == "scale_gradient_triton":  # leaves the gradient alone where upstream is 1
            assert args[1] == 1
        elif is_new:
            self.count(name, (), results)
        elif name == "token_logprobs_backward_rounded_triton":  # of no result, and only its first argument is written
            self.count(name, args[1:], args[:1])
        else:
            self.count(name, args, results)
        return results

    def count(self, name: str, read: Any, written: Any) -> None:
        self.read[name] += size(read)
        self.written[name] += size(written)

    def multiply(self, a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
        """In place of chunks.multiply, whose copies in float32 are only for the CPU."""
        with _disable_current_modes():
            MULTIPLY(a, b, out, add)
        self.count("product", (a, b, out) if add else (a, b), out)


def counted(monkeypatch: pytest.MonkeyPatch, head: head_model.Head, ref_width: int | None = None) -> Bytes:
    device = device_of("triton")

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    hidden, weight = noise(2, ROWS // 2, WIDTH).requires_grad_(), noise(VOCABULARY, WIDTH).requires_grad_()
    targets = torch.randint(VOCABULARY, (2, ROWS // 2), device=device)
    old, advantages = torch.randn(2, ROWS // 2, device=device) - 9, torch.tensor([1.0, -1.0], device=device)
    reference: dict[str, Any] = {}
    if ref_width is not None:
        reference = {"ref_hidden": noise(2, ROWS // 2, ref_width), "ref_weight": noise(VOCABULARY, ref_width)}
        reference["config"] = gk.LossConfig(kl="k3", kl_coef=0.1)
    counter = Bytes()
    monkeypatch.setattr(chunks, "multiply", counter.multiply)
    monkeypatch.setattr("grpo_kernels.ops.linear_head.chunking.rows_per_chunk", lambda *_: head.chunk_rows)
    monkeypatch.setattr(chunks, "rows_per_product", lambda *_: head.product_rows)
    # without a GPU, rows without a gradient are looked for, which on a GPU would wait
    monkeypatch.setattr("grpo_kernels.ops.linear_head.registration.rows_with_grad", lambda *_: None)
    with counter:
        gk.linear_policy_loss(
            hidden, weight, targets, old, advantages, compact=False, backend="triton", **reference
        ).loss.backward()
    return counter


@pytest.mark.parametrize("ref_width", [None, 16])
@pytest.mark.parametrize("unsplit", [1, 2**24])
@pytest.mark.parametrize(("chunk_rows", "product_rows"), [(64, 64), (16, 64), (16, 32), (16, 16)])
def test_bytes(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, product_rows: int, unsplit: int, ref_width: int | None
) -> None:
    monkeypatch.setattr(chunks, "UNSPLIT", unsplit)
    head = head_model.Head(ROWS, WIDTH, VOCABULARY, chunk_rows, product_rows)
    counter = counted(monkeypatch, head, ref_width)
    steps = head_model.steps_of(head, 1, ref_width)
    products = [step for step in steps if step.flops]
    assert counter.read["product"] == sum(step.read for step in products)
    assert counter.written["product"] == sum(step.written for step in products)
    logits = ROWS * VOCABULARY
    for name, direction in (("read", counter.read), ("written", counter.written)):
        expected, total = sum(getattr(step, name) for step in steps), sum(direction.values())
        assert abs(total - expected) <= SMALL * 4 * logits, (name, expected, direction.most_common(9))


def test_a_gradient_in_float32_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    once = chunks.Products.matrix
    monkeypatch.setattr(chunks.Products, "matrix", lambda self, rows, _: once(self, rows, torch.float32))
    head = head_model.Head(ROWS, WIDTH, VOCABULARY, 16, 64)
    written = sum(counted(monkeypatch, head).written.values())
    expected = sum(step.written for step in head_model.steps_of(head, 1))
    assert written - expected > 10 * SMALL * 4 * ROWS * VOCABULARY


def test_the_tables_are_up_to_date() -> None:
    output = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "head_model.py")], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() in (ROOT / "docs" / "performance.md").read_text()


def test_the_bar_is_met() -> None:
    """At most 1.15 times three bare products, predicted."""
    gpu = head_model.GPUS["H100"]
    head = head_model.Head.planned(8192, 4096, 151_936, gpu.sms)
    seconds = sum(step.seconds(gpu) for step in head_model.steps_of(head, gpu.sms))
    assert seconds <= 1.12 * head_model.bare_products(head)
