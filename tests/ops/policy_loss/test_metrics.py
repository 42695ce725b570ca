"""The metrics of policy_loss under the names of TRL and verl, by a loop over the terms of each row.

Faults that this is for: a fraction of another number, of tokens for segments or of rows for tokens; a
lower bound for an upper one; the rare ratios, which no peer has; a row without tokens that counts.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

import pytest

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.losses import LOSSES
from tests.ops.policy_loss import cases
from tests.ops.promises import Inputs

LOW, HIGH, DUAL = 0.1, 0.15, 1.4
ROWS = 24
CLIPPING: dict[str, dict[str, Any]] = {
    "clip": {"clip_low": LOW, "clip_high": HIGH, "dual_clip": DUAL},
    "cispo": {"clip_low": LOW, "clip_high": HIGH},
    "geo_mean": {"clip_low": LOW, "clip_high": HIGH, "aggregation": "token-sum"},
}
KINDS = [(loss, ratio) for loss in CLIPPING for ratio in LOSSES[loss].ratios]


class Term(NamedTuple):
    ratio: float
    advantage: float


def tokens_of(inputs: Inputs, row: int) -> list[int]:
    is_in = inputs["mask"][row] & (inputs["segments"][row] >= 0) if "segments" in inputs else inputs["mask"][row]
    return [int(place) for place in is_in.nonzero()]


def terms_of(inputs: Inputs, ratio: str, row: int) -> list[Term]:
    """One for each token, or for each segment; an advantage of a segment is that of its last token."""
    tokens = tokens_of(inputs, row)
    moved = {t: float(inputs["logprobs"][row, t] - inputs["old_logprobs"][row, t]) for t in tokens}
    advantages = inputs["advantages"][row].expand(inputs["mask"].shape[1]).tolist()
    if ratio == "token":
        return [Term(math.exp(moved[t]), advantages[t]) for t in tokens]
    if ratio.startswith("sequence"):
        return [Term(math.exp(statistics.fmean(moved.values())), advantages[t]) for t in tokens]
    segments: dict[int, list[int]] = {}
    for t in tokens:
        segments.setdefault(int(inputs["segments"][row, t]), []).append(t)
    joint = statistics.fmean if ratio == "segment_mean" else math.fsum
    return [Term(math.exp(joint([moved[t] for t in own])), advantages[own[-1]]) for own in segments.values()]


def is_clipped(loss: str, term: Term) -> dict[str, bool]:
    """Whether a term is clipped, by the name of the fraction."""
    ratio, advantage = term
    low, high = (-LOW, HIGH) if loss == "geo_mean" else (1 - LOW, 1 + HIGH)
    ratio = math.log(ratio) if loss == "geo_mean" else ratio
    below, above = ratio < low, ratio > high
    sides = {"low": below and advantage < 0, "high": above and advantage > 0}
    if loss == "clip":
        return sides | {"any": sides["low"] or sides["high"], "dual": ratio > DUAL and advantage < 0}
    if loss == "cispo":
        return sides | {"any": below or above, "dual": False}
    return sides | {"any": (below or above) and advantage > 0, "dual": (below or above) and advantage < 0}


def batch_of(loss: str, ratio: str, by_token: bool) -> Inputs:
    optional = ("segments",) if ratio.startswith("segment") else ()
    inputs = cases.padded(6, ROWS, 9, size=0.5, optional=(*optional, "token_advantages"))
    of_tokens = inputs.pop("token_advantages")
    return inputs | ({"advantages": of_tokens} if by_token else {})


@pytest.mark.pairs
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(("loss", "ratio"), KINDS)
def test_fractions_of_clipped_terms(loss: str, ratio: str, by_token: bool) -> None:
    inputs = batch_of(loss, ratio, by_token)
    config = gk.LossConfig(loss=loss, ratio=ratio, **CLIPPING[loss])
    metrics = gk.policy_loss(**inputs, config=config).metrics
    flags = [[is_clipped(loss, term) for term in terms_of(inputs, ratio, row)] for row in range(ROWS)]
    number = sum(map(len, flags))

    def fraction(name: str) -> float:
        return sum(flag[name] for row in flags for flag in row) / number

    def of_rows(name: str) -> list[float]:
        """Fractions of the rows that have terms."""
        return [statistics.fmean(flag[name] for flag in row) for row in flags if row]

    theirs = metrics.verl()
    assert theirs["actor/pg_clipfrac"] == pytest.approx(fraction("any"), abs=1e-12)
    assert theirs["actor/pg_clipfrac_lower"] == pytest.approx(fraction("dual"), abs=1e-12)
    moved = [
        float((inputs["logprobs"] - inputs["old_logprobs"])[row, t])
        for row in range(ROWS)
        for t in tokens_of(inputs, row)
    ]
    assert theirs["actor/ppo_kl"] == pytest.approx(-statistics.fmean(moved), rel=1e-9)
    # then TRL has one ratio for a row, which is 1 where there is no token
    is_of_rows = ratio == "sequence" and not by_token
    want = {side: sum(of_rows(side)) / ROWS if is_of_rows else fraction(side) for side in ("low", "high")}
    assert min(want.values()) > 0
    ours = metrics.trl()
    if loss == "cispo":
        assert ours["cispo_clip_ratio"] == pytest.approx(want["high"], abs=1e-12)
        return
    assert ours["clip_ratio/low_mean"] == pytest.approx(want["low"], abs=1e-12)
    assert ours["clip_ratio/high_mean"] == pytest.approx(want["high"], abs=1e-12)
    assert ours["clip_ratio/region_mean"] == pytest.approx(want["low"] + want["high"], abs=1e-12)
    assert ours["clip_ratio/low_min"] == pytest.approx(0 if is_of_rows else min(of_rows("low")), abs=1e-12)
    assert ours["clip_ratio/high_max"] == pytest.approx(max(of_rows("high")), abs=1e-12)
