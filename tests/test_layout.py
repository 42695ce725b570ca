"""Rules that can be checked on the sources: imports by layer, files by op, functions, environment variables."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "grpo_kernels"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))

# A file's name is its layer; other files of an op are public functions. A layer imports itself and those before it.
LAYERS = ("names", "reference", "arguments", "op", "public")
LAYER_OF = {
    **dict.fromkeys(("config", "trl_fields", "verl_fields", "sizes"), "names"),
    **dict.fromkeys(("reference", "losses", "head", "divergence", "by_rollout"), "reference"),
    **dict.fromkeys(("arguments", "teacher"), "arguments"),
    **dict.fromkeys(("registration", "products", "objectives", "loop", "autograd", "plan"), "op"),
    "triton": "triton",
    "aot": "aot",
}
# Top-level modules of the package that each layer of an op may import.
SHARED = {
    "names": {"checks", "plans"},
    "reference": {"checks", "groups", "inputs", "plans"},
    "triton": set(),
    "aot": {"aot"},
    "arguments": {"checks"},
    "op": {"registry", "groups", "inputs", "plans", "shared_positions"},
    "public": {"backends", "checks", "groups", "rollouts", "shared_positions"},
}
# Third-party packages that modules may import at the top.
OUTSIDE = {"torch", "typing_extensions"}  # which torch requires
OPS = sorted(p.parent.name for p in (PACKAGE / "ops").glob("*/__init__.py"))
# Files of an op for each of its implementations.
FILES_OF = {
    "reference": ("grpo_kernels/ops/{op}/reference.py", "grpo_kernels/ops/{op}/reference"),
    "triton": ("grpo_kernels/ops/{op}/triton.py",),
    "cpu": ("csrc/{op}/cpu.cpp",),
    "cuda": ("csrc/{op}/cuda.cu",),
}


def layer_of(parts: tuple[str, ...]) -> str:
    """Layer of a module below grpo_kernels/ops/<op>."""
    return LAYER_OF.get(parts[0], "public") if parts else "public"


def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at any level, also inside functions and for type checkers."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                submodules = [root.joinpath(*inner.split(".")) for root in (ROOT, ROOT / "python")]
                is_module = any(each.is_dir() or each.with_suffix(".py").exists() for each in submodules)
                names.add(inner if is_module else str(node.module))
    return names


def is_allowed(importer: tuple[str, ...], imported: tuple[str, ...]) -> bool:
    """Whether one module of the package may import another; both are given without the leading grpo_kernels."""
    if importer[0] == "integrations":
        # public names, their own folder, and modules that translate the fields of TRL's and verl's configs
        return not imported or imported[0] in ("checks", *importer[:1]) or imported[-1].endswith("_fields")
    if importer[0] != "ops":
        return True  # by the test of circles
    layer = layer_of(importer[2:])
    if not imported:
        return False
    if imported[0] != "ops":
        return imported[0] in SHARED[layer]
    other = layer_of(imported[2:])
    if layer in ("triton", "aot") or other in ("triton", "aot"):
        is_shared = imported[1:] == ("token_logprobs", "triton")  # whose rows a support's kernels measure
        return other == "triton" and (layer == "aot" or (layer == "triton" and is_shared))
    if layer == "names" and imported[1] == importer[1]:  # LossConfig has the rows of a table of formulas
        return other == layer or imported[2:] == ("losses",)
    return LAYERS.index(other) <= LAYERS.index(layer)


def parts_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path: Path) -> None:
    importer = parts_of(path)
    for name in imports_of(path):
        head, *rest = name.split(".")
        if head == "grpo_kernels":
            assert is_allowed(importer, tuple(rest)), f"{'.'.join(importer)} must not import {name}"
        elif importer[0] != "integrations" and not {"triton", "aot"} & {*importer}:
            is_standard = head in sys.stdlib_module_names
            assert is_standard or head in OUTSIDE, f"{'.'.join(importer)} must not import {name}"


TRAINER_FILES = sorted((ROOT / "python" / "grpo_trainer").rglob("*.py"))


@pytest.mark.parametrize(("root", "files"), [(ROOT, FILES), (ROOT / "python", TRAINER_FILES)], ids=["ops", "trainer"])
def test_no_module_imports_itself_through_others(root: Path, files: list[Path]) -> None:
    graph = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    edges: dict[str, list[str]] = {
        name: [
            other
            for other in imports_of(path) & graph.keys()
            # a package may import the modules in it, and those may import it
            if not f"{name}.".startswith(f"{other}.") and not other.startswith(f"{name}.")
        ]
        for name, path in graph.items()
    }
    assert sum(map(len, edges.values())) > len(files)
    graphlib.TopologicalSorter(edges).prepare()  # raises an error with the modules of a circle


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_its_files(op: str) -> None:
    files = [(f"tests/ops/{op}",)]
    registration = PACKAGE / "ops" / op / "registration.py"
    if registration.exists():
        supports = importlib.import_module(f"grpo_kernels.ops.{op}.registration").SUPPORTS
        computed = {"cpu"} if op == "sampled_support" else set()  # by the reference, as a CPU has no kernel
        files += [tuple(name.format(op=op) for name in FILES_OF[each]) for each in supports.keys() - computed]
        files += [(f"benchmarks/cases/{op}.py",), (f"docs/ops/{op}.md",)]
    for choices in files:
        assert any((ROOT / name).exists() for name in choices), f"{op} lacks {' or '.join(choices)}"


def includes_of(source: Path) -> set[str]:
    """Includes of a file of csrc, direct and through other files of csrc."""
    result: set[str] = set()
    pending = [source]
    while pending:
        for name in re.findall(r'#include [<"]([^>"]+)[>"]', pending.pop().read_text()):
            if name not in result and (ROOT / "csrc" / name).exists():
                pending.append(ROOT / "csrc" / name)
            result.add(name)
    return result


@pytest.mark.parametrize("pattern", ["*/simd.cpp", "*/*.cu"])
def test_kernels_do_not_include_torch(pattern: str) -> None:
    """torch's headers would be compiled for each instruction set, and take nvcc a minute."""
    sources = list((ROOT / "csrc").glob(pattern))
    assert sources
    for source in sources:
        torch = {name for name in includes_of(source) if name.startswith(("torch/", "ATen/", "c10/"))}
        assert not torch, f"{source} includes {torch}"


def tracked(*suffixes: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if name.endswith(suffixes) and (ROOT / name).exists()]


def body_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its signature and docstring, which have one line per parameter."""
    first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
    return (function.end_lineno or 0) - first.lineno + 1


def test_functions_stay_small() -> None:
    for path in tracked(".py"):
        limit = 90 if {"triton", "reference", "aot"} & {*path.parts, path.stem} else 60
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                lines = body_lines(node)
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


@pytest.mark.parametrize("path", TRAINER_FILES, ids=lambda path: path.stem)
def test_the_trainer_uses_public_names_of_the_kernels_only(path: Path) -> None:
    public = set(importlib.import_module("grpo_kernels").__all__)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            inner = {alias.name for alias in node.names if alias.name.startswith("grpo_kernels.")}
            assert not inner, f"{path} imports {inner}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "grpo_kernels":
            names = {alias.name for alias in node.names}
            assert node.module == "grpo_kernels" and names <= public, f"{path} imports {names} of {node.module}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id not in ("gk", "grpo_kernels") or node.attr in public, f"{path} uses gk.{node.attr}"
