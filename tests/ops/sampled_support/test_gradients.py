"""Gradients over a support: chunks and threads change no bit, and the weight's is added to a tensor."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.ops.sampled_support import reference
from tests.harness import assert_within_budget
from tests.ops.linear_head import cases, heads
from tests.ops.linear_head.heads import BF16, F32, F64, OVER_SUPPORT
from tests.ops.linear_head.policy_loss_cases import problem
from tests.ops.linear_head.test_torch import assert_near, on_device
from tests.ops.promises import Results, run
from tests.rounding import Moves


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gathered_chunks_and_threads_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over tokens and ids whose entries are in several chunks."""
    inputs = cases.drawn("bias", "support", columns=40, width=21)
    expected, threads = run(cases.op_of(inputs), inputs, "reference", dtype), torch.get_num_threads()
    for numbers, count in ((21, 1), (5 * 21, 2), (reference._GATHERED, 3)):
        monkeypatch.setattr(reference, "_GATHERED", numbers)
        torch.set_num_threads(count)
        got = run(cases.op_of(inputs), inputs, "reference", dtype)
        torch.set_num_threads(threads)
        assert all(torch.equal(got[name], expected[name]) for name in expected), numbers


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_the_sums_of_a_gpu_are_those_of_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = heads.rounded(cases.drawn("bias", "support", columns=40, width=21), dtype)
    working, gold = (run(cases.op_of(inputs), inputs, "reference", kind) for kind in (dtype, F64))
    moves = Moves(lambda: run(cases.op_of(inputs), inputs, "reference", F64), gold)
    monkeypatch.setattr(reference, "_on_cpu", lambda tensor: False)
    got = run(cases.op_of(inputs), inputs, "reference", dtype)
    for name, value in gold.items():
        assert_within_budget(got[name], working[name], value, name, moves=moves)


@pytest.mark.parametrize("backend", [name for name in OVER_SUPPORT if name != "reference"])
def test_over_a_support_a_scaled_gradient_is_added_to_the_rows_of_kept_ids(backend: str) -> None:
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
