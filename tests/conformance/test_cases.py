"""The cases, against trainers that are right and wrong.

The faults to notice: a case that a wrong trainer passes, or that a right one fails. Each fault in the table is a few
lines that make the plain trainer wrong in the way that a case is there for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_conformance import CONVENTIONS, INVARIANTS, PAD_GROUP, Batch, NotOffered, run
from grpo_conformance.adapters import load
from grpo_conformance.cases import LOSSES
from grpo_conformance.run import LACKS
from torch import Tensor

from tests.conformance.plain import Plain

CASES = (*INVARIANTS, *CONVENTIONS)
RIGHT = Plain()


def rows_as_rollouts(batch: Batch) -> Batch:
    """Each row for itself, in the batch and in the whole of which it is a part."""
    whole = None if batch.whole is None else rows_as_rollouts(batch.whole)
    return batch.replace(rollouts=batch.of_total(torch.arange(len(batch.total.mask))), whole=whole)


def alone(batch: Batch) -> Batch:
    """A part that knows of no whole."""
    return batch.replace(whole=None, rows=None, columns=None)


def everything_counts(batch: Batch) -> Batch:
    return batch.replace(mask=torch.ones_like(batch.mask))


def pads_vote(batch: Batch) -> Tensor:
    return RIGHT.advantages(everything_counts(batch.replace(groups=batch.groups.where(batch.groups != PAD_GROUP, 0))))


def global_mean_if_uneven(batch: Batch) -> Tensor:
    even = len(set(batch.groups.bincount().tolist())) == 1
    return RIGHT.advantages(batch if even else batch.replace(groups=torch.zeros_like(batch.groups)))


def last_row_decides(batch: Batch) -> Tensor:
    ids = batch.rollouts.tolist()
    last = [len(ids) - 1 - ids[::-1].index(rollout) for rollout in ids]
    return RIGHT.advantages(batch) * batch.mask.any(1)[last]


def by_width(batch: Batch) -> Tensor:
    return RIGHT.loss(batch) / batch.mask.shape[1]


def counted_alone(batch: Batch) -> Tensor:
    return RIGHT.loss(alone(batch))


def mean_over_parts(batch: Batch) -> Tensor:
    return RIGHT.loss(alone(batch)) / batch.ranks / batch.steps


def rows_count(batch: Batch) -> Tensor:
    return RIGHT.loss(rows_as_rollouts(batch))


def wrong_rows_if_packed(batch: Batch) -> Tensor:
    return RIGHT.loss(batch.replace(advantages=batch.advantages.roll(1)) if batch.packed else batch)


def times_mask(name: str) -> Callable[[Batch], Tensor]:
    return lambda batch: RIGHT.loss(batch) + (getattr(batch, name) * batch.mask).sum() * 0


def changed(method: str, **fields: Any) -> Callable[[Batch], Tensor]:
    return lambda batch: getattr(RIGHT, method)(batch.replace(**fields))


FAULTS: dict[str, Callable[[Batch], Tensor]] = {
    "mean": lambda batch: RIGHT.advantages(batch.replace(groups=torch.zeros_like(batch.groups))),
    "leave-one-out": changed("advantages", estimator="mean"),
    "equal-rewards": lambda batch: (batch.rewards - batch.rewards.mean()) / (batch.rewards.std() + 1e-6),
    "row-order": lambda batch: RIGHT.advantages(batch.replace(groups=torch.arange(len(batch.groups)) // 3)),
    "uneven-groups": global_mean_if_uneven,
    "rollout-in-mean": lambda batch: RIGHT.advantages(rows_as_rollouts(batch)),
    "rollout-leave-one-out": lambda batch: RIGHT.advantages(rows_as_rollouts(batch)),
    "rollout-in-std": lambda batch: RIGHT.advantages(rows_as_rollouts(batch)),
    "rollout-masked-end": last_row_decides,
    "masked-vote": lambda batch: RIGHT.advantages(everything_counts(batch)),
    "unscored": lambda batch: RIGHT.advantages(batch.replace(rewards=batch.rewards.nan_to_num())),
    "pad-rows": pads_vote,
    "gae": changed("token_advantages", lam=1.0),
    "gae-gap": lambda batch: RIGHT.token_advantages(everything_counts(batch)),
    "gae-nan": lambda batch: RIGHT.token_advantages(batch) + (batch.values * batch.mask).sum() * 0,
    "gae-masked-reward": lambda batch: RIGHT.token_advantages(batch.over(0.0, "token_rewards")),
    "gae-rollout": lambda batch: RIGHT.token_advantages(rows_as_rollouts(batch)),
    "token-mean": changed("loss", aggregation="seq-mean-token-mean"),
    "row-mean": by_width,
    "row-sum": by_width,
    "clip": changed("loss", clip=10.0),
    "padding": by_width,
    "gaps": by_width,
    "packing": wrong_rows_if_packed,
    "nan-masked": times_mask("logprobs"),
    "inf-masked": times_mask("ref_logprobs"),
    "row-order-loss": lambda batch: RIGHT.loss(batch.replace(advantages=batch.advantages.sort().values)),
    "parts-tokens": counted_alone,
    "parts-rows": counted_alone,
    "parts-sizes": mean_over_parts,
    "ranks-tokens": mean_over_parts,
    "ranks-rows": lambda batch: RIGHT.loss(batch) / batch.ranks,
    "ranks-sizes": mean_over_parts,
    "slices-tokens": counted_alone,
    "slices-rows": counted_alone,
    "kl-share": mean_over_parts,
    "entropy-share": mean_over_parts,
    "entropy-of-ranks": mean_over_parts,
    "rollout-mean": rows_count,
    "rollout-sum": rows_count,
    "rollout-ratio": rows_count,
    "rollout-in-parts": rows_count,
    "pad-rows-loss": lambda batch: RIGHT.loss(batch) * batch.mask.any(1).sum() / len(batch.mask),
    "empty-part": lambda batch: RIGHT.loss(batch) * (batch.mask.sum() / batch.mask.sum()),
}


class Faulty(Plain):
    def __init__(self, method: str, function: Callable[[Batch], Tensor]) -> None:
        setattr(self, method, function)


def test_every_invariant_has_a_fault() -> None:
    assert list(FAULTS) == [case.name for case in INVARIANTS]
    assert len({case.name for case in (*INVARIANTS, *CONVENTIONS)}) == len(INVARIANTS) + len(CONVENTIONS)


def test_the_docstring_of_a_batch_has_its_fields() -> None:
    attributes = str(Batch.__doc__).partition("Attributes:\n")[2]
    assert re.findall(r"^ {8}(\w+): ", attributes, re.MULTILINE) == [field.name for field in dataclasses.fields(Batch)]


@pytest.mark.parametrize("case", INVARIANTS, ids=lambda case: case.name)
def test_a_fault_is_noticed(case: Any) -> None:
    (right,) = run(RIGHT, [case])
    assert (right.status, right.text) == ("yes", "")
    (wrong,) = run(Faulty(case.method, FAULTS[case.name]), [case])
    assert wrong.status == "NO" and ", not " in wrong.text, wrong.text


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


@pytest.mark.parametrize(("name", "off", "status"), [("equal-rewards", 1e-7, "NO"), ("mean", 1e-6, "yes")])
def test_a_case_has_its_own_tolerance(name: str, off: float, status: str) -> None:
    trainer = Faulty("advantages", lambda batch: RIGHT.advantages(batch) + off)
    (result,) = run(trainer, [case for case in INVARIANTS if case.name == name])
    assert result.status == status


def test_our_ops_pass_everything() -> None:
    results = run(load("grpo_kernels"), INVARIANTS)
    assert [result.case.name for result in results if result.status != "yes"] == []


def said(adapter: Any) -> dict[str, str]:
    return {result.case.name: result.text for result in run(adapter, CONVENTIONS)}


def test_conventions_of_the_plain_trainer() -> None:
    assert said(RIGHT) == {
        "voters": "masked do not; unscored do not",
        "lone": "0; 0",
        "std": "n - 1",
        "epsilon": "nothing",
        "siblings": "the last counts",
        "discount": "skips it",
        "aggregation": "mean over tokens",
        "empty-row": "is left out",
        "dual-clip": "100, unbounded",
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
        given = batch.replace(logprobs=leaf, aggregation=aggregation)
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
        "voters": "masked do; NaN",
        "lone": "its reward; its reward",
        "std": "n",
        "epsilon": "1e-03",
        "siblings": "each row has its own",
        "discount": "counts its tokens",
        "aggregation": "mean over rows",
        "empty-row": "counts",
        "dual-clip": "3",
    }


def test_what_an_adapter_lacks_is_not_offered() -> None:
    def refuses(batch: Batch) -> Tensor:
        raise NotOffered("groups are fixed")

    half = SimpleNamespace(name="half", advantages=refuses)
    assert {(result.status, result.text) for result in run(half, (*INVARIANTS, *CONVENTIONS))} == {
        ("-", "groups are fixed"),
        ("-", "the adapter has no token_advantages"),
        ("-", "the adapter has no loss"),
    }


def test_what_a_trainer_lacks_is_not_offered() -> None:
    class Small(Plain):
        lacks = tuple(LACKS)

    results = {result.case.name: result for result in run(Small(), (*INVARIANTS, *CONVENTIONS))}
    assert {result.text for result in results.values() if result.status == "-"} == {
        f"the trainer has no {name}" for name in LACKS
    }
    lacking = [name for name, result in results.items() if result.status == "-"]
    assert lacking == [
        *("uneven-groups", "rollout-in-mean", "rollout-leave-one-out", "rollout-in-std", "rollout-masked-end"),
        *("pad-rows", "gae-rollout", "packing", "parts-sizes", "ranks-sizes", "slices-tokens", "slices-rows"),
        *("rollout-mean", "rollout-sum", "rollout-ratio", "rollout-in-parts", "siblings"),
    ]


def test_a_setting_without_effect_is_not_offered() -> None:
    """Only to the cases about it; others that have it are still asked."""

    class Bare(Plain):
        def loss(self, batch: Batch) -> Tensor:
            ignored: dict[str, Any] = {"aggregation": "token-mean", "kl_coef": 0.0, "entropy_coef": 0.0}
            whole = None if batch.whole is None else batch.whole.replace(**ignored)
            return super().loss(batch.replace(ratio="token", whole=whole, **ignored))

    means = ["row-mean", "row-sum", "parts-rows", "parts-sizes", "ranks-rows", "ranks-sizes", "slices-rows"]
    means += ["rollout-mean", "rollout-sum", "rollout-in-parts", "empty-row"]
    about = dict.fromkeys(means, "aggregation") | {"kl-share": "kl_coef", "rollout-ratio": "ratio"}
    about |= dict.fromkeys(["entropy-share", "entropy-of-ranks"], "entropy_coef")
    results = [result for result in run(Bare(), CASES) if result.status not in ("yes", "reports")]
    assert {result.case.name: (result.status, result.text) for result in results} == {
        name: ("-", f"its loss does not depend on {setting}") for name, setting in about.items()
    }


def test_a_trainer_without_the_default_of_a_setting_has_the_setting() -> None:
    class OfRows(Plain):
        def loss(self, batch: Batch) -> Tensor:
            return super().loss(batch) * {"seq-mean-token-mean": 1}[str(batch.aggregation)]

    statuses = {result.case.name: result.status for result in run(OfRows(), LOSSES)}
    assert [statuses[name] for name in ("row-mean", "parts-rows", "token-mean")] == ["yes", "yes", "ERROR"]


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
