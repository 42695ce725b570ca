"""Properties of the Triton kernels alone: a new length, stride or coefficient does not recompile them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.emulation.build import ROOT

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

# Runs in its own process: here, kernels are interpreted and expose no parameters.
CODE = """
from grpo_kernels.ops.token_logprobs import triton as op
for kernel in (op._forward_kernel, op._backward_kernel):
    for p in kernel.params:
        fixed = p.is_constexpr or p.name.endswith("_ptr") or p.do_not_specialize
        assert fixed, f"{kernel.__name__}: {p.name} is specialised"
        assert p.is_constexpr or p.name.endswith("_ptr") or p.annotation_type, f"{p.name} has the type of its value"
    print(kernel.__name__, *(p.name for p in kernel.params if p.is_constexpr))
"""


def test_no_run_time_argument_is_specialised() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # each has at most two values, except for the block size of a small vocabulary
    assert done.stdout.split("\n")[:2] == [
        "_forward_kernel CAPPED ALIGNED BLOCK",
        "_backward_kernel CAPPED ALIGNED INPLACE BLOCK",
    ]
