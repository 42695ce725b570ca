"""The measurements of a policy loss: their names, and their specification."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows
from grpo_kernels.ops.policy_loss.losses import TOKEN, Outcome, Plan
from grpo_kernels.ops.policy_loss.reference.rows import Terms, Tokens, Weights

Table = dict[str, Tensor]
# In the order of PolicyLossMetrics.tensor, and of the kernels' (csrc/policy_loss/plan.h).
METRICS = (
    *("loss", "policy_loss", "kl_loss", "entropy_loss"),
    *("rows", "active_rows", "tokens", "terms", "kept_tokens"),
    *("low_clipped", "high_clipped", "clipped", "dual_clipped"),
    *("low_clipped_rows", "high_clipped_rows", "low_clipped_min", "high_clipped_max"),
    *("log_ratio_sum", "kl_sum", "entropy_sum"),
    *("ratio_sum", "ratio_spread_sum", "ratio_min", "ratio_max"),
    *("phi_sum", "phi_rows"),
    *("is_sum", "is_square_sum", "is_min", "is_max", "is_count"),
)


def measure(
    rows: TokenRows,
    tokens: Tokens,
    terms: Terms,
    outcome: Outcome,
    kl: Tensor,
    entropies: Tensor | None,
    weights: Weights,
    plan: Plan,
) -> Table:
    """Counts, sums and extremes over the tokens and over the rows, each kind in one reduction."""
    where = tokens.valid if plan.row.is_of_rows else terms.here  # there tokens are clipped
    none = torch.zeros_like(where)
    low_clipped, high_clipped, clipped, dual_clipped = (
        none if flags is None else flags & where
        for flags in (outcome.low_clipped, outcome.high_clipped, outcome.clipped, outcome.dual_clipped)
    )
    ratio = torch.where(terms.here, terms.ratio.detach(), math.nan)
    phi = torch.zeros_like(ratio) if outcome.phi is None else torch.where(terms.here, outcome.phi, 0)
    weight = ratio.new_full(ratio.shape, math.nan)
    if weights.of_tokens is not None:
        weight = torch.where(tokens.valid, weights.of_tokens, math.nan)
    weight = weight if weights.of_rows is None else weights.of_rows

    flags = torch.stack((tokens.valid, where, low_clipped, high_clipped, terms.here))
    num_counted, number, low, high, num_terms = rows.sum(flags.double()).unbind()
    low_fraction, high_fraction = (torch.where(number > 0, side / number, math.nan) for side in (low, high))

    of_tokens = {
        "tokens": tokens.valid,
        "terms": terms.here,
        "kept_tokens": tokens.kept,
        "low_clipped": low_clipped,
        "high_clipped": high_clipped,
        "clipped": clipped,
        "dual_clipped": dual_clipped,
        "log_ratio_sum": torch.where(tokens.valid, _log_ratio(tokens, plan), 0),
        "kl_sum": kl,
        "entropy_sum": torch.zeros_like(kl) if entropies is None else entropies,
        "ratio_sum": _numbers(ratio),
        "ratio_spread_sum": _numbers((ratio - 1).square()),
        "phi_sum": phi,
    }
    of_rows = {
        "rows": torch.ones_like(number),
        "active_rows": num_counted > 0,
        "low_clipped_rows": _numbers(low_fraction),
        "high_clipped_rows": _numbers(high_fraction),
        "phi_rows": rows.sum(phi.double()) / num_terms.clamp(min=1),
    }
    weighted = of_tokens if weights.of_rows is None else of_rows
    weighted |= {
        "is_sum": _numbers(weight),
        "is_square_sum": _numbers(weight.square()),
        "is_count": ~weight.isnan(),
    }
    smallest = {"low_clipped_min": low_fraction}, {"ratio_min": ratio}
    largest = {"high_clipped_max": high_fraction}, {"ratio_max": ratio}
    of_weight = int(weights.of_rows is None)
    smallest[of_weight]["is_min"] = largest[of_weight]["is_max"] = weight
    return _sums(of_tokens) | _sums(of_rows) | _extremes(smallest[0], largest[0]) | _extremes(smallest[1], largest[1])


def _log_ratio(tokens: Tokens, plan: Plan) -> Tensor:
    d = (tokens.lp - tokens.old).detach()
    return d.clamp(plan.clamp_low, plan.clamp_high) if plan.ratio == TOKEN else d


def _numbers(values: Tensor) -> Tensor:
    """0 where there is NaN."""
    return torch.where(values.isnan(), 0, values)


def _sums(values: Table) -> Table:
    """Sums in float64, of flags in one reduction and of numbers in another."""
    sums: Table = {}
    for is_flag in (True, False):
        chosen = {name: value for name, value in values.items() if (value.dtype == torch.bool) == is_flag}
        total = torch.stack([value.detach() for value in chosen.values()]).sum(1, dtype=torch.float64)
        sums |= dict(zip(chosen, total.unbind(), strict=True))
    return sums


def _extremes(smallest: Table, largest: Table) -> Table:
    """The smallest and the largest values that are not NaN; NaN if there are none."""
    values = torch.stack([*smallest.values(), *(-value for value in largest.values())]).detach().double()
    is_missing = values.isnan()
    filled = torch.cat([torch.where(is_missing, math.inf, values), values.new_full((len(values), 1), math.inf)], 1)
    least = torch.where(is_missing.all(1), math.nan, filled.amin(1)).unbind()
    named = dict(zip((*smallest, *largest), least, strict=True))
    return {name: -value if name in largest else value for name, value in named.items()}
