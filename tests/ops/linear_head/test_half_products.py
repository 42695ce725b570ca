"""Products of bfloat16 matrices with float32 sums on the matrix units of a CPU.

Faults that this is for: a panel's last lanes or last depth that are not zero, or are written beyond the matrix; a
transposition of one layout; sums of a depth that replace those of the one before; a block that is packed once although
its depth changed; parts of the threads that overlap; a result that is rounded twice.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.linear_head import products
from tests.harness import assert_close_to_rounding, cpu_threads, needs_cpu_kernels
from tests.ops.linear_head.cases import problem

BF16 = torch.bfloat16

needs_units = pytest.mark.skipif(not registry.HAS_HALF_PRODUCTS, reason="this CPU has no matrix units")


def factor(rows: int, columns: int, is_transposed: bool) -> Tensor:
    """Within a larger matrix, whose other numbers are NaN."""
    shape = (columns, rows) if is_transposed else (rows, columns)
    around = torch.full((shape[0] + 2, shape[1] + 5), torch.nan, dtype=BF16)
    inside = around[1:-1, 2:-3]
    inside.copy_(torch.randn(shape))
    return inside.t() if is_transposed else inside


def bound(a: Tensor, b: Tensor) -> Tensor:
    """Of sums in float32, in any order, where each addition rounds."""
    return (a.double().abs() @ b.double().abs()) * (a.shape[1] + 2) * 2**-24


# One number, panels and a rest, several blocks; an odd depth, and more than is packed at once.
SIZES = [(1, 1, 1), (47, 79, 63), (70, 5, 2100), (64, 96, 1024), (40, 2300, 1100), (600, 33, 65), (1100, 5, 3)]


@needs_units
@pytest.mark.parametrize("layout", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_layout_and_size(size: tuple[int, int, int], layout: tuple[bool, bool]) -> None:
    """With any number of threads, which change no bit."""
    rows, columns, depth = size
    a, b = factor(rows, depth, layout[0]), factor(depth, columns, layout[1])
    gold = a.double() @ b.double()
    products = []
    for threads in (1, 2, 4):
        around = torch.full((rows + 2, columns + 3), 7.0)
        out = around[1:-1, 1:-2]
        with cpu_threads(threads):
            registry.ops._half_product_cpu(out, a, b, False)
            assert ((out.double() - gold).abs() <= bound(a, b)).all()
            products.append(out.clone())
            registry.ops._half_product_cpu(out, a, b, True)
            torch.testing.assert_close(out, 2 * products[-1], rtol=2**-23, atol=0)
            assert (around[0] == 7).all() and (around[-1] == 7).all()
            assert (around[:, 0] == 7).all() and (around[:, -2:] == 7).all()
            rounded = torch.full((rows, columns), torch.nan, dtype=BF16)
            registry.ops._half_product_cpu(rounded, a, b, False)
        assert torch.equal(rounded, products[0].to(BF16)) and torch.equal(products[-1], products[0])


@needs_units
def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    a, b = torch.randn(40, 64).to(BF16), torch.randn(64, 50).to(BF16)
    a[3, 5], a[37, 63] = torch.nan, torch.inf
    out = torch.empty(40, 50)
    registry.ops._half_product_cpu(out, a, b, False)
    assert out[3].isnan().all() and not out[37].isfinite().any()
    others = [row for row in range(40) if row not in (3, 37)]
    assert out[others].isfinite().all()


@needs_cpu_kernels
@pytest.mark.parametrize("of", ["logprobs", "grpo"])
def test_a_machine_without_units_gets_the_same(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the rounding of the gradient by the logits, which is a relative 2^-9 of each."""
    case = problem(of, rows=3, width=20, columns=501).rounded(BF16)
    here = case.run("cpu", BF16)
    monkeypatch.setattr(registry, "HAS_HALF_PRODUCTS", False)
    assert not products._multiplies_on_cpu(case.inputs["weight"].to(BF16))
    there = case.run("cpu", BF16)
    assert_close_to_rounding(here["loss"], there["loss"], lambda: case.run("reference", torch.float32)["loss"])
    for name in ("d_hidden", "d_weight"):
        assert (here[name].float() - there[name].float()).norm() < 2**-8 * there[name].float().norm()
