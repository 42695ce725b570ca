#!/usr/bin/env python3
"""Compile the project's Triton kernels ahead of time and report what each one costs.

    python tools/aot_compile.py [--target sm_90 ...] [--op NAME ...] [--json FILE] [--allow-spills]

Neither a GPU nor a driver is needed. The cases come from ``AOT_SIGNATURES`` in
``grpo_kernels/ops/<op>/aot.py`` (see ``grpo_kernels/aot.py``). The exit status is 1 if a case does not
compile, needs more shared memory than its target has, or spills registers without saying why it may
(``spills_ok``). ``--allow-spills`` only reports spills: their number depends on the version of Triton,
and the tests hold it for the pinned one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_kernels.aot import AotCase  # noqa: E402 - found through the line above

OPS_DIR = ROOT / "grpo_kernels" / "ops"


class Target(NamedTuple):
    backend: str
    arch: int | str
    warp_size: int
    # Triton checks this only at launch, so an over-sized kernel would otherwise compile and look fine here.
    max_shared: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "sm_100": Target("cuda", 100, 32, 227 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses; a field that the target's tool chain does not report is None."""

    registers: int
    scratch_bytes: int
    shared_bytes: int
    binary_bytes: int
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    scalar_registers: int | None = None
    spilled_vgprs: int | None = None
    spilled_sgprs: int | None = None
    widest_load: int | None = None  # bytes, from global memory

    @property
    def spills(self) -> bool:
        counts = (self.spill_store_bytes, self.spill_load_bytes, self.spilled_vgprs, self.spilled_sgprs)
        return any(counts)


@dataclass(frozen=True)
class Row:
    """The outcome of one case on one target; ``error`` is empty when the case is accepted."""

    op: str
    kernel: str
    label: str
    target: str
    seconds: float
    resources: Resources | None
    error: str = ""
    spills_ok: str = ""

    @property
    def where(self) -> str:
        label = f"[{self.label}]" if self.label else ""
        return f"{self.op}: {self.kernel}{label} on {self.target}"


def prepare_environment() -> None:
    """Make the result independent of the caller's Triton switches; must run before triton is imported.

    TRITON_INTERPRET would replace the kernels by interpreted ones that cannot be compiled, and the debugging
    switches (architecture or IR overrides, instrumentation, caches) would change what is measured. Where the
    tools are, and the documented default for fused multiply-add, are the user's to choose.
    """
    for name in list(os.environ):
        if name.startswith("TRITON_") and not name.endswith("_PATH") and name != "TRITON_DEFAULT_FP_FUSION":
            del os.environ[name]
    os.environ.pop("DISABLE_PTXAS_OPT", None)
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")


def find_ops() -> list[str]:
    """Names of the ops with Triton kernels, in alphabetical order."""
    return sorted(path.parent.name for path in OPS_DIR.glob("*/triton.py"))


def collect(op: str) -> tuple[str, tuple[AotCase, ...]]:
    """Short name and declared cases of one op: a path ending in .py, or a name from find_ops()."""
    if op.endswith(".py"):
        path = Path(op).resolve()
        sys.path.insert(0, str(path.parent))
        module = importlib.import_module(path.stem)
    else:
        module = importlib.import_module(f"grpo_kernels.ops.{op}.aot")
    cases = getattr(module, "AOT_SIGNATURES", None)
    if not isinstance(cases, tuple) or not cases:
        raise ValueError("the module must declare a non-empty tuple AOT_SIGNATURES")
    return module.__name__.removesuffix(".aot").rpartition(".")[2], cases


def _jit_function(kernel: Any) -> Any:
    """The JITFunction inside any autotune or heuristics wrappers."""
    from triton.runtime.jit import JITFunction

    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    return kernel


def _kernel_name(kernel: Any) -> str:
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", kernel))


