#!/usr/bin/env python3
"""Write the ops in the layout of the kernels hub, from which `kernels.get_kernel` loads them.

    python tools/hub_kernel.py OUTPUT                      # the universal variants: Triton and plain torch
    python tools/hub_kernel.py OUTPUT --compiled cpu cuda  # and those with kernels of this machine's platform
    python tools/hub_kernel.py OUTPUT --project            # a project for kernel-builder, of the universal variants

A variant is a copy of the package under a name of its own, which is also the namespace of its ops: several versions and
an installed package load into one process. Absolute imports become relative ones for this purpose. The adapters for TRL
and verl stay with the installed package, whose entry points they need.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "grpo_kernels"
LEFT_OUT = ("integrations", "__main__.py")
UNIVERSAL = ("cpu", "cuda", "rocm", "xpu")  # where Triton or plain torch runs
STABLE_ABI = "211"  # torch 2.11, as TORCH_TARGET_VERSION in CMakeLists.txt
VERSION = 0  # by the hub's convention not yet for production; a number per incompatible change of __all__


def relative_imports(source: str, package: str) -> str:
    """The source of a module in `package`, with the imports of the whole package as relative ones."""
    dots = "." * len(package.split("."))
    return re.sub(rf"^( *from ){PACKAGE}\b\.?(?=.* import )", rf"\1{dots}", source, flags=re.MULTILINE)


def sources() -> dict[str, str]:
    """The relocatable modules by path below the package."""
    modules = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        inner = path.relative_to(ROOT / PACKAGE)
        if inner.parts[0] not in LEFT_OUT:
            package = ".".join(path.parent.relative_to(ROOT).parts)
            modules[inner.as_posix()] = relative_imports(path.read_text(), package)
    return modules


def write_sources(folder: Path, modules: dict[str, str]) -> None:
    for inner, source in modules.items():
        path = folder / inner
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def unique_id(modules: dict[str, str]) -> str:
    """A name for the content of this version, kernels included."""
    digest = hashlib.sha256(json.dumps(modules).encode())
    for path in [ROOT / "CMakeLists.txt", *sorted((ROOT / "csrc").rglob("*"))]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:7]


def write_variant(folder: Path, modules: dict[str, str], identifier: str) -> None:
    write_sources(folder, modules)
    # Early versions of `kernels` load this module.
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").write_text(
        "import importlib.util\nimport sys\nfrom pathlib import Path\n\n"
        f'_name = "{identifier}"\n'
        "if _name not in sys.modules:\n"
        '    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).parent.parent / "__init__.py")\n'
        "    sys.modules[_name] = importlib.util.module_from_spec(_spec)\n"
        "    _spec.loader.exec_module(sys.modules[_name])\n"
        "globals().update({name: getattr(sys.modules[_name], name) for name in sys.modules[_name].__all__})\n"
        "__all__ = sys.modules[_name].__all__\n"
    )


def write_metadata(folder: Path, identifier: str, backend: dict[str, object]) -> None:
    """Describes the variant, with a digest of each of its files."""
    files = {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    metadata = {
        "name": PACKAGE.replace("_", "-"),
        "id": identifier,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": files},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def build_libraries(folder: Path, identifier: str, backend: str) -> dict[str, str]:
    """Compiles the kernels into the variant and returns the facts of the build."""
    build = folder.parent / f".cmake-{backend}"
    definitions = {
        "Python_EXECUTABLE": sys.executable,
        "CMAKE_BUILD_TYPE": "Release",
        "GRPO_NAMESPACE": identifier,
        "GRPO_OUTPUT_DIR": folder,
        "GRPO_WITH_CUDA": "ON" if backend == "cuda" else "OFF",
    }
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *(f"-D{k}={v}" for k, v in definitions.items())]
    configure += os.environ.get("CMAKE_ARGS", "").split()
    environment = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    subprocess.run(configure, check=True, env=environment, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", build], check=True, env=environment, stdout=sys.stderr)
    text = (build / f"{PACKAGE}_{backend}" / "build_facts.h").read_text()
    shutil.rmtree(build)
    return {name.lower(): value for name, value in re.findall(r'#define GRPO_(\w+) "(.*)"', text)}


def capabilities(architectures: str) -> list[str]:
    """CMake's list of architectures as the hub writes it: 80-real;120 is 8.0, 12.0+PTX."""
    return [
        f"{number[:-1]}.{number[-1]}" + ("" if kind == "-real" else "+PTX")
        for number, kind in re.findall(r"(\d+)(-real)?", architectures)
    ]


def write_build(output: Path, compiled: Sequence[str]) -> list[Path]:
    """Writes OUTPUT/build with a folder for each variant, and returns these folders."""
    modules, build = sources(), output / "build"
    version, folders = unique_id(modules), []
    for backend in UNIVERSAL:
        folder, identifier = build / f"torch-{backend}", f"_{PACKAGE}_{backend}_{version}"
        write_variant(folder, modules, identifier)
        write_metadata(folder, identifier, {"type": backend})
        folders.append(folder)
    for backend in compiled:
        partial, identifier = build / f".{backend}", f"_{PACKAGE}_compiled_{backend}_{version}"
        write_variant(partial, modules, identifier)
        facts = build_libraries(partial.resolve(), identifier, backend)
        is_cuda = backend == "cuda"
        architectures = {"archs": capabilities(facts["cuda_architectures"])} if is_cuda else {}
        write_metadata(partial, identifier, {"type": backend, **architectures})
        runtime = f"cu{''.join(facts['cuda_version'].split('.')[:2])}" if is_cuda else backend
        machine = f"{platform.machine()}-{platform.system().lower()}"
        folders.append(partial.rename(build / f"torch-stable-abi{STABLE_ABI}-{runtime}-{machine}"))
    return folders


def write_project(output: Path) -> None:
    """Writes what kernel-builder builds the universal variants from."""
    backends = ", ".join(f'"{backend}"' for backend in UNIVERSAL)
    (output / "build.toml").write_text(
        f'[general]\nname = "{PACKAGE.replace("_", "-")}"\nversion = {VERSION}\nedition = 5\nlicense = "Apache-2.0"\n'
        f"backends = [{backends}]\n\n[torch-noarch]\n"
    )
    write_sources(output / "torch-ext" / PACKAGE, sources())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a new folder, or an empty one")
    parser.add_argument(
        "--compiled", nargs="+", choices=("cpu", "cuda"), default=[], help="compile these kernels; default: none"
    )
    parser.add_argument("--project", action="store_true", help="write the sources for kernel-builder instead")
    options = parser.parse_args(argv)
    if options.project and options.compiled:
        parser.error("--project has no compiled variants, which kernel-builder does not build")
    if options.output.exists() and any(options.output.iterdir()):
        parser.error(f"OUTPUT must be empty, got {options.output} with {next(options.output.iterdir()).name}")
    options.output.mkdir(parents=True, exist_ok=True)
    if options.project:
        write_project(options.output)
    else:
        print("\n".join(map(str, write_build(options.output, options.compiled))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
