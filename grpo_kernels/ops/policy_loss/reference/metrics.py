"""The measurements of the specification of policy_loss, in the order of METRICS in config.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows
from grpo_kernels.ops.policy_loss.config import GEO_MEAN, KL_COV, TOKEN, Plan
from grpo_kernels.ops.policy_loss.reference.rows import Terms, Tokens


def counts(rows: TokenRows, counted: Tensor, kept: Tensor, here: Tensor) -> list[Tensor]:
    active = rows.sum(counted.double()) > 0
    return [torch.full_like(active.sum(), rows.count), active.sum(), counted.sum(), here.sum(), kept.sum()]


def clipping(rows: TokenRows, valid: Tensor, terms: Terms, counters: dict[str, Tensor], plan: Plan) -> list[Tensor]:
    where = valid if plan.loss == GEO_MEAN else terms.here
    count = rows.sum(where.double())
    fractions = {}
    for side in ("low", "high"):
        fraction = rows.sum((counters[side] & where).double()) / count
        fractions[side] = torch.where(count > 0, fraction, math.nan)
    return [
        *((counters[name] & where).sum() for name in ("low", "high", "clipped", "dual")),
        *(fractions[side].nansum() for side in ("low", "high")),
        _extreme(fractions["low"], "min"),
        _extreme(fractions["high"], "max"),
    ]


def _extreme(values: Tensor, how: str) -> Tensor:
    """The smallest or largest value that is not NaN; NaN if there is none."""
    none = math.inf if how == "min" else -math.inf
    filled = torch.cat([torch.where(values.isnan(), none, values), values.new_full((1,), none)])
    extreme = filled.min() if how == "min" else filled.max()
    return torch.where((~values.isnan()).any(), extreme, math.nan)


def sums(
    rows: TokenRows,
    tokens: Tokens,
    terms: Terms,
    kl: Tensor,
    entropies: Tensor | None,
    counters: dict[str, Tensor],
    plan: Plan,
) -> list[Tensor]:
    d = (tokens.lp - tokens.old).detach()
    if plan.loss == KL_COV:
        d = d.abs()
    if plan.ratio == TOKEN:
        d = d.clamp(plan.clamp_low, plan.clamp_high)
    ratio = torch.where(terms.here, terms.ratio.detach(), math.nan)
    phi = torch.where(terms.here, counters["phi"], 0)
    phi_of_row = rows.sum(phi) / rows.sum(terms.here.to(phi.dtype)).clamp(min=1)
    entropy_sum = torch.zeros_like(d).sum() if entropies is None else entropies.sum()
    return [
        torch.where(tokens.valid, d, 0).sum(),
        kl.sum(),
        entropy_sum,
        ratio.nansum(),
        (ratio - 1).square().nansum(),
        _extreme(ratio, "min"),
        _extreme(ratio, "max"),
        phi.sum(),
        phi_of_row.sum(),
    ]


def mismatch(
    valid: Tensor,
    old: Tensor,
    sampling: Tensor | None,
    correction: Tensor | None,
    correction_by_row: Tensor | None,
    dropped: Tensor,
) -> list[Tensor]:
    none = torch.full_like(old, math.nan)
    weights = none if correction is None else torch.where(valid, correction, math.nan)
    weights = weights if correction_by_row is None else correction_by_row
    gap = none if sampling is None else torch.where(valid, (old - sampling.reshape(-1)).abs(), math.nan)
    return [
        weights.nansum(),
        (weights**2).nansum(),
        _extreme(weights, "min"),
        _extreme(weights, "max"),
        (~weights.isnan()).sum(),
        gap.nansum(),
        _extreme(gap, "max"),
        (~gap.isnan()).sum(),
        dropped.sum(),
    ]