def _source(case: AotCase) -> Any:
    """Triton's source object for a case, after checking that the case describes exactly the arguments."""
    from triton.compiler import ASTSource

    kernel = _jit_function(case.kernel)
    names = list(kernel.arg_names)
    declared = {param.name for param in kernel.params if param.is_constexpr}
    typed, constant = set(case.signature), set(case.constexprs)
    problems = {
        "neither in signature nor in constexprs": set(names) - typed - constant,
        "both in signature and in constexprs": typed & constant,
        "declared tl.constexpr but not in constexprs": declared - constant,
        "not an argument of the kernel": (typed | constant) - set(names),
        "aligned, but not a pointer or an integer of the signature": {
            name for name in case.aligned if not case.signature.get(name, "").startswith(("*", "i", "u"))
        },
    }
    lines = [f"{', '.join(sorted(args))}: {text}" for text, args in problems.items() if args]
    if lines:
        raise ValueError("; ".join(lines))
    # Triton wants every argument in declaration order, and refers to hinted ones by position.
    signature = {name: "constexpr" if name in constant else case.signature[name] for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    return ASTSource(fn=kernel, signature=signature, constexprs=dict(case.constexprs), attrs=attrs)


def _options(case: AotCase) -> dict[str, Any]:
    """Compile options of a case. Triton would silently drop one that it does not know."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    known: set[str] = set()
    for target in TARGETS.values():
        known |= set(vars(make_backend(GPUTarget(*target[:3])).parse_options({})))
    unknown = set(case.options) - known
    if unknown:
        raise ValueError(f"unknown option {', '.join(sorted(unknown))}")
    options = dict(case.options) | {"num_warps": case.num_warps}
    return options if case.num_stages is None else options | {"num_stages": case.num_stages}


def parse_ptxas(log: str) -> dict[str, int]:
    """Registers, stack and spill bytes from the output of ``ptxas -v``.

    A kernel that calls functions which are not inlined gets one block of properties for each, so the bytes
    are summed.
    """
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not memory:
        raise RuntimeError(f"ptxas did not report registers and spills:\n{log}")
    stack, stores, loads = (sum(int(block[i]) for block in memory) for i in range(3))
    return {
        "registers": max(registers),
        "scratch_bytes": stack,
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
    }


def parse_amdgcn(assembly: str) -> dict[str, int]:
    """Registers, scratch bytes and spilled registers from the metadata at the end of AMD assembly."""
    keys = {
        "registers": "vgpr_count",
        "scalar_registers": "sgpr_count",
        "spilled_vgprs": "vgpr_spill_count",
        "spilled_sgprs": "sgpr_spill_count",
        "scratch_bytes": "private_segment_fixed_size",
    }
    counts = {}
    for name, key in keys.items():
        values = re.findall(rf"^\s*\.{key}:\s*(\d+)\s*$", assembly, flags=re.MULTILINE)
        if len(values) != 1:
            raise RuntimeError(f"the AMD metadata holds {len(values)} values of .{key}, not one")
        counts[name] = int(values[0])
    return counts


def compile_case(case: AotCase, target_name: str, scratch: str) -> Resources:
    """Compile one case in this process, with the directory ``scratch`` as cache and for temporary files."""
    os.environ["TRITON_CACHE_DIR"] = scratch
    tempfile.tempdir = scratch
    import triton
    from triton.backends.compiler import GPUTarget

    target = TARGETS[target_name]
    # The numbers must come from the very ptxas run that made the binary: its flags differ between versions.
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(_source(case), target=GPUTarget(*target[:3]), options=_options(case))
    if target.backend == "cuda":
        numbers, binary = parse_ptxas(log.getvalue()), compiled.asm["cubin"]
        numbers["widest_load"] = widest_load(compiled.asm["ptx"])
    else:
        numbers, binary = parse_amdgcn(compiled.asm["amdgcn"]), compiled.asm["hsaco"]
    return Resources(shared_bytes=compiled.metadata.shared, binary_bytes=len(binary), **numbers)


def _child(pipe: Connection, case: AotCase, target_name: str, scratch: str) -> None:
    try:
        pipe.send(compile_case(case, target_name, scratch))
    except Exception as error:  # whatever the compiler raises is the result of this case
        pipe.send(f"{type(error).__name__}: {error}")


@functools.cache
def _warm_up() -> None:
    """Do in the parent, once, what every forked child would otherwise spend most of its time on."""
    import triton.compiler.code_generator
    import triton.runtime.cache

    # Hashes all of triton for its cache key; not a documented function, hence the check that it is there.
    triton_key = getattr(triton.runtime.cache, "triton_key", None)
    if triton_key is not None:
        triton_key()


def compile_isolated(case: AotCase, target_name: str) -> Resources | str:
    """Compile one case in a forked process: its resources, or what went wrong.

    LLVM aborts the whole process on some inputs, and one such kernel must not hide the result of the others.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="aot_compile_") as scratch, receiver:
        child = context.Process(target=_child, args=(sender, case, target_name, scratch), daemon=True)
        child.start()
        sender.close()
        try:
            result: Resources | str = receiver.recv()
        except EOFError:
            result = ""
        child.join()
    return result or f"the compiler ended abnormally (exit code {child.exitcode})"


def verdict(case: AotCase, target_name: str, result: Resources | str) -> str:
    """Why a result is not acceptable, or an empty string."""
    if isinstance(result, str):
        return result
    limit = TARGETS[target_name].max_shared
    if result.shared_bytes > limit:
        return f"needs {result.shared_bytes} bytes of shared memory, the target has {limit}"
    if result.spills and not case.spills_ok:
        return f"spills registers ({_spill_text(result)}) and spills_ok gives no reason"
    return ""


