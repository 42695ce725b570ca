"""Parts of error messages: the known names, and the nearest one."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path


def require_package(where: str, package: str, extra: str) -> None:
    """Raises if a package is missing, and names the extra that installs it.

    Args:
        where: what needs the package.
        package: its name in imports.
        extra: the extra of grpo-kernels that has it.
    """
    if importlib.util.find_spec(package) is None:
        name = package.replace("_", "-")
        raise ValueError(
            f'{where}: needs the package {name}, which is not installed: pip install "grpo-kernels[{extra}]"'
        )


def unknown_key(where: str, name: str, known: Sequence[str]) -> str:
    """Error message for an unknown key, with the nearest known one."""
    return f"{where}.{name}: no such key{_nearest_of_all(name, sorted(known)) or '; there is none'}".lstrip(".")


def unknown_name(where: str, name: str, known: Sequence[str]) -> str:
    """Error message for a value that is none of the known names, with the nearest one."""
    return f"{where}: must be one of {', '.join(known)}, got {name!r}{nearest(name, known)}"


def known_columns(column: str, known: Iterable[str]) -> str:
    """The columns that there are, and the one that is most like a missing one, as the end of an error."""
    return _nearest_of_all(column, [str(name) for name in known]) or "; there is no column"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like one that is not known, as the end of an error; empty if none is like it."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower)
    # first what differs in the order of its letters alone
    near.sort(key=lambda other: sorted(other) != sorted(name.lower()))
    return f"; the nearest is {by_lower[near[0]]!r}" if near else ""


def nearest_file(name: object) -> str:
    """The name in the same folder that is most like one that is not there, as the end of an error."""
    path = Path(str(name))
    if name is None or not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], 1)
    return f"; the nearest is {str(path.with_name(near[0]))!r}" if near else ""


def _nearest_of_all(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"{near}{',' if near else ';'} all are {', '.join(known)}" if known else ""
