"""Cases, how they ask an adapter, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_conformance.batch import Batch, NotOffered

METHODS = ("advantages", "token_advantages", "loss")
PASSES, FAILS, ERROR, NOT_OFFERED, REPORTS = "pass", "fail", "error", "not offered", "reports"


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A batch, or parts of one, for which a method has the result that is expected: numbers, or those of another."""

    method: str
    name: str
    title: str
    given: Batch | Sequence[Batch]
    expected: Batch | Sequence[Batch] | Sequence[float]
    threads: str = ""  # of those who met it, as "verl#7580 rllm#924"
    rows: Sequence[int] | None = None  # of the result, that are compared
    expected_rows: Sequence[int] | None = None
    tolerance: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Convention:
    """A choice that is reported, not failed, by a function that says it in a few words."""

    name: str
    title: str
    ask: Callable[[Asked], str]
    threads: str = ""


Case = Invariant | Convention


@dataclasses.dataclass(frozen=True)
class Result:
    case: Case
    status: str
    text: str = ""  # the convention, or why there is nothing to compare
    numbers: tuple[tuple[str, float, float], ...] = ()  # name, expected, got: the wrong ones


class Asked:
    """An adapter, whose answers are checked for their shape and made comparable."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def advantages(self, batch: Batch) -> Tensor:
        return self._answer("advantages", batch, batch.rewards.shape)

    def token_advantages(self, batch: Batch) -> Tensor:
        """Advantages of the tokens in the mask, in the order of the rows."""
        return self._answer("token_advantages", batch, batch.mask.shape)[batch.mask]

    def loss(self, *parts: Batch) -> Tensor:
        """The loss, the largest gradient outside of the mask, and those of the tokens in it, added up over parts."""
        whole = parts[0].total
        total, gradient = torch.zeros(1, dtype=torch.float64), torch.zeros(whole.mask.shape, dtype=torch.float64)
        for part in parts:
            loss, of_part = self._loss_and_gradient(part)
            rows = torch.arange(len(part.mask)) if part.rows is None else part.rows
            first, last = part.columns or (0, whole.mask.shape[1])
            gradient[rows, first:last] += of_part
            total = total + loss
        outside = torch.where(whole.mask, 0, gradient).abs().max()  # NaN is the largest of all
        return torch.cat([total, outside[None], gradient[whole.mask]])

    def _loss_and_gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        leaf = batch.logprobs.detach().clone().requires_grad_()
        result = self._call("loss", batch.replace(logprobs=leaf))
        if isinstance(result, Tensor):
            (gradient,) = torch.autograd.grad(result, leaf, allow_unused=True) if result.requires_grad else (None,)
            result = result, torch.zeros_like(leaf) if gradient is None else gradient
        loss, gradient = (value.detach().double() for value in result)
        if loss.dim() or gradient.shape != leaf.shape:
            shapes = f"{list(loss.shape)} and {list(gradient.shape)}"
            raise ValueError(f"loss must return a scalar, with a gradient of shape {list(leaf.shape)}, got {shapes}")
        return loss, gradient

    def _answer(self, method: str, batch: Batch, shape: torch.Size) -> Tensor:
        result = self._call(method, batch)
        if not isinstance(result, Tensor) or result.shape != shape:
            got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"{method} must return a tensor of shape {list(shape)}, got {got}")
        return result.detach().double()

    def _call(self, method: str, batch: Batch) -> Any:
        if not hasattr(self.adapter, method):
            raise NotOffered(f"the adapter has no {method}")
        return getattr(self.adapter, method)(batch)


def run(adapter: Any, cases: Sequence[Case]) -> list[Result]:
    """Runs cases with an adapter; whatever a trainer raises is its answer."""
    results = []
    for case in cases:
        try:
            results.append(_run(case, Asked(adapter)))
        except NotOffered as reason:
            results.append(Result(case, NOT_OFFERED, str(reason)))
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            results.append(Result(case, ERROR if isinstance(case, Invariant) else REPORTS, f"raises {text}"))
    return results


def _run(case: Case, asked: Asked) -> Result:
    if isinstance(case, Convention):
        return Result(case, REPORTS, case.ask(asked))
    expected, got = _result(case.expected, case, asked), _result(case.given, case, asked)
    expected = expected if case.expected_rows is None else expected[list(case.expected_rows)]
    got = got if case.rows is None else got[list(case.rows)]
    if case.method == "loss":
        names = ["loss", "gradient outside the mask", *(f"gradient of token {i}" for i in range(len(expected) - 2))]
    else:
        unit = "row" if case.method == "advantages" else "token"
        names = [f"{unit} {i}" for i in case.rows or range(len(expected))]
    wrong = (~torch.isclose(got, expected, rtol=case.tolerance, atol=case.tolerance)).nonzero().flatten().tolist()
    numbers = tuple((names[i], float(expected[i]), float(got[i])) for i in wrong)
    return Result(case, FAILS if numbers else PASSES, numbers=numbers)


def _result(of: Batch | Sequence[Batch] | Sequence[float], case: Invariant, asked: Asked) -> Tensor:
    batches = [of] if isinstance(of, Batch) else list(of)
    if isinstance(batches[0], Batch):
        result: Tensor = getattr(asked, case.method)(*batches)
        return result
    return torch.tensor(batches, dtype=torch.float64)
