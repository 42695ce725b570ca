"""Finding and reading recipes: YAML files, their bases, overrides, and one sentence for each mistake in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_trainer.messages import nearest, unknown_key
from grpo_trainer.recipe import Recipe
from grpo_trainer.section import Section

_PACKAGE = Path(__file__).parent
FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parent.parent / "recipes")  # in an installation, or in a checkout


def load(path: str | Path, overrides: list[str] | None = None, smoke: bool = False) -> Recipe:
    """Reads a recipe.

    Args:
        path: YAML file, or name of a bundled recipe. A `base` in it, likewise, is read first.
        overrides: assignments "a.b=value".
        smoke: reduce all sizes to a run of seconds that only shows that everything works.
    """
    values = _read(_find(path))
    if smoke:
        sizes = _smoke_sizes(values)
        values = merge(values, {name: sizes[name] for name in sizes if values.get(name, {}) is not None})
        # keeps the folder of the full run free
        values["output"] = f"{values.get('output', Recipe.model_fields['output'].default)}-smoke"
    for assignment in overrides or []:
        if assignment.startswith("base="):
            raise ValueError(f"base: must be in a recipe's file, which overrides change, got {assignment!r}")
        override(values, assignment)
    recipe: Recipe = validated(Recipe, values)
    return recipe


def bundled() -> dict[str, Path]:
    """Bundled recipes by name."""
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.rglob("*.yaml"))}


def description(path: Path) -> str:
    """The first clause of the comment that a recipe begins with."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return re.split(r"[.;:]?$|[.;] ", " ".join(line.lstrip("# ") for line in comment), maxsplit=1)[0]


