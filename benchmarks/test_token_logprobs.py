"""token_logprobs against the installed TRL and plain torch: `make bench`, or
pytest benchmarks/test_token_logprobs.py --benchmark-only -s for the table alone, -k ratio for the bars.

Bytes at the least, per row of V logits of s bytes: V s read by the forward; V s read and V s written by the backward,
which in place takes no new memory. On the CPU the first touch of that new memory is part of everybody's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.utils import selective_log_softmax

import grpo_kernels as gk
from benchmarks.memory import peak_memory
from benchmarks.paired import paired

ROWS, VOCABULARY = 512, 151936
Case = Callable[[], Any]


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, VOCABULARY, generator=generator) * 4 + 20).to(dtype)
    return logits.requires_grad_(), torch.randint(VOCABULARY, (rows,), generator=generator)


def by_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ours": lambda logits, targets: gk.token_logprobs(logits, targets).logprobs,
    "trl": selective_log_softmax,
    "torch, log_softmax": by_log_softmax,
}


def forward(name: str, logits: Tensor, targets: Tensor) -> Case:
    def call() -> Tensor:
        with torch.no_grad():
            return FUNCTIONS[name](logits, targets)

    return call


def forward_backward(name: str, logits: Tensor, targets: Tensor) -> Case:
    weights = torch.linspace(-1, 1, len(targets))

    def call() -> Tensor:
        return torch.autograd.grad((FUNCTIONS[name](logits, targets) * weights).sum(), logits)[0]

    return call


def assert_agree(rows: int = 8) -> None:
    """Nobody is timed who computes something else."""
    logits, targets = inputs(rows, torch.float32)
    for make in (forward, forward_backward):
        gold = make("ours", logits, targets)()
        for name in FUNCTIONS:
            # logits around 20 in float32: a log-probability is exact to a few of their units, 2e-6
            torch.testing.assert_close(make(name, logits, targets)(), gold, rtol=1e-5, atol=1e-5)


# The bars of the project; rows and dtype, as TRL works row by row below float32.
BARS = {
    ("forward_backward", "trl", torch.float32): 2,
    ("forward_backward", "torch, log_softmax", torch.float32): 2,
    ("forward", "trl", torch.float32): None,
    ("forward", "torch, log_softmax", torch.float32): None,
    ("forward", "torch, log_softmax", torch.bfloat16): None,
}


@pytest.mark.parametrize(("what", "theirs", "dtype"), BARS, ids=lambda v: str(v))
def test_ratio(benchmark: Any, what: str, theirs: str, dtype: torch.dtype) -> None:
    assert_agree()
    logits, targets = inputs(ROWS, dtype)
    make = forward if what == "forward" else forward_backward
    ours, other = make("ours", logits, targets), make(theirs, logits, targets)
    result = benchmark.pedantic(lambda: paired(ours, other, pairs=7, target=0.0), rounds=1)
    bar = BARS[what, theirs, dtype]
    print(f"\n{what} {dtype} {theirs:20} {result}" + (f", bar {bar}" if bar else ""))
    benchmark.extra_info.update(result._asdict())
    size = logits.element_size() * logits.numel()
    benchmark.extra_info["bytes"] = size if what == "forward" else 3 * size
    assert bar is None or result.ratio >= bar


@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory(benchmark: Any, name: str) -> None:
    rows = 128
    logits, targets = inputs(rows, torch.float32)
    forward_backward(name, *inputs(2, torch.float32))()  # loads what is loaded at the first call
    peak = peak_memory(forward_backward(name, logits, targets)) / (logits.numel() * 4)
    print(f"\n{name}: {peak:.2f} times the logits at the peak of forward and backward")
    benchmark.extra_info["times the logits"] = peak
    benchmark.pedantic(lambda: None, rounds=1)
    if name == "ours":
        assert peak < 1.1  # one gradient


def test_memory_in_place(benchmark: Any) -> None:
    logits, targets = inputs(128, torch.float32)
    head = torch.nn.Linear(1, VOCABULARY, bias=False)  # what logits come from: its backward reads their gradient
    hidden = torch.randn(128, 1)

    def call() -> None:
        gk.token_logprobs(head(hidden), targets, inplace_backward=True).logprobs.sum().backward()

    call()
    peak = peak_memory(call) / (logits.numel() * 4)
    print(f"\nin place, the logits included: {peak:.2f} times the logits")
    benchmark.extra_info["times the logits"] = peak
    benchmark.pedantic(lambda: None, rounds=1)
    assert peak < 1.1  # the logits themselves
