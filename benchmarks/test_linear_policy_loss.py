"""linear_policy_loss against its three bare matrix products and the installed peers: `make bench`, or
pytest benchmarks/test_linear_policy_loss.py --benchmark-only -s for the table, -k ratio for the bars.

Floor: 6 N H V flops in three products. Our kernels read the logits once, and read and write them once: 12 bytes each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import linear_head
from benchmarks.linear_head import SHAPES, BareProducts, Inputs, Shape, ours
from benchmarks.memory import peak_memory
from benchmarks.paired import paired

PEERS: dict[str, Callable[[Inputs], Any]] = {
    "naive autograd": linear_head.naive,
    "F.linear_cross_entropy": linear_head.torch_fused,
    "F.linear_cross_entropy, chunked": linear_head.torch_chunked,
    "trl": linear_head.trl,
}
if linear_head.HAS_GPU:
    PEERS["liger"] = linear_head.liger
BAR = 1.2 if linear_head.HAS_GPU else 1.15


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def inputs(request: Any) -> Inputs:
    return Inputs(request.param)


def test_ratio_to_bare_products(benchmark: Any, inputs: Inputs) -> None:
    bare = BareProducts(inputs)
    result = benchmark.pedantic(lambda: paired(bare, lambda: ours(inputs), pairs=7), rounds=1)
    print(f"\n{inputs.shape}: ours / three bare products   {result}, at most {BAR}")
    benchmark.extra_info.update(result._asdict())
    assert result.ratio <= BAR


@pytest.mark.parametrize("theirs", PEERS)
def test_ratio(benchmark: Any, inputs: Inputs, theirs: str) -> None:
    if theirs == "liger":
        pytest.importorskip("liger_kernel")
    result = benchmark.pedantic(lambda: linear_head.compared(inputs, ours, PEERS[theirs]), rounds=1)
    print(f"\n{inputs.shape}: {theirs:32} {result}, bar 1")
    benchmark.extra_info.update(result._asdict())
    assert result.ratio >= 1


def test_memory(benchmark: Any, inputs: Inputs) -> None:
    gradients = inputs.hidden.element_size() * (inputs.hidden.numel() + inputs.weight.numel())
    ours(Inputs(Shape(8, 8, 100)))  # loads what is loaded at the first call
    found = {}
    for name, call in {"ours": ours, "naive autograd": linear_head.naive}.items():
        gc.collect()
        found[name] = peak_memory(lambda call=call: call(inputs)) - gradients
    share = found["ours"] / found["naive autograd"]
    print(f"\n{inputs.shape}: {found['ours'] / 2**20:.0f} MiB beside the gradients, {share:.1%} of the naive way's")
    benchmark.extra_info["share of the naive way's"] = share
    benchmark.pedantic(lambda: None, rounds=1)
    assert share <= 0.15


def test_ratio_at_sparse_endpoints(benchmark: Any, inputs: Inputs) -> None:
    positions = torch.arange(0, inputs.shape.rows, 16, device=linear_head.DEVICE)
    call = lambda: ours(inputs, positions=positions)  # noqa: E731
    result = benchmark.pedantic(lambda: paired(call, lambda: ours(inputs), pairs=5), rounds=1)
    print(f"\n{inputs.shape}: one row in 16 {result}, bar 10")
    assert result.ratio >= 10


def test_ratio_where_half_the_rows_teach_nothing(benchmark: Any, inputs: Inputs) -> None:
    half = inputs.ones.clone()
    half[::2] = 0
    call = lambda: ours(inputs, advantages=half)  # noqa: E731
    result = benchmark.pedantic(lambda: paired(call, lambda: ours(inputs), pairs=5), rounds=1)
    print(f"\n{inputs.shape}: half the advantages are 0 {result}, bar 1.4")
    assert result.ratio >= 1.4
