"""The kernels of token_logprobs against the float64 reference.

Faults that this is for: a tail of a vector, piece, block or tile; a maximum that comes late; digits of a nearly certain
token that are lost; a bad row that spoils another; a gradient in place that is written before the target is read, or
beside the logits; an instruction set or a schedule with other bits; a launch too many.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.token_logprobs.registration import SUPPORTS
from tests.emulation.build import ROOT
from tests.harness import assert_close_to_rounding, device_of, examples
from tests.ops.promises import Inputs, Results, run
from tests.ops.token_logprobs import cases
from tests.ops.token_logprobs.cases import (
    BACKENDS,
    F32,
    F64,
    FAST,
    HALVES,
    INF,
    KERNELS,
    NAN,
    OPTIONS,
    assert_like_reference,
    op_of,
    rows_of,
)
from tests.simd import levels

on_backends = pytest.mark.parametrize("backend", BACKENDS)
on_kernels = pytest.mark.parametrize("backend", KERNELS)
DTYPES = [(name, dtype) for dtype in (F64, F32, *HALVES) for name in KERNELS if dtype in SUPPORTS[name]]
on_dtypes = pytest.mark.parametrize(("backend", "dtype"), DTYPES, ids=str)


@on_dtypes
def test_any_rows(backend: str, dtype: torch.dtype) -> None:
    is_fast = backend in FAST

    @settings(max_examples=examples(120) if is_fast else examples(18))
    @given(cases.batches(dtype, 300 if is_fast else 60))
    def check(case: tuple[Inputs, dict[str, Any]]) -> None:
        assert_like_reference(case[0], backend, dtype, **case[1])

    check()


# 1: one certain token; 31: less than any vector; 1023: a ragged tail; 5008: several tiles, all aligned; 151936: the
# vocabulary of a real model.
@pytest.mark.pairs
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("columns", [1, 31, 1023, 5008, 151936])
@on_dtypes
def test_sizes(backend: str, dtype: torch.dtype, columns: int, name: str, request: pytest.FixtureRequest) -> None:
    if columns > 10_000 and backend not in FAST and not request.config.getoption("--all"):
        pytest.skip("slow")
    shape = (3, 7, columns) if backend in FAST and columns < 10_000 else (2, 1, columns)
    assert_like_reference(rows_of(shape, dtype), backend, dtype, **OPTIONS[name])


@pytest.mark.full
@pytest.mark.parametrize("backend", [name for name in FAST if name in KERNELS])
def test_more_than_2_to_the_31_elements(backend: str) -> None:
    rows, columns = 70_000, 30_720  # 2.15e9, and more rows than a grid's second dimension takes
    logits = torch.zeros((), dtype=torch.bfloat16, device=device_of(backend)).expand(rows, columns)
    if backend != "cpu":
        logits = logits.contiguous()
    got = gk.token_logprobs(logits, torch.arange(rows, device=logits.device) % columns, backend=backend)
    torch.testing.assert_close(got.logprobs, torch.full_like(got.logprobs, -math.log(columns)))


@pytest.mark.parametrize("offset", [0.0, 40.0, -1000.0])
@pytest.mark.parametrize("columns", [2, 700])
@on_backends
def test_nearly_certain_tokens_keep_their_digits(backend: str, columns: int, offset: float) -> None:
    """Log-probs up to -1e-9, for which subtracting log-sum-exp in float32 gives 0 or more, and a target beside them."""
    rest = torch.tensor([1e-1, 1e-3, 1e-6, 1e-7, 1e-8, 1e-9, 1e-8], dtype=F64).expm1().log() - math.log(columns - 1)
    logits, own = rest[:, None].expand(-1, columns).clone(), columns // 2
    logits[:, own] = 0
    logits = (logits + offset).float().double()  # the gold values are those of the rounded logits
    distance = torch.cat([logits[:, :own], logits[:, own + 1 :]], -1) - logits[:, own, None]
    mass = distance.exp().sum(-1)
    log_sum = torch.log1p(mass)
    gold = -log_sum
    gold[-1] += distance[-1, 0]
    targets, ones = torch.tensor([own] * 6 + [0]), torch.ones(7, dtype=F64)
    inputs = {"logits": logits, "targets": targets, "by_logprobs": ones, "by_entropy": 0 * ones}
    got = run(op_of(), inputs, backend, F32)
    entropy = log_sum - (distance.exp() * distance).sum(-1) / (1 + mass)
    torch.testing.assert_close(got["logprobs"].double(), gold, rtol=1e-5, atol=0)
    torch.testing.assert_close(got["entropy"].double(), entropy, rtol=1e-5, atol=0)
    # rounding of a float64 log-sum-exp, which is as large as the logits
    atol = torch.finfo(F64).eps * abs(offset)
    torch.testing.assert_close(got["d_logits"][:6, own].double(), -torch.expm1(gold[:6]), rtol=1e-5, atol=atol)
    assert (got["logprobs"] < 0).all()


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@on_backends
def test_the_lowest_number_masks_as_minus_infinity_does(backend: str, dtype: torch.dtype) -> None:
    inputs = rows_of((3, 530), dtype)
    hidden = torch.rand(3, 530) < 0.7
    hidden[0, :520] = True  # a whole tile of a kernel
    hidden[torch.arange(3), inputs["targets"]] = False
    by_mask = [
        run(op_of(), inputs | {"logits": inputs["logits"].masked_fill(hidden, lowest)}, backend, dtype)
        for lowest in (-INF, torch.finfo(dtype).min)
    ]
    assert all(torch.equal(by_mask[0][name], by_mask[1][name]) for name in ("logprobs", "entropy"))
    assert by_mask[0]["d_logits"].isfinite().all() and not by_mask[0]["d_logits"][hidden].any()
    inputs["logits"][0, inputs["targets"][0]] = -INF
    for softcap in (None, 5.0):
        assert run(op_of(softcap=softcap), inputs, backend, dtype)["logprobs"][0] == -INF


@on_kernels
def test_a_softcap_far_below_and_above_the_logits(backend: str) -> None:
    """All parts of the tangent, each as a target; a low temperature makes their errors large."""
    logits = torch.linspace(-1, 1, 41, dtype=F64) * torch.tensor([0.3, 0.8, 3.0, 200.0])[:, None]
    logits = logits.float().double()[:, None].expand(-1, 41, -1)
    inputs = rows_of((4, 41, 41)) | {"logits": logits, "targets": torch.arange(41).expand(4, -1)}
    assert_like_reference(inputs, backend, F32, softcap=1.0, temperature=0.02)


@pytest.mark.parametrize("softcap", [None, 20.0])
@on_kernels
def test_rows_whose_largest_logit_comes_late(backend: str, softcap: float | None) -> None:
    """Every batch raises the top, none does after the first, or all logits are the largest."""
    columns = 5000 if backend != "triton" else 2100
    inputs = rows_of((2, columns)) | {"targets": torch.tensor([columns - 1, 17])}
    ascending = torch.linspace(-60, 30, columns).double().expand(2, -1)
    for logits in (ascending, ascending.flip(-1), torch.full_like(ascending, 3.7)):
        assert_like_reference(inputs | {"logits": logits}, backend, F32, softcap=softcap)


# Bad rows


@pytest.mark.pairs
@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("where", [0, 64, 640])
@pytest.mark.parametrize("softcap", [None, 5.0])
@on_backends
def test_a_bad_row_spoils_itself_alone(backend: str, softcap: float | None, where: int, poison: float) -> None:
    inputs = rows_of((3, 641))
    inputs |= {"by_logprobs": torch.ones(3, dtype=F64), "by_entropy": torch.ones(3, dtype=F64)}
    op, bad = op_of(softcap=softcap), inputs["logits"].clone()
    bad[1, where] = poison
    assert_spoiled_alone(run(op, inputs | {"logits": bad}, backend, F32), run(op, inputs, backend, F32))
    silent = torch.tensor([1.0, 0.0, 1.0], dtype=F64)  # the row's gradient is not requested
    got = run(op, inputs | {"logits": bad, "by_logprobs": silent, "by_entropy": silent}, backend, F32)
    assert not got["d_logits"][1].any()


def assert_spoiled_alone(got: dict[str, Tensor], clean: dict[str, Tensor]) -> None:
    for name in ("logprobs", "entropy", "d_logits"):
        assert got[name][1].isnan().any() and torch.equal(got[name][[0, 2]], clean[name][[0, 2]]), name


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF], ids=str)
@on_backends
def test_a_temperature_of_no_meaning_spoils_its_row_alone(backend: str, temperature: float) -> None:
    inputs = rows_of((3, 40))
    inputs |= {"by_logprobs": torch.ones(3, dtype=F64), "temperature": torch.ones(3, dtype=F64)}
    bad = torch.tensor([1.0, temperature, 1.0], dtype=F64)
    assert_spoiled_alone(run(op_of(), inputs | {"temperature": bad}, backend, F32), run(op_of(), inputs, backend, F32))


@pytest.mark.parametrize("value", [NAN, -INF], ids=str)
@on_backends
def test_a_row_without_any_number_is_nan(backend: str, value: float) -> None:
    got = run(op_of(), rows_of((1, 600)) | {"logits": torch.full((1, 600), value, dtype=F64)}, backend, F32)
    assert got["logprobs"].isnan().all() and got["entropy"].isnan().all()


@pytest.mark.parametrize("target", [-1, -99, -101, 7, 2**40])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if device_of(name).type == "cuda" or name == "triton"])
def test_a_target_that_is_no_column_spoils_its_row_alone(backend: str, target: int) -> None:
    """On a GPU, where an error would wait; errors.py has the one of the CPU."""
    inputs = rows_of((3, 7)) | {"by_logprobs": torch.ones(3, dtype=F64)}
    wrong = inputs | {"targets": inputs["targets"].index_fill(0, torch.tensor(1), target)}
    assert_spoiled_alone(run(op_of(), wrong, backend, F32), run(op_of(), inputs, backend, F32))


# In place


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@on_backends
def test_inplace_backward_writes_the_same_gradient_over_the_logits(backend: str, dtype: torch.dtype) -> None:
    device, inputs = device_of(backend), rows_of((2, 5, 130), dtype)
    inputs["targets"][0, 1] = -100
    leaf = inputs["logits"].to(device, dtype).requires_grad_()
    others = {name: value[:, :-1].to(device) for name, value in inputs.items() if name != "logits"}
    copied = leaf.detach().clone()[:, :-1].requires_grad_()
    (expected,) = torch.autograd.grad(cases.call(others | {"logits": copied}, backend)["loss"], copied)
    computed = leaf * 1
    cases.call(others | {"logits": computed[:, :-1]}, backend, inplace_backward=True)["loss"].backward()
    assert leaf.grad is not None and torch.equal(leaf.grad[:, :-1], expected) and not leaf.grad[:, -1].any()
    assert torch.equal(computed[:, :-1], expected), "the logits' memory"
    assert torch.equal(computed[:, -1], leaf[:, -1]), "beside it"
    without = cases.call(others | {"logits": copied.detach()}, backend, inplace_backward=True)
    assert torch.equal(without["logprobs"], cases.call(others | {"logits": copied}, backend)["logprobs"])


@on_backends
def test_logits_that_were_overwritten_are_noticed(backend: str) -> None:
    logits, targets = torch.randn(3, 50, device=device_of(backend), requires_grad=True), torch.arange(3)
    targets = targets.to(logits.device)
    computed = logits * 1
    logprobs = gk.token_logprobs(computed, targets, inplace_backward=True, backend=backend).logprobs
    other = computed.square().sum()  # saves the logits for its own backward
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    with pytest.raises(RuntimeError, match="token_logprobs: backward must run once"):
        logprobs.sum().backward()
    computed = logits * 1
    logprobs = gk.token_logprobs(computed, targets, backend=backend).logprobs
    computed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


@on_backends
def test_what_an_overwriting_backward_cannot_do(backend: str) -> None:
    leaf = torch.zeros(2, 7, device=device_of(backend), requires_grad=True)
    targets = torch.zeros(2, dtype=torch.int64, device=leaf.device)

    def loss(logits: Tensor) -> Tensor:
        return gk.token_logprobs(logits * 2, targets, inplace_backward=True, backend=backend).logprobs.sum()

    with pytest.raises(RuntimeError, match="create_graph must be False with inplace_backward"):
        torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    torch.compiler.reset()
    with pytest.raises(Exception, match="inplace_backward must be False under"):
        torch.compile(loss, fullgraph=True, backend="eager")(leaf)


@on_backends
def test_no_rows_of_any_strides_are_overwritten(backend: str) -> None:
    row = torch.zeros(7, device=device_of(backend), requires_grad=True)
    targets = torch.zeros(2, 0, dtype=torch.int64, device=row.device)
    loss = gk.token_logprobs(row.expand(2, 0, 7), targets, inplace_backward=True, backend=backend).logprobs.sum()
    loss.backward()
    assert loss == 0 and row.grad is not None and not row.grad.any()


# One kernel alone


# The gradient of a slice is contiguous, so its rows and those of the logits are aligned differently.
@pytest.mark.pairs
@pytest.mark.parametrize("before", range(1, 8))
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 9, 24, 301, 1800])
@on_kernels
def test_logits_aligned_differently_from_their_gradient(
    backend: str, columns: int, dtype: torch.dtype, before: int
) -> None:
    inputs = rows_of((2, before + columns + 1), dtype)
    memory = inputs["logits"].to(device_of(backend), dtype)
    inputs = inputs | {"logits": inputs["logits"][:, before:-1], "targets": inputs["targets"] % columns}
    expected = assert_like_reference(inputs, backend, dtype)
    leaf = memory[:, before:-1].detach().requires_grad_()
    given = {name: value.to(leaf.device) for name, value in inputs.items()} | {"logits": leaf}
    results = cases.call(given, backend)
    (gradient,) = torch.autograd.grad(results["loss"], leaf)
    # a row's alignment may change the order of its sum
    found = {"logprobs": results["logprobs"], "entropy": results["entropy"], "d_logits": gradient}
    op, wanted = cases.op_of(), {name: expected[name] for name in found}

    def reference() -> Results:
        results = run(op, inputs, "reference", F32)
        return {name: results[name] for name in found}

    assert_close_to_rounding(found, wanted, reference)


TYPES = {"float32": F32, "float64": F64, "float16": torch.float16, "bfloat16": torch.bfloat16}


def by_level(name: str, logits: Tensor, softcap: float, level: str) -> list[Tensor]:
    """The gradient by the logits of a row, and the sums of its softmax."""
    gradient, results = torch.empty_like(logits), torch.empty(5, dtype=F64)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (logits, gradient, results)]
    size, target = ctypes.c_int64(len(logits)), ctypes.c_int64(len(logits) // 2)
    call = getattr(levels.library("token_logprobs.cpp", level), f"run_{name}")
    call(*pointers[:2], size, target, ctypes.c_double(softcap), pointers[2])
    assert not results.isnan().any() or logits.isnan().any()
    # any NaN matches any other, whatever its sign
    return [tensor.where(~tensor.isnan(), 12345) for tensor in (gradient, results)]


# The baseline rounds products that the others do not round; halves may then be rounded the other way.
NEAR = {"float32": 2e-6, "float64": 1e-12, "float16": 1e-3, "bfloat16": 8e-3}


@levels.needs_sources
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("name", TYPES)
def test_avx512_gives_the_bits_of_avx2_and_the_baseline_is_close(name: str, softcap: float) -> None:
    for columns in (1, 7, 8, 33, 2047, 4099):
        logits = rows_of((columns,), TYPES[name])["logits"].to(TYPES[name])
        for spoiled in (None, -INF, NAN) if columns > 1 else (None,):
            if spoiled is not None:
                logits[columns // 3] = spoiled
            by_set = [by_level(name, logits, softcap, level) for level in ("avx512", "avx2", "baseline")]
            for avx512, avx2, baseline in zip(*by_set, strict=True):
                assert torch.equal(avx512.view(torch.uint8), avx2.view(torch.uint8))
                torch.testing.assert_close(baseline, avx2, rtol=NEAR[name], atol=NEAR[name] / 10)


# In a process of its own, as kernels are interpreted here. A launch computes the key of its compilation, and stops.
CODE = """
import itertools, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit
from grpo_kernels.ops.token_logprobs import triton as op

