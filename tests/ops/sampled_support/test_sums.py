"""The sums of a support's backward: by row for the hidden states, by token id for the weight and the bias.

Faults that this is for: a piece of a frequent id that is left out, added twice or starts at another entry; entries of
rows that take no part; the last entries of an id, the last columns, or what the weight held before; sums that differ
between two calls; a program for each entry instead of for each id.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.ops.sampled_support import registration
from tests.harness import device_of
from tests.ops.linear_head.heads import BF16, F32, NAN, OVER_SUPPORT

PIECE = 256  # entries that one program of Triton adds up
# Rows that keep each id, from few to several pieces; all rows, and more that take no part but keep most ids.
COUNTS = {
    "pieces": ([PIECE - 1, PIECE, PIECE + 1, 0, 2 * PIECE, 600, 1, 9, 3], 600, 300),
    "one id": ([2 * PIECE + 5], 2 * PIECE + 5, 0),
    "several ids of one piece": ([PIECE, PIECE, PIECE, 2], PIECE, 0),
    "less than a piece": ([1, 1, 1, 0, 0], 1, 0),
    "long rows": ([10, 18, 20] * 9, 20, 3),
    "no row takes part": ([0, 0], 1, 2 * PIECE),
    "no entries": ([0, 0, 0], 4, 0),
}
BACKENDS = [backend for backend in OVER_SUPPORT if backend != "cpu"]
WIDTHS = [(7, F32), (1040, BF16)]


class Sums:
    """Entries of a support, the gradients by their logits, a head, and the sums in float64."""

    def __init__(self, name: str, width: int, dtype: torch.dtype) -> None:
        torch.manual_seed(len(name))
        counts, live, idle = COUNTS[name]
        kept = torch.stack([torch.randperm(live) < count for count in counts], 1)
        self.kept = torch.cat((kept, torch.rand(idle, len(counts)) < 0.8))
        self.idle = torch.arange(len(self.kept)) >= live
        rows, self.token_ids = self.kept.nonzero().unbind(1)
        self.bounds = torch.cat((torch.zeros(1, dtype=torch.int64), self.kept.sum(1).cumsum(0)))
        self.rows = torch.where(self.idle[rows], -1, rows)
        key = torch.where(self.rows >= 0, self.token_ids, len(counts))
        self.order = key.sort(stable=True).indices
        self.by_logits = torch.randn(len(rows))
        # a stride that is not the width
        self.hidden = torch.randn(len(self.kept), width + 3).to(dtype)[:, :width]
        self.weight, self.bias = torch.randn(len(counts), width).to(dtype), torch.randn(len(counts)).to(dtype)
        self.by_pair = torch.zeros(self.kept.shape, dtype=torch.float64)
        self.by_pair[self.kept] = self.by_logits.double()

    def added(self, backend: str, *names: str) -> dict[str, Tensor]:
        """The weight, the bias or both after the gradients are added to them."""
        self.by_logits[self.rows < 0] = NAN
        to = device_of(backend)
        inputs = [value.to(to) for value in (self.by_logits, self.hidden, self.token_ids, self.rows, self.order)]
        totals = {name: getattr(self, name).clone().to(to) for name in names}
        registration.ADD_WEIGHT(backend, registration.AddWeight(*inputs, totals.get("weight"), totals.get("bias")))
        return {name: total.cpu() for name, total in totals.items()}


def assert_close(got: Tensor, terms: Tensor, matrix: Tensor, before: Tensor) -> None:
    """Terms are rounded 64 times at most in a row, and the result once more, which Triton's interpreter cuts off."""
    gold = terms @ matrix.double() + before
    rounding = 64 * 2**-24 * (terms.abs() @ matrix.double().abs() + before.abs())
    assert ((got.double() - gold).abs() <= rounding + torch.finfo(got.dtype).eps * gold.abs()).all()


@pytest.mark.pairs
@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize(("backend", "name"), [(backend, name) for backend in BACKENDS for name in COUNTS])
def test_sums_by_id_and_by_row(backend: str, name: str, width: int, dtype: torch.dtype) -> None:
    sums = Sums(name, width, dtype)
    if name == "long rows":
        inputs = [value.to(device_of(backend)) for value in (sums.by_logits, sums.weight, sums.token_ids, sums.bounds)]
        by_row = registration.TO_HIDDEN(backend, registration.ToHidden(*inputs)).cpu()
        assert_close(by_row, sums.by_pair, sums.weight, torch.zeros(()))
    both, terms = sums.added(backend, "weight", "bias"), sums.by_pair[~sums.idle].T
    assert_close(both["weight"], terms, sums.hidden[~sums.idle], sums.weight.double())
    assert_close(both["bias"], terms, torch.ones(terms.shape[1]), sums.bias.double())
    for total, again in both.items():
        assert torch.equal(sums.added(backend, total)[total], again)


@pytest.mark.skipif("triton" not in OVER_SUPPORT, reason="needs Triton")
def test_triton_has_a_program_for_each_id_and_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("grpo_kernels.ops.sampled_support.triton")
    assert kernels.PIECE.value == PIECE
    kernel, programs, sizes = kernels._sums_kernel, [], []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*inputs: Any) -> None:
                begins, ends = inputs[3:5]
                programs.append(grid)
                sizes.append((ends - begins).cpu())
                kernel[grid](*inputs)

            return launch

    monkeypatch.setattr(kernels, "_sums_kernel", Recorded())
    sums = Sums("pieces", 7, F32)
    sums.added("triton", "weight")
    ids = sums.kept.shape[1] + 1  # and the entries that take no part
    assert programs == [(len(sums.rows) // PIECE, 1), (ids, 1)]
    whole = sums.kept[~sums.idle].sum(0) // PIECE
    assert sizes[0].unique().tolist() == [0, PIECE] and sizes[0].sum() == PIECE * whole.sum()
    programs.clear()
    Sums("less than a piece", 7, F32).added("triton", "weight")
    assert programs == [(3, 1)]  # of fewer entries than ids