def _find(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    names = bundled()
    if str(path) not in names:
        files = [str(file) for file in Path(path).parent.glob("*.y*ml")]
        raise FileNotFoundError(
            f"recipe: no file {str(path)!r}{nearest(str(path), [*names, *files])}; the bundled ones are "
            f"{', '.join(names)}"
        )
    return names[str(path)]


def _smoke_sizes(values: dict[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "data": {"limit": 32},
        "evaluation": {"every": 1, "prompts": 6, "test_prompts": 6},
    }
    if (values.get("data") or {}).get("task", "arithmetic") is not None:
        sizes["data"] = {"options": {"demonstrations": 96, "train": 32, "validation": 6, "test": 6}}
    sizes["evaluation"]["samples"] = min((values.get("evaluation") or {}).get("samples", 0), 4)
    if values.get("sft") is not None:
        sizes["sft"] = {"steps": 4, "batch": 16, "micro_batch": 8}
    if values.get("rl") is not None:
        rollout = {"prompts": 4, "num_generations": 4, "batch": 16}
        rollout |= {"min_completion_length": 0, "max_completion_length": 12}
        sizes["rl"] = {"steps": 2, "micro_batch": 8, "minibatches": 2, "rollout": rollout, "algorithm": {"set_size": 0}}
    return sizes


def _read(path: Path, readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file merged into its base; `readers` are the files whose base it is."""
    if path.resolve() in readers:
        raise ValueError(f"base: must not lead back to a file that it is the base of, got {str(path)!r}")
    values = read_yaml(read_text(path), str(path))
    if not isinstance(values, dict):
        got = "an empty file" if values is None else f"{type(values).__name__} {values!r:.80}"
        raise TypeError(f"{path}: must be a mapping of a recipe's keys, got {got}; grpo train --keys lists them")
    base = values.pop("base", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    other = beside if beside.is_file() else _find(str(base))
    return merge(_read(other, (*readers, path.resolve())), values)


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
            names = [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
            seen = set()
            for name in names:  # of equal keys, yaml would keep the last
                if (name.tag, name.value) in seen:
                    line = name.start_mark.line + 1
                    raise ValueError(f"{where}: must have the key {name.value!r} once, got it again in line {line}")
                seen.add((name.tag, name.value))
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise ValueError(f"{where}: must be YAML, got {text.strip()[:80]!r}: {reason}") from None


def merge(base: Any, changes: Any) -> Any:
    """Merges mappings key by key; null removes a mapping of the base, other values are replaced."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    merged = dict(base)
    for name, value in changes.items():
        if value is None and isinstance(base.get(name), dict):
            del merged[name]
        else:
            merged[name] = merge(base.get(name), value)
    return merged


def override(values: dict[str, Any], assignment: str) -> None:
    """Applies `a.b.0.c=value`; the value is parsed as YAML, and null removes a mapping."""
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise ValueError(f"override: must be key=value, got {assignment!r}")
    *parents, last = path.split(".")
    place: Any = values
    for name in parents:
        place = place[_index(place, name, path)] if isinstance(place, list) else place.setdefault(name, {})
        if not isinstance(place, dict | list):
            raise ValueError(f"override: {path} must lead through mappings, got {name!r}, which is {place!r}")
    value = read_yaml(text, path)
    if isinstance(place, list):
        place[_index(place, last, path)] = value
    elif value is None and isinstance(place.get(last), dict):
        del place[last]
    else:
        place[last] = value


def _index(place: list[Any], name: str, path: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise ValueError(f"override: {path} must have an index below {len(place)}, got {name!r}")
    return int(name)


def validated(kind: type[Section], values: Mapping[str, Any], where: str = "") -> Any:
    """Builds a section; one error lists all mistakes, a line each: key, rule and value."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        message = explain(error, where, lambda parts: _keys_at(kind, parts), lambda name: [*_places_of(kind, name)])
        raise ValueError(message) from None


def explain(
    error: ValidationError,
    where: str,
    keys_at: Callable[[Sequence[Any]], list[str]],
    places_of: Callable[[str], list[str]],
) -> str:
    """The mistakes that pydantic found, as `key: rule, got value`, a line each.

    Args:
        error: the mistakes.
        where: key of what was validated.
        keys_at: the known keys at a place below it.
        places_of: the paths of the known keys with a name.
    """
    return "\n  ".join(dict.fromkeys(_sentence(problem, where, keys_at, places_of) for problem in error.errors()))


def _sentence(
    problem: Mapping[str, Any],
    where: str,
    keys_at: Callable[[Sequence[Any]], list[str]],
    places_of: Callable[[str], list[str]],
) -> str:
    parts = [part for part in problem["loc"] if part not in ("int", "str")]  # the choices of a union
    path = ".".join(map(str, [where, *parts] if where else parts))
    value, what = problem["input"], problem["type"]
    if what in ("extra_forbidden", "unexpected_keyword_argument"):
        if places := places_of(str(parts[-1])):
            return f"{path}: no such key; it is {min(places, key=lambda place: place.count('.'))}"
        return unknown_key(path.rpartition(".")[0], str(parts[-1]), keys_at(parts[:-1]))
    if what == "value_error":  # of a rule over several keys, whose text begins with the last part of its own
        text = str(problem["ctx"]["error"])
        return f"{path}.{text}" if path else text
    if what.startswith("missing"):
        return f"{path}: must be given"
    if what == "model_type":
        return f"{path or 'recipe'}: must be a mapping, got {type(value).__name__} {value!r}"
    rule = problem["msg"].replace("Input should be", "must be").replace("a valid ", "of type ")
    known = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ") if "literal" in what else []
    return f"{path}: {rule}, got {value!r:.200}{nearest(str(value), known)}"


def _keys_at(kind: type[Section], parts: Sequence[Any]) -> list[str]:
    """The keys of the section that a path leads to."""
    for part in parts:
        if isinstance(part, str):
            section = section_in(kind.model_fields[part].annotation)
            assert section is not None, parts
            kind = section
    return list(kind.model_fields)


def _places_of(kind: type[Section], name: str, path: str = "") -> Iterator[str]:
    """The paths of a section's keys with this name."""
    for key, field in kind.model_fields.items():
        place = f"{path}.{key}".lstrip(".")
        if key == name:
            yield place
        if (inner := section_in(field.annotation)) is not None:
            yield from _places_of(inner, name, place)


def section_in(annotation: Any) -> type[Section] | None:
    """The section in a field's type: the type itself, an optional one or the elements of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    nested = map(section_in, getattr(annotation, "__args__", ()))
    return next((section for section in nested if section is not None), None)


def flat(values: Any, where: str = "") -> dict[str, Any]:
    """The values of nested mappings and lists by their paths."""
    if isinstance(values, dict) and values:
        return {path: v for name, of in values.items() for path, v in flat(of, f"{where}.{name}".lstrip(".")).items()}
    if isinstance(values, list) and values:
        return {path: v for i, of in enumerate(values) for path, v in flat(of, f"{where}.{i}".lstrip(".")).items()}
    return {where: values}
