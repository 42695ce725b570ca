"""The losses of the policy term, a row of one table each.

A row has the formula, the ratios that it is defined for, and the settings that it reads. LossConfig, the reference and
its metrics read them here. csrc/policy_loss/terms.h has the formulas of the kernels, under the same names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows
from grpo_kernels.ops.policy_loss.reference.rows import Terms, Tokens
from grpo_kernels.plans import planned

RATIOS = ("token", "sequence", "sequence_token", "segment", "segment_mean")  # kernels know them by their positions
TOKEN, SEQUENCE, SEQUENCE_TOKEN, SEGMENT, SEGMENT_MEAN = range(len(RATIOS))
_VALUES = ("token", "sequence", "segment", "segment_mean")  # what a ratio may be where only its value is read


@planned
class Plan(NamedTuple):
    """A LossConfig as the kernels read it: codes and flags first, then numbers, with infinity for absent bounds."""

    loss: int
    ratio: int
    kl: int
    kl_straight: int
    kl_unbiased: int
    aggregation: int
    kl_aggregation: int
    entropy_aggregation: int
    count_empty_rows: int
    low: float
    high: float
    dual_clip: float
    cap: float
    sapo_pos: float
    sapo_neg: float
    k_pos: float
    lambda_pos: float
    k_neg: float
    lambda_neg: float
    dro_beta: float
    clamp_low: float
    clamp_high: float
    kl_coef: float
    kl_clamp_in: float
    kl_clamp_out: float
    entropy_coef: float
    max_length: float

    @property
    def by_segment(self) -> bool:
        return self.ratio in (SEGMENT, SEGMENT_MEAN)

    @property
    def row(self) -> Loss:
        """The row of the loss in the table."""
        return _ROWS[self.loss]


class Batch(NamedTuple):
    """Everything that a formula reads: one entry per token; `is_weights` only where the loss folds them."""

    rows: TokenRows
    tokens: Tokens
    terms: Terms
    is_weights: Tensor | None
    plan: Plan


class Outcome(NamedTuple):
    """Policy terms before their weights, and flags and numbers of tokens for the metrics; None where nothing counts."""

    term: Tensor
    low_clipped: Tensor | None = None
    high_clipped: Tensor | None = None
    clipped: Tensor | None = None
    dual_clipped: Tensor | None = None
    phi: Tensor | None = None


class Coefficient(NamedTuple):
    """A number of LossConfig, or None if that is the default: at least `minimum`, or above it with `open_end`."""

    default: float | None
    minimum: float | None = 0.0
    open_end: bool = True


# Numbers of the losses. Those that are None by default have no bound, but for ratio_cap, whose own row says more.
COEFFICIENTS = {
    "clip_low": Coefficient(0.2, open_end=False),
    "clip_high": Coefficient(0.2, minimum=None),  # an absolute cap of CISPO may lie below 1
    "dual_clip": Coefficient(None, minimum=1.0),
    "delta": Coefficient(None),
    "ratio_cap": Coefficient(None),
    "dro_beta": Coefficient(None),
}


@dataclasses.dataclass(frozen=True)
class Loss:
    """A row of the table.

    Attributes:
        formula: policy terms of a batch
        ratios: ratios that it is defined for
        reads: fields of LossConfig that only some losses read
        needs: those of them that must not be None
        clips_ratio: whether clip_low and clip_high bound the ratio, as 1 - clip_low and 1 + clip_high
        cap: field with the upper bound of the detached ratio
        no_cap: the bound where that field is None
        couples_tokens: whether a term depends on other tokens of its row
        is_of_rows: whether a row has one term
        folds_weights: whether the tokens' importance weights enter as one weight of the row
        has_other_terms: whether a token without an advantage has a gradient
    """

    formula: Callable[[Batch], Outcome]
    ratios: tuple[str, ...] = ("token",)
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    clips_ratio: bool = False
    cap: str = "ratio_cap"
    no_cap: float = math.inf
    couples_tokens: bool = False
    is_of_rows: bool = False
    folds_weights: bool = False
    has_other_terms: bool = False


# Formulas


def clip(batch: Batch) -> Outcome:
    plan, advantage, ratio = batch.plan, batch.tokens.advantage, batch.terms.ratio
    fixed = ratio.detach().clamp(max=plan.cap)
    low, high = (fixed < plan.low) & (advantage < 0), (fixed > plan.high) & (advantage > 0)
    plain, clipped = -advantage * ratio.clamp(max=plan.cap), -advantage * ratio.clamp(plan.low, plan.high)
    term = torch.maximum(plain, clipped)
    if plan.dual_clip == math.inf:
        return Outcome(term, low, high, low | high)
    ceiling = -advantage * plan.dual_clip
    dual = (advantage < 0) & (term.detach() > ceiling)
    return Outcome(torch.where(advantage < 0, torch.minimum(term, ceiling), term), low, high, low | high, dual)


def cispo(batch: Batch) -> Outcome:
    plan, advantage, fixed = batch.plan, batch.tokens.advantage, batch.terms.ratio.detach()
    weight = fixed.clamp(plan.low, plan.high)
    low, high = (fixed < plan.low) & (advantage < 0), (fixed > plan.high) & (advantage > 0)
    return Outcome(-weight * advantage * batch.terms.score, low, high, weight != fixed)


def sapo(batch: Batch) -> Outcome:
    advantage, ratio = batch.tokens.advantage, batch.terms.ratio
    tau = _by_sign(advantage > 0, batch.plan.sapo_pos, batch.plan.sapo_neg, ratio)
    return Outcome(-advantage * torch.sigmoid(tau * (ratio - 1)) * (4 / tau))


def vespo(batch: Batch) -> Outcome:
    rows, plan, (valid, _, lp, old, advantage) = batch.rows, batch.plan, batch.tokens
    floor = math.log(1e-8)
    log_w = rows.sum(torch.where(valid, (lp - old).detach().clamp(-20, 20), 0))
    if batch.is_weights is not None:
        log_w = log_w + rows.sum(torch.where(valid, batch.is_weights.log().clamp(floor, 20), 0))
    log_w = rows.spread(log_w.clamp(floor, 20))
    k = _by_sign(advantage >= 0, plan.k_pos, plan.k_neg, log_w)
    rate = _by_sign(advantage >= 0, plan.lambda_pos, plan.lambda_neg, log_w).clamp(min=1e-4)
    weight = (rate + k * log_w - rate * log_w.exp()).exp()
    weight = torch.where(weight.isinf(), 0, weight)
    return Outcome(-weight * advantage * batch.terms.score, phi=weight)


def geo_mean(batch: Batch) -> Outcome:
    """GMPO. The term is the row's. Tokens are clipped, and counted as verl does, apart for better and worse rows."""
    rows, plan, (valid, _, lp, old, advantage) = batch.rows, batch.plan, batch.tokens
    d, ratio = (lp - old).detach(), batch.terms.ratio
    below, above = d < -plan.low, d > plan.high
    total = rows.sum(valid.to(ratio.dtype)).clamp(min=1)
    term = -rows.spread(rows.sum(advantage) / total) * ratio
    if batch.is_weights is not None:
        logs = torch.where(valid, (batch.is_weights + 1e-10).log(), 0)
        term = term * rows.spread(rows.sum(logs) / total).exp()
    better, worse = advantage > 0, advantage < 0
    return Outcome(term, below & worse, above & better, (below | above) & better, (below | above) & worse)


