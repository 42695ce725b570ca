"""SimilarityConfig: how the responses to a prompt are put into groups."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from grpo_kernels.config.rules import finite, unknown

LINKAGES = ("single", "complete", "average", "ward")
COLLAPSES = ("one", "singletons")
MOST_ROWS = 256


@dataclasses.dataclass(frozen=True)
class SimilarityConfig:
    """How the responses to a prompt are put into groups.

    linkage          distance of two clusters: single (of the nearest), complete (of the farthest), average (mean) |
                     ward (on the unit vectors, where distances are sqrt(2 d))
    k_min, k_max     how many groups are tried: k_min to the smaller of k_max and n - 1; None: n - 1
    min_silhouette   a cut whose silhouette is below this is none: the prompt collapses
    tie_tolerance    the smallest k is taken whose silhouette is not further than this from the best
    distance_floor   responses none of which are further apart than this are all the same: one group. 0: off, but for
                     identical ones
    different_at     a collapsed prompt whose responses are all further apart than this is all different
    collapse         what a collapsed prompt becomes: one (group) | singletons
    different        the same for one that is all different; None: as collapse says
    """

    linkage: str = "average"
    k_min: int = 2
    k_max: int | None = None
    min_silhouette: float = 0.1
    tie_tolerance: float = 0.0
    distance_floor: float = 1e-4
    different_at: float = 0.3
    collapse: str = "one"
    different: str | None = None

    # What the kernels read, in the order of csrc/include/grpo_kernels/similarity.h.
    modes: list[int] = dataclasses.field(init=False, repr=False, compare=False)
    coefficients: list[float] = dataclasses.field(init=False, repr=False, compare=False)

    _presets: ClassVar[dict[str, SimilarityConfig]] = {}

    def __post_init__(self) -> None:
        self._check()
        different = self.collapse if self.different is None else self.different
        k_max = MOST_ROWS if self.k_max is None else self.k_max
        modes = [LINKAGES.index(self.linkage), self.k_min, k_max, COLLAPSES.index(self.collapse)]
        object.__setattr__(self, "modes", [*modes, COLLAPSES.index(different)])
        limits = [self.min_silhouette, self.tie_tolerance, self.distance_floor, self.different_at]
        object.__setattr__(self, "coefficients", [float(value) for value in limits])

    def _check(self) -> None:
        where = "SimilarityConfig"
        choices: dict[str, tuple[str, ...]] = {"linkage": LINKAGES, "collapse": COLLAPSES}
        if self.different is not None:
            choices["different"] = COLLAPSES
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise unknown(where, field, getattr(self, field), allowed)
        bounds: dict[str, Any] = (
            {"k_min": self.k_min} if self.k_max is None else {"k_min": self.k_min, "k_max": self.k_max}
        )
        for field, value in bounds.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{where}: {field} must be an int, got {type(value).__name__} {value!r}")
        if self.k_min < 2:
            raise ValueError(f"{where}: k_min must be at least 2, got {self.k_min}")
        if self.k_max is not None and self.k_max < self.k_min:
            raise ValueError(f"{where}: k_max must be at least k_min, {self.k_min}, got {self.k_max}")
        finite(where, "min_silhouette", self.min_silhouette)
        if abs(self.min_silhouette) > 1:
            raise ValueError(f"{where}: min_silhouette must be in [-1, 1], got {self.min_silhouette!r}")
        for field in ("tie_tolerance", "distance_floor", "different_at"):
            finite(where, field, getattr(self, field), minimum=0.0)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return LINKAGES

    @classmethod
    def of(cls, config: SimilarityConfig | str, where: str) -> SimilarityConfig:
        """The config itself, or the default one with the linkage of that name; `where` is for the message."""
        if isinstance(config, SimilarityConfig):
            return config
        if not isinstance(config, str):
            raise TypeError(f"{where}: config must be a SimilarityConfig or a str, got {type(config).__name__}")
        if config not in cls._presets:
            raise unknown(where, "config", config, LINKAGES)
        return cls._presets[config]


SimilarityConfig._presets.update({name: SimilarityConfig(name) for name in LINKAGES})
