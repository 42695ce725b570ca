"""Dataclasses from nested mappings, and back: each key is checked for its name and its type, and explained by
`grpo-train --keys`.

A field is made with `key(default, "what it does")`. Types are those a YAML file can hold: bool, int, float, str, None,
lists and mappings of them, Literal choices, and other dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

Made = TypeVar("Made")


def key(default: Any, help: str, config: str | None = None) -> Any:
    """A field with its explanation; a default that is mutable or a dataclass is made anew for each use.

    config  of a mapping: the class of grpo_kernels whose fields are its keys
    """
    meta = {"help": help, "config": config}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=meta)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def build(kind: type[Made], values: Mapping[str, Any], where: str = "") -> Made:
    """The dataclass `kind` of what a file says. Errors name the full path of the key, the rule and the value."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{where or 'recipe'}: must be a mapping, got {type(values).__name__} {values!r}")
    fields = fields_of(kind)
    for name in values:
        if name not in fields:
            raise ValueError(unknown(where, str(name), list(fields)))
    given = {name: _convert(fields[name].type, value, _join(where, name)) for name, value in values.items()}
    return kind(**given)


def unknown(where: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.0)
    return f"{_join(where, name)}: no such key; the nearest is {near[0]!r}, all are {', '.join(sorted(known))}"


class Field(typing.NamedTuple):
    type: Any
    default: Any
    help: str
    config: str | None


def fields_of(kind: type) -> dict[str, Field]:
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = Field(hints[field.name], default, field.metadata["help"], field.metadata["config"])
    return found


def explain(kind: type, where: str = "") -> Iterator[str]:
    """A line for every key, those of nested dataclasses and of the configs of grpo_kernels included."""
    for name, field in fields_of(kind).items():
        path = _join(where, name)
        nested = _dataclass_in(field.type)
        if nested is not None:
            is_list = typing.get_origin(field.type) is list
            yield f"{path}: {field.help}"
            yield from explain(nested, path + "[]" if is_list else path)
        else:
            yield f"{path} ({_describe(field.type)}, default {field.default!r}): {field.help}"
        if field.config is not None:
            import grpo_kernels

            for each in dataclasses.fields(getattr(grpo_kernels, field.config)):
                if each.init:
                    yield f"{path}.{each.name} ({each.type}, default {each.default!r}): of {field.config}"


def override(values: dict[str, Any], assignment: str) -> None:
    """`a.b.0.c=value` into nested mappings and lists; the value is read as YAML."""
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ValueError(f"override: must be key=value, got {assignment!r}")
    value = read_yaml(text)
    place: Any = values
    *parents, last = path.split(".")
    for name in parents:
        place = place[_index(place, name, path)] if isinstance(place, list) else place.setdefault(name, {})
        if not isinstance(place, dict | list):
            raise ValueError(f"override: {path} goes through {name!r}, which is {place!r}")
    place[_index(place, last, path) if isinstance(place, list) else last] = value


def read_yaml(text: str) -> Any:
    """Without code, and with numbers such as 1e-5, which YAML 1.1 takes for text."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader)


def plain(value: Any) -> Any:
    """What `build` makes the same of: for writing down."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def _index(place: list[Any], name: str, path: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise ValueError(f"override: {path} needs a number below {len(place)} in place of {name!r}")
    return int(name)


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        choices = [each for each in arguments if each is not type(None)]
        errors = []
        for choice in choices:
            try:
                return _convert(choice, value, where)
            except (TypeError, ValueError) as error:
                errors.append(error)
        raise errors[0] if len(errors) == 1 else _mismatch(kind, value, where)
    if origin is Literal:
        if value not in arguments:
            near = difflib.get_close_matches(str(value), [str(each) for each in arguments], 1, 0.0)
            allowed = ", ".join(repr(each) for each in arguments)
            raise ValueError(
                f"{where}: must be one of {allowed}, got {value!r} (nearest {near[0] if near else None!r})"
            )
        return value
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if origin is list:
        if not isinstance(value, list):
            raise _mismatch(kind, value, where)
        return [_convert(arguments[0], each, f"{where}.{i}") for i, each in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _mismatch(kind, value, where)
        return {str(name): _convert(arguments[1], each, _join(where, str(name))) for name, each in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise _mismatch(kind, value, where)
    return value


def _mismatch(kind: Any, value: Any, where: str) -> TypeError:
    return TypeError(f"{where}: must be {_describe(kind)}, got {type(value).__name__} {value!r}")


def _describe(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("nothing" if each is type(None) else _describe(each) for each in arguments)
    if origin is Literal:
        return " | ".join(str(each) for each in arguments)
    if origin is list:
        return f"list of {_describe(arguments[0])}"
    if origin is dict:
        return "mapping"
    return getattr(kind, "__name__", str(kind))


def _dataclass_in(kind: Any) -> type | None:
    """The dataclass that a field holds, by itself, in a list, or as one choice of two."""
    if dataclasses.is_dataclass(kind):
        return typing.cast(type, kind)
    for each in typing.get_args(kind):
        found = _dataclass_in(each)
        if found is not None:
            return found
    return None


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
