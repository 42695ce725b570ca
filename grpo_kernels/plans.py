"""The bases of all configs, and of those that kernels read as a plan: a list of integers and a list of floats."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from grpo_kernels.checks import ELSEWHERE, unknown

C = TypeVar("C", bound="CheckedConfig")


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
        modes: list[int] = dataclasses.field(init=False)
        coefficients: list[float] = dataclasses.field(init=False)

    def _set_plan(self, plan: Any, first_coefficient: str) -> None:
        """Sets `modes` to the fields of a named tuple before this one, and `coefficients` to the others."""
        first = plan._fields.index(first_coefficient)
        object.__setattr__(self, "modes", [int(value) for value in plan[:first]])
        object.__setattr__(self, "coefficients", [float(value) for value in plan[first:]])
