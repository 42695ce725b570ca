"""Cases, how they ask an adapter, and what comes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_conformance.batch import PAD_GROUP, Batch, Logits, NotOffered, make, probe

SETTINGS = {  # of a batch that a method should read
    "advantages": ("estimator", "filter_groups"),
    "token_advantages": ("gamma", "lam", "whiten"),
    "loss": (
        *("aggregation", "ratio", "clip", "kl", "kl_coef", "entropy_coef"),
        *("teacher_coef", "value_coef", "auxiliary_coef", "mask_truncated"),
    ),
    "logprobs": ("temperature",),
}
METHODS = tuple(SETTINGS)
INPUTS = {  # numbers of a batch that a method should read, and a report shows
    "advantages": ("rewards", "groups", "rollouts"),
    "token_advantages": ("token_rewards", "values", "rollouts"),
    "loss": ("advantages", "rollouts"),
    "logprobs": ("logits", "tokens"),
}
PASSES, FAILS, ERROR, IGNORED, CHOICE, NOT_OFFERED, REPORTS = "yes", "NO", "ERROR", "ignored", "choice", "-", "reports"
FAULT, ROBUSTNESS = "fault", "robustness"

Number = float | tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A batch, or parts of one, for which a method has the result that is expected.

    Attributes:
        method: name of the method that is asked
        name: in reports
        title: what must hold
        given: the batch, its parts, whose losses are added up, or logits
        expected: numbers, of which a pair is bounds, NaN is a row that is left out, and None is not compared; or the
            batch, or batches one after another, whose result it is
        variants: settings under each of which it is asked, where the trainer has them
        tolerance: absolute and relative
        places: of the expected numbers, which belong to those of `given`, None for one that is not compared; None
            means all
        kind: what a failure is, FAULT or ROBUSTNESS
    """

    method: str
    name: str
    title: str
    given: Batch | Logits | Sequence[Batch]
    expected: Batch | Sequence[Batch] | Sequence[Number]
    variants: Sequence[Mapping[str, Any]] = ({},)
    tolerance: float = 1e-5
    places: Sequence[int | None] | None = None
    kind: str = FAULT

    def under(self, variant: Mapping[str, Any]) -> Invariant:
        """The case with these settings in all its batches."""

        def change(side: Any) -> Any:
            if isinstance(side, Batch):
                whole = None if side.whole is None else side.whole.replace(**variant)
                return side.replace(whole=whole, **variant)
            return [change(one) for one in side] if isinstance(side, list) else side

        return dataclasses.replace(self, given=change(self.given), expected=change(self.expected))

    @property
    def parts(self) -> Sequence[Any]:
        return self.given if isinstance(self.given, Sequence) else [self.given]

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings of the case that are not the default."""
        batch = self.parts[0]
        values = {name: getattr(batch, name) for name in SETTINGS[self.method]}
        return {name: value for name, value in values.items() if value != getattr(type(batch), name)}

    @property
    def settings(self) -> str:
        """The estimator or aggregation that the case asks for, and its settings that are not the default."""
        name = {"advantages": "estimator", "loss": "aggregation"}.get(self.method)
        named = {name: getattr(self.parts[0], name)} if name else {}
        return " ".join(f"{name}={value!r}" for name, value in (named | self.chosen).items())

    @property
    def inputs(self) -> str:
        """The batch that the case gives: its mask, a word for each row, and the numbers that the method reads."""
        batch = self.parts[0].total
        shown = [name for name in INPUTS[self.method] if name != "rollouts" or batch.has_rollouts]
        words = []
        if isinstance(batch, Batch):
            words = ["mask " + " ".join("".join(str(int(token)) for token in row) for row in batch.mask.tolist())]
        return "; ".join([*words, *(f"{name} {_numbers(getattr(batch, name))}" for name in shown)])


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
    case: Case  # under the settings in which it failed
    status: str  # one of those above
    text: str = ""  # the wrong numbers beside the right ones, the convention, an error, or why there is nothing
    where: str = ""  # file and line of the trainer

    @property
    def has_failed(self) -> bool:
        return self.status in (FAILS, ERROR)

    @property
    def is_fault(self) -> bool:
        return self.has_failed and isinstance(self.case, Invariant) and self.case.kind == FAULT


class Ignored(NotOffered):
    """A setting that changes nothing, which the trainer or the adapter does not read."""


# What an adapter may say in `lacks` that its trainer has not, and whether a batch asks for it.
LACKS: dict[str, Callable[[Batch], bool]] = {
    "rollouts of several rows": lambda batch: batch.has_rollouts,
    "uneven groups": lambda batch: len({batch.groups.tolist().count(group) for group in batch.groups.tolist()}) > 1,
    "rows that pad a batch": lambda batch: PAD_GROUP in batch.total.groups,
    "masked rows": lambda batch: batch.lengths is None and not bool(batch.mask.any(1)[batch.groups != PAD_GROUP].all()),
    "unscored rows": lambda batch: bool(batch.rewards.isnan().any()),
    "rewards at masked tokens": lambda batch: bool((batch.token_rewards.nan_to_num()[~batch.mask] != 0).any()),
    "packed rows": lambda batch: batch.lengths is not None,
    "slices of the context": lambda batch: batch.columns is not None,
    "parts of different sizes": lambda batch: (
        batch.columns is None
        and len(batch.mask) * batch.ranks * batch.steps not in (len(batch.mask), len(batch.total.mask))
    ),
}
# Fields of a batch that a result must depend on, and when.
FIELDS: dict[str, dict[str, Callable[[Batch], Any]]] = {
    "advantages": {
        "rewards": lambda batch: True,
        "groups": lambda batch: len({*batch.groups.tolist()} - {PAD_GROUP}) > 1,
        "rollouts": lambda batch: batch.has_rollouts,
    },
    "token_advantages": {
        "token_rewards": lambda batch: True,
        "values": lambda batch: True,
        "mask": lambda batch: not batch.mask.all(),
        "rollouts": lambda batch: batch.has_rollouts,
    },
    "loss": {
        "mask": lambda batch: True,
        "advantages": lambda batch: True,
        "logprobs": lambda batch: batch.advantages.any() or batch.kl_coef or batch.teacher_coef,
        "old_logprobs": lambda batch: batch.advantages.any(),
        "ref_logprobs": lambda batch: batch.kl_coef,
        "teacher_logprobs": lambda batch: batch.teacher_coef,
        "entropy": lambda batch: batch.entropy_coef,
        "values": lambda batch: batch.value_coef,
        "returns": lambda batch: batch.value_coef,
        "auxiliary": lambda batch: batch.auxiliary_coef,
        "truncated": lambda batch: batch.mask_truncated,
        "rollouts": lambda batch: batch.has_rollouts,
    },
    "logprobs": {},
}
# a batch in which every setting matters
_REFERENCE = make(
    [[1, 1, 1, 1], [1, 0, 1, 1], [1], [1, 1], [1, 1, 1], [1, 1]],
    [3, 1, 2.5, 1, 1, 1],
    [0, 0, 0, 1, 1, 1],
    token_rewards=[[0, 1, 0, 0], [0, 0, 0, 2], [1, 0, 0, 0], [0, 3, 0, 0], [0, 0, 1, 0], [0, 2, 0, 0]],
    values=[[0.5, 0.2, 0.1, 0.4], [0.3] * 4, [0.1] * 4, [0.6] * 4, [0.2] * 4, [0.7] * 4],
    auxiliary=1.0,
    truncated=[True] + [False] * 5,
)


class Asked:
    """An adapter, whose answers are checked for their shape and made comparable."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self._matters: dict[tuple[Any, ...], bool] = {}

    def numbers(self, method: str, *parts: Any) -> Tensor:
        """The advantages of rows, those of tokens in the mask, or the loss and its gradients, as one row of numbers."""
        if method == "loss":
            return self.loss(*parts)
        return torch.cat([getattr(self, method)(one) for one in parts])

    def advantages(self, batch: Batch) -> Tensor:
        return _checked("advantages", self._call("advantages", batch), batch.rewards.shape)

    def token_advantages(self, batch: Batch) -> Tensor:
        """Advantages of the tokens in the mask, in the order of the rows."""
        return _checked("token_advantages", self._call("token_advantages", batch), batch.mask.shape)[batch.mask]

    def logprobs(self, given: Logits) -> Tensor:
        """Log-probs of all tokens but the first of each row."""
        method = self._method("logprobs")
        value = method(given.logits, given.tokens, given.temperature)
        count, length = given.tokens.shape
        return _checked("logprobs", value, torch.Size((count, length - 1))).flatten()

    def loss(self, *parts: Batch) -> Tensor:
        """The loss, the largest gradient outside of the mask, and those of the tokens in it, added up over parts."""
        mask, (total, gradient) = parts[0].total.mask, self.added_up(*parts)
        outside = torch.where(mask, 0, gradient).abs().max()  # NaN is the largest of all
        return torch.cat([torch.stack([total, outside]), gradient[mask]])

    def added_up(self, *parts: Batch) -> tuple[Tensor, Tensor]:
        """The loss and its gradient [N, T]."""
        total = torch.zeros((), dtype=torch.float64)
        gradient = torch.zeros(parts[0].total.mask.shape, dtype=torch.float64)
        for part in parts:
            leaf = part.logprobs.detach().clone().requires_grad_()
            answer = self._call("loss", part.replace(logprobs=leaf))
            if isinstance(answer, Tensor):
                (by_leaf,) = torch.autograd.grad(answer, leaf, allow_unused=True) if answer.requires_grad else (None,)
                answer = answer, torch.zeros_like(leaf) if by_leaf is None else by_leaf
            total += _checked("loss", answer[0], torch.Size())
            rows = torch.arange(len(leaf)) if part.rows is None else part.rows
            gradient[rows, slice(*(part.columns or (None,)))] += _checked("loss's gradient", answer[1], leaf.shape)
        return total, gradient

    def assert_reads(self, method: str, settings: Mapping[str, Any]) -> None:
        """Raises Ignored for a setting under which the reference has the result that it has by default."""
        known = {name: value for name, value in settings.items() if name not in ("clip", "gamma", "lam", "temperature")}
        for name, value in known.items():
            key = (name, *known.items())
            if value is not None and key not in self._matters:
                batch = _REFERENCE.replace(**known)
                self._matters[key] = self._differ(method, [batch], [batch.replace(**{name: getattr(Batch, name)})])
            if value is not None and not self._matters[key]:
                raise Ignored(f"{name}={value!r} changes nothing")

    def ignored(self, case: Invariant) -> list[str]:
        """Fields of the case's batch that may change without a change of the result."""
        batch = case.parts[0].total
        names = [name for name, matters in FIELDS[case.method].items() if matters(batch)]
        return [
            name
            for name in names
            if not self._differ(case.method, case.parts, [probe(part, name) for part in case.parts])
        ]

    def _differ(self, method: str, first: Sequence[Any], second: Sequence[Any]) -> bool:
        """Whether the results of two batches differ; one that raises differs, since it was read."""

        def everything(parts: Sequence[Any]) -> Tensor:
            if method == "loss":
                total, gradient = self.added_up(*parts)
                return torch.cat([total[None], gradient.flatten()])
            values = [torch.as_tensor(self._call(method, one)).detach().double() for one in parts]
            pairs = zip(values, first, strict=True)
            return torch.cat([value[one.mask] if value.dim() == 2 else value for value, one in pairs])

        try:
            return not torch.allclose(everything(first), everything(second), rtol=1e-6, atol=1e-9, equal_nan=True)
        except Exception:
            return True

    def _method(self, name: str) -> Any:
        if not hasattr(self.adapter, name):
            raise NotOffered(f"the adapter has no {name}")
        return getattr(self.adapter, name)

    def assert_has(self, batch: Batch) -> None:
        """Raises NotOffered for a batch with something that the trainer lacks."""
        for name in getattr(self.adapter, "lacks", ()):
            if LACKS[name](batch):
                raise NotOffered(f"the trainer has no {name}")

    def _call(self, method: str, batch: Batch) -> Any:
        function = self._method(method)
        self.assert_has(batch)
        return function(batch)


