"""sampling_correction against the formulas of its page, in NumPy and row by row.

Faults: a ratio upside down, or over masked or unscored tokens; a sum for a mean; a bound that is not applied, or on the
wrong side; a rejection that sees another one's mask; a mean of other weights than the ones it divides; M2PO that drops
one token too many, splits equal squares or loses an outlier; a block that ends within a row or loses a token; metrics
that do not merge; bits that depend on threads.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.sampling_correction import reference
from tests.communication import on_ranks
from tests.harness import examples
from tests.ops.promises import Inputs
from tests.ops.sampling_correction.cases import (
    DEVICE,
    NAN,
    OF_BATCH,
    OF_TOKENS,
    Batch,
    by_token,
    calls,
    correct,
    make_batch,
)

Numbers = NDArray[Any]
EPS = torch.finfo(torch.float64).eps
PAGE = Path(__file__).parents[3] / "docs" / "ops" / "sampling_correction.md"


def m2po(squares: Numbers, threshold: float) -> Numbers:
    """Flags of the squares that stay: from the largest down they go until the mean of the others is below."""
    squares = squares.astype(np.float32).astype(float)
    for ceiling in sorted(set(squares.tolist()), reverse=True):
        if squares[squares <= ceiling].mean() < threshold:
            return squares <= ceiling
    return squares <= squares.min(initial=np.inf)  # the smallest square stays


def estimates(old: Numbers, sampling: Numbers, d: Numbers, estimator: str) -> Numbers:
    if estimator == "binary_kl":
        p, q = (np.exp(values).clip(1e-6, 1 - 1e-6) for values in (old, sampling))
        forward = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        backward = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
        return np.where(np.isnan(sampling), 0, np.maximum(forward, backward))
    result: Numbers = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator]
    return result


def expected(inputs: Inputs, config: gk.CorrectionConfig) -> tuple[Numbers, Numbers]:
    """Weights and mask, flat."""
    old, sampling = (inputs[name].reshape(-1).numpy() for name in ("old_logprobs", "sampling_logprobs"))
    valid = inputs["mask"].reshape(-1).numpy() if "mask" in inputs else np.ones(len(old), bool)
    shape = inputs["old_logprobs"].shape
    bounds = inputs["cu_seqlens"].tolist() if "cu_seqlens" in inputs else [shape[1] * b for b in range(shape[0] + 1)]
    rows = [a + np.flatnonzero(valid[a:b]) for a, b in itertools.pairwise(bounds)]
    rows = [row for row in rows if len(row)]
    scored = ~np.isnan(sampling)
    d = np.where(scored, old - sampling, 0)
    bound = math.inf if config.log_ratio_bound is None else config.log_ratio_bound
    limited = d.clip(-bound, bound)
    low, high = (-math.inf if config.weight_min is None else config.weight_min), config.high
    weights, mask, of_rows = np.zeros(len(old)), np.zeros(len(old), bool), []
    for row in rows:
        log_weight = {"none": 0 * d[row], "token": d[row]}.get(config.weights, d[row].sum() + 0 * d[row])
        log_weight = log_weight / len(row) if config.weights == "geometric" else log_weight
        raw = np.exp(log_weight.clip(-bound, bound))
        is_inside = (raw >= low) & (raw <= high)
        weights[row] = raw.clip(low, high) if config.outside == "truncate" else np.where(is_inside, raw, 0)
        of_rows.append(weights[row].mean())
        mask[row] = True
        for statistic, smallest, largest in config.rejections:
            least, most = -math.inf if smallest is None else smallest, math.inf if largest is None else largest
            level, estimator = re.fullmatch("(token|seq_sum|seq_mean|seq_max)_(.*)", statistic).groups()  # type: ignore[union-attr]
            values = estimates(old[row], sampling[row], limited[row], estimator)
            values = {"seq_sum": values.sum(keepdims=True), "seq_mean": values.mean(keepdims=True)}.get(level, values)
            outside = (values < least) | (values > most)
            outside = outside & scored[row] if level in ("token", "seq_max") else outside
            mask[row] &= ~(outside if level == "token" else outside.any())
    used = np.concatenate([np.zeros(0, int), *rows])
    if config.m2_threshold is not None:
        used_scored = used[scored[used]]
        mask[used_scored] &= m2po(d[used_scored] ** 2, config.m2_threshold)
    if config.batch_normalize and len(used):
        mean = weights[used].mean() if config.weights == "token" else np.mean(of_rows)
        weights = weights / (mean if mean > 1e-8 else 1)
    return weights * mask, mask


@settings(max_examples=examples(450))
@given(calls)
def test_any_weights_and_mask_are_their_formulas(drawn: tuple[Inputs, gk.CorrectionConfig]) -> None:
    inputs, config = drawn
    weights, mask = expected(inputs, config)
    got = gk.sampling_correction(**{name: value.to(DEVICE) for name, value in inputs.items()}, config=config)
    np.testing.assert_array_equal(got.mask.cpu().reshape(-1).numpy(), mask)
    bounds = inputs.get("cu_seqlens")
    if config.weighs_rows:
        assert got.weights.shape == (len(inputs["old_logprobs"]) if bounds is None else len(bounds) - 1, 1)
    flat = by_token(got, None if bounds is None else bounds.to(DEVICE)).cpu().reshape(-1)
    np.testing.assert_allclose(flat.numpy(), weights, rtol=1e-12)


def test_weights_of_rows_are_refused_where_tokens_multiply_theirs() -> None:
    batch = make_batch(3)
    weights = correct(batch, gk.CorrectionConfig(weights="sequence", weight_max=2.0)).weights
    lp, advantages = batch.old.to(DEVICE), torch.ones(7, device=DEVICE)
    with pytest.raises(ValueError, match=r"is_weights must be one per token for loss='vespo', got .* \[7\]"):
        gk.policy_loss(lp, lp, advantages, mask=batch.mask.to(DEVICE), is_weights=weights, config="vespo")


def test_a_row_of_which_nothing_is_left_weighs_nothing() -> None:
    batch = make_batch(3, far=0.05)
    got = correct(batch, gk.CorrectionConfig(weights="geometric", rejections=(("seq_max_k1", -1.0, 1.0),)))
    assert 0 < int((got.weights == 0).sum()) < 7
    assert torch.equal(got.weights == 0, ~got.mask.any(1, True))


def test_tokens_without_a_score_have_ratio_one() -> None:
    """They only leave with their row, count in its length, and in no metric of the mismatch."""
    batch = make_batch(7, holes=False)
    holes = torch.zeros_like(batch.mask)
    holes[0, 3] = holes[1, ::2] = holes[4, 7] = True
    without = correct(batch._replace(mask=batch.mask & ~holes)).metrics
    config = gk.CorrectionConfig(weights="token", rejections=(("seq_sum_k2", None, 9.0), ("seq_mean_k2", None, 9.0)))
    unscored = correct(batch._replace(sampling=torch.where(holes, NAN, batch.sampling)), config)
    names = ("log_ratio_sum", "gap_sum", "k3_sum", "ratio_sum", "old_perplexity_sum", "log_ratio_max", "scored_tokens")
    for name in names:
        assert float(unscored.metrics[name]) == pytest.approx(float(without[name]), rel=1e-12), name
    assert (unscored.weights[holes.to(DEVICE)] == 1).all()
    total, mean = (float(unscored.metrics[f"seq_{level}_k2/row_sum"]) for level in ("sum", "mean"))
    assert total == pytest.approx(23 * mean, rel=1e-12)


# M2PO


@pytest.mark.parametrize(
    ("ratios", "threshold", "kept"),
    [
        ([3.0, 1.0, 2.0], 0.5, 1),  # the smallest stays
        ([3.0, 1.0, 2.0], 2.5, 1),  # a mean at the threshold is not below it
        ([1e-3, 2e-3, 3e-3, 1e15], 3e-6, 2),  # an outlier does not hide the others
        ([1e-3, 2e-3, 3e-3, 1e15], 1e12, 3),
        ([2e-20, 1e-20, 0.0], 1e-39, 3),  # squares of less than a normal float
        ([2.0, 2.0, 1.0], 2.6, 1),  # equal squares go together
    ],
)
def test_m2po_found_by_hand(ratios: list[float], threshold: float, kept: int) -> None:
    sampling, config = -torch.tensor([ratios]), gk.CorrectionConfig(m2_threshold=threshold)
    assert int(gk.sampling_correction(0 * sampling, sampling, config=config).mask.sum()) == kept


@pytest.mark.parametrize("config", [OF_BATCH, gk.CorrectionConfig(weights="token", batch_normalize=True)])
def test_the_batches_of_all_ranks_are_one(config: gk.CorrectionConfig) -> None:
    batch = make_batch(5, rows=8, width=41)
    whole, group = correct(batch, config), object()

    def part(rows: slice) -> gk.SamplingCorrection:
        old, sampling, mask = (values[rows] for values in batch.to(torch.float64))
        return gk.sampling_correction(old, sampling, mask=mask, config=config, process_group=group)

    first, second = on_ranks([lambda: part(slice(3)), lambda: part(slice(3, 8))], group)
    assert torch.equal(torch.cat((first.mask, second.mask)), whole.mask)
    torch.testing.assert_close(torch.cat((first.weights, second.weights)), whole.weights, rtol=1e-12, atol=0)
    assert not torch.equal(correct(Batch(*(x[:3] for x in batch)), config).weights, first.weights)


# SkyRL's settings as rows of the page; each has the fields that its first column names

SKYRL: list[dict[str, Any]] = [
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.05},
    {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.1},
    {"sequence_mask_metric": "geometric", "geo_mask_low": 0.99, "geo_mask_high": 1.01},
    {"sequence_mask_metric": "product", "product_mask_low": 0.8, "product_mask_high": 1.2},
    {"outlier_token_is_threshold_low": 0.85, "outlier_token_is_threshold_high": 1.2},
    {"token_mask_is_threshold_low": 0.95, "token_mask_is_threshold_high": 1.1},
]


def skyrl(batch: Batch, f: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Weights and mask by the definitions of SkyRL's documentation."""
    d = torch.where(batch.mask, batch.old - batch.sampling, 0)
    count = batch.mask.sum(1, True).clamp(min=1)
    outlier, token = "outlier_token_is_threshold", "token_mask_is_threshold"
    masked = {outlier: d, token: d, "product_mask": d.sum(1, True), "geo_mask": d.sum(1, True) / count}
    weights, mask = torch.ones_like(d), batch.mask.clone()
    for bounds, values in masked.items():
        if f"{bounds}_low" in f:
            out = (values.exp() < f[f"{bounds}_low"]) | (values.exp() > f[f"{bounds}_high"])
            mask &= ~((out & batch.mask).any(1, True) if bounds == outlier else out)
    if f.get("tis_ratio_type") == "token":
        weights = d.clamp(-20, 20).exp().clamp(max=f["token_tis_ratio_clip_high"]) * mask
    if f.get("tis_ratio_type") == "sequence":
        weights = d.sum(1, True).clamp(-20, 20).exp().clamp(max=f["sequence_tis_ratio_clip_high"])
        weights = weights * mask.any(1, True)
    return torch.where(mask, weights, 0) if weights.shape == mask.shape else weights, mask


@pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")
@pytest.mark.parametrize("fields", SKYRL, ids=range(len(SKYRL)))
def test_equals_skyrl(fields: dict[str, Any]) -> None:
    batch = make_batch(4, far=0.05)  # log ratios beyond 20, which SkyRL limits
    settings = ", ".join(f"`{name}: {value}`" for name, value in fields.items())
    rows = dict(re.findall(r"^\| (`.*`) \| `(gk\..*)` \|$", PAGE.read_text(), re.M))
    weights, mask = skyrl(batch, fields)
    assert int(mask.sum()) > 0 and (weights != 1).any()
    got = correct(batch, eval(rows[settings], {"gk": gk, "math": math}))
    assert torch.equal(got.mask.cpu(), mask)
    torch.testing.assert_close(got.weights.cpu(), weights, rtol=1e-12, atol=0)


# Blocks of rows, on a CPU


@given(calls, st.sampled_from((1, 40, 100)))
def test_rows_in_blocks_are_the_whole_batch(drawn: tuple[Inputs, gk.CorrectionConfig], size: int) -> None:
    inputs, config = drawn
    whole = gk.sampling_correction(**inputs, config=config)
    with mock.patch.object(reference, "_BLOCK", size):
        got = gk.sampling_correction(**inputs, config=config)
    assert torch.equal(got.mask, whole.mask)
    torch.testing.assert_close(got.weights, whole.weights, rtol=1e-12, atol=0)
    found, want = got.metrics.to_dict(), whole.metrics.to_dict()
    for name, value in want.items():
        # a divergence is a difference of terms of up to 20, and a sum of both signs rounds as its terms do
        error = 80 * EPS * max(want["gap_sum"], want["tokens"], 1)
        assert found[name] == pytest.approx(value, rel=1e-10, abs=error), name


