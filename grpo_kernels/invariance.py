"""The option of the whole process for results of a row that do not depend on its batch."""

from __future__ import annotations

from types import TracebackType

# A plain global and not a ContextVar, so that torch.compile can trace its use and guard on it.
_enabled = False


class use_invariant:
    """Makes calls that leave out `invariant` run with this value, until the end of the block if there is one.

    `gk.use_invariant()` as a statement holds for the whole process; `with gk.use_invariant():` for a block.
    """

    def __init__(self, enabled: bool = True) -> None:
        global _enabled
        self._before, _enabled = _enabled, _checked("use_invariant: enabled", enabled)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _enabled
        _enabled = self._before


def resolve(op: str, invariant: bool | None) -> bool:
    """The argument of a call, or the option of the process where it was left out."""
    return _enabled if invariant is None else _checked(f"{op}: invariant", invariant)


def refuse(op: str, reason: str) -> None:
    """Refuses the option of the process where an op lacks it."""
    if _enabled:
        raise RuntimeError(f"{op}: use_invariant must be off: {reason}; call it in a block of use_invariant(False)")


def _checked(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{where} must be True or False, got {type(value).__name__} {value!r}")
    return value
