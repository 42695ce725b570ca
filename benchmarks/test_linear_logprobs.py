"""linear_logprobs against the installed peers: `make bench`, or pytest benchmarks/test_linear_logprobs.py -s.

Floor: 2 N H V flops forward, and 6 N H V backward: the logits again, and two products for the gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import grpo_kernels as gk
from benchmarks import linear_head
from benchmarks.linear_head import SHAPES, Inputs

PEERS = {"naive autograd": linear_head.naive, "trl": linear_head.trl}


def ours(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(-gk.linear_logprobs(i.hidden, i.weight, i.targets).logprobs.mean())


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def inputs(request: Any) -> Inputs:
    return Inputs(request.param)


@pytest.mark.parametrize("theirs", PEERS)
def test_ratio(benchmark: Any, inputs: Inputs, theirs: str) -> None:
    result = benchmark.pedantic(lambda: linear_head.compared(inputs, ours, PEERS[theirs]), rounds=1)
    print(f"\n{inputs.shape}: {theirs:20} {result}")
    benchmark.extra_info.update(result._asdict())