def dppo_tv(batch: Batch) -> Outcome:
    plan, advantage, change = batch.plan, batch.tokens.advantage, _change(batch.tokens)
    return _dppo(batch, torch.where(advantage > 0, change <= plan.high, change >= -plan.low))


def dppo_kl(batch: Batch) -> Outcome:
    """The divergence is that of the two outcomes "this token" and "another"."""
    plan, (_, _, lp, old, advantage) = batch.plan, batch.tokens
    new, before = lp.detach().exp(), old.exp()
    others = (1 - before) * ((1 - before + 1e-8) / (1 - new + 1e-8)).log()
    divergence = before * (old - lp.detach()) + others
    upward = (divergence <= plan.high) | (new <= before)
    downward = (divergence <= plan.low) | (new >= before)
    return _dppo(batch, torch.where(advantage > 0, upward, downward))


def _dppo(batch: Batch, trusted: Tensor) -> Outcome:
    """Tokens whose probability moved little, or against the advantage, with a capped ratio."""
    fixed, cap = batch.terms.ratio.detach(), batch.plan.cap
    weight = torch.where(trusted, fixed.clamp(max=cap), 0)
    term = -weight * batch.tokens.advantage * batch.terms.score
    return Outcome(term, clipped=~trusted, dual_clipped=(fixed > cap) & trusted)


