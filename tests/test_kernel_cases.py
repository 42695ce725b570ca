"""tests/kernel_cases.py on a GPU, or on kernels compiled for the host: every kernel has a case, and every result is
correct. `make gpu-check` runs the tests marked gpu first, in this order."""

from __future__ import annotations

import re

import pytest
import torch

from tests import emulation, kernel_cases
from tests.emulation import build

HAS_GPU = torch.cuda.is_available()
# without a GPU, all of CUDA's are one test below
CASES = [(name, case.backend) for name, case in kernel_cases.CASES.items() if HAS_GPU or case.backend == "triton"]


@pytest.mark.skipif(not HAS_GPU and emulation.only.args[0], reason="needs a GPU, or what emulates one")
@(pytest.mark.pairs if HAS_GPU else pytest.mark.gpu)  # with a GPU, every case runs
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_values_and_gradients_of_each_case(name: str, backend: str) -> None:
    kernel_cases.check(name, torch.device("cuda" if HAS_GPU else "cpu"))


def kernels_of_the_sources() -> set[str]:
    kernels = set()
    for path in (build.ROOT / "csrc").rglob("*.cu*"):
        # removes the macro or __launch_bounds__(...) between __global__ and the name
        text = re.sub(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)|GRPO_BOUNDS(\([^()]*\))?", "", path.read_text())
        names = re.findall(r"__global__\s+(?:\w+\s+)*?(\w+)\(", text)
        assert len(names) == text.count("__global__"), path
        kernels |= {f"{path.parent.name}.{name}" for name in names}
    return kernels


@emulation.only
def test_the_cases_launch_every_kernel_and_give_the_reference() -> None:
    def run() -> None:
        for name, case in kernel_cases.CASES.items():
            if case.backend == "cuda":
                kernel_cases.check(name, torch.device("cpu"))

    assert emulation.launched(run) == kernels_of_the_sources()
