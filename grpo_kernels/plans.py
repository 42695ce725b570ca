"""The bases of all configs, and of those that kernels read as a plan, a list of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

from grpo_kernels.checks import ELSEWHERE, unknown

C = TypeVar("C", bound="CheckedConfig")
P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class CheckedConfig:
    """A config that refuses unknown keywords. torch.compile traces its creation, too."""

    _meant: ClassVar[dict[str, str]] = {}  # keywords of peers, and what is meant by them

    def __new__(cls: type[C], *_: Any, **fields: Any) -> C:
        """Refuses unknown keywords with the nearest one that exists, which the generated __init__ does not name."""
        for name in fields:
            if name not in cls.__match_args__:  # dataclasses.fields of a class cannot be traced
                raise TypeError(
                    str(
                        unknown(
                            cls.__name__,
                            "keywords",
                            name,
                            cls.__match_args__,
                            cls._meant.get(name, ELSEWHERE.get(name)),
                        )
                    )
                )
        return super().__new__(cls)


@dataclasses.dataclass(frozen=True)
class PlannedConfig(CheckedConfig):
    """A config with its plan, derived when it is created."""

    if TYPE_CHECKING:  # they are no fields, which dataclasses.asdict would list and the config would not take
        settings: list[float] = dataclasses.field(init=False)

    def _set_plan(self, plan: Any) -> None:
        """Sets `settings` to the fields of a named tuple, of which the first are integers."""
        object.__setattr__(self, "settings", [float(value) for value in plan])


def planned(plan: type[P]) -> type[P]:
    """Makes a named tuple, whose first fields are integers, one that `read` makes of settings."""
    plan.modes = [*get_type_hints(plan).values()].count(int)  # type: ignore[attr-defined]
    return plan


def read(plan: type[P], settings: Sequence[float]) -> P:
    """The plan of a config with these settings."""
    modes: int = plan.modes  # type: ignore[attr-defined]
    return plan(*map(int, settings[:modes]), *settings[modes:])
