"""Cuts functions of a trainer live out of its sources, which are unpacked and never installed or copied.

    source = Source("openrlhf", "0.11.2")              # from the package index, unpacked once into .sources/
    losses = source.cut("openrlhf/models/loss.py", "aggregate_loss", "PolicyLoss", torch=torch)
    losses.PolicyLoss(...)

GRPO_SOURCE_OPENRLHF names another version of the package, or the folder of a checkout. Cut code keeps its file and its
line numbers, and is counted: `lines` is how much of a column is the trainer's own.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("GRPO_SOURCES", Path(__file__).parent / ".sources"))
_FLAGS = annotations.compiler_flag  # so that names in annotations need not exist


class Source:
    """The sources of one version of a package, or a checkout."""

    def __init__(self, package: str, version: str = "") -> None:
        """Takes the version that the adapter was written for; without one, the user names a checkout."""
        variable = f"GRPO_SOURCE_{package.upper().replace('-', '_')}"
        chosen = os.environ.get(variable, version)
        if not chosen:
            raise FileNotFoundError(f"{variable} must name a checkout of {package}, which has no package, got nothing")
        is_checkout = Path(chosen).is_dir()
        self.root = Path(chosen) if is_checkout else _unpacked(package, chosen)
        self.version = _commit(self.root) if is_checkout else chosen
        self.lines = 0

    def cut(self, path: str, *names: str, **scope: Any) -> types.SimpleNamespace:
        """Executes definitions of a file, and of classes in it as `Class.method`, in a scope; returns them by name."""
        module = self._module(path, scope)
        found = dict(_definitions(self._tree(path).body))
        missing = [name for name in names if name not in found]
        if missing:
            raise KeyError(f"{path} of version {self.version} must define {', '.join(missing)}")
        body = [_undecorated(found[name]) for name in names]
        self._execute(body, path, module)
        return types.SimpleNamespace(
            **{name.rpartition(".")[2]: vars(module)[name.rpartition(".")[2]] for name in names}
        )

    def has(self, path: str, name: str) -> bool:
        """Whether this version has the file, and it defines a name."""
        return (self.root / path).exists() and name in dict(_definitions(self._tree(path).body))

    def statements(
        self, path: str, function: str, first: str, last: str, parameters: str, result: str, **scope: Any
    ) -> Any:
        """A function of the statements of another, from one that begins with a text to one, beside it, that does."""
        for node in ast.walk(self._tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != function:
                continue
            for block in _blocks(node):
                texts = [ast.unparse(statement) for statement in block]
                starts = [i for i, text in enumerate(texts) if text.startswith(first)]
                ends = [i for i, text in enumerate(texts) if text.startswith(last) and starts and i >= starts[0]]
                if ends:
                    made = ast.parse(f"def statements({parameters}):\n    return {result}").body[0]
                    assert isinstance(made, ast.FunctionDef)
                    made.body[:0] = block[starts[0] : ends[0] + 1]
                    module = self._module(path, scope)
                    self._execute([made], path, module, block[starts[0] : ends[0] + 1])
                    return vars(module)["statements"]
        raise KeyError(f"{path} of version {self.version} must have {first!r} to {last!r} in {function}")

    def where(self, path: str, text: str) -> str:
        """File and line of a text, or the file if this version does not have it."""
        lines = (self.root / path).read_text().splitlines()
        found = [str(number) for number, line in enumerate(lines, 1) if text in line]
        return ":".join([path, *found[:1]])

    def _tree(self, path: str) -> ast.Module:
        return ast.parse((self.root / path).read_text())

    def _module(self, path: str, scope: dict[str, Any]) -> types.ModuleType:
        """A module for the definitions, since dataclasses look theirs up."""
        module = types.ModuleType(f"cut_{len(sys.modules)}_{Path(path).stem}")
        sys.modules[module.__name__] = module
        vars(module).update(scope)
        return module

    def _execute(self, body: list[Any], path: str, module: types.ModuleType, counted: list[Any] | None = None) -> None:
        tree = ast.fix_missing_locations(ast.Module(body, []))
        exec(compile(tree, str(self.root / path), "exec", flags=_FLAGS), vars(module))
        self.lines += sum(node.end_lineno - node.lineno + 1 for node in counted or body)


def _commit(root: Path) -> str:
    """The commit of a checkout, and its day; the name of any other folder."""
    if not (root / ".git").exists():
        return root.name
    command = ["git", "-C", str(root), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """Functions, classes, their methods, and assigned names, by name."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{name}", inner) for name, inner in _definitions(node.body))


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of statements in a node, the outer ones first."""
    for inner in ast.walk(node):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(inner, field, None)
            if isinstance(block, list):
                yield block


def _undecorated(node: Any) -> Any:
    """The definition without decorators but those that make it what it is."""
    kept = ("staticmethod", "classmethod", "property", "dataclass")
    for inner in ast.walk(node):
        if hasattr(inner, "decorator_list"):
            inner.decorator_list = [each for each in inner.decorator_list if ast.unparse(each).startswith(kept)]
    return node


def _unpacked(package: str, version: str) -> Path:
    """The folder with the files of a wheel, which is fetched if it is not there."""
    folder = FOLDER / f"{package}-{version}"
    if not folder.exists():
        target = FOLDER / "wheels"
        command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(target)]
        subprocess.run([sys.executable, "-m", "pip", *command, f"{package}=={version}"], check=True)
        (wheel,) = target.glob(f"{package.replace('-', '_')}-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    (data,) = [*folder.glob("*.data/purelib"), folder][:1]
    return data