def _checked(name: str, value: Any, shape: torch.Size) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != shape:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor of shape {list(shape)}, got {got}")
    return value.detach().double().cpu()


def run(adapter: Any, cases: Sequence[Case]) -> list[Result]:
    """Runs cases with an adapter; whatever a trainer raises is its answer."""
    asked, results, wrong = Asked(adapter), list[Result](), set[str]()
    for case in cases:
        result = _answered(case, asked, wrong) if isinstance(case, Invariant) else _reported(case, asked)
        where = getattr(adapter, "where", {}) if result.has_failed or result.status == CHOICE else {}
        if isinstance(case, Invariant):
            result = dataclasses.replace(result, where=where.get(case.name, where.get(case.method, "")))
        if result.status in (FAILS, ERROR, IGNORED):
            wrong.add(case.name)
        results.append(result)
    return results


def _reported(case: Convention, asked: Asked) -> Result:
    try:
        return Result(case, REPORTS, case.ask(asked))
    except NotOffered as reason:
        return Result(case, NOT_OFFERED, str(reason))
    except Exception as error:
        return Result(case, REPORTS, _raised(error))


def _answered(case: Invariant, asked: Asked, wrong: set[str]) -> Result:
    """Asks a case under each of its settings; the first that fails is the result."""
    passed, absent = list[Invariant](), list[Result]()
    for variant in case.variants:
        varied = case.under(variant)
        try:
            if case.method != "logprobs":
                asked.assert_has(varied.parts[0])
            unmet = [name for name in _known(varied) if name in wrong and name != case.name]
            if unmet:
                raise NotOffered(f"counts only after {unmet[0]}")
            asked.assert_reads(case.method, varied.chosen)
            differences = _compared(varied, asked)
        except NotOffered as reason:
            absent.append(Result(case, IGNORED if isinstance(reason, Ignored) else NOT_OFFERED, str(reason)))
            continue
        except Exception as error:
            return Result(varied, ERROR, _raised(error))
        if differences:
            documented = getattr(asked.adapter, "documents", {}).get(case.name)
            return Result(varied, CHOICE if documented else FAILS, documented or differences)
        passed.append(varied)
    if not passed:
        return min(absent, key=lambda result: result.status != IGNORED)
    ignored = asked.ignored(passed[0])
    return Result(case, IGNORED, f"{', '.join(ignored)} changes nothing") if ignored else Result(case, PASSES)


