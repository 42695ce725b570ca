"""The bundled rewards' base: sections whose fields are the options of the recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PrivateAttr

from grpo_trainer.section import Rule, Section

Parts = dict[str, float]
Rows = list[Parts | None]  # of each response, None where it cannot be scored


class BundledReward(Section):
    """A reward that is validated like any other part of a recipe. Subclasses score in `__call__`."""

    columns_needed: ClassVar[tuple[tuple[str, ...], ...]] = ()
    _counters: dict[str, int] = PrivateAttr(default_factory=dict)

    @property
    def __name__(self) -> str:
        """Name under which TRL logs the reward; that of its file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def needs(self) -> Sequence[tuple[str, ...]]:
        """Alternatives for each column that the data must have."""
        return self.columns_needed

    @property
    def counters(self) -> dict[str, int]:
        """Numbers about the last call; none before it."""
        return self._counters

    def require(self, columns: Mapping[str, Any]) -> None:
        """Raises if columns lack one that is needed; in TRL nobody else would notice."""
        for names in self.needs:
            if not any(name in columns for name in names):
                needed = " or ".join(map(repr, names))
                raise ValueError(f"reward {self.__name__}: needs the column {needed}, the data has {sorted(columns)}")


def sums_to_one(weights: Section) -> Rule:
    """The rule of a field `weights`."""
    return "weights", abs(math.fsum(dict(weights).values()) - 1) < 1e-6, "must sum to 1"


class WeightedReward(BundledReward):
    """Weighted sum of components; subclasses compute the components of a response."""

    def weight_of(self) -> Mapping[str, float]:
        """Weight of each component in the sum; by default the field `weights`."""
        return dict(self.weights)  # type: ignore[attr-defined]

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        """Components of one response, each in [0, 1]; None if it cannot be scored."""
        raise NotImplementedError

    def total(self, parts: Parts) -> float:
        return math.fsum(weight * parts[name] for name, weight in self.weight_of().items())

    def graded(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> tuple[list[float | None], dict[str, list[float]]]:
        """Total of each response, and its unweighted components; None and NaN where it cannot be scored."""
        rows = self.rows(prompts, completions, columns)
        names = next((list(parts) for parts in rows if parts is not None), list(self.weight_of()))
        components = {name: [math.nan if parts is None else parts[name] for parts in rows] for name in names}
        return [None if parts is None else self.total(parts) for parts in rows], components

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        return self.graded(prompts, completions, **columns)[0]

    def rows(self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Any]) -> Rows:
        """Components of each response; TRL also passes arguments that are not columns."""
        self.require(columns)
        by_row = {name: v for name, v in columns.items() if isinstance(v, list | tuple) and len(v) == len(completions)}
        return [
            self.parts(prompt, response, {name: values[i] for name, values in by_row.items()})
            for i, (prompt, response) in enumerate(zip(prompts, completions, strict=True))
        ]
