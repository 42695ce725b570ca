"""The interpreter that tests/interpreter.py makes faster: its results, and what a launch leaves patched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from grpo_kernels import backends

pytestmark = pytest.mark.skipif(not backends.interpreting(), reason="with a GPU, the compiled kernels run")


@triton.jit
def halved(x):  # type: ignore[no-untyped-def]
    return x * 0.5


@triton.jit
def sum_of_halves(x_ptr, out_ptr, CALLS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    for _ in range(CALLS):
        x = halved(x)
    tl.store(out_ptr, tl.sum(x, 0))


def test_functions_are_patched_once_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    patched: list[object] = []
    patch = interpreter._patch_builtin

    def counted(module: object, *rest: object) -> None:
        patched.append(module)
        patch(module, *rest)

    x, out = torch.arange(8.0), torch.zeros(1)
    sum_of_halves[1,](x, out, CALLS=1, BLOCK=8)  # tl.sum, of a module of its own, is patched at its first call
    assert out.item() == 14.0
    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    load = tl.load
    counts = []
    for calls in (1, 3):
        patched.clear()
        sum_of_halves[1,](x, out, CALLS=calls, BLOCK=8)
        assert out.item() == 28.0 * 0.5**calls and tl.load is load
        counts.append(len(patched))
    assert counts[0] == counts[1] > 0


def test_every_type_keeps_its_own() -> None:
    from triton.runtime import interpreter

    for _ in range(2):
        assert interpreter._get_np_dtype(tl.float32).name == "float32"
        assert interpreter._get_np_dtype(tl.bfloat16).name == "uint16"
        assert interpreter._get_np_dtype(tl.pointer_type(tl.float32)).name == "uint64"
        assert interpreter._get_np_dtype(tl.block_type(tl.float64, [4])).name == "float64"
        assert interpreter._get_np_dtype(tl.block_type(tl.pointer_type(tl.int8), [4])).name == "uint64"
