"""The kernels of token_advantages against its definition in extended precision.

Faults that this is for: a tail of a vector or tile; a carry that is lost between tiles or rows; a turn that goes on in
the next row or ends at a tile; moments that are merged wrongly; a NaN that other tiles of its row do not see; tokens
after the last row that are not written; equal returns whose rounded mean is whitened.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import grpo_kernels as gk
from tests.harness import examples
from tests.ops.promises import Inputs, run
from tests.ops.token_advantages import cases
from tests.ops.token_advantages.cases import BACKENDS, F32, F64, NAN, assert_by_definition, op_of, padded

on_kernels = pytest.mark.parametrize("backend", cases.KERNELS)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@on_kernels
def test_any_settings(backend: str, dtype: torch.dtype) -> None:
    is_fast = backend in cases.FAST

    def check(inputs: Inputs, config: gk.TokenAdvantageConfig) -> None:
        assert_by_definition(inputs, config, backend, dtype)

    batch = cases.batches(9, 40) if is_fast else cases.batches(3, 20)
    settings(max_examples=examples(200) if is_fast else examples(30))(given(batch, cases.configs())(check))()


# Around the vectors of the CPU and the tiles of Triton, and many short rows.
@pytest.mark.pairs
@pytest.mark.parametrize("turns", ["none", "some"])
@pytest.mark.parametrize(("rows", "width"), [(3, 31), (3, 257), (3, 1023), (3, 1100), (3, 2500), (40, 9), (1500, 9)])
@on_kernels
def test_long_and_many_rows(backend: str, rows: int, width: int, turns: str) -> None:
    if backend == "triton" and rows * width in (3 * 257, 3 * 2500, 1500 * 9):
        pytest.skip("the interpreter is slow")
    batch = cases.with_garbage(padded(3, rows, width, turns=turns, gaps=0.3))
    config = gk.TokenAdvantageConfig(gamma=0.999, lam=0.95)
    assert_by_definition(batch, config, backend, F32)
    assert_by_definition(cases.packed(batch), config, backend, F64)
    batch["rewards"][0, (0, width // 2, -1)[width % 3]] = NAN  # which one of several tiles sees
    assert_by_definition(batch, config, backend, F64)


@pytest.mark.parametrize("reward", [0.7, 1000.1, -3.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_returns_are_whitened_to_exact_zeros(backend: str, reward: float) -> None:
    rewards = torch.zeros(8, 33, dtype=F64)
    rewards[:, -1] = reward
    for dtype in (F32, F64):
        got = run(op_of("reinforce_plus_plus"), {"rewards": rewards}, backend, dtype)
        assert not got["advantages"].any() and (got["returns"] == torch.tensor(reward, dtype=dtype)).all()