def test_the_number_of_threads_changes_no_bit() -> None:
    """A block has more than one row: torch divides the sum of a single one among its threads."""
    batch, before, results = make_batch(3, rows=4, width=40_000), torch.get_num_threads(), []
    with mock.patch.object(reference, "_BLOCK", 2**17):
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(correct(batch, OF_TOKENS))
    torch.set_num_threads(before)
    one, other = results
    assert torch.equal(one.weights, other.weights) and torch.equal(one.mask, other.mask)
    assert torch.equal(one.metrics.tensor, other.metrics.tensor)


def test_metrics_by_name() -> None:
    metrics = correct(make_batch()).metrics
    with pytest.raises(KeyError, match="CorrectionMetrics: 'token' is none of rows"):
        metrics["token"]
    assert "tokens" in repr(metrics)


def test_nothing_to_correct() -> None:
    old = torch.full((2, 4), NAN, device=DEVICE)
    metrics = gk.sampling_correction(old, old, mask=torch.zeros_like(old), config=OF_BATCH).metrics
    assert metrics.to_dict()["tokens"] == 0 and metrics.verl() == {}
    assert metrics.trl()["sampling/sampling_logp_difference/mean"] == 0


def test_impossible_tokens_are_rejected_and_cancel() -> None:
    old, sampling = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -math.inf, -1.2]])
    for statistic in ("token_k3", "seq_mean_k3", "seq_max_k3"):
        config = gk.CorrectionConfig(log_ratio_bound=None, rejections=((statistic, None, 1.0),))
        assert not gk.sampling_correction(old, sampling, config=config).mask[0, 1], statistic
    old = torch.tensor([[-1.0, -math.inf, -1.0]])
    sampling = torch.tensor([[-math.inf, -1.0, -1.2]])
    for weights in ("sequence", "geometric"):
        config = gk.CorrectionConfig(weights=weights, weight_max=2.0)
        assert gk.sampling_correction(old, sampling, config=config).weights.isfinite().all()
    config = gk.CorrectionConfig(weights="geometric", rejections=(("seq_mean_k1", -0.05, 0.05),))
    assert not gk.sampling_correction(old, sampling, config=config).mask.any()
