"""Properties of the CPU kernels alone: the same bits from every instruction set and any number of threads."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tests.harness import cpu_threads, needs_cpu_kernels
from tests.ops.sampled_support.batches import batch, run
from tests.simd import levels

TYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


def run_level(name: str, rows: Tensor, level: str) -> list[bytes]:
    a, b = rows.to(TYPES[name])
    b, total = b.clone(), a.clone().to(torch.promote_types(a.dtype, torch.float32))
    result = torch.empty(1, dtype=torch.float64)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, total, result)]
    function = getattr(levels.library("sampled_support.cpp", level), f"run_{name}")
    function(*pointers[:3], ctypes.c_int64(len(a)), pointers[3])
    torch.testing.assert_close(result[0], a.double() @ rows.to(a.dtype)[1].double(), rtol=1e-5, atol=1e-4)
    return [t.view(torch.uint8).numpy().tobytes() for t in (b, total, result)]


@levels.needs_sources
@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(level: str, name: str) -> None:
    for width in (1, 7, 8, 33, 64, 511):
        rows = torch.randn(2, width, dtype=torch.float64)
        assert run_level(name, rows, level) == run_level(name, rows, "baseline"), width


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    given = batch(60, hidden=21, columns=40)
    expected = run(given, "cpu", dtype)
    for threads in (2, 5):
        with cpu_threads(threads):
            got = run(given, "cpu", dtype)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
