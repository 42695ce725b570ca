"""linear_policy_loss with its features together: any three that chunks are about, and all pairs.

Faults that this is for: tokens that are left out although another feature gives them a gradient; a
value of a packed row that its neighbour gets; a feature that is lost beside a second one alone.
Random batches have most pairs of features once in a hundred examples; these batches are fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ops.linear_head.distillation_cases import TEACHERS
from tests.ops.linear_head.heads import EXACT, assert_close
from tests.ops.linear_head.policy_loss_cases import (
    CONFIGS,
    FEATURES,
    REFERENCES,
    problem,
    with_garbage,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "not compact": {"compact": False},
    "in chunks": {"chunk_size": 9},
    "in low memory": {"memory": "low"},
}
OF_CHUNKS = (
    *("zeros", "by token", "packed", "teacher"),
    *("policy_mask", "gaps", "not compact", "in chunks"),
)


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
    features = [name for name in wanted if name not in OPTIONS]
    torch.manual_seed(len(wanted))
    case = with_garbage(problem(config, *features, rows=rows, **options))
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


EVERY = (*FEATURES, *OPTIONS)
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