def reinforce(batch: Batch) -> Outcome:
    return Outcome(-batch.tokens.advantage * batch.terms.score)


def dro(batch: Batch) -> Outcome:
    _, _, lp, old, advantage = batch.tokens
    return Outcome(-(lp * advantage - 0.5 * batch.plan.dro_beta * (lp - old) ** 2))


def ipo(batch: Batch) -> Outcome:
    return _within(batch, _change(batch.tokens), -batch.plan.low)


def icepop(batch: Batch) -> Outcome:
    return _within(batch, batch.terms.ratio.detach(), batch.plan.low)


def _within(batch: Batch, position: Tensor, low: float) -> Outcome:
    """Terms inside of a trust region, whatever the sign of the advantage."""
    below, above = position < low, position > batch.plan.high
    term = torch.where(below | above, 0, -batch.tokens.advantage * batch.terms.ratio)
    return Outcome(term, below, above, below | above)


def topr(batch: Batch) -> Outcome:
    advantage, fixed, cap = batch.tokens.advantage, batch.terms.ratio.detach(), batch.plan.cap
    weight = torch.where(advantage > 0, 1, fixed.clamp(max=cap))
    return Outcome(-weight * advantage * batch.terms.score, clipped=(advantage <= 0) & (fixed > cap))


def _change(tokens: Tokens) -> Tensor:
    """The change of each token's probability."""
    return (tokens.lp.exp() - tokens.old.exp()).detach()


def _by_sign(positive: Tensor, value: float, other: float, like: Tensor) -> Tensor:
    """Selects one of two numbers at each token. torch.where alone would round them to float32."""
    return torch.where(positive, like.new_full((), value), like.new_full((), other))


_BOUNDS, _CLAMP, _CAP = ("clip_low", "clip_high"), ("log_ratio_clamp",), ("ratio_cap",)

# Kernels know a loss by its position.
LOSSES = {
    "clip": Loss(clip, RATIOS, (*_BOUNDS, *_CLAMP, "dual_clip", "delta"), clips_ratio=True, cap="delta"),
    "cispo": Loss(cispo, _VALUES, (*_BOUNDS, *_CLAMP), clips_ratio=True),
    "sapo": Loss(sapo, _VALUES, (*_CLAMP, "sapo_temperatures")),
    "vespo": Loss(vespo, ("token", "sequence"), ("vespo_shape",), couples_tokens=True, folds_weights=True),
    "geo_mean": Loss(geo_mean, reads=_BOUNDS, couples_tokens=True, is_of_rows=True, folds_weights=True),
    "dppo_tv": Loss(dppo_tv, reads=(*_BOUNDS, *_CLAMP, *_CAP), needs=_BOUNDS),
    "dppo_kl": Loss(dppo_kl, reads=(*_BOUNDS, *_CLAMP, *_CAP), needs=_BOUNDS),
    "reinforce": Loss(reinforce),
    "dro": Loss(dro, reads=("dro_beta",), needs=("dro_beta",), has_other_terms=True),
    "ipo": Loss(ipo, reads=(*_BOUNDS, *_CLAMP)),
    "icepop": Loss(icepop, _VALUES, (*_BOUNDS, *_CLAMP), clips_ratio=True),
    "topr": Loss(topr, _VALUES, (*_CLAMP, *_CAP), no_cap=1.0),
}
_ROWS = tuple(LOSSES.values())
