"""Deterministic choice of the cases of a parametrized test that run by default, covering every value or every pair."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Mapping

import torch

# Values of the parameters by name.
Case = Mapping[str, Hashable]


def covering_order(cases: Mapping[str, Case], strength: int = 2) -> tuple[list[str], list[str]]:
    """Splits the names of cases into a cover of all pairs of values that occur, and the others.

    With strength 1, the cover contains every value. One pass in a random but fixed order takes each case with a pair
    not yet seen. This is larger than the smallest cover, but takes a second for ten thousand cases and gives the same
    result in every worker.
    """
    seen: set[tuple[tuple[str, Hashable], ...]] = set()
    taken, others = [], []
    for name in sorted(cases, key=lambda name: (zlib.crc32(name.encode()), name)):
        values = sorted(cases[name].items(), key=lambda item: item[0])
        pairs = {pair for size in range(1, strength + 1) for pair in itertools.combinations(values, size)}
        (others if pairs <= seen else taken).append(name)
        seen |= pairs
    return taken, others


def thinned(cases: Mapping[str, Case], strength: int = 2, is_slow: bool = False) -> set[str]:
    """Names of the cases to run: a cover of all pairs or, for slow cases, of all values but at most a twentieth."""
    if not is_slow:
        return set(covering_order(cases, strength)[0])
    return set(covering_order(cases, 1)[0][: max(1, round(0.05 * len(cases)))])


def values_of(params: Mapping[str, object]) -> Case:
    """The values of one parametrized test; the entries of a dict count as separate parameters."""
    case: dict[str, Hashable] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            case |= {f"{name}.{key}": repr(entry) for key, entry in value.items()}
        else:
            # All cases share the object of a parameter's value, except that equal plain values can be several objects.
            plain = isinstance(value, str | int | float | torch.dtype) or value is None
            case[name] = repr(value) if plain else id(value)
    return case