def run_case(op: str, case: AotCase, target_name: str) -> Row:
    _warm_up()
    start = time.perf_counter()
    result = compile_isolated(case, target_name)
    return Row(
        op=op,
        kernel=_kernel_name(case.kernel),
        label=case.label,
        target=target_name,
        seconds=round(time.perf_counter() - start, 3),
        resources=None if isinstance(result, str) else result,
        error=verdict(case, target_name, result),
        spills_ok=case.spills_ok,
    )


def _spill_text(used: Resources) -> str:
    if used.spill_store_bytes is None:
        return f"{used.spilled_vgprs}v/{used.spilled_sgprs}s"
    return f"{used.spill_store_bytes}/{used.spill_load_bytes}"


def format_table(rows: Iterable[Row]) -> str:
    header = "op kernel label target regs spill scratch shared binary time status"
    lines: list[Sequence[str]] = [header.split()]
    for row in rows:
        used = row.resources
        numbers = ["-"] * 5
        if used is not None:
            scalar = "" if used.scalar_registers is None else f"v/{used.scalar_registers}s"
            sizes = (used.scratch_bytes, used.shared_bytes, used.binary_bytes)
            numbers = [f"{used.registers}{scalar}", _spill_text(used), *map(str, sizes)]
        accepted = "spills ok" if used is not None and used.spills else "ok"
        status = "FAIL" if row.error else accepted
        name = (row.op, row.kernel, row.label or "-", row.target)
        lines.append((*name, *numbers, f"{row.seconds:.2f}s", status))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    text.append("spill: bytes stored/loaded (NVIDIA), vector/scalar registers (AMD); sizes in bytes")
    return "\n".join(text)


def compile_ops(ops: Iterable[str], targets: Sequence[str], allow_spills: bool = False) -> tuple[list[Row], list[str]]:
    """Compile every case of ``ops`` for ``targets``: one row each, and one line for each failure."""
    rows: list[Row] = []
    failures: list[str] = []
    for op in ops:
        try:
            name, cases = collect(op)
        except Exception as error:  # an op that cannot be loaded must not hide the others
            failures.append(f"{op}: {type(error).__name__}: {error}")
            continue
        if allow_spills:
            cases = tuple(replace(case, spills_ok=case.spills_ok or "--allow-spills") for case in cases)
        new = [run_case(name, case, target) for case in cases for target in targets]
        failures += [f"{row.where}: {row.error}" for row in new if row.error]
        rows += new
    return rows, failures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", action="extend", choices=list(TARGETS), help="default: all")
    parser.add_argument("--op", nargs="+", action="extend", help="module name or path of a .py file; default: all")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--allow-spills", action="store_true", help="report spilled registers without failing")
    args = parser.parse_args(argv)
    prepare_environment()
    ops = args.op or find_ops()
    if not ops:
        print(f"no ops in {OPS_DIR}", file=sys.stderr)
        return 1
    rows, failures = compile_ops(ops, args.target or list(TARGETS), args.allow_spills)
    if rows:
        print(format_table(rows), flush=True)
    for failure in failures:
        print(f"FAIL {failure}", file=sys.stderr)
    if args.json:
        import triton

        report = {"triton": triton.__version__, "rows": [asdict(row) for row in rows], "failures": failures}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failures else 0


# Reading PTX

# Fused on purpose, or inside the math library, whose code is attributed to the line of the call.
_FUSED_ON_PURPOSE = re.compile(r"\b(fma|exp|expm1|log|log1p)f?\(")


def contractions(ptx: str) -> list[str]:
    """Source lines, as ``file:line: text``, whose products PTX fuses into sums or lets ptxas fuse.

    ptxas may contract ``mul`` and ``add``, but never the forms that name a rounding, ``mul.rn`` and ``add.rn``. Lines
    that call ``fma`` or a function of the math library are left out. The PTX needs line information.
    """
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, flags=re.MULTILINE))
    lines = set()
    where = ("", 0)
    for line in ptx.splitlines():
        location = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)
        if location is not None:
            where = (files[location[1]], int(location[2]))
        elif re.match(r"\s*(@\S+\s+)?(fma\.rn(\.ftz)?|(mul|add|sub)(\.ftz)?)\.f(32|64)\b", line):
            lines.add(where)
    texts = [f"{Path(file).name}:{number}: {_source_line(file, number)}" for file, number in sorted(lines)]
    return [text for text in texts if _FUSED_ON_PURPOSE.search(text) is None]


def widest_load(ptx: str) -> int:
    """Bytes of the widest load from global memory; 0 without any."""
    loads = re.findall(r"\bld\.global\.(?:[a-z]+[0-9]*::\w+\.|[a-z]+\.)*(?:v(\d)\.)?[bsuf](\d+)", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0)


def _source_line(file: str, number: int) -> str:
    lines = Path(file).read_text().splitlines() if Path(file).is_file() else []
    return lines[number - 1].strip() if 0 < number <= len(lines) else "not found"


if __name__ == "__main__":
    sys.exit(main())
