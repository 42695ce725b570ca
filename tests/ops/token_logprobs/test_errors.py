"""Errors of token_logprobs.

Faults that this is for: a wrong argument that is taken, or fails with another type, without its value or the way out.
What test_promises.py checks of every tensor is not here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.backends import runs_on
from tests.harness import assert_raises, device_of
from tests.ops.token_logprobs.cases import BACKENDS, INF, NAN

LOGITS, TARGETS, ONES = torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
FACTORS = ("temperature", "softcap", "logit_scale")
# (message, arguments); " ... " stands for any text
TYPES: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"logits must be of dtype ... {d}", {"logits": LOGITS.to(d)})
        for d in (torch.int64, torch.bool, torch.float8_e4m3fn)
    ),
    *((f"targets must be of dtype ... {d}", {"targets": TARGETS.to(d)}) for d in (torch.float32, torch.bool)),
    *((f"{n} must be a tensor, got {type(v).__name__}", {n: v}) for n in ("logits", "targets") for v in ([1.0], 1.0)),
    *((f"{n} must be a number, got {type(v).__name__}", {n: v}) for n in FACTORS for v in ("1", True, [1.0])),
    ("temperature must be of dtype ... torch.int64", {"temperature": TARGETS}),
    *(
        (f"{n} must be a bool, got ... {v!r}", {n: v})
        for n in ("return_entropy", "inplace_backward")
        for v in ("x", 1, None)
    ),
]
LEAF = torch.zeros(2, 3, 7).requires_grad_()
OVERLAPPING = torch.zeros(7).requires_grad_().expand(2, 3, 7)
VALUES: list[tuple[str, dict[str, Any]]] = [
    *(
        (f"logits must have shape [..., V] with V > 0, got {list(s)}", {"logits": torch.zeros(s)})
        for s in ((), (2, 3, 0))
    ),
    *(
        (f"targets must have shape [2, 3], ... {list(s)}", {"targets": torch.zeros(s).long()})
        for s in ((2, 3, 1), (3, 2), (6,), (), (2, 4))
    ),
    *((f"{n} must be positive and finite, got {v}", {n: v}) for n in FACTORS for v in (0, 0.0, -1.0, NAN, INF, -INF)),
    *(
        (f"temperature must have the shape of the targets, [2, 3], ... got {list(s)}", {"temperature": torch.ones(s)})
        for s in ((3,), (2, 4), (3, 2), (2, 3, 1), (), (6,))
    ),
    ("temperature must not require grad ... detach", {"temperature": torch.ones(2, requires_grad=True)}),
    ("inplace_backward must be False for logits that are a leaf", {"logits": LEAF, "inplace_backward": True}),
    ("logits must not overlap ... got strides [0, 0, 1]", {"logits": OVERLAPPING, "inplace_backward": True}),
]


@pytest.mark.parametrize("backend", [None, *(name for name in BACKENDS if runs_on(name, "cpu"))])
def test_errors(backend: str | None) -> None:
    right = {"logits": LOGITS, "targets": TARGETS, "backend": backend}
    for error, table in ((TypeError, TYPES), (ValueError, VALUES)):
        for rule, changes in table:
            start, *parts = rule.split(" ... ")
            given = right | changes
            assert_raises(error, f"token_logprobs: {start}", parts, lambda given=given: gk.token_logprobs(**given))


@pytest.mark.parametrize("target", [-1, -99, -101, 7, 2**40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_that_is_no_column(backend: str, target: int) -> None:
    """An error on the CPU; on a GPU, where that would wait, NaN."""
    targets = TARGETS.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(target)).to(device_of(backend))
    logits = torch.zeros(2, 3, 7, device=targets.device, requires_grad=True)
    if backend in ("cpu", "reference") and logits.device.type == "cpu":
        with pytest.raises(RuntimeError, match=rf"token_logprobs: targets must be in \[0, 7\) or -100, got {target}"):
            gk.token_logprobs(logits, targets, backend=backend)
        return
    result = gk.token_logprobs(logits, targets, return_entropy=True, backend=backend)
    assert result.entropy is not None
    (gradient,) = torch.autograd.grad(result.logprobs.sum() + result.entropy.sum(), logits)
    for value in (*result, gradient):
        assert value[1, 1].isnan().all() and value[0].isfinite().all() and value[1, 0].isfinite().all()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("cpu", "reference")])
def test_float64_on_a_gpu(backend: str) -> None:
    logits, targets = (value.to(device_of(backend)) for value in (LOGITS.double(), TARGETS))
    with pytest.raises(RuntimeError, match=f"token_logprobs: backend '{backend}' cannot run here.*float64"):
        gk.token_logprobs(logits, targets, backend=backend)


def test_inplace_backward_under_compile() -> None:
    torch.compiler.reset()

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return gk.token_logprobs(logits * 2, TARGETS, inplace_backward=True).logprobs.sum()

    with pytest.raises(Exception, match="inplace_backward must be False under"):
        torch.compile(loss, fullgraph=True, backend="eager")(LEAF)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives(backend: str) -> None:
    leaf, targets = LEAF.detach().to(device_of(backend)).requires_grad_(), TARGETS.to(device_of(backend))
    logprobs = gk.token_logprobs(leaf, targets, backend=backend).logprobs
    (gradient,) = torch.autograd.grad(logprobs.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="token_logprobs: a second derivative"):
        gradient.square().sum().backward()
    logprobs = gk.token_logprobs(leaf * 1, targets, inplace_backward=True, backend=backend).logprobs
    with pytest.raises(RuntimeError, match="create_graph must be False with inplace_backward"):
        torch.autograd.grad(logprobs.sum(), leaf, create_graph=True)
