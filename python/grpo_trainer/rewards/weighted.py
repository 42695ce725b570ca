"""Rewards that are weighted sums of components, which they also report one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_trainer.messages import unknown_key

Parts = dict[str, float]


class WeightedReward:
    """Weighted sum of components; subclasses compute the components of a response."""

    columns: tuple[str, ...] = ()  # the data must have at least one of these

    def __init__(self, name: str, weights: Mapping[str, float]) -> None:
        self.__name__ = name  # TRL logs a reward under its function's name
        self.weights = dict(weights)

    @property
    def needs(self) -> list[tuple[str, ...]]:
        """Alternatives for each column that the data must have."""
        return [self.columns] if self.columns else []

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        """Components of one response, each in [0, 1]; None if it cannot be scored."""
        raise NotImplementedError

    def total(self, parts: Parts) -> float:
        return math.fsum(weight * parts[name] for name, weight in self.weights.items())

    def graded(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Any
    ) -> tuple[list[float | None], dict[str, list[float]]]:
        """Total of each response, and its unweighted components; None and NaN where it cannot be scored."""
        rows = self._rows(prompts, completions, columns)
        names = next((list(parts) for parts in rows if parts is not None), list(self.weights))
        components = {name: [math.nan if parts is None else parts[name] for parts in rows] for name in names}
        return [None if parts is None else self.total(parts) for parts in rows], components

    def components(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> dict[str, list[float]]:
        return self.graded(prompts, completions, **columns)[1]

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
        return self.graded(prompts, completions, **columns)[0]

    def _rows(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Any]
    ) -> list[Parts | None]:
        if self.columns and not any(name in columns for name in self.columns):
            names = " or ".join(map(repr, self.columns))
            raise ValueError(f"reward {self.__name__}: needs the column {names}, the data has {sorted(columns)}")
        # TRL also passes arguments that are not columns
        by_row = {name: values for name, values in columns.items() if isinstance(values, list | tuple)}
        by_row = {name: values for name, values in by_row.items() if len(values) == len(completions)}
        return [
            self.parts(prompt, response, {name: values[i] for name, values in by_row.items()})
            for i, (prompt, response) in enumerate(zip(prompts, completions, strict=True))
        ]


def checked_weights(where: str, changes: Mapping[str, float] | None, defaults: Mapping[str, float]) -> dict[str, float]:
    """Default weights updated by `changes`; raises unless they are in [0, 1] and sum to 1."""
    for name in changes or {}:
        if name not in defaults:
            raise ValueError(unknown_key(where, name, list(defaults)))
    weights = {**defaults, **(changes or {})}
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or not 0 <= weight <= 1:
            raise ValueError(f"{where}.{name}: must be within 0 and 1, got {weight!r}")
    if abs(math.fsum(weights.values()) - 1) > 1e-6:
        raise ValueError(f"{where}: must sum to 1, got {math.fsum(weights.values())!r} of {weights}")
    return weights
