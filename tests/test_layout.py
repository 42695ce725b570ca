"""The house rules that can be read off the sources: who may import whom, common stems, sizes, environment variables."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "grpo_kernels"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))

# What a part of the package may import of the package; parts are folders or top-level modules.
ALLOWED = {
    "functional": {"checks", "config", "dispatch", "functional", "ops", "segments"},
    "ops": {"dispatch", "_native", "ops"},
    "reference": {"reference", "segments"},
    "triton": {"triton", "segments"},
    "native": {"_native", "segments"},
    "segments": set(),
    "config": {"config"},
    "checks": set(),
    "dispatch": {"capability", "checks"},
    "capability": {"_native"},
    "_native": set(),
    "integrations": {"grpo_kernels", "config", "functional", "integrations"},
    "__init__": {"functional", "config", "dispatch"},
    "__main__": {"_native", "grpo_kernels"},
}
# Third-party packages that the package may import at the top of a module.
OUTSIDE = {"torch"}
OPS = sorted(p.stem for p in (PACKAGE / "ops").glob("*.py") if p.stem != "registry" and p.stem[0] != "_")


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # "from grpo_kernels import x" imports a submodule or a public name
            names = [alias.name for alias in node.names] if node.module == "grpo_kernels" else []
            found |= {f"{node.module}.{name}" for name in names} or {str(node.module)}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path: Path) -> None:
    part = part_of(path)
    for name in imports_of(path):
        head, *rest = name.split(".")
        if head == "grpo_kernels":
            target = rest[0] if rest else "grpo_kernels"
            assert target in ALLOWED[part], f"{part} must not import {name}"
        elif part not in ("integrations", "triton"):
            is_standard = head in sys.stdlib_module_names
            assert is_standard or head in OUTSIDE, f"{part} must not import {name}"


def test_import_rule_sees_a_forbidden_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from grpo_kernels.triton import group_advantages\n    import numpy.linalg\n")
    assert imports_of(bad) == {"grpo_kernels.triton", "numpy.linalg"}
    assert "triton" not in ALLOWED["functional"]


@pytest.mark.parametrize("op", OPS)
def test_every_layer_of_an_op_has_its_name(op: str) -> None:
    of_backend = {
        "reference": [f"grpo_kernels/reference/{op}.py"],
        "triton": [f"grpo_kernels/triton/{op}.py"],
        "cpu": [f"csrc/cpu/{op}.cpp"],
        "cuda": [f"csrc/cuda/{op}.cu", f"grpo_kernels/native/{op}.py"],
    }
    module = importlib.import_module(f"grpo_kernels.ops.{op}")
    # an op that is built on others has no kernels of its own
    compiled = [] if hasattr(module, "BUILT_ON") else [file for name in module.SUPPORTS for file in of_backend[name]]
    tested = [f"tests/ops/test_{op}.py", f"benchmarks/cases/{op}.py", f"docs/ops/{op}.md"]
    for file in (f"grpo_kernels/functional/{op}.py", *compiled, *tested):
        assert (ROOT / file).exists(), f"{op} lacks {file}"


def test_some_op_was_found() -> None:
    assert "group_advantages" in OPS


def test_torch_free_headers_include_the_standard_library_only() -> None:
    headers = list((ROOT / "csrc/include").rglob("*.h"))
    assert headers
    for header in headers:
        for included in re.findall(r'#include [<"]([^>"]+)[>"]', header.read_text()):
            standard = "." not in included or included in ("math.h", "stdint.h", "string.h")
            assert standard or included.startswith("grpo_kernels/"), f"{header} includes {included}"


def tracked(*suffixes: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if name.endswith(suffixes) and (ROOT / name).exists()]


def test_files_and_functions_stay_small() -> None:
    for path in tracked(".py", ".cpp", ".cu", ".cuh", ".h"):
        text = path.read_text()
        assert text.count("\n") <= 500, f"{path} has {text.count(chr(10))} lines"
        if path.suffix != ".py":
            continue
        limit = 90 if "triton" in path.parts or "reference" in path.parts else 60
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= limit, f"{path}: {node.name} has {lines} lines, at most {limit}"


def test_only_two_environment_variables_of_our_own() -> None:
    own = {
        name
        for path in tracked(".py", ".cpp", ".h", ".cu")
        for name in re.findall(r"GRPO_KERNELS_[A-Z]+", path.read_text())
    }
    compile_time = {"GRPO_KERNELS_EMULATE"}
    assert own - compile_time == {"GRPO_KERNELS_BACKEND", "GRPO_KERNELS_BUILD"}


def test_importing_the_package_imports_torch_alone() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import grpo_kernels; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(n for n in new if n not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['grpo_kernels']"
