"""Ahead-of-time compilation of the Triton kernels for every supported GPU, without needing one.

The tool compiles in its own process throughout: other tests set TRITON_INTERPRET, which is fixed for a
process once triton is imported. For the same reason this module must not import triton itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools import aot_compile

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "aot_compile.py"
OPS_DIR = ROOT / "grpo_kernels" / "ops"
OPS = sorted(path.name for path in OPS_DIR.iterdir() if (path / "triton.py").exists())
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]

PRELUDE = """
import os
import triton
import triton.language as tl
from grpo_kernels.aot import AotCase

@triton.jit
def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(y_ptr + offsets, x * factor / tl.sum(x, 0), mask=offsets < n)

@triton.jit
def big_tile(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(y_ptr + offsets, x / tl.sum(x, 0))

TYPES = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32", "factor": "fp32"}
POINTERS = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
"""


@dataclass
class Outcome:
    status: int
    stdout: str
    stderr: str
    rows: list[dict[str, Any]]


@pytest.fixture
def compile_module(tmp_path: Path) -> Any:
    """Writes a kernel module and runs the tool on it."""

    def run(body: str, *targets: str, options: tuple[str, ...] = ()) -> Outcome:
        module = tmp_path / "sample_op.py"
        module.write_text(PRELUDE + body)
        return run_tool(tmp_path, "--op", str(module), *(["--target", *targets] if targets else []), *options)

    return run


def run_tool(tmp_path: Path, *args: str) -> Outcome:
    report = tmp_path / "report.json"
    # The tool must work for a caller with Triton's interpreter enabled and without a GPU.
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TOOL), *args, "--json", str(report)]
    # The working directory is not the checkout root: the tool must find the package itself.
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    rows = json.loads(report.read_text())["rows"] if report.exists() else []
    return Outcome(done.returncode, done.stdout, done.stderr, rows)


@pytest.mark.full
def test_a_spill_needs_a_reason(compile_module: Any) -> None:
    outcome = compile_module(
        """
few = {"maxnreg": 32, "waves_per_eu": 8}
spill = {"num_warps": 1, "aligned": ("x_ptr", "y_ptr"), "options": few}
AOT_SIGNATURES = (
    AotCase(big_tile, POINTERS, {"BLOCK": 8192}, label="strict", **spill),
    AotCase(big_tile, POINTERS, {"BLOCK": 8192}, label="excused", spills_ok="The test wants it to.", **spill),
)
"""
    )
    assert outcome.status == 1
    assert len(outcome.rows) == 2 * len(TARGETS)
    for row in outcome.rows:
        used = row["resources"]
        assert used["spill_store_bytes"] or used["spilled_vgprs"]
        assert bool(row["error"]) == (row["label"] == "strict")
        assert (f"sample_op: big_tile[{row['label']}] on {row['target']}: spills" in outcome.stderr) == (
            row["label"] == "strict"
        )
    kernel = 'big_tile, POINTERS, {"BLOCK": 8192}, options={"maxnreg": 32}'
    allowed = compile_module(f"AOT_SIGNATURES = (AotCase({kernel}),)\n", "sm_90", options=("--allow-spills",))
    assert allowed.status == 0 and "spills ok" in allowed.stdout


@pytest.mark.full
def test_a_broken_kernel_is_named_and_hides_no_other(compile_module: Any) -> None:
    outcome = compile_module(
        """
class Abort(dict):
    # Ends the compiling process the way an LLVM assertion does.
    def __iter__(self):
        os.abort()

@triton.jit
def wrong_type(x_ptr, y_ptr):
    tl.store(y_ptr, x_ptr * y_ptr)

@triton.jit
def wrong_syntax(x_ptr, y_ptr):
    try:
        tl.store(y_ptr, tl.load(x_ptr))
    except ValueError:
        pass

AOT_SIGNATURES = (
    AotCase(wrong_type, POINTERS, {}),
    AotCase(wrong_syntax, POINTERS, {}),
    AotCase(big_tile, POINTERS, Abort(BLOCK=64), label="aborts"),
    AotCase(big_tile, POINTERS, {"BLOCK": 64}, label="good"),
)
""",
        "sm_80",
        "gfx942",
    )
    assert outcome.status == 1
    for name in ("wrong_type", "wrong_syntax", "big_tile[aborts]"):
        for target in ("sm_80", "gfx942"):
            assert f"FAIL sample_op: {name} on {target}: " in outcome.stderr
    assert "ended abnormally (exit code -6)" in outcome.stderr
    assert [row["error"] for row in outcome.rows if row["label"] == "good"] == ["", ""]


def test_missing_numbers_are_an_error_rather_than_zero() -> None:
    with pytest.raises(RuntimeError, match="did not report"):
        aot_compile.parse_ptxas("ptxas info : Used 40 registers")
    with pytest.raises(RuntimeError, match="vgpr_count"):
        aot_compile.parse_amdgcn("    .sgpr_count: 19\n")


def test_shared_memory_is_limited_by_the_target() -> None:
    case = aot_compile.AotCase(None, {}, {})
    used = aot_compile.Resources(registers=32, scratch_bytes=0, shared_bytes=200 * 1024, binary_bytes=1)
    refused = [name for name in TARGETS if "shared memory" in aot_compile.verdict(case, name, used)]
    assert refused == ["sm_80", "gfx942"]


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_op_compiles_for_every_target(op: str, target: str, tmp_path: Path) -> None:
    outcome = run_tool(tmp_path, "--op", op, "--target", target)
    # a module that declares no cases fails here, too, because the tool rejects it
    assert outcome.status == 0, outcome.stdout + outcome.stderr
    assert {row["target"] for row in outcome.rows} == {target}
    assert all(row["resources"]["registers"] > 0 and f"{row['kernel']} " in outcome.stdout for row in outcome.rows)


def test_rows_of_logits_are_loaded_16_bytes_at_a_time(tmp_path: Path) -> None:
    """A hint of alignment that is lost costs a third to a half of the speed, and nothing else."""
    outcome = run_tool(tmp_path, "--op", "token_logprobs", "--target", "sm_90")
    assert outcome.status == 0, outcome.stdout + outcome.stderr
    widths = {row["label"]: row["resources"]["widest_load"] for row in outcome.rows}
    assert widths and set(widths.values()) == {16}, widths
