"""The cases that run by default lose no value of a parameter, or where it is asked for no pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import thinning

pytest_plugins = "pytester"

AXES = {"backend": ["cpu", "cuda", "reference"], "dtype": ["float32", "float64"], "name": [f"n{i}" for i in range(20)]}


def product(axes: dict[str, list[str]]) -> dict[str, thinning.Case]:
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return {"-".join(case.values()): case for case in cases}


def pairs(cases: dict[str, thinning.Case], names: set[str]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for name in names for pair in itertools.combinations(cases[name].items(), 2)}


def test_every_pair_of_values_stays() -> None:
    cases = product(AXES | {"layout": ["padded", "packed"], "shape": ["0", "1", "31", "1023"]})
    kept = thinning.thinned(cases)
    assert pairs(cases, kept) == pairs(cases, set(cases))
    assert len(kept) < len(cases) / 4


def test_with_strength_1_every_value_stays() -> None:
    cases = product(AXES)
    kept = thinning.thinned(cases, strength=1)
    assert {value for name in kept for value in cases[name].items()} == {
        (axis, value) for axis, values in AXES.items() for value in values
    }
    assert len(kept) <= 22


def test_slow_cases_are_every_value_or_a_twentieth_but_one_at_least() -> None:
    cases = product(AXES)
    kept = thinning.thinned(cases, is_slow=True)
    assert len(kept) == 6 and kept == thinning.thinned(dict(reversed(cases.items())), is_slow=True)
    assert len(thinning.thinned(dict(itertools.islice(cases.items(), 3)), is_slow=True)) == 1
    wide = product({axis: values[:3] for axis, values in AXES.items()} | {"seed": [str(i) for i in range(9)]})
    assert len(thinning.thinned(wide, is_slow=True)) == 8
    assert thinning.thinned(wide, is_slow=True) < thinning.thinned(wide, strength=1)


def test_entries_of_a_dict_are_parameters() -> None:
    batch = object()
    params = {"dtype": torch.float32, "options": {"beta": 0.1, "delta": None}, "batch": batch}
    assert thinning.values_of(params) == {
        "dtype": "torch.float32",
        "options.beta": "0.1",
        "options.delta": "None",
        "batch": id(batch),
    }


@pytest.fixture
def outcomes(pytester: pytest.Pytester) -> Callable[..., dict[str, int]]:
    """Runs the collection of tests/conftest.py on a source, and counts the outcomes."""
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers =\n    pairs\n    full")

    def run(source: str, *options: str) -> dict[str, int]:
        pytester.makepyfile(source)
        counts: dict[str, int] = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options).parseoutcomes()
        return counts

    return run


PARAMETRIZED = """
import pytest

{mark}
@pytest.mark.parametrize("size", [(0, 1), (1, 0), (2, 2), (3, 1)])
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("backend", ["cpu", "cuda", "triton"])
@pytest.mark.parametrize("kind", range(5))
def test_grid(kind, backend, name, size):
    pass

@pytest.mark.parametrize("size", range(30))
def test_other(size):
    pass
"""


def test_every_value_or_pair_runs_on_each_backend_unless_all_cases_are_asked_for(outcomes: Any) -> None:
    source = PARAMETRIZED.format(mark="")
    counts = outcomes(source)
    # 30 of the other test, 2 of Triton's 40, and elsewhere at least each of the five kinds
    assert 30 + 2 + 2 * 5 <= counts["passed"] <= 30 + 2 + 2 * 8 and counts["passed"] + counts["deselected"] == 150
    assert outcomes(source, "--all") == {"passed": 150}
    counts = outcomes(PARAMETRIZED.format(mark="@pytest.mark.pairs"))
    assert 30 + 3 * 20 <= counts["passed"] <= 30 + 3 * 30
    counts = outcomes(PARAMETRIZED.format(mark="@pytest.mark.full"))
    assert counts == {"passed": 30, "deselected": 120}
