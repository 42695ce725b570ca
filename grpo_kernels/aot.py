"""The declaration a kernel module makes so that its kernels can be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AotCase"]


@dataclass(frozen=True)
class AotCase:
    """One specialisation of a Triton kernel that ``tools/aot_compile.py`` compiles for every target.

    The file ``aot.py`` of every op with Triton kernels lists the specialisations that it really launches in a
    module-level tuple ``AOT_SIGNATURES``. This module imports neither torch nor triton, so that declaring
    the cases costs nothing at import time and works where the kernels run in Triton's interpreter.

    Attributes:
        kernel: the ``@triton.jit`` function (one wrapped in ``autotune`` or ``heuristics`` is unwrapped).
        signature: Triton type of each run-time argument by name, such as ``"*fp32"``, ``"i32"``, ``"fp64"``.
        constexprs: value of each compile-time argument by name.
        num_warps: warps per program.
        num_stages: software-pipelining depth; None takes the default of the target's backend.
        label: tells the cases of one kernel apart in the report.
        spills_ok: a sentence that says why this case may spill registers; empty means that it must not.
        aligned: the pointer and integer arguments that are always divisible by 16 at launch.
        options: further launch options, such as ``maxnreg`` (NVIDIA) or ``waves_per_eu`` (AMD); a backend
            ignores those that belong to the other one.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int | None = None
    label: str = ""
    spills_ok: str = ""
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
