"""The cases that run by default lose no value of a parameter, or where it is asked for no pair of values."""

from __future__ import annotations

import itertools

from tests import thinning

AXES = {"dtype": ["float32", "float64"], "name": [f"n{i}" for i in range(20)], "size": ["0", "1", "31", "1023"]}
CASES = {"-".join(values): dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())}


def combinations(names: set[str], size: int) -> set[object]:
    return {frozenset(some) for name in names for some in itertools.combinations(CASES[name].items(), size)}


def test_every_pair_or_value_stays_and_a_twentieth_of_slow_cases() -> None:
    for strength, most in ((1, 26), (2, 120)):
        kept = thinning.thinned(CASES, strength)
        assert combinations(kept, strength) == combinations({*CASES}, strength) and len(kept) <= most
    slow = thinning.thinned(CASES, is_slow=True)
    assert len(slow) == 8 and slow == thinning.thinned(dict(reversed(CASES.items())), is_slow=True)


def test_entries_of_a_dict_are_parameters() -> None:
    values = thinning.values_of({"size": 3, "options": {"beta": 0.1, "delta": None}})
    assert values == {"size": "3", "options.beta": "0.1", "options.delta": "None"}
