#!/usr/bin/env python3
"""Let a CUDA build of torch for arm64 be imported without CUDA's libraries, for tests of the CPU kernels.

    python tools/cuda_stand_ins.py TORCH_DIR SYSROOT

From torch 2.11 on, the package index has only the CUDA build for arm64, which needs gigabytes of CUDA's libraries to
load. Replaces libtorch_cuda.so and these libraries in TORCH_DIR/lib by stand-ins: all but one are empty, and that one
defines the symbols that no other library defines. torch.distributed and torch.cuda are made to say that they are not
available, as their Python modules call into the replaced library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PREFIX = "aarch64-linux-gnu-"
NO_DEVICE = 100  # cudaErrorNoDevice
REPLACED = "libtorch_cuda.so"
# They need libtorch_cuda.so, and no CPU op loads them.
REMOVED = (REPLACED, "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")


def run(tool: str, *arguments: str) -> list[str]:
    command = [PREFIX + tool, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def symbols(libraries: Sequence[Path], *, undefined: bool) -> set[str]:
    """Names of the dynamic symbols that the libraries define, or that they must find elsewhere."""
    lines = [line for library in libraries for line in run("nm", "-D", "--without-symbol-versions", str(library))]
    fields = [line.split() for line in lines if not line.endswith(":")]
    return {field[-1] for field in fields if (field[-2] == "U" if undefined else field[-2] not in "Uwv")}


def needed(libraries: Sequence[Path]) -> set[str]:
    lines = [line for library in libraries for line in run("readelf", "-dW", str(library)) if "(NEEDED)" in line]
    return {line.partition("[")[2].rstrip("]") for line in lines}


def assembly(names: Sequence[str]) -> str:
    """C functions that return an error, C++ functions that return a reference to zeros, as torch's Python module calls
    one of these when it is loaded, vtables of zeros, and type_infos with a name, which pybind11 hashes.
    """
    lines = [".comm zeros, 4096, 4096", ".text"]
    for name in names:
        if not name.startswith(("_ZTI", "_ZTV")):
            zeros = "adrp x0, :got:zeros\nldr x0, [x0, :got_lo12:zeros]"
            result = zeros if name.startswith("_Z") else f"mov w0, #{NO_DEVICE}"
            lines += [f".globl {name}", f".type {name}, %function", f"{name}: {result}", "ret"]
    lines.append(".data")
    for name in names:
        if name.startswith("_ZTI"):
            content = f".quad 0, name_of{name}"
            lines += [f'name_of{name}: .asciz "{name.removeprefix("_ZTI")}"']
        elif name.startswith("_ZTV"):
            content = ".zero 1024"
        else:
            continue
        lines += [".balign 8", f".globl {name}", f".type {name}, %object", f"{name}: {content}"]
    return "\n".join([*lines, ""])


def link(path: Path, source: str) -> None:
    subprocess.run(
        [f"{PREFIX}gcc", "-shared", "-nostdlib", "-x", "assembler", "-", "-o", str(path), f"-Wl,-soname,{path.name}"],
        check=True,
        input=source,
        text=True,
    )


def switch_off(torch: Path) -> None:
    """Replaces torch's checks of whether it was compiled with CUDA and with torch.distributed by False."""
    check = re.compile(r'hasattr\(torch\._C, "_(cuda_getDeviceCount|(c10d|rpc|dist_autograd|faulty_agent)_init)"\)')
    count = 0
    for path in [torch / "__init__.py", *(torch / "distributed").rglob("__init__.py"), torch / "cuda" / "__init__.py"]:
        text, replaced = check.subn("False", path.read_text())
        path.write_text(text)
        count += replaced
    if count < 5:
        raise SystemExit(f"cuda_stand_ins: torch must have at least five checks of its features, found {count}")


def main(torch: Path, sysroot: Path) -> None:
    switch_off(torch)
    folder = torch / "lib"
    for name in REMOVED:
        (folder / name).unlink(missing_ok=True)
    libraries = sorted(path for path in [*folder.glob("*.so*"), *torch.glob("_C.*.so")])
    wanted = needed(libraries)
    system = [path for path in sorted(sysroot.rglob("lib*/**/*.so*")) if path.name in wanted]
    missing = wanted - {path.name for path in (*libraries, *system)}
    python = sysroot / "usr" / "bin" / "python3.11"
    undefined = symbols(libraries, undefined=True) - symbols([*libraries, *system, python], undefined=False)
    for name in sorted(missing - {REPLACED}):
        link(folder / name, "")
    link(folder / REPLACED, assembly(sorted(undefined)))
    print(f"stand-ins: {len(undefined)} symbols in {REPLACED}; empty: {' '.join(sorted(missing - {REPLACED}))}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
