"""The public API of the package must match tests/public_api.txt, so every change of it is visible.

python -m tests.test_public_api > tests/public_api.txt
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpo_kernels as gk

LISTED = Path(__file__).parent / "public_api.txt"


def parameters(function: Any) -> str:
    """Names, kinds and defaults of a callable's parameters."""
    signature = inspect.signature(function)
    without_types = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=without_types, return_annotation=inspect.Signature.empty))


def field(f: dataclasses.Field[Any]) -> str:
    return f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default!r}"


def members(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        for public in sorted(value.__all__):
            yield from members(f"{name}.{public}", getattr(value, public))
    elif inspect.isfunction(value):
        yield f"{name}{parameters(value)}"
    elif dataclasses.is_dataclass(value):
        yield f"{name}({', '.join(map(field, filter(lambda f: f.init, dataclasses.fields(value))))})"
    elif hasattr(value, "_fields"):
        yield f"{name}({', '.join(value._fields)})"
    elif inspect.isclass(value) and hasattr(value, "__members__"):
        yield f"{name}({', '.join(f'{member} = {int(number)}' for member, number in value.__members__.items())})"
    elif inspect.isclass(value):
        yield f"{name}{parameters(value)}"
    if inspect.isclass(value):
        for method, function in sorted(vars(value).items()):
            is_own = not method.startswith("_") and not hasattr(tuple, method)
            if (is_own and isinstance(function, staticmethod | classmethod)) or (
                inspect.isfunction(function) and is_own
            ):
                yield f"{name}.{method}{parameters(getattr(value, method))}"


def listing() -> str:
    lines = [line for name in sorted(gk.__all__) if name != "__version__" for line in members(name, getattr(gk, name))]
    return "\n".join(lines) + "\n"


def test_public_api_is_the_listed_one() -> None:
    print(listing())
    assert listing() == LISTED.read_text()


def test_results_of_functions_are_documented() -> None:
    functions = {name: value for name in gk.__all__ if inspect.isfunction(value := getattr(gk, name))}
    without = {name for name, function in functions.items() if "    Returns:\n" not in function.__doc__}
    assert without == {"available_kernels"}, "its first line says it"


def test_help_shows_the_fields_of_peers() -> None:
    for config in (gk.LossConfig, gk.CorrectionConfig):
        for constructor in (config.trl, config.verl):
            fields = inspect.signature(constructor).parameters
            assert len(fields) > 3
            for name, field in fields.items():
                assert constructor(**{name: field.default}) == constructor(), name


def test_dir_has_public_names_alone() -> None:
    assert dir(gk) == sorted(gk.__all__)


if __name__ == "__main__":
    print(listing(), end="")
