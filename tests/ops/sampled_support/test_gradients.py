"""Gradients over a support: sums by row for the hidden states, and by token id for the weight.

Faults that this is for: a piece of a frequent id that is left out, added twice or starts at another
entry; entries of rows that take no part; the last entries of an id, or the last columns; a chunk or
a thread that changes bits; a program for each entry instead of for each id.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from grpo_kernels.ops.sampled_support import reference
from tests.ops.linear_head import heads
from tests.ops.linear_head.cases import KEPT, TABLE, Problem, assert_within_budgets, problem
from tests.ops.linear_head.heads import BF16, F32, F64, IGNORED, INF, NAN, OVER_SUPPORT
from tests.ops.linear_head.test_torch import assert_near, on_device
from tests.ops.promises import Results, run

PIECE = 256  # entries that one program of Triton adds up
# Of the ids after two that all rows keep, how many rows keep each; rows, and others without a target.
COUNTS = {
    "pieces": ([PIECE - 1, PIECE, PIECE + 1, 0, 2 * PIECE, 1, 9, 3], 600, 300),
    "one piece": ([2], PIECE, 0),
    "less than a piece": ([1, 1, 1, 0, 0], 1, 0),
    "long rows": ([10, 18, 20] * 9, 20, 3),
    "no row takes part": ([0, 0], 0, PIECE),
}
KERNELS = [backend for backend in OVER_SUPPORT if backend != "reference"]


def drawn(name: str, width: int) -> Problem:
    torch.manual_seed(len(name))
    counts, rows, others = COUNTS[name]
    kept = [torch.randperm(rows) < count for count in (rows, rows, *counts)]
    kept = torch.cat((torch.stack(kept, 1), torch.rand(others, len(kept)) < 0.8))
    case = problem("logprobs", "bias", shape=(rows + others,), columns=len(counts) + 2, hidden_width=width)
    case.inputs["targets"] = torch.where(torch.arange(rows + others) < rows, 1, IGNORED)
    case.inputs["hidden"][rows:] = NAN
    return case.but(support=heads.support_of([row.nonzero()[:, 0].flip(0) for row in kept]))


@pytest.mark.pairs
@pytest.mark.parametrize(("width", "dtype"), [(7, F32), (1040, BF16)], ids=str)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("backend", KERNELS)
def test_sums_by_id_and_by_row(backend: str, name: str, width: int, dtype: torch.dtype) -> None:
    case = drawn(name, width)
    assert_within_budgets(backend, dtype, [case])
    heads.assert_close(case.run("reference"), case.defined())


@pytest.mark.parametrize("backend", OVER_SUPPORT)
def test_a_certain_row_has_no_gradient_whatever_it_gets(backend: str) -> None:
    case = TABLE["linear_logprobs over a support"].draw()
    inputs = case.inputs
    is_certain = (inputs["support"][1].diff() == 1).view(4, 5)
    assert is_certain.any()
    expected = case.defined()
    inputs["by_logprobs"][is_certain] = INF
    got = case.run(backend, F32)
    for name in ("d_hidden", "d_weight", "d_bias"):
        torch.testing.assert_close(got[name].double(), expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.skipif("triton" not in OVER_SUPPORT, reason="needs Triton")
def test_triton_has_a_program_for_each_id_and_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("grpo_kernels.ops.sampled_support.triton")
    kernel, grids = kernels._sums_kernel, []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "_sums_kernel", Recorded())
    for name in ("pieces", "less than a piece"):
        case = drawn(name, 7)._replace(frozen=("hidden",))
        case.run("triton", F32)
        entries, ids = len(case.inputs["support"][0]), len(case.inputs["weight"])
        assert grids == [(entries // PIECE, 1), (min(entries, ids), 1)]
        grids.clear()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_chunks_and_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over tokens and ids whose entries are in several chunks."""
    options = KEPT | {"columns": 40, "hidden_width": 21}
    case = problem("logprobs", "ignored", "temperatures", "bias", "support", **options)
    expected, threads = case.run("reference", dtype), torch.get_num_threads()
    for numbers, count in ((21, 1), (5 * 21, 2), (reference._GATHERED, 3)):
        monkeypatch.setattr(reference, "_GATHERED", numbers)
        torch.set_num_threads(count)
        got = case.run("reference", dtype)
        torch.set_num_threads(threads)
        assert all(torch.equal(got[name], expected[name]) for name in expected), numbers


@pytest.mark.parametrize("backend", KERNELS)
def test_a_scaled_gradient_is_added_to_the_rows_of_kept_ids(backend: str) -> None:
    op = problem("dapo", "bias", "support", columns=67, rows=2).op
    given = on_device(op, backend, "weight")
    start = torch.randn_like(given["weight"])
    into = start.detach().clone()
    (4 * op.call(given | {"weight_grad": into}, backend)["loss"]).backward()

    def gold() -> Results:
        before = start.detach().cpu().double()
        gradient = run(op, op.draw(), "reference", F64)["d_weight"]
        return {"d_weight": (before + 4 * gradient) - before}

    assert_near({"d_weight": (into - start).detach().cpu()}, gold)
    untouched = torch.ones(67, dtype=torch.bool).index_fill(0, op.draw()["support"][0], False)
    assert untouched.any() and torch.equal(into[untouched], start[untouched])
