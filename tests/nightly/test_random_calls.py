"""Calls with one argument changed at random return, or raise TypeError, ValueError or RuntimeError; none crashes.

    SEED=3 pytest tests/nightly/test_random_calls.py --nightly

Random valid calls are those of tests/ops, of which test_random_valid_calls draws many more than `make test`. Both run
on the CPU kernels as built and under AddressSanitizer and UBSan, in a process that may crash.
"""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulation import build
from tests.nightly import sanitized
from tests.nightly.conftest import SEED
from tests.ops.all_cases import OPS
from tests.ops.promises import Inputs, Op, placed
from tests.strategies import LAYOUTS, laid_out

TESTS = build.ROOT / "tests"
CLEAN = (TypeError, ValueError, RuntimeError)
CALLS, CALLS_OF_SLOW = 1_000, 25  # of each op, on the CPU and on an emulated GPU
BACKENDS = ("cpu", "cpu-sanitized", "triton", "cuda-sanitized")
# The tests of tests/ops that draw their inputs, each of all settings of an op.
RANDOM = "any or every_estimator or reference_distances or bits_of_the_reference"
REPORT = re.compile(r"^.*(?:runtime error|ERROR: AddressSanitizer).*$", re.MULTILINE)


def changed(value: Any, chance: random.Random) -> Any:
    """Another value in place of an argument: of another type, shape, dtype or device, or with wild elements."""
    kind = chance.choice(("other", "shape", "rank", "longer", "dtype", "meta", "wild"))
    if not isinstance(value, Tensor) or kind == "other":
        return chance.choice((None, "no such thing", -1, 0, math.nan, 2**70, [1, 2], torch.tensor(1.0)))
    if kind == "shape":
        return value[1:] if value.dim() and len(value) else torch.ones(3, dtype=value.dtype)
    if kind == "rank":
        return value[None] if chance.random() < 0.5 else value.flatten()
    if kind == "longer":
        return torch.cat((value, value)) if value.dim() else value
    if kind == "dtype":
        others = (torch.int64, torch.bool, torch.complex64, torch.float16, torch.uint8, torch.float64, torch.int32)
        return value.to(chance.choice(others))
    if kind == "meta":
        return value.to("meta")
    if value.dtype == torch.bool:
        return ~value
    wild = (math.nan, math.inf, -math.inf, 3e38) if value.is_floating_point() else (-1, -(2**31), 2**31, 10**6, 2**62)
    other = torch.tensor(chance.choice(wild), dtype=value.dtype if value.is_floating_point() else torch.int64)
    return torch.where(torch.rand(value.shape) < 0.3, other, value)


def call(op: Op, backend: str, seed: int) -> None:
    """A call with one argument changed, forward and backward."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    inputs: Inputs = placed(
        op, op.draw(), op.working, lambda value: laid_out(value, chance.choice(LAYOUTS)) if value.dim() else value
    )
    name = chance.choice(sorted(name for name, value in inputs.items() if value is not None))
    inputs[name] = changed(inputs[name], chance)
    results = op.call(inputs, backend)
    leaves = [inputs[leaf] for leaf in op.leaves if isinstance(inputs[leaf], Tensor) and inputs[leaf].requires_grad]
    if leaves and results["loss"].requires_grad:
        torch.autograd.grad(results["loss"], leaves, allow_unused=True)


def try_calls(op: Op, backend: str, calls: int) -> None:
    first = int(SEED) * 10**6
    for seed in range(first, first + calls):
        try:
            call(op, backend, seed)
        except CLEAN:
            continue
        except Exception as error:
            if Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(TESTS):
                continue  # the case itself reads the argument, such as factors of results
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


def run(backend: str, *arguments: str) -> None:
    """Runs pytest on a backend, perhaps under the sanitizers, and fails with its report or the end of its output."""
    environment = os.environ | {"PYTHONPATH": f"{build.ROOT}:{build.ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    environment["SEED"] = SEED
    code = "import grpo_kernels, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    if backend.endswith("-sanitized"):
        environment |= sanitized.environment()
        code = f"import os; del os.environ['LD_PRELOAD']; {code}"  # not for the processes that this one starts
    if backend == "cpu-sanitized":
        environment["PYTHONPATH"] = f"{sanitized.package()}:{environment['PYTHONPATH']}"
    if backend == "cuda-sanitized":
        environment["EMULATION"] = "sanitized"
    command = [sys.executable, "-c", code, "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    done = subprocess.run(command, env=environment, cwd=build.ROOT, capture_output=True, text=True)
    reports = REPORT.findall(done.stderr)
    why = "\n".join(reports[:3]) or (done.stdout + done.stderr)[-9000:]
    assert done.returncode == 0 and not reports, f"SEED={SEED}\n{why}"


@pytest.mark.parametrize("backend", ["cpu", "cpu-sanitized"])
def test_random_valid_calls(backend: str) -> None:
    files = [str(path) for path in sorted((build.ROOT / "tests" / "ops").glob("*/test_backends.py"))]
    profile = f"--hypothesis-profile={backend.replace('cpu', 'nightly')}"
    run(backend, *files, profile, f"--hypothesis-seed={SEED}", "-k", f"({RANDOM}) and cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_with_a_random_change(backend: str) -> None:
    run(backend, __file__, "--nightly", "-k", f"changed_calls and {backend.partition('-')[0]}")


@pytest.mark.skipif("SEED" not in os.environ, reason="run by test_calls_with_a_random_change, or with a SEED")
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("backend", ["cpu", "cuda", "triton"])
def test_changed_calls(backend: str, name: str) -> None:
    if backend not in OPS[name].supports:
        pytest.skip("not implemented for this op")
    try_calls(OPS[name], backend, CALLS if backend == "cpu" else CALLS_OF_SLOW)