backend, keys = make_backend(GPUTarget("cuda", 90, 32)), set()

def run(self, *args, grid, warmup, **kwargs):
    bind = jit.create_function_from_signature(self.signature, self.params, backend)
    _, specialization, options = bind(*args, **kwargs)
    keys.add((self.__name__, str(specialization), str(options)))

jit.JITFunction.run = run
columns, temperatures, shifts = (1, 16, 32000, 50257, 151936, 128256), (1.0, 0.7), (0, 1)

def rows(dtype, shift, *shape):
    return torch.empty(torch.Size(shape).numel() + shift, dtype=dtype)[shift:].view(shape)

def count(dtype, cap, entropy, gradient_dtype):
    keys.clear()
    for v, temperature, shift, n in itertools.product(columns, temperatures, shifts, (1, 3)):
        logits, targets = rows(dtype, shift, 1, n, v), rows(torch.int64, shift, 1, n)
        scaling = None, temperature, cap, 1.0
        results = op.forward(logits, targets, *scaling, entropy)
        upstream = rows(torch.float32, shift, 1, n)
        gradient = logits if gradient_dtype == dtype and shift else torch.empty(logits.shape, dtype=gradient_dtype)
        own = (upstream, results[1]) if entropy else (None, None)
        op.backward_into(gradient, upstream, own[0], results[2], own[1], logits, targets, *scaling)
    return len(keys)

