"""Conversion between nested mappings and dataclasses, with checked key names and types.

Fields are declared as `key(default, "help text")`. Their types are those of YAML (bool, int, float, str, None, lists,
mappings), Literal choices, and other such dataclasses. `grpo_trainer.keys` prints the help texts.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_NEEDS_QUOTES = "a text with braces or brackets needs quotes of its own: '\"{...}\"'"
_EMPTY = "; {} leaves its keys at their defaults"


def key(default: Any, help: str, config: str | None = None, names: str | None = None) -> Any:
    """Declares a field.

    Args:
        default: default value, or a dataclass that is instantiated without arguments.
        help: help text.
        config: for mappings, the config class of grpo_kernels whose fields are the keys.
        names: for names, where the known ones are, as module:variable.
    """
    metadata = {"help": help, "config": config, "names": names}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Builds the dataclass `kind` from a mapping. Errors name the key's full path, the rule and the value."""
    if not isinstance(values, Mapping):
        written = _as_mapping(kind, values)
        way_out = f"; it is written {written}" if written else _EMPTY if values is None or values is True else ""
        raise TypeError(f"{where or 'recipe'}: must be a mapping, got {type(values).__name__} {values!r}{way_out}")
    fields = fields_of(kind)
    problems: list[Exception] = [
        ValueError(unknown_key(where, str(name), list(fields))) for name in values if name not in fields
    ]
    kwargs = {
        name: attempt(problems, _convert, fields[name].type, value, join(where, name))
        for name, value in values.items()
        if name in fields
    }
    refuse(problems)
    return kind(**kwargs)


def attempt(problems: list[Exception], call: Callable[..., T], *arguments: Any) -> T | None:
    """The result of a call; an error of its arguments is added to the problems instead of raised."""
    try:
        return call(*arguments)
    except (TypeError, ValueError) as error:
        problems.append(error)
        return None


def refuse(problems: Sequence[Exception]) -> None:
    """Raises the one problem that there is, or one error of all of them, so that they are mended together."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ValueError("\n  ".join(map(str, problems)))


def unknown_key(where: str, name: str, known: Sequence[str]) -> str:
    """Error message for an unknown key, with the nearest known one."""
    return f"{join(where, name)}: no such key{_nearest_of_all(name, sorted(known)) or '; there is none'}"


def unknown_name(where: str, name: str, known: Sequence[str]) -> str:
    """Error message for a value that is none of the known names, with the nearest one."""
    return f"{where}: must be one of {', '.join(known)}, got {name!r}{nearest(name, known)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like one that is not known, as the end of an error; empty if none is like it."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower)
    # first what differs in the order of its letters alone
    near.sort(key=lambda other: sorted(other) != sorted(name.lower()))
    return f"; the nearest is {by_lower[near[0]]!r}" if near else ""


def known_columns(column: str, known: Iterable[str]) -> str:
    """The columns that there are, and the one that is most like a missing one, as the end of an error."""
    return _nearest_of_all(column, [str(name) for name in known]) or "; there is no column"


def _nearest_of_all(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"{near}{',' if near else ';'} all are {', '.join(known)}" if known else ""


def refuse_misspelt(where: str, name: str, known: Sequence[str]) -> None:
    """Refuses what is neither known nor a folder, but close to a known name, before it is sought on the hub."""
    is_own = name in known or "/" in name or Path(name).exists()
    if not is_own and difflib.get_close_matches(name, known, 1, 0.75):
        raise ValueError(unknown_name(where, name, known))


class Field(typing.NamedTuple):
    type: Any
    default: Any
    help: str
    config: str | None
    names: str | None


def fields_of(kind: type) -> dict[str, Field]:
    hints = typing.get_type_hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields[field.name] = Field(hints[field.name], default, **field.metadata)
    return fields


def override(values: dict[str, Any], assignment: str) -> None:
    """Applies `a.b.0.c=value` to nested mappings and lists; the value is parsed as YAML, and null removes a mapping."""
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ValueError(f"override: must be key=value, got {assignment!r}")
    value = read_yaml(text, path)
    place: Any = values
    *parents, last = path.split(".")
    for name in parents:
        place = place[_index(place, name, path)] if isinstance(place, list) else place.setdefault(name, {})
        if not isinstance(place, dict | list):
            raise ValueError(f"override: {path} goes through {name!r}, which is {place!r}")
    if value is None and isinstance(place, dict) and isinstance(place.get(last), dict):
        del place[last]  # as null in a file removes a mapping of the base
    else:
        place[_index(place, last, path) if isinstance(place, list) else last] = value


def nearest_file(name: object) -> str:
    """The name in the same folder that is most like one that is not there, as the end of an error."""
    path = Path(str(name))
    if name is None or not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], 1)
    return f"; the nearest is {str(path.with_name(near[0]))!r}" if near else ""


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """Text of a file; the error for bytes that are not text names the file."""
    try:
        return Path(path).read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be UTF-8, got {error.object[error.start]:#04x} at byte {error.start}") from None


def read_yaml(text: str, where: str) -> Any:
    """Parses YAML without object tags; numbers such as 1e-5, which are strings in YAML 1.1, are read as floats."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names: set[tuple[str, str]] = set()
            for name, _ in node.value:
                if not isinstance(name, yaml.ScalarNode):
                    continue
                if (name.tag, name.value) in names:
                    text = f"the key {name.value!r} must be there once"
                    raise yaml.constructor.ConstructorError(None, None, text, name.start_mark)
                names.add((name.tag, name.value))
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        is_text = text.lstrip().startswith(("{", "[")) and "\n" not in text
        way_out = f"; {_NEEDS_QUOTES}" if is_text else ""
        raise ValueError(f"{where}: must be YAML: {reason}{way_out}") from None


