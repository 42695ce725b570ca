"""Which cases of a large grid run by default: a deterministic choice that covers every pair of values."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Mapping

import torch

# One value of each parameter by its name.
Case = Mapping[str, Hashable]


def covering_order(cases: Mapping[str, Case], strength: int = 2) -> tuple[list[str], list[str]]:
    """Names of cases that together hold every pair of values that any case holds, and the names of the others.

    With strength 1 they hold every value. One pass in a random but fixed order takes each case that holds a pair not
    yet seen: more cases than the smallest cover has, but in a second for ten thousand, in every worker alike.
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
    """Names of the cases to run: a cover of all pairs or, where a case is slow, of all values but at most a tenth."""
    if not is_slow:
        return set(covering_order(cases, strength)[0])
    return set(covering_order(cases, 1)[0][: max(1, round(0.1 * len(cases)))])


def values_of(params: Mapping[str, object]) -> Case:
    """The values of one parametrised test; the entries of a dict count as parameters of their own."""
    case: dict[str, Hashable] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            case |= {f"{name}.{key}": repr(entry) for key, entry in value.items()}
        else:
            # All cases share the object of a parameter's value; equal ones may come in several: ("cpu", float32).
            plain = isinstance(value, str | int | float | torch.dtype) or value is None
            case[name] = repr(value) if plain else id(value)
    return case