def _known(case: Invariant) -> list[str]:
    """Names of the cases with known numbers that must hold before one with these settings counts."""
    batch = case.parts[0]
    if case.method == "advantages":
        return [batch.estimator or "default-advantages"]
    if case.method != "loss":
        return ["gae"] if case.method == "token_advantages" else []
    names = [batch.aggregation or "default-loss"]
    names += ["gspo"] if batch.ratio == "sequence" else []
    names += [name for name in ("entropy", "teacher", "value", "auxiliary") if getattr(batch, f"{name}_coef")]
    return names + ([f"kl-{batch.kl}"] if batch.kl_coef else [])


def _raised(error: Exception) -> str:
    return f"raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _bounds(expected: Sequence[Number]) -> Tensor:
    """The lowest and the highest number at each place [2, K]."""
    pairs = [number if isinstance(number, tuple) else (number, number) for number in expected]
    everything = (-math.inf, math.inf)
    return torch.tensor([everything if low is None else (low, high) for low, high in pairs]).double().mT


def _compared(case: Invariant, asked: Asked) -> str:
    """The wrong numbers of an answer beside the right ones; nothing if there are none."""
    sides = [case.expected] if isinstance(case.expected, Batch) else case.expected
    if isinstance(sides[0], Batch):
        own = torch.cat([asked.numbers(case.method, side) for side in sides])
        places = range(len(own)) if case.places is None else case.places
        bounds = _bounds([None if place is None else float(own[place]) for place in places])
    else:
        bounds = _bounds(sides)  # type: ignore[arg-type]
    got = asked.numbers(case.method, *case.parts)
    slack = case.tolerance * (1 + torch.where(bounds.isfinite(), bounds, 0).abs())
    is_free = bounds.isinf().all(0)
    is_right = ((bounds[0] - slack[0] <= got) & (got <= bounds[1] + slack[1])) | (bounds.isnan().all(0) & got.isnan())
    unit = {"advantages": "row", "loss": "gradient of token"}.get(case.method, "token")
    names = ["loss", "gradient outside the mask"] if case.method == "loss" else []
    names += [f"{unit} {i}" for i in range(len(got) - len(names))]
    places = (~is_free & ~is_right).nonzero().flatten().tolist()
    wrong = [f"{names[i]} is {_beside(got[i], bounds[:, i])}" for i in places]
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return "; ".join(wrong[:3]) + more


def _beside(got: Tensor, bounds: Tensor) -> str:
    """A wrong number beside the right one, or its bounds, and how many times that it is."""
    low, high = bounds.tolist()
    if low != high and not math.isnan(low):
        return f"{got:.4g}, not within {low:.4g} and {high:.4g}"
    ratio = got / low
    return f"{got:.4g}, not {low:.4g}" + (f" ({ratio:.3g} times)" if ratio.isfinite() and got != 0 else "")