for dtype, cap, entropy in itertools.product((torch.bfloat16, torch.float32), (None, 30.0), (False, True)):
    print(dtype, cap, entropy, count(dtype, cap, entropy, dtype))
print("float32 to bfloat16", count(torch.float32, None, False, torch.bfloat16))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_vocabulary_temperature_stride_or_alignment_compiles_no_triton_kernel() -> None:
    """One compilation of each kernel for a dtype, with or without a softcap and an entropy."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 9 and all(line.endswith(" 2") for line in lines), done.stdout


DOCUMENT = ROOT / "docs" / "ops" / "token_logprobs.md"
COPIED = """
import sys, torch
import token_logprobs_triton
exec(sys.stdin.read())
torch.manual_seed(0)
for dtype, columns in ((torch.float32, 37), (torch.bfloat16, 640)):
    leaves = [torch.randn(2, 3, columns, dtype=dtype, requires_grad=True) for _ in range(2)]
    leaves[1].data.copy_(leaves[0].data)
    targets = torch.randint(columns, (2, 3))
    ours = TokenLogprobs.apply(leaves[0], targets, 0.7)
    theirs = (leaves[1].float() / 0.7).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn(2, 3)
    ours.backward(upstream)
    theirs.backward(upstream)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
assert not [name for name in sys.modules if name.startswith("grpo_kernels")], "it is to stand alone"
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(not DOCUMENT.exists(), reason="tests are run from outside the checkout")
def test_the_copied_file_works_alone(tmp_path: Path) -> None:
    """The file of Triton's kernels in a folder of its own, with the function of the document."""
    shutil.copy(ROOT / "grpo_kernels/ops/token_logprobs/triton.py", tmp_path / "token_logprobs_triton.py")
    shown = DOCUMENT.read_text().partition("## Copy the kernels")[2].partition("```python\n")[2].partition("```")[0]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", COPIED]
    done = subprocess.run(command, input=shown, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr
