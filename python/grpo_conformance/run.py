"""Cases, how they ask an adapter, and what comes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_conformance.batch import Batch, NotOffered

SETTINGS = {  # of a batch that a method should read
    "advantages": ("estimator",),
    "token_advantages": ("gamma", "lam"),
    "loss": ("aggregation", "ratio", "clip", "kl_coef", "entropy_coef", "packed"),
}
METHODS = tuple(SETTINGS)
INPUTS = {  # numbers of a batch that a method should read, and a report shows
    "advantages": ("rewards", "groups", "rollouts"),
    "token_advantages": ("token_rewards", "values", "rollouts"),
    "loss": ("advantages", "rollouts"),
}
PASSES, FAILS, ERROR, NOT_OFFERED, REPORTS = "yes", "NO", "ERROR", "-", "reports"


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A batch, or parts of one, for which a method has the result that is expected: numbers, or those of another."""

    method: str
    name: str
    title: str
    given: Batch | Sequence[Batch]
    expected: Batch | Sequence[float | None]  # None: not compared
    tolerance: float = 1e-5
    places: Sequence[int] | None = None  # of the expected numbers, which belong to those of `given`; None: all
    about: str | None = None  # the setting that the loss must depend on, or the case would tell nothing

    @property
    def settings(self) -> str:
        """The estimator or aggregation that the case asks for, and its settings that are not the default."""
        batch = self.given if isinstance(self.given, Batch) else self.given[0]
        values = {name: getattr(batch, name) for name in SETTINGS[self.method]}
        shown = [
            name for name in values if name in ("estimator", "aggregation") or values[name] != getattr(Batch, name)
        ]
        return " ".join(f"{name}={values[name]!r}" for name in shown)

    @property
    def inputs(self) -> str:
        """The batch that the case gives: its mask, a word for each row, and the numbers that the method reads."""
        batch = self.given if isinstance(self.given, Batch) else self.given[0].total
        shown = [name for name in INPUTS[self.method] if name != "rollouts" or batch.has_rollouts]
        words = " ".join("".join(str(int(token)) for token in row) for row in batch.mask.tolist())
        return "; ".join([f"mask {words}", *(f"{name} {_numbers(getattr(batch, name))}" for name in shown)])


def _numbers(values: Tensor) -> str:
    if values.dim() == 0:
        return f"{values.item():g}"
    return f"[{', '.join(map(_numbers, values))}]"


@dataclasses.dataclass(frozen=True)
class Convention:
    """A choice that is reported, not failed, by a function that says it in a few words."""

    name: str
    title: str
    ask: Callable[[Asked], str]


Case = Invariant | Convention


@dataclasses.dataclass(frozen=True)
class Result:
    case: Case
    status: str  # one of those above
    text: str = ""  # the wrong numbers beside the right ones, the convention, an error, or why there is nothing

    @property
    def has_failed(self) -> bool:
        return self.status in (FAILS, ERROR)


# What an adapter may say in `lacks` that its trainer has not, and whether a batch asks for it.
LACKS: dict[str, Callable[[Batch], bool]] = {
    "rollouts of several rows": lambda batch: batch.has_rollouts,
    "uneven groups": lambda batch: len({batch.groups.tolist().count(group) for group in batch.groups.tolist()}) > 1,
    "packed rows": lambda batch: batch.packed,
    "slices of the context": lambda batch: batch.columns is not None,
    "parts of different sizes": lambda batch: (
        batch.columns is None
        and len(batch.mask) * batch.ranks * batch.steps not in (len(batch.mask), len(batch.total.mask))
    ),
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """An adapter, whose answers are checked for their shape and made comparable."""

    adapter: Any

    def advantages(self, batch: Batch) -> Tensor:
        return _checked("advantages", self._call("advantages", batch), batch.rewards.shape)

    def token_advantages(self, batch: Batch) -> Tensor:
        """Advantages of the tokens in the mask, in the order of the rows."""
        return _checked("token_advantages", self._call("token_advantages", batch), batch.mask.shape)[batch.mask]

    def loss(self, *parts: Batch) -> Tensor:
        """The loss, the largest gradient outside of the mask, and those of the tokens in it, added up over parts."""
        mask = parts[0].total.mask
        total, gradient = torch.zeros((), dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
        for part in parts:
            leaf = part.logprobs.detach().clone().requires_grad_()
            answer = self._call("loss", part.replace(logprobs=leaf))
            if isinstance(answer, Tensor):
                (by_leaf,) = torch.autograd.grad(answer, leaf, allow_unused=True) if answer.requires_grad else (None,)
                answer = answer, torch.zeros_like(leaf) if by_leaf is None else by_leaf
            total += _checked("loss", answer[0], torch.Size())
            rows = torch.arange(len(leaf)) if part.rows is None else part.rows
            gradient[rows, slice(*(part.columns or (None,)))] += _checked("loss's gradient", answer[1], leaf.shape)
        outside = torch.where(mask, 0, gradient).abs().max()  # NaN is the largest of all
        return torch.cat([torch.stack([total, outside]), gradient[mask]])

    def assert_depends(self, setting: str, batch: Batch) -> None:
        """Raises NotOffered if the batch has the same loss by default as with its own value of a setting."""
        try:
            by_default = self.loss(batch.replace(**{setting: getattr(Batch, setting)}))
        except Exception:  # the trainer reads the setting, and lacks the default
            return
        if torch.allclose(self.loss(batch), by_default):
            raise NotOffered(f"its loss does not depend on {setting}")

    def _call(self, method: str, batch: Batch) -> Any:
        if not hasattr(self.adapter, method):
            raise NotOffered(f"the adapter has no {method}")
        for name in getattr(self.adapter, "lacks", ()):
            if LACKS[name](batch):
                raise NotOffered(f"the trainer has no {name}")
        return getattr(self.adapter, method)(batch)


def _checked(name: str, value: Any, shape: torch.Size) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != shape:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor of shape {list(shape)}, got {got}")
    return value.detach().double().cpu()


def run(adapter: Any, cases: Sequence[Case]) -> list[Result]:
    """Runs cases with an adapter; whatever a trainer raises is its answer."""
    results, asked = [], Asked(adapter)
    for case in cases:
        try:
            reported = (
                Result(case, REPORTS, case.ask(asked)) if isinstance(case, Convention) else _compared(case, asked)
            )
        except NotOffered as reason:
            reported = Result(case, NOT_OFFERED, str(reason))
        except Exception as error:
            text = f"raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            reported = Result(case, REPORTS if isinstance(case, Convention) else ERROR, text)
        results.append(reported)
    return results


def _compared(case: Invariant, asked: Asked) -> Result:
    ask = getattr(asked, case.method)
    if case.about is not None:
        asked.assert_depends(case.about, next(side for side in (case.expected, case.given) if isinstance(side, Batch)))
    if isinstance(case.expected, Batch):
        expected = ask(case.expected)
        expected = expected if case.places is None else expected[list(case.places)]
        is_compared = torch.ones_like(expected, dtype=torch.bool)
    else:
        expected = torch.tensor([math.nan if number is None else number for number in case.expected]).double()
        is_compared = ~expected.isnan()
    got = ask(case.given) if isinstance(case.given, Batch) else ask(*case.given)
    unit = {"advantages": "row", "token_advantages": "token", "loss": "gradient of token"}[case.method]
    names = ["loss", "gradient outside the mask"] if case.method == "loss" else []
    names += [f"{unit} {i}" for i in range(len(expected) - len(names))]
    is_wrong = is_compared & ~torch.isclose(got, expected, rtol=case.tolerance, atol=case.tolerance)
    wrong = [f"{names[i]} is {_beside(got[i], expected[i])}" for i in is_wrong.nonzero().flatten().tolist()]
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return Result(case, FAILS if wrong else PASSES, "; ".join(wrong[:3]) + more)


def _beside(got: Tensor, expected: Tensor) -> str:
    """A wrong number beside the right one, and how many times that it is."""
    ratio = got / expected
    return f"{got:.4g}, not {expected:.4g}" + (f" ({ratio:.3g} times)" if ratio.isfinite() and got != 0 else "")
