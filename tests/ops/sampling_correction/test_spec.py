"""sampling_correction against formulas of papers and peers in a few independent lines."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.sampling_correction.config import STATISTICS
from grpo_kernels.ops.sampling_correction.m2 import find_m2_ceiling
from tests.ops.sampling_correction.batches import DEVICE, NAN, Batch, make_batch

F64 = torch.float64
PAGE = Path(__file__).parents[3] / "docs" / "ops" / "sampling_correction.md"


def correct(batch: Batch, config: gk.CorrectionConfig) -> gk.SamplingCorrection:
    moved = batch.to(F64, DEVICE)
    return gk.sampling_correction(moved.old, moved.sampling, mask=moved.mask, config=config)


def token_values(batch: Batch, estimator: str) -> Tensor:
    d = torch.where(batch.mask, batch.old - batch.sampling, 0).clamp(-20, 20)
    if estimator == "binary_kl":
        p, q = (values.exp().clamp(1e-6, 1 - 1e-6) for values in (batch.old, batch.sampling))

        def divergence(a: Tensor, b: Tensor) -> Tensor:
            return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()

        return torch.where(batch.mask, torch.maximum(divergence(p, q), divergence(q, p)), 0)
    return {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - 1 - d}[estimator]


@pytest.mark.parametrize("far", [0.0, 0.1])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_rejection_drops_what_is_outside_of_its_bounds(statistic: str, far: float) -> None:
    batch = make_batch(1, far=far)
    level, estimator = next(
        (n, statistic.removeprefix(f"{n}_"))
        for n in ("token", "seq_sum", "seq_mean", "seq_max")
        if statistic.startswith(f"{n}_")
    )
    values = token_values(batch, estimator)
    count = batch.mask.sum(1, keepdim=True).clamp(min=1)
    measured = {"token": values, "seq_sum": values.sum(1, True), "seq_mean": values.sum(1, True) / count}.get(level)
    low = None
    if measured is None:
        high = 1.0001 * float(values.amax(1).quantile(0.4))
        outside = (values > high).any(1, keepdim=True)
        if estimator == "k1":
            low = 1.0001 * float(values.amin(1).quantile(0.6))
            outside |= (values < low).any(1, keepdim=True)
    else:
        high = 1.0001 * float(measured.quantile(0.7))
        low = 1.0001 * float(measured.quantile(0.2)) if estimator == "k1" else None
        outside = (measured > high) | (measured < (-math.inf if low is None else low))
    expected = batch.mask & ~outside
    assert 0 < int(expected.sum()) < int(batch.mask.sum())
    got = correct(batch, gk.CorrectionConfig(rejections=((statistic, low, high),)))
    assert torch.equal(got.mask.cpu(), expected)
    assert torch.equal(got.weights.cpu(), expected.double())
    assert got.metrics.to_dict()[f"{statistic}/masked_tokens"] == int((batch.mask & outside).sum())


@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_geometric_weights_are_the_means_of_log_ratios(outside: str) -> None:
    batch = make_batch(2)
    d = torch.where(batch.mask, batch.old - batch.sampling, 0)
    ratio = (d.sum(1) / batch.mask.sum(1).clamp(min=1)).exp()[:, None]
    limited = ratio.clamp(0.99, 1.01)
    expected = (limited if outside == "truncate" else torch.where(limited == ratio, ratio, 0)) * batch.mask
    config = gk.CorrectionConfig(weights="geometric", weight_min=0.99, weight_max=1.01, outside=outside)
    got = correct(batch, config)
    torch.testing.assert_close(got.weights.cpu(), expected, rtol=1e-12, atol=0)
    assert torch.equal(got.mask.cpu(), batch.mask)


# SkyRL's settings as rows of the page; each has the fields that its first column names.
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
        weights = d.exp().clamp(max=f["token_tis_ratio_clip_high"])
    if f.get("tis_ratio_type") == "sequence":
        weights = d.sum(1, True).exp().clamp(max=f["sequence_tis_ratio_clip_high"])
    return weights * mask, mask


@pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")
@pytest.mark.parametrize("fields", SKYRL, ids=range(len(SKYRL)))
def test_equals_skyrl(fields: dict[str, Any]) -> None:
    batch = make_batch(4)
    settings = ", ".join(f"`{name}: {value}`" for name, value in fields.items())
    rows = dict(re.findall(r"^\| (`.*`) \| `(gk\..*)` \|$", PAGE.read_text(), re.M))
    weights, mask = skyrl(batch, fields)
    assert int(mask.sum()) > 0 and (weights != 1).any()
    got = correct(batch, eval(rows[settings], {"gk": gk, "math": math}))
    assert torch.equal(got.mask.cpu(), mask)
    torch.testing.assert_close(got.weights.cpu(), weights, rtol=1e-12, atol=0)


def m2po(squares: Tensor, threshold: float) -> Tensor:
    """Flags of the squares that stay: from the largest down they go until the mean of the others is below."""
    ordered = squares.sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    stay = int((means < threshold).sum())
    ceiling = ordered[max(stay, 1) - 1]
    if stay < len(ordered) and ordered[max(stay, 1)] == ceiling:  # equal squares go together
        smaller = ordered[ordered < ceiling]
        ceiling = smaller[-1] if len(smaller) else ordered[0]
    return squares <= ceiling


@pytest.mark.parametrize("threshold", [1e-9, 1e-4, 1e-3, 0.004, 0.01, 10.0])
def test_m2po_drops_the_largest_squares(threshold: float) -> None:
    batch = make_batch(5, rows=9, width=41)
    squares = (batch.old - batch.sampling)[batch.mask].square()
    expected = torch.zeros_like(batch.mask)
    expected[batch.mask] = m2po(squares, threshold)
    got = correct(batch, gk.CorrectionConfig(m2_threshold=threshold))
    assert torch.equal(got.mask.cpu(), expected)
    metrics = got.metrics.to_dict()
    assert metrics["m2_dropped_tokens"] == int((batch.mask & ~expected).sum())
    assert metrics["m2_sum"] == pytest.approx(float(squares.sum()), rel=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_the_ceiling_is_exact_with_ties(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 200, (), generator=random))
    ratios = torch.randint(-4, 5, (count,), generator=random) * 2.0 ** torch.randint(-3, 2, (count,), generator=random)
    scored = torch.rand(count, generator=random) < 0.7
    scored[0] = True
    threshold = float(ratios[scored].square().double().mean()) * 0.3 + 1e-3
    ceiling = find_m2_ceiling(torch.where(scored, ratios, NAN), scored, threshold, None)
    kept = ratios[scored].square() <= ceiling
    assert torch.equal(kept, m2po(ratios[scored].double().square(), threshold))


def test_an_outlier_does_not_hide_the_others() -> None:
    ratios = torch.tensor([1e-3, 2e-3, 3e-3, 1e15])
    scored = torch.ones(4, dtype=torch.bool)
    for threshold, kept in ((3e-6, 2), (5e-6, 3), (1e12, 3)):
        assert int((ratios.square() <= find_m2_ceiling(ratios, scored, threshold, None)).sum()) == kept


def test_a_mean_at_the_threshold_is_not_below_it() -> None:
    ratios, scored = torch.tensor([3.0, 1.0, 2.0]), torch.ones(3, dtype=torch.bool)
    for threshold, kept in ((0.5, 1), (2.5, 1), (2.5001, 2), (4.66, 2), (4.67, 3)):
        assert int((ratios.square() <= find_m2_ceiling(ratios, scored, threshold, None)).sum()) == kept


def test_without_tokens_nothing_is_dropped() -> None:
    assert find_m2_ceiling(torch.zeros(0), torch.zeros(0, dtype=torch.bool), 0.1, None) == math.inf
    assert find_m2_ceiling(torch.ones(3), torch.zeros(3, dtype=torch.bool), 0.1, None) == math.inf


EVERYTHING = gk.CorrectionConfig(
    weights="token",
    weight_max=1.1,
    batch_normalize=True,
    rejections=(("token_k1", -0.15, 0.1), ("seq_mean_k3", None, 0.006), ("seq_max_binary_kl", None, 0.2)),
    m2_threshold=0.005,
)


def test_packed_rows_equal_padded_ones() -> None:
    batch = make_batch(6, holes=False)
    padded = correct(batch, EVERYTHING)
    lengths = batch.mask.sum(1)
    bounds = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).to(DEVICE)
    tail = torch.full((3,), NAN, dtype=F64)
    old, sampling = (torch.cat((values[batch.mask], tail)).to(bounds.device) for values in batch[:2])
    packed = gk.sampling_correction(old, sampling, cu_seqlens=bounds, config=EVERYTHING)
    mask = batch.mask.to(bounds.device)
    assert torch.equal(packed.mask[:-3], padded.mask[mask]) and not packed.mask[-3:].any()
    torch.testing.assert_close(packed.weights[:-3], padded.weights[mask], rtol=1e-12, atol=0)
    assert not packed.weights[-3:].any()
    torch.testing.assert_close(packed.metrics.tensor, padded.metrics.tensor, rtol=1e-12, atol=1e-14)


def test_tokens_without_a_score() -> None:
    """They have ratio 1, only leave with their row, and count in no metric of the mismatch."""
    batch = make_batch(7, holes=False)
    holes = torch.zeros_like(batch.mask)
    holes[0, 3] = holes[1, ::2] = holes[4, 7] = True
    holes &= batch.mask
    unscored = batch._replace(sampling=torch.where(holes, NAN, batch.sampling))
    got = correct(unscored, gk.CorrectionConfig(weights="token", rejections=(("token_k1", -0.05, 0.05),)))
    device = got.mask.device
    assert got.mask[holes.to(device)].all() and (got.weights[holes.to(device)] == 1).all()
    without = correct(batch._replace(mask=batch.mask & ~holes), gk.CorrectionConfig())
    names = ("log_ratio_sum", "gap_sum", "k3_sum", "ratio_sum", "old_perplexity_sum", "log_ratio_max", "scored_tokens")
    for name in names:
        assert float(got.metrics[name]) == pytest.approx(float(without.metrics[name]), rel=1e-12), name
    # with the row's length in the mean
    rejected = correct(unscored, gk.CorrectionConfig(rejections=(("seq_mean_k2", None, 1e-9),)))
    assert not rejected.mask.any()


def test_normalized_weights_have_mean_one() -> None:
    batch = make_batch(8)
    for weights in ("token", "sequence", "geometric"):
        got = correct(batch, gk.CorrectionConfig(weights=weights, weight_max=1.05, batch_normalize=True))
        by_row = got.weights.amax(1)[batch.mask.any(1).to(got.weights.device)]
        mean = got.weights[got.mask].mean() if weights == "token" else by_row.mean()
        assert float(mean) == pytest.approx(1, rel=1e-12)


def test_metrics_of_parts_merge_to_those_of_the_batch() -> None:
    batch = make_batch(9, rows=8)
    config = gk.CorrectionConfig(weights="sequence", rejections=(("token_k2", None, 0.01),))
    whole = correct(batch, config).metrics
    parts = [correct(Batch(*(x[i : i + 4] for x in batch)), config).metrics for i in (0, 4)]
    merged = parts[0].merged(torch.stack([part.tensor for part in parts]))
    torch.testing.assert_close(merged.tensor, whole.tensor, rtol=1e-12, atol=1e-14)
    for names in (None, "verl", "trl"):
        assert merged.to_dict(names) == pytest.approx(whole.to_dict(names), rel=1e-9)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 4)])
def test_nothing_to_correct(shape: tuple[int, int]) -> None:
    old = torch.full(shape, NAN, device=DEVICE)
    got = gk.sampling_correction(old, old, mask=torch.zeros(shape, dtype=torch.bool, device=DEVICE), config=EVERYTHING)
    assert not got.weights.any() and not got.mask.any() and got.weights.shape == shape
    assert got.metrics.to_dict()["tokens"] == 0
    assert got.metrics.to_dict("verl") == {}
    assert got.metrics.to_dict("trl")["sampling/sampling_logp_difference/mean"] == 0
