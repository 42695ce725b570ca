"""The cases, against trainers that are right and wrong.

The faults to notice: a case that a wrong trainer passes, or that a right one fails; a yes for what an adapter ignores.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from grpo_conformance import CONVENTIONS, INVARIANTS, Batch, NotOffered, run
from grpo_conformance.adapters import load
from grpo_conformance.cases import LOSSES
from grpo_conformance.run import LACKS, _known
from torch import Tensor

from tests.conformance.mutants import MUTANTS, SENTENCE, is_noticed, noticed
from tests.conformance.plain import Plain

PAGE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"
CASES = (*INVARIANTS, *CONVENTIONS)
RIGHT = Plain()


@pytest.mark.full
def test_mutants_of_a_right_trainer_are_noticed() -> None:
    count = sum(map(is_noticed, MUTANTS))
    assert len(MUTANTS) >= 40 and count >= 38
    if PAGE.exists():
        assert SENTENCE.findall(PAGE.read_text()) == [f"notices {count} of {len(MUTANTS)} mutants"]


@pytest.mark.full
def test_every_case_notices_a_mutant() -> None:
    assert {case.name for case in INVARIANTS} == {case for name in MUTANTS for case in noticed(name)}


def test_names_are_different() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_known_numbers_come_before_the_cases_that_count_after_them() -> None:
    names = [case.name for case in INVARIANTS]
    for place, case in enumerate(INVARIANTS):
        known = {name for variant in case.variants for name in _known(case.under(variant))} - {case.name, "kl-None"}
        assert known <= {*names[:place]}, case.name


class Zeros:
    name = "zeros"

    def advantages(self, batch: Batch) -> Tensor:
        return torch.zeros_like(batch.rewards)

    def token_advantages(self, batch: Batch) -> Tensor:
        return torch.zeros_like(batch.values)

    def loss(self, batch: Batch) -> Tensor:
        return batch.logprobs.nansum() * 0

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        return torch.zeros_like(tokens[:, 1:])


def test_zeros_are_never_right() -> None:
    assert "yes" not in {result.status for result in run(Zeros(), INVARIANTS)}


def test_a_plain_trainer_is_right() -> None:
    assert [(of.case.name, of.status, of.text) for of in run(RIGHT, INVARIANTS) if of.status != "yes"] == []


class Faulty(Plain):
    def __init__(self, method: str, function: Callable[[Batch], Tensor]) -> None:
        setattr(self, method, function)


def everything_counts(batch: Batch) -> Batch:
    return batch.replace(mask=torch.ones_like(batch.mask))


def test_the_docstring_of_a_batch_has_its_fields() -> None:
    attributes = str(Batch.__doc__).partition("Attributes:\n")[2]
    assert re.findall(r"^ {8}(\w+): ", attributes, re.MULTILINE) == [field.name for field in dataclasses.fields(Batch)]


@pytest.mark.parametrize(
    ("case", "answer", "ignored"),
    [
        ("mean", lambda batch: torch.tensor([1.0, -1, -2, 2]), "rewards, groups"),
        ("equal-rewards", lambda batch: torch.zeros(8), "rewards"),
        (
            "token-mean",
            lambda batch: RIGHT.loss(batch.replace(old_logprobs=batch.logprobs.detach())),
            "logprobs, old_logprobs",
        ),
        ("clip", lambda batch: RIGHT.loss(batch.replace(mask=torch.ones(2, 1).bool())), "mask"),
    ],
)
def test_a_field_that_an_adapter_ignores_is_found(case: str, answer: Any, ignored: str) -> None:
    (found,) = (each for each in INVARIANTS if each.name == case)
    (result,) = run(Faulty(found.method, answer), [found])
    assert (result.status, result.text) == ("ignored", f"{ignored} changes nothing")


def leaks(by: float) -> Callable[[Batch], tuple[Tensor, Tensor]]:
    """A loss whose gradient outside of the mask is this."""

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        value = RIGHT.loss(batch)
        (gradient,) = torch.autograd.grad(value, batch.logprobs)
        return value.detach(), gradient.where(batch.mask, by)

    return loss


def test_a_trainer_may_divide_by_n() -> None:
    def advantages(batch: Batch) -> Tensor:
        rollouts = len(set(batch.rollouts.tolist()))
        return RIGHT.advantages(batch) * math.sqrt(rollouts / (rollouts - 1))

    results = run(Faulty("advantages", advantages), [case for case in INVARIANTS if case.name == "rollout-in-std"])
    assert [result.status for result in results] == ["yes"]


@pytest.mark.parametrize(("name", "off", "status"), [("equal-rewards-exact", 1e-7, "NO"), ("mean", 1e-6, "yes")])
def test_a_case_has_its_own_tolerance(name: str, off: float, status: str) -> None:
    trainer = Faulty("advantages", lambda batch: RIGHT.advantages(batch) + off)
    (result,) = run(trainer, [case for case in INVARIANTS if case.name == name])
    assert result.status == status


def test_our_ops_pass_everything() -> None:
    results = run(load("grpo_kernels"), INVARIANTS)
    assert {result.case.name: result.status for result in results if result.status != "yes"} == dict.fromkeys(
        (
            *("filter-whole-groups", "value", "auxiliary", "value-share", "auxiliary-share", "auxiliary-of-ranks"),
            "truncated-denominator",
        ),
        "-",
    )


def said(adapter: Any) -> dict[str, str]:
    return {result.case.name: result.text for result in run(adapter, CONVENTIONS)}


def test_conventions_of_the_plain_trainer() -> None:
    assert said(RIGHT) == {
        "voters": "masked do not",
        "scored-voters": "unscored do not",
        "lone": "0; 0",
        "std": "n - 1",
        "epsilon": "nothing",
        "siblings": "the last counts",
        "discount": "skips it",
        "aggregation": "mean over tokens",
        "empty-row": "is left out",
        "dual-clip": "100, unbounded",
        "rollout-ratio": "the rollout's",
        "kl-weight": "nothing",
    }


class Other:
    """Other choices."""

    name = "other"

    def advantages(self, batch: Batch) -> Tensor:
        rewards = batch.rewards.double()
        if len(rewards) == 1:
            return rewards
        centred = rewards - rewards.mean()
        return centred / (rewards.std(correction=0) + 1e-3) if batch.estimator == "mean-std" else centred

    def token_advantages(self, batch: Batch) -> Tensor:
        return RIGHT.token_advantages(everything_counts(batch))

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """With the gradient, rather than by autograd."""
        leaf = batch.logprobs.detach().requires_grad_()
        aggregation = batch.aggregation or "seq-mean-token-mean"
        rows = torch.arange(len(batch.mask))
        given = batch.replace(logprobs=leaf, aggregation=aggregation, rollouts=rows, kl_coef=2 * batch.kl_coef)
        loss = RIGHT.loss(given) * (batch.mask.any(1).double().mean() if aggregation.startswith("seq") else 1)
        loss = loss.clamp(max=3.0)
        return loss, torch.autograd.grad(loss, leaf)[0]


class Undivided(Other):
    """Never divides by the deviation."""

    def advantages(self, batch: Batch) -> Tensor:
        return super().advantages(batch.replace(estimator="mean"))


def test_other_conventions() -> None:
    assert said(Undivided())["epsilon"] == "no division by it"
    assert said(Other()) == {
        "voters": "masked do",
        "scored-voters": "NaN",
        "lone": "its reward; its reward",
        "std": "n",
        "epsilon": "1e-03",
        "siblings": "each row has its own",
        "discount": "counts its tokens",
        "aggregation": "mean over rows",
        "empty-row": "counts",
        "dual-clip": "3",
        "rollout-ratio": "each row's",
        "kl-weight": "the ratio",
    }


def test_what_an_adapter_lacks_is_not_offered() -> None:
    def refuses(batch: Batch) -> Tensor:
        raise NotOffered("groups are fixed")

    half = SimpleNamespace(name="half", advantages=refuses)
    assert {(result.status, result.text) for result in run(half, CASES)} == {
        ("-", "groups are fixed"),
        ("-", "the adapter has no token_advantages"),
        ("-", "the adapter has no loss"),
        ("-", "the adapter has no logprobs"),
    }


def test_what_a_trainer_lacks_is_not_offered() -> None:
    class Small(Plain):
        lacks = tuple(LACKS)

    results = {result.case.name: result for result in run(Small(), CASES)}
    assert {result.text for result in results.values() if result.status == "-"} == {
        f"the trainer has no {name}" for name in LACKS
    }
    lacking = [name for name, result in results.items() if result.status == "-"]
    assert lacking == [
        *("uneven-groups", "rollout-in-mean", "rollout-leave-one-out", "rollout-in-std", "rollout-masked-end"),
        *(
            "pad-rows",
            "gae-masked-reward",
            "gae-rollout",
            "packing",
            "parts-sizes",
            "ranks-sizes",
            "slices-tokens",
            "slices-rows",
        ),
        *("rollout-mean", "rollout-in-parts", "pad-rows-tokens", "pad-rows-means", "empty-part"),
        *("voters", "scored-voters", "siblings", "empty-row", "rollout-ratio"),
    ]


def test_a_setting_without_effect_is_ignored() -> None:
    """Only the cases about it; others that have it are still asked."""

    class Bare(Plain):
        def loss(self, batch: Batch) -> Tensor:
            ignored: dict[str, Any] = {"aggregation": "token-mean", "kl_coef": 0.0, "entropy_coef": 0.0}
            whole = None if batch.whole is None else batch.whole.replace(**ignored)
            return super().loss(batch.replace(ratio="token", whole=whole, **ignored))

    results = {of.case.name: (of.status, of.text) for of in run(Bare(), LOSSES) if of.status != "yes"}
    assert {status for status, _ in results.values()} == {"ignored", "-"}
    assert results["seq-mean-token-mean"] == ("ignored", "aggregation='seq-mean-token-mean' changes nothing")
    assert results["kl-share"] == ("ignored", "kl_coef=0.5 changes nothing")
    assert results["filter-mask"] == ("-", "counts only after kl-k3")
    assert results["gspo"] == ("ignored", "ratio='sequence' changes nothing")
    asked = {case.name for case in LOSSES} - results.keys()
    assert {"clip", "padding", "parts-tokens", "parts-default", "ranks-steps", "nan-masked"} <= asked


def test_a_trainer_is_asked_under_the_settings_that_it_has() -> None:
    class OfRows(Plain):
        def loss(self, batch: Batch) -> Tensor:
            if batch.aggregation not in ("seq-mean-token-mean", None):
                raise NotOffered("a mean over rows alone")
            named = {"aggregation": "seq-mean-token-mean"}
            return super().loss(batch.replace(whole=batch.whole and batch.whole.replace(**named), **named))

    statuses = {result.case.name: result.status for result in run(OfRows(), LOSSES)}
    assert {name for name, status in statuses.items() if status != "yes"} == {
        *("token-mean", "kl-token-mean", "entropy-token-mean", "parts-tokens", "ranks-tokens", "slices-tokens"),
        *("seq-mean-token-sum", "kl-seq-mean-token-sum", "entropy-seq-mean-token-sum"),
        *("pad-rows-tokens", "truncated-denominator"),
    }


def test_a_documented_deviation_is_a_choice() -> None:
    class Documented(Faulty):
        documents: ClassVar = {"clip": "in its manual"}
        where: ClassVar = {"loss": "trainer.py:7"}

    trainer = Documented("loss", lambda batch: RIGHT.loss(batch.replace(clip=10.0)))
    clip, low = run(trainer, [case for case in INVARIANTS if case.name.startswith("clip")])
    assert (clip.status, clip.text, clip.where) == ("choice", "in its manual", "trainer.py:7")
    assert (low.status, low.is_fault, low.where) == ("NO", True, "trainer.py:7")


@pytest.mark.parametrize(
    "name, function, status, text",
    [
        ("mean", lambda batch: 1.0, "ERROR", r"raises ValueError: advantages must be .* of shape \[4\], got float"),
        ("mean", lambda batch: batch.values, "ERROR", r"raises ValueError: .* of shape \[4\], got \[4, 2\]"),
        ("mean", lambda batch: 1 / 0, "ERROR", "raises ZeroDivisionError: division by zero"),
        ("mean", lambda batch: batch.rewards * math.nan, "NO", ".*; and 1 more"),
        ("token-mean", lambda batch: (batch.advantages, batch.logprobs), "ERROR", r".* of shape \[\], got \[2\]"),
        ("token-mean", leaks(1.0), "NO", "gradient outside the mask is 1, not 0"),
        ("token-mean", leaks(math.nan), "NO", "gradient outside the mask is nan, not 0"),
    ],
)
def test_an_answer_that_is_never_right(name: str, function: Any, status: str, text: str) -> None:
    (case,) = (case for case in INVARIANTS if case.name == name)
    (result,) = run(Faulty(case.method, function), [case])
    assert result.status == status and re.fullmatch(text, result.text)
