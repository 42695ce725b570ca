"""tools/kernel_cases.py on kernels compiled for the host: every kernel has a case, and every result is correct."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_lines
from tests import emulation
from tests.emulation import build
from tests.harness import quick
from tools import gpu_summary, kernel_cases

CPU = torch.device("cpu")
OF_CUDA = [name for name, case in kernel_cases.CASES.items() if "cuda" in case.backends]


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


@emulation.only
@pytest.mark.parametrize(("name", "backend"), gpu_summary.PAIRS)
def test_a_small_call_of_each_op_gives_the_reference(name: str, backend: str) -> None:
    assert kernel_cases.compare(kernel_cases.SMOKE[name], name, backend, CPU) > 0


@emulation.only
def test_lines_are_written_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "lines"
    command = f"kernel_cases token_logprobs agglomerate --smoke --device cpu --share 1/2 --results {lines}"
    monkeypatch.setattr("sys.argv", command.split())
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            kernel_cases.main()
        assert ended.value.code == 0
        assert [line["state"] for line in gpu_lines.read(lines)] == ["begun", "passed"]


@emulation.only
def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(backend: str, put: kernel_cases.Put) -> kernel_cases.Results:
        yield torch.full((3,), 1.0 if backend == "cuda" else 1.001)

    monkeypatch.setitem(kernel_cases.CASES, "wrong", kernel_cases.Case(wrong, set()))
    with pytest.raises(AssertionError, match="wrong on cuda, result 0"):
        kernel_cases.check("wrong", CPU)
