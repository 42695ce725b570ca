"""linear_logprobs against the installed peers: `make bench`, or pytest benchmarks/test_linear_logprobs.py -s.

Floor: 2 N H V flops forward, and 6 N H V backward: the logits again, and two products for the gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks import linear_head
from benchmarks.linear_head import SHAPES, Inputs
from benchmarks.paired import paired

PEERS = {"naive autograd": linear_head.naive, "trl": linear_head.trl}


def ours(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(-gk.linear_logprobs(i.hidden, i.weight, i.targets).logprobs.mean())


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def inputs(request: Any) -> Inputs:
    return Inputs(request.param)


@pytest.mark.parametrize("theirs", PEERS)
def test_ratio(benchmark: Any, inputs: Inputs, theirs: str) -> None:
    call = PEERS[theirs]
    for got, gold in zip(call(inputs), ours(inputs), strict=True):
        torch.testing.assert_close(got, gold, rtol=1e-4, atol=1e-5 * float(gold.abs().max()))
    result = benchmark.pedantic(lambda: paired(lambda: ours(inputs), lambda: call(inputs), pairs=5), rounds=1)
    print(f"\n{inputs.shape}: {theirs:20} {result}")
    benchmark.extra_info.update(result._asdict())
