"""SimilarityConfig: how the responses to a prompt are clustered."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, NamedTuple

from grpo_kernels.checks import choices, config_or_name, finite, integer, unknown
from grpo_kernels.plans import PlannedConfig, planned

# Names, and the codes that kernels know them by: their positions. csrc/similarity_groups/rules.h repeats them for C++.
LINKAGES = ("single", "complete", "average", "ward")
SINGLE, COMPLETE, AVERAGE, WARD = range(len(LINKAGES))
COLLAPSES = ("one", "singletons")
ONE, SINGLETONS = range(len(COLLAPSES))
MAX_ROWS = 256  # responses of one prompt


class Verdict(enum.IntEnum):
    """Outcome of the clustering of one prompt."""

    CLUSTERED = 0
    ALL_SAME = 1  # no two responses are further apart than distance_floor
    ALL_DIFFERENT = 2  # no good cut, and all responses are further apart than different_at
    SMALL = 3  # fewer than three responses
    EMPTY = 4  # no response
    UNCLEAR = 5  # no good cut, and neither of the above


class RowStatus(enum.IntFlag):
    """Condition of one response."""

    IN_USE = 0
    MASKED = 1  # `valid` is False; left out
    NOT_FINITE = 2  # or its squared norm exceeds float32; left out
    ZERO_VECTOR = 4  # or its squared norm is below 1e-30; in use, at distance 1 from all others


@planned
class Plan(NamedTuple):
    """A SimilarityConfig as the kernels read it: codes and bounds of k first, then numbers."""

    linkage: int
    k_min: int
    k_max: int
    collapse: int
    different: int
    min_silhouette: float
    tie_tolerance: float
    distance_floor: float
    different_at: float


@dataclasses.dataclass(frozen=True)
class SimilarityConfig(PlannedConfig):
    """How the responses to a prompt are clustered.

    Args:
        linkage: distance of two clusters: "single" (nearest members), "complete" (farthest members), "average", or
            "ward" (on the unit vectors, whose distances are sqrt(2 d))
        k_min, k_max: numbers of groups that are tried, from k_min to min(k_max, n - 1); None means n - 1
        min_silhouette: a prompt collapses if its best silhouette is below this
        tie_tolerance: take the smallest k whose silhouette is within this of the best
        distance_floor: responses no two of which are further apart than this are all the same, one group; 0 restricts
            that to identical ones
        different_at: a collapsed prompt whose responses are all further apart than this is all different
        collapse: what a collapsed prompt becomes: "one" group or "singletons"
        different: the same for a prompt that is all different; None means as `collapse`
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

    max_rows: ClassVar[int] = MAX_ROWS
    _presets: ClassVar[dict[str, SimilarityConfig]] = {}

    def __post_init__(self) -> None:
        self._check()
        plan = Plan(
            linkage=LINKAGES.index(self.linkage),
            k_min=min(self.k_min, MAX_ROWS),  # kernels read 32 bits; no prompt has as many groups
            k_max=MAX_ROWS if self.k_max is None else min(self.k_max, MAX_ROWS),
            collapse=COLLAPSES.index(self.collapse),
            different=COLLAPSES.index(self.collapse if self.different is None else self.different),
            min_silhouette=self.min_silhouette,
            tie_tolerance=self.tie_tolerance,
            distance_floor=self.distance_floor,
            different_at=self.different_at,
        )
        self._set_plan(plan)

    def _check(self) -> None:
        where = "SimilarityConfig"
        choices(self, linkage=LINKAGES, collapse=COLLAPSES)
        if self.different is not None:
            choices(self, different=COLLAPSES)
        if integer(where, "k_min", self.k_min) < 2:
            raise ValueError(f"{where}: k_min must be at least 2, got {self.k_min}")
        if self.k_max is not None and integer(where, "k_max", self.k_max) < self.k_min:
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
        """Returns a config unchanged, and resolves the name of a linkage; `where` is for the error message."""
        if isinstance(config, SimilarityConfig):
            return config
        config_or_name(where, "config", config, cls)
        if config not in cls._presets:
            raise unknown(where, "config", config, LINKAGES)
        return cls._presets[config]


SimilarityConfig._presets.update({name: SimilarityConfig(name) for name in LINKAGES})
