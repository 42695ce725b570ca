"""Properties of the compiled Triton kernels of endpoint_segments: no recompilation, and loops that end on AMD."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
pytest.importorskip("triton")


def printed_by(code: str, folder: Path) -> list[str]:
    """Runs code in a process without Triton's interpreter, which hides kernel parameters; returns its output lines."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
def test_no_kernel_is_compiled_again_for_another_number(tmp_path: Path) -> None:
    """Triton must specialize scalar arguments, other than constexpr settings, on their type alone."""
    code = (
        "from triton.runtime.jit import JITFunction\n"
        "from grpo_kernels.ops.endpoint_segments import aot, triton as endpoint_segments\n"
        "for name, kernel in vars(endpoint_segments).items():\n"
        "    if name.endswith('_kernel') and isinstance(kernel, JITFunction):\n"
        "        for p in kernel.params:\n"
        "            if not p.name.endswith('_ptr') and not p.is_constexpr:\n"
        "                fixed = p.annotation_type == 'fp64' or (p.annotation_type and p.do_not_specialize)\n"
        "                print(name, p.name, 'fixed' if fixed else 'FREE')\n"
    )
    lines = printed_by(code, tmp_path)
    assert len({line.split()[0] for line in lines}) == 8, lines
    assert not [line for line in lines if line.endswith("FREE")]


@pytest.mark.full
def test_the_loop_over_segments_ends_on_amd(tmp_path: Path) -> None:
    """Triton 3.7 for AMD folds a while loop's condition to true if constants make it true in the first iteration."""
    code = (
        "import aot_compile, triton\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from grpo_kernels.ops.endpoint_segments import aot, triton as endpoint_segments\n"
        "for case in aot.AOT_SIGNATURES:\n"
        "    target = GPUTarget(*aot_compile.TARGETS['gfx942'][:3])\n"
        "    options = aot_compile._options(case)\n"
        "    text = triton.compile(aot_compile._source(case), target=target, options=options).asm['ttgir']\n"
        "    print(case.kernel.__name__, text.count('scf.while'), text.count('scf.condition(%true'))\n"
    )
    lines = printed_by(code, tmp_path)
    assert [line for line in lines if line.startswith("_cuts_kernel 1 ")] and not [
        line for line in lines if not line.endswith(" 0")
    ], lines
