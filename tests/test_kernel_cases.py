"""tests/kernel_cases.py on a GPU, or on kernels compiled for the host: every op and every kernel has a case, and every
result is correct. `make gpu-check` runs the tests marked gpu first, in this order."""

from __future__ import annotations

import re

import pytest
import torch

from grpo_kernels import registry
from tests import emulation, kernel_cases
from tests.emulation import build
from tests.harness import quick

CPU = torch.device("cpu")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
OF_CUDA = [name for name, case in kernel_cases.CASES.items() if case.kernels]
SMOKE = [
    (op, backend)
    for op in kernel_cases.SMOKE
    for backend in ("cuda", "triton")
    if backend in registry.all_ops[op].supports
]
CASES = [(name, case.backend) for name, case in kernel_cases.CASES.items()]
pytestmark = pytest.mark.skipif(
    not HAS_GPU and emulation.only.args[0], reason="needs a GPU, or a compiler and the sources to emulate one"
)
on_gpus = pytest.mark.pairs if HAS_GPU else pytest.mark.gpu  # with a GPU, every case on each backend runs


@on_gpus
@pytest.mark.parametrize(("name", "backend"), SMOKE)
def test_a_small_call_of_each_op_gives_the_reference(name: str, backend: str) -> None:
    assert kernel_cases.compare(kernel_cases.SMOKE[name], name, backend, DEVICE) > 0


@on_gpus
@pytest.mark.parametrize(("name", "backend"), CASES if HAS_GPU else [case for case in CASES if case[1] == "triton"])
def test_values_and_gradients_of_each_case(name: str, backend: str) -> None:
    assert kernel_cases.compare(kernel_cases.CASES[name].run, name, backend, DEVICE) > 0


def kernels_of_the_sources() -> set[str]:
    kernels = set()
    for path in (build.ROOT / "csrc").rglob("*.cu*"):
        # removes the macro or __launch_bounds__(...) between __global__ and the name
        text = re.sub(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)|GRPO_BOUNDS(\([^()]*\))?", "", path.read_text())
        names = re.findall(r"__global__\s+(?:\w+\s+)*?(\w+)\(", text)
        assert len(names) == text.count("__global__"), path
        kernels |= {f"{path.parent.name}.{name}" for name in names}
    return kernels


@pytest.mark.skipif(not (build.ROOT / "csrc").exists(), reason="needs the sources")
def test_every_kernel_has_a_case() -> None:
    assert set().union(*(case.kernels for case in kernel_cases.CASES.values())) == kernels_of_the_sources()


@emulation.only
@pytest.mark.parametrize("name", quick(kernel_cases.CASES, *OF_CUDA))
def test_a_case_launches_the_kernels_it_says_and_gives_the_reference(name: str) -> None:
    results = []
    launched = emulation.launched(lambda: results.append(kernel_cases.check(name, CPU)))
    assert launched == kernel_cases.CASES[name].kernels
    assert results[0] > 0


def test_every_op_that_chooses_a_backend_has_a_small_call() -> None:
    ops = set()
    for path in (build.ROOT / "grpo_kernels" / "ops").rglob("*.py"):
        if "backends.select(" in path.read_text():
            ops |= set(re.findall(r"(?:(?:_OP|name) = |select\(\s*)\"(\w+)\"", path.read_text()))
    assert ops == kernel_cases.SMOKE.keys()


@emulation.only
def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(backend: str, put: kernel_cases.Put) -> kernel_cases.Results:
        yield torch.full((3,), 1.0 if backend == "cuda" else 1.001)

    monkeypatch.setitem(kernel_cases.CASES, "wrong", kernel_cases.Case(wrong, set()))
    with pytest.raises(AssertionError, match="wrong on cuda, result 0"):
        kernel_cases.check("wrong", CPU)
