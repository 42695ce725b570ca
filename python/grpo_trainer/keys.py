"""`grpo-train --keys`: a line for every key of a recipe, with its type or choices, its default and what it means."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from grpo_trainer.settings import Field, dataclass_in, describe, fields_of, join


def explain(kind: type, where: str = "") -> Iterator[str]:
    """Yields a line of help for every key, including those of nested dataclasses and of grpo_kernels' configs."""
    for name, field in fields_of(kind).items():
        path = join(where, name)
        nested = dataclass_in(field.type)
        if nested is not None:
            is_list = typing.get_origin(field.type) is list
            yield f"{path}: {field.help}"
            yield from explain(nested, path + "[]" if is_list else path)
        else:
            yield f"{path} ({_values(field)}, default {field.default!r}): {field.help}"
        if field.config is not None:
            import grpo_kernels

            yield from _explain_config(getattr(grpo_kernels, field.config), path)


def _values(field: Field) -> str:
    """Type of a key, or the names that it takes."""
    if field.names is None:
        return describe(field.type)
    module, _, variable = field.names.partition(":")
    names = [*getattr(importlib.import_module(module), variable)]
    return " | ".join([*names, "null"] if type(None) in typing.get_args(field.type) else names)


def _explain_config(config: Any, path: str) -> Iterator[str]:
    """The fields of a config of grpo_kernels, explained by its docstring."""
    help_of = argument_help(config)
    for option in dataclasses.fields(config):
        if option.init:
            names = choices(config, option.name) if option.type in ("str", "str | None") else []
            kind = " | ".join(names) if names else option.type
            text = f"of {config.__name__}; {help_of[option.name]}"
            yield f"{path}.{option.name} ({kind}, default {option.default!r}): {text}"


def argument_help(documented: Any) -> dict[str, str]:
    """The section Args of a docstring, by argument; several arguments may share an entry."""
    section = re.search(r"Args:\n((?: +.*\n|\n)+)", f"{inspect.getdoc(documented)}\n")
    assert section is not None, documented
    entries = re.findall(r"^    (\w[\w, ]*): ((?:.*\n)(?:^     +.*\n)*)", section[1], re.MULTILINE)
    return {name.strip(): " ".join(text.split()) for names, text in entries for name in names.split(",")}


def choices(config: Any, name: str) -> list[str]:
    """Names that a field of a config takes, from its own refusal of another one."""
    try:
        config(**{name: "?"})
    except ValueError as error:
        allowed = re.search(r"must be one of (.*?), got '\?'", str(error))
        return allowed[1].split(", ") if allowed else []
    return []