def plain(value: Any) -> Any:
    """Converts a dataclass to plain mappings and lists; the inverse of `build`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def _index(place: list[Any], name: str, path: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise ValueError(f"override: {path} needs an index below {len(place)}, got {name!r}")
    return int(name)


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        choices = [argument for argument in arguments if argument is not type(None)]
        errors = []
        for choice in choices:
            try:
                return _convert(choice, value, where)
            except (TypeError, ValueError) as error:
                errors.append(error)
        raise errors[0] if len(errors) == 1 else _mismatch(kind, value, where)
    if origin is Literal:
        if value not in arguments:
            allowed = ", ".join(map(repr, arguments))
            raise ValueError(
                f"{where}: must be one of {allowed}, got {value!r}{nearest(str(value), map(str, arguments))}"
            )
        return value
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where)
    if origin is list:
        if isinstance(value, Mapping) and value and all(str(name).isdigit() for name in value):
            raise ValueError(
                f"{where}: has no item {min(value, key=str)} in the recipe; set the whole list, as {where}=[...]"
            )
        if not isinstance(value, list):
            raise _mismatch(kind, value, where)
        problems: list[Exception] = []
        items = [attempt(problems, _convert, arguments[0], item, f"{where}.{i}") for i, item in enumerate(value)]
        refuse(problems)
        return items
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _mismatch(kind, value, where)
        return {str(name): _convert(arguments[1], item, join(where, str(name))) for name, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise _mismatch(kind, value, where)
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where}: must be a finite number, got {value}")
    return value


def check_type(kind: Any, value: Any, where: str) -> None:
    """Raises TypeError for a value of another type than a bool, number or text that is asked for."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if all(one in (bool, int, float, str, type(None)) for one in kinds):
        _convert(kind, value, where)


def _mismatch(kind: Any, value: Any, where: str) -> TypeError:
    is_text = isinstance(value, list | dict) and str in (kind, *typing.get_args(kind))
    way_out = f"; {_NEEDS_QUOTES}" if is_text else ""
    if typing.get_origin(kind) is dict:
        return TypeError(
            f"{where}: must be a mapping, got {type(value).__name__} {value!r}{_EMPTY if value is None else ''}"
        )
    if typing.get_origin(kind) is list and isinstance(value, str | int | float):
        of = typing.get_args(kind)[0]
        mapping = _as_mapping(of, value) if dataclasses.is_dataclass(of) else ""
        way_out = f"; a list of one is written [{mapping or value}]"
    return TypeError(f"{where}: must be {describe(kind)}, got {type(value).__name__} {value!r}{way_out}")


def _as_mapping(kind: Any, value: Any) -> str:
    """The mapping that a text in its place was meant to be, such as a reward's name; empty if it is unknown."""
    first = dataclasses.fields(kind)[0]
    return f"{{{first.name}: {value}}}" if isinstance(value, str) and first.type in (str, "str") else ""


def describe(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if choice is type(None) else describe(choice) for choice in arguments)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is list:
        return f"list of {describe(arguments[0])}"
    if origin is dict:
        return "mapping"
    return getattr(kind, "__name__", str(kind))


def dataclass_in(kind: Any) -> type | None:
    """Dataclass in a field's type: the type itself, a list's element or an optional."""
    if dataclasses.is_dataclass(kind):
        return typing.cast(type, kind)
    for argument in typing.get_args(kind):
        nested = dataclass_in(argument)
        if nested is not None:
            return nested
    return None


def join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
