"""Properties of the CPU kernels alone: the same bits from every instruction set."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tests.ops.token_logprobs.rows import INF, NAN, rows_of
from tests.simd import levels

pytestmark = levels.needs_sources
TYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


def run(name: str, logits: Tensor, target: int, softcap: float, level: str) -> tuple[bytes, ...]:
    gradient, results = torch.empty_like(logits), torch.empty(5, dtype=torch.float64)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (logits, gradient, results)]
    getattr(levels.library("token_logprobs.cpp", level), f"run_{name}")(
        *pointers[:2], ctypes.c_int64(len(logits)), ctypes.c_int64(target), ctypes.c_double(softcap), pointers[2]
    )
    assert not results.isnan().any() or logits.isnan().any()
    # any NaN matches any other, whatever its sign
    clean = (t.where(~t.isnan(), 12345) for t in (gradient, results))
    return tuple(t.view(torch.uint8).numpy().tobytes() for t in clean)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(level: str, name: str, softcap: float) -> None:
    for columns in (1, 7, 8, 33, 2047, 4099):
        logits, _ = rows_of((columns,), TYPES[name])
        for spoiled in (None, -INF, NAN):
            if spoiled is not None:
                logits[columns // 3] = spoiled
            target = columns // 2
            if columns == 1 and spoiled is not None:
                continue
            assert run(name, logits, target, softcap, level) == run(name, logits, target, softcap, "baseline")
