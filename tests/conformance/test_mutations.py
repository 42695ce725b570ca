"""Every number that an adapter returns is compared: a case says NO wherever one of them is wrong.

Faults that this is for: a row, a token or a part that a case asks about and does not look at, such as
the last one; a tolerance that takes anything; a convention that does not read what it asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from grpo_conformance import CONVENTIONS, INVARIANTS, Batch, Invariant, run
from grpo_conformance.batch import make
from grpo_conformance.run import Asked, Case, Result
from torch import Tensor

from tests.conformance.plain import Plain


class Answer(NamedTuple):
    """The adapter's answer for a batch: advantages, or the loss and its gradient."""

    batch: Batch
    numbers: tuple[Tensor, ...]


class Recorder:
    """The plain trainer, with the answers that it gave."""

    name = "recorder"

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def advantages(self, batch: Batch) -> Tensor:
        return self._noted(batch, Plain().advantages(batch))[0]

    def token_advantages(self, batch: Batch) -> Tensor:
        return self._noted(batch, Plain().token_advantages(batch))[0]

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        return self._noted(make([2]), Plain().logprobs(logits, tokens, temperature))[0]

    def loss(self, batch: Batch) -> tuple[Tensor, ...]:
        loss = Plain().loss(batch)
        return self._noted(batch, loss, *torch.autograd.grad(loss, batch.logprobs))

    def _noted(self, batch: Batch, *numbers: Tensor) -> tuple[Tensor, ...]:
        self.answers.append(Answer(batch, tuple(value.detach().double() for value in numbers)))
        return self.answers[-1].numbers


class Repeater:
    """Gives these answers, whatever it is asked."""

    name = "repeater"

    def __init__(self, answers: list[tuple[Tensor, ...]]) -> None:
        self.answers = iter(answers)

    def loss(self, batch: Batch) -> tuple[Tensor, ...]:
        return next(self.answers)

    def advantages(self, batch: Batch) -> Tensor:
        return next(self.answers)[0]

    token_advantages = advantages

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        return next(self.answers)[0]


def mutants(answers: list[Answer], by: float | None) -> Iterator[tuple[Answer, int, Repeater]]:
    """For each number of each answer the answer, the number's place, and an adapter of which it is wrong.

    It is off by a number, or far away on the other side of 0.
    """
    right = [answer.numbers for answer in answers]
    for call, answer in enumerate(answers):
        sizes = [value.numel() for value in answer.numbers]
        for place in range(sum(sizes)):
            flat = torch.cat([value.reshape(-1) for value in answer.numbers])
            number = float(flat[place])
            flat[place] = number + by if by is not None else -10.0 if number > 0 else 10.0
            parts = zip(torch.split(flat, sizes), answer.numbers, strict=True)
            wrong = tuple(part.view(value.shape) for part, value in parts)
            yield answer, place, Repeater([*right[:call], wrong, *right[call + 1 :]])


def recorded(case: Case) -> tuple[list[Answer], Result]:
    recorder = Recorder()
    (result,) = run(recorder, [case])
    return recorder.answers, result


def is_compared(case: Invariant, batch: Batch, place: int) -> bool:
    """Whether a number means something: a row without a token in the loss has no advantage."""
    if case.method == "loss":
        return place != 0 or isinstance(case.expected, Batch) or case.expected[0] is not None
    if case.method == "logprobs":
        return place > 0
    if case.name in ("default-advantages", "loo-std-outlier"):
        return case.expected[place] is not None
    counts = batch.mask.any(1) if case.method == "advantages" else batch.mask.flatten()
    return bool(counts[place])


@pytest.fixture(autouse=True)
def without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask without comparing."""
    monkeypatch.setattr(Asked, "assert_reads", lambda *arguments: None)
    monkeypatch.setattr(Asked, "ignored", lambda *arguments: [])


@pytest.mark.parametrize("case", INVARIANTS, ids=lambda case: case.name)
def test_a_wrong_number_is_noticed(case: Any) -> None:
    answers, right = recorded(case)
    assert right.status == "yes" and answers
    has_bounds = not isinstance(case.expected, Batch) and any(isinstance(number, tuple) for number in case.expected)
    for answer, place, adapter in mutants(answers, None if has_bounds else 0.01):
        (result,) = run(adapter, [case])
        expected = "NO" if is_compared(case, answer.batch, place) else "yes"
        assert result.status == expected, f"number {place} of {len(answers)} answers"


@pytest.mark.parametrize("case", CONVENTIONS, ids=lambda case: case.name)
def test_a_convention_reads_every_answer(case: Any) -> None:
    answers, right = recorded(case)
    texts: dict[int, set[str]] = {id(answer): set() for answer in answers}
    for answer, _, adapter in mutants(answers, None):
        (result,) = run(adapter, [case])
        texts[id(answer)].add(result.text)
    assert texts and all(found - {right.text} for found in texts.values())
