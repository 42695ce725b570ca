"""Every op of the head against its definition from whole logits, in float64: any batch, and features together.

Faults that this is for: a bias or an adapter outside of logit_scale; a softcap before it, or after the temperature; a
banned id with a logit of 0, or of the softcap; an entropy over ids that are banned or not kept; a temperature of the
wrong token; a tail that is in a divergence where it should not be, or left out; an unused slot that is read; a
divergence in the wrong direction or with the wrong mixture; a chunk that is written elsewhere, or ends within a
sequence; a gradient that is kept before its sequence is known; tokens that are left out although another feature gives
them a gradient; a mask, position or target of -100 that one of the ways does not see; an option of the head, of the
reference's head or of the loss that is lost on the way, or beside a second one alone; a term of a shared position that
counts once; a value of a packed row that its neighbour gets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.harness import examples
from tests.ops.linear_head import cases, terms
from tests.ops.linear_head.cases import Problem, problem
from tests.ops.linear_head.heads import EXACT, assert_close
from tests.ops.linear_head.teachers import TEACHERS
from tests.ops.linear_head.terms import CONFIGS, REFERENCES

# Roundings of sums over 67 columns of numbers below 10; a policy loss multiplies them by ratios.
TOLERANCES = {"logprobs": {"rtol": 1e-10, "atol": 1e-12}, "distillation": {"rtol": 1e-11, "atol": 1e-13}}


@pytest.mark.parametrize("of", cases.FEATURES)
@pytest.mark.parametrize("backend", EXACT)
def test_any_problem(backend: str, of: str) -> None:
    def check(case: Problem) -> None:
        assert_close(case.run(backend), case.defined(), **TOLERANCES.get(of, {}))

    check(problem(of, "zeros"))  # tokens that most losses, but not all, may leave out
    count = 300 if of in TOLERANCES else 90 if backend == "cpu" else 15
    settings(max_examples=examples(count))(given(cases.problems(of))(check))()


# Features together. Random batches have most pairs of them once in a hundred examples; these batches are fixed.

OPTIONS: dict[str, dict[str, Any]] = {
    "not compact": {"compact": False},
    "in chunks": {"chunk_size": 9},
    "in low memory": {"memory": "low"},
}
OF_CHUNKS = ("zeros", "by token", "packed", "teacher", "policy_mask", "gaps", "not compact", "in chunks")


def subsets() -> Iterator[tuple[str, ...]]:
    """Sixteen of them, in which any three of the eight features have each of their eight values.

    They are the words of the extended Hamming code.
    """
    for a, b, c, d in itertools.product((False, True), repeat=4):
        yield tuple(itertools.compress(OF_CHUNKS, (a, b, c, d, a ^ b ^ c, a ^ b ^ d, a ^ c ^ d, b ^ c ^ d)))


def test_any_three_features_meet() -> None:
    for three in itertools.combinations(OF_CHUNKS, 3):
        assert len({tuple(name in chosen for name in three) for chosen in subsets()}) == 8


def check(config: str, *wanted: str, rows: int) -> None:
    """Compares a batch with these features and options with the definition."""
    options = {key: value for name in wanted for key, value in OPTIONS.get(name, {}).items()}
    torch.manual_seed(len(wanted))
    case = problem(config, *wanted, rows=rows, **options).with_garbage()
    expected = case.defined()
    for backend in EXACT:
        try:
            assert_close(case.run(backend), expected)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise AssertionError(f"{backend}, {config}: {', '.join(wanted)}") from error


# Whether the gradient of a token depends on others is a matter of the config.
@pytest.mark.parametrize("name", CONFIGS)
def test_three_features_together(name: str) -> None:
    for chosen in subsets():
        check(name, *chosen, rows=6)


EVERY = (*terms.FEATURES, *OPTIONS)
# what a feature has no meaning without
NEEDED = dict.fromkeys(TEACHERS, ("teacher",)) | {"weights": ("normalizer",)}
WITH_KL = [name for name, config in CONFIGS.items() if config.kl != "none"]


@pytest.mark.parametrize("first", EVERY)
def test_two_features_alone(first: str) -> None:
    """With another config each time, which has a reference if that is a feature."""
    place = EVERY.index(first)
    for number, second in enumerate(EVERY[place:]):
        names = WITH_KL if {first, second} & {*REFERENCES} else list(CONFIGS)
        wanted = dict.fromkeys((first, second, *NEEDED.get(first, ()), *NEEDED.get(second, ())))
        check(names[(5 * place + number) % len(names)], *wanted, rows=4)
