"""The reference of policy_loss against its formulas, row by row, and what its page and the papers say of it.

Faults that this is for: a wrong sign, bound or side of a clip; a gradient through what is detached; a mean over the
wrong unit; a segment whose ratio, advantage or weight is not its own; a token that enters a sum, a metric or a ratio
although it does not count; an estimate whose expectation is not the KL; a setting that is not read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import grpo_kernels as gk
from tests.harness import examples
from tests.ops.policy_loss import cases
from tests.ops.policy_loss.cases import F64, INF, NAN
from tests.ops.promises import Inputs, run

# The formulas


class Row(NamedTuple):
    """Values of a row's tokens that count, or of its terms: those of a segment stand at its last token."""

    lp: Tensor
    old: Tensor
    advantage: Tensor
    d: Tensor  # log ratio
    weight: Tensor
    kept: Tensor
    share: Tensor  # the weights argument


def rows_of(inputs: Inputs) -> list[Tensor]:
    """The flattened tokens of each row that count."""
    count = inputs["logprobs"].numel()
    bounds = inputs.get("cu_seqlens", torch.arange(len(inputs["logprobs"]) + 1) * (inputs["logprobs"].shape[-1]))
    counts = inputs.get("mask", torch.ones(count)).reshape(-1) != 0
    if "segments" in inputs:
        counts = counts & (inputs["segments"].reshape(-1) >= 0)
    return [torch.arange(a, b)[counts[a:b]] for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]


def tokens_of(inputs: Inputs, number: int, tokens: Tensor) -> Row:
    def of(name: str, default: float = 1.0) -> Tensor:
        value = inputs.get(name)
        if value is None:
            return torch.full((len(tokens),), default, dtype=F64)
        if value.shape == inputs["logprobs"].shape:
            return value.reshape(-1)[tokens]
        return value.reshape(-1)[number].expand(len(tokens))

    lp = of("logprobs")
    old = of("old_logprobs") if "old_logprobs" in inputs else lp.detach()
    weights = of("is_weights"), of("policy_mask"), of("weights")
    return Row(lp, old, of("advantages"), lp - old, *weights)


def mean(values: Tensor) -> Tensor:
    return values.sum() / max(len(values), 1)


def terms_of(config: gk.LossConfig, row: Row, segments: Tensor) -> Row:
    if config.ratio == "sequence":
        return row._replace(d=mean(row.d).expand(len(row.d)))
    if config.ratio == "sequence_token":
        return row._replace(d=mean(row.d).detach() + row.lp - row.lp.detach())
    if config.ratio == "token":
        return row
    parts = [segments == name for name in segments.unique()]

    def joint(values: Tensor) -> Tensor:
        whole = [values[part].mean() if config.ratio == "segment_mean" else values[part].sum() for part in parts]
        return torch.stack(whole) if whole else values

    last = {
        name: torch.stack([value[part][-1] for part in parts]) if parts else value
        for name, value in zip(Row._fields, row, strict=True)
    }
    return Row(**last)._replace(d=joint(row.d), lp=joint(row.lp))


def policy_terms(config: gk.LossConfig, row: Row, clamped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The terms, their factors, and which ones are clipped, by the table of the page."""
    a, r, score, c = row.advantage, clamped.exp(), row.lp, config
    low = -INF if c.clip_low is None else c.clip_low
    low, high = (INF if bound is None else bound for bound in (c.clip_low, c.clip_high))
    none, fixed, factor = torch.zeros_like(a) > 0, r.detach(), row.weight
    change = (row.lp.exp() - row.old.exp()).detach()
    if c.loss == "clip":
        most = r.clamp(max=INF if c.delta is None else c.delta)
        term, limited = -a * most, -a * r.clamp(1 - low, 1 + high)
        term = torch.where(limited > term, limited, term)
        if c.dual_clip is not None:
            term = torch.where(a < 0, torch.minimum(term, -a * c.dual_clip), term)
        return term, factor, ((most < 1 - low) & (a < 0)) | ((most > 1 + high) & (a > 0))
    if c.loss == "cispo":
        return -fixed.clamp(1 - low, 1 + high) * a * score, factor, (fixed < 1 - low) | (fixed > 1 + high)
    if c.loss == "sapo":
        tau = torch.where(a > 0, *(torch.tensor(t, dtype=F64) for t in c.sapo_temperatures))
        return -a * (tau * (r - 1)).sigmoid() * 4 / tau, factor, none
    if c.loss == "vespo":
        log_w = row.d.detach().clamp(-20, 20).sum() + row.weight.log().clamp(math.log(1e-8), 20).sum()
        log_w = log_w.clamp(math.log(1e-8), 20)
        better, worse = c.vespo_shape[:2], c.vespo_shape[2:]
        phi = [math.exp(max(lam, 1e-4) + k * log_w - max(lam, 1e-4) * log_w.exp()) for k, lam in (better, worse)]
        return -torch.where(a >= 0, phi[0], torch.tensor(phi[1], dtype=F64)) * a * score, torch.ones_like(a), none
    if c.loss in ("dppo_tv", "dppo_kl"):
        p, q = row.lp.detach().exp(), row.old.exp()
        moved = change.abs()
        if c.loss == "dppo_kl":
            moved = q * (row.old - row.lp.detach()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        away = ((a > 0) & (p > q) & (moved > high)) | ((a <= 0) & (p < q) & (moved > low))
        return -fixed.clamp(max=c.ratio_cap or INF) * a * score * ~away, factor, away
    if c.loss == "reinforce":
        return -a * score, factor, none
    if c.loss == "dro":
        assert c.dro_beta is not None
        return -(a * score - c.dro_beta * (row.lp - row.old) ** 2 / 2), factor, none
    if c.loss == "topr":
        most = c.ratio_cap or 1.0
        clipped = (a <= 0) & (fixed > most)
        return -torch.where(a > 0, torch.ones_like(a), fixed.clamp(max=most)) * a * score, factor, clipped
    outside = (change < -low) | (change > high) if c.loss == "ipo" else (fixed < 1 - low) | (fixed > 1 + high)
    return torch.where(outside, 0, -a * r), factor, outside


def of_row(config: gk.LossConfig, row: Row, has_token_weights: bool) -> tuple[Row, Tensor, Tensor, Tensor]:
    """GMPO: the term of a row, its ratio and its factor."""
    assert config.clip_high is not None
    limited = row.d.clamp(-INF if config.clip_low is None else -config.clip_low, config.clip_high)
    lower = torch.where(row.advantage < 0, torch.maximum(row.d, limited), torch.minimum(row.d, limited))
    ratio = mean(torch.where(row.advantage == 0, 0, lower)).exp()
    weight = mean((row.weight + 1e-10).log()).exp() if has_token_weights else row.weight.mean()
    last = Row(*(value[-1:] for value in row))._replace(kept=torch.ones(1))
    return last, ratio[None], (-mean(row.advantage) * ratio)[None], weight[None]


def kl_of(config: gk.LossConfig, d: Tensor, ratio: Tensor) -> Tensor:
    inner, outer = config.kl_clamp or (INF, INF)
    x = d.clamp(-inner, inner)
    value = {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x, "abs": x.abs()}[config.kl.removesuffix("+")]
    value = value.clamp(-outer, outer)
    if config.kl.endswith("+"):
        value = value.detach() + d**2 / 2 - (d**2 / 2).detach()
    return value * ratio if config.kl_unbiased else value


def share_of(
    name: str, counts: dict[str, float], unit: str, length: int, all_rows: bool, config: gk.LossConfig
) -> float:
    """The share of each of `length` terms of a row, of which the batch has counts."""
    if name == "token-sum":
        return 1.0
    if name == "local-token-mean":
        return 1 / max(counts["here"], 1)
    if name == "token-mean":
        return 1 / max(counts[unit], 1)
    rows = max(counts["all rows" if all_rows else "rows"], 1)
    divisors = {"seq-mean-token-mean": max(length, 1), "seq-mean-token-sum": 1}
    return 1 / rows / divisors.get(name, config.max_length or 1)


def by_definition(inputs: Inputs, config: gk.LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, differentiable, and metrics."""
    rows = rows_of(inputs)
    flat = [tokens_of(inputs, number, tokens) for number, tokens in enumerate(rows)]
    segments = inputs.get("segments", torch.zeros(inputs["logprobs"].shape, dtype=torch.int64)).reshape(-1)
    low, high = config.log_ratio_clamp or (-INF, INF)
    is_token_weight = "is_weights" in inputs and inputs["is_weights"].shape == inputs["logprobs"].shape
    found: list[tuple[Row, Tensor, Tensor, Tensor, Tensor]] = []  # row, ratio, term, factor, is clipped
    for row, tokens in zip(flat, rows, strict=True):
        if config.loss == "geo_mean" and len(tokens):
            of_terms = of_row(config, row, is_token_weight)
            found.append((*of_terms, torch.zeros(1) > 0))
            continue
        terms = terms_of(config, row, segments[tokens])
        clamped = terms.d.clamp(low, high)
        found.append((terms, clamped.exp(), *policy_terms(config, terms, clamped)))
    here = {"here": float(sum(map(len, rows))), "all rows": float(len(rows)), "rows": float(sum(map(any_of, rows)))}
    counts = here | {"tokens": here["here"], "segments": float(sum(len(terms.lp) for terms, *_ in found))}
    known = {name: float(value) for name, value in inputs.get("normalizer", {}).items()}
    counts |= known | ({"all rows": known["rows"]} if "rows" in known else {})
    nothing = inputs["logprobs"][:0].sum()
    parts = dict.fromkeys(("policy_loss", "kl_loss", "entropy_loss", "kl_sum", "entropy_sum"), nothing)
    unit = "segments" if config.ratio.startswith("segment") else "tokens"
    for number, (terms, ratio, term, factor, _) in enumerate(found):
        tokens, of_tokens, every = rows[number], flat[number], config.count_empty_rows
        every_term = every or config.loss == "geo_mean"
        share = share_of(config.aggregation, counts, unit, len(terms.lp), every_term, config)
        shares = terms.share if "weights" in inputs else share
        parts["policy_loss"] = parts["policy_loss"] + torch.where(terms.kept != 0, shares * factor * term, 0).sum()
        for name, values in measured(inputs, config, of_tokens, tokens, ratio).items():
            how = getattr(config, f"{name}_aggregation") or config.aggregation
            share = share_of(how, counts, "tokens", len(tokens), every, config)
            is_weighted = "weights" in inputs and how != "local-token-mean"
            shares = of_tokens.share if is_weighted else share
            parts[f"{name}_loss"] = parts[f"{name}_loss"] + (shares * values).sum()
            parts[f"{name}_sum"] = parts[f"{name}_sum"] + values.sum()
    loss = parts["policy_loss"] - config.entropy_coef * parts["entropy_loss"]
    loss = loss + (config.kl_coef * parts["kl_loss"] if config.kl_coef else 0)
    ratios = torch.cat([ratio for _, ratio, *_ in found] or [torch.zeros(0)]).detach().double()
    parts |= {name: torch.tensor(here[key]) for name, key in NUMBERS.items()} | {
        "loss": loss,
        "terms": torch.tensor(len(ratios)),
        "kept_tokens": sum((row.kept != 0).sum() for row in flat) + torch.tensor(0),
        "ratio_sum": ratios.sum(),
        "ratio_spread_sum": (ratios - 1).square().sum(),
        "ratio_min": ratios.min() if len(ratios) else torch.tensor(NAN),
        "ratio_max": ratios.max() if len(ratios) else torch.tensor(NAN),
    }
    if "is_weights" in inputs:  # one for each token, or for each row that has one
        weights = torch.cat([row.weight if is_token_weight else row.weight[:1] for row in flat])
        parts |= {"is_sum": weights.sum(), "is_count": torch.tensor(len(weights))}
    if config.loss != "geo_mean":
        parts["clipped"] = sum(clipped.sum() for *_, clipped in found) + torch.tensor(0)
    return loss, parts


NUMBERS = {"tokens": "here", "rows": "all rows", "active_rows": "rows"}


def any_of(tokens: Tensor) -> bool:
    return len(tokens) > 0


def measured(inputs: Inputs, config: gk.LossConfig, row: Row, tokens: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """The KL and the entropy of a row's tokens, where they are given."""
    found = {}
    if config.kl != "none":
        d = row.lp - inputs["ref_logprobs"].reshape(-1)[tokens]
        found["kl"] = kl_of(config, d, ratio if config.kl_unbiased else torch.ones_like(d))
    if "entropy" in inputs:
        found["entropy"] = inputs["entropy"].reshape(-1)[tokens]
    return found


@pytest.mark.pairs
@pytest.mark.parametrize(("loss", "ratio"), cases.KINDS)
def test_any_settings_give_the_formulas(loss: str, ratio: str) -> None:
    @settings(max_examples=examples(45))
    @given(cases.cases(loss, ratio, sizes=((3, 5), (4, 9), (2, 20), (9, 2), (1, 1))))
    def check(case: tuple[gk.LossConfig, Inputs]) -> None:
        assert_by_definition(*case)

    check()


def assert_by_definition(config: gk.LossConfig, inputs: Inputs) -> None:
    op = cases.op_of(config)
    got = run(op, inputs, "reference", F64)
    leaves = {name: inputs[name].clone().requires_grad_() for name in op.leaves}
    loss, want = by_definition(inputs | leaves, config)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    metrics = dict(zip(cases.METRICS, got["metrics"], strict=True))
    scale = max(1.0, *(float(value.abs().nan_to_num()) for value in metrics.values()))
    pairs = {name: (got[f"d_{name}"], gradient) for name, gradient in zip(op.leaves, gradients, strict=True)}
    pairs |= {name: (metrics[name], value.detach().double()) for name, value in want.items()}
    for name, (ours, formula) in pairs.items():
        torch.testing.assert_close(
            ours, formula, rtol=1e-9, atol=1e-12 * scale, equal_nan=True, msg=lambda text, of=name: f"{of}: {text}"
        )


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_weights_of_rows_stay_theirs_in_as_many_tokens_as_rows(backend: str) -> None:
    """[B, 1] of a packed batch with B tokens is one for each row, in the metrics, too."""
    padded = cases.padded(2, 4, 3, gaps=0.0, optional=("row_weights",))
    padded["is_weights"] = padded.pop("row_weights")
    padded["mask"] = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0]]) > 0
    packed = cases.packed(padded, [3, 0, 1, 0], extra=0)
    assert packed["logprobs"].shape == (4,) and packed["is_weights"].shape == (4, 1)
    op = cases.op_of(gk.LossConfig())
    got, want = (run(op, batch, backend, F64) for batch in (packed, padded))
    torch.testing.assert_close(got["metrics"], want["metrics"], equal_nan=True)
    assert got["counts"][cases.COUNTS.index("is_count")] == 2
    torch.testing.assert_close(got["d_logprobs"], want["d_logprobs"][padded["mask"]])


# Promises of the page


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+", "abs+"])
def test_the_expectation_of_an_estimate_is_the_kl_or_its_gradient(name: str) -> None:
    """Over all outcomes, weighted by their probability: the values of k1 and k3, the gradients of k2 and of "+"."""
    logits = torch.randn(7, dtype=F64).requires_grad_()
    reference = (logits.detach() + 0.1 * torch.randn(7, dtype=F64)).log_softmax(0)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    inputs = {"advantages": torch.zeros(7), "logprobs": logprobs[:, None], "ref_logprobs": reference[:, None]}
    inputs["weights"] = logprobs.exp().detach()[:, None]
    loss = cases.call(inputs, "reference", gk.LossConfig("reinforce", kl=name, kl_coef=1.0))["loss"]
    (wanted,), (gradient,) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (exact, loss))
    if name[:2] in ("k1", "k3"):
        torch.testing.assert_close(loss, exact, rtol=1e-12, atol=1e-15)
    has_gradient = name == "k2" or name.endswith("+")
    assert torch.allclose(gradient, wanted, rtol=1e-11, atol=1e-15) == has_gradient


def test_gradients_of_shared_positions_add_up_in_a_fixed_order() -> None:
    logprobs, index = torch.randn(50, requires_grad=True), torch.randint(50, (1, 20_000))
    losses = [gk.policy_loss(logprobs, None, torch.ones(1), term_index=index).loss for _ in range(3)]
    first, *others = (torch.autograd.grad(loss, logprobs)[0] for loss in losses)
    assert all(torch.equal(first, other) for other in others)


def test_gradients_of_shared_positions_add_up_in_float32() -> None:
    """In bfloat16 a sum of a thousandth each stops at a half."""
    logprobs, entropy = (torch.tensor([value], dtype=torch.bfloat16).requires_grad_() for value in (-1.0, 1.0))
    config, index = gk.LossConfig(entropy_coef=1.0), torch.zeros(1000, 1, dtype=torch.int64)
    gk.policy_loss(logprobs, None, torch.ones(1000), term_index=index, entropy=entropy, config=config).loss.backward()
    assert (logprobs.grad, entropy.grad) == (-1, -1)


def test_clip_fractions_of_segments_are_of_segments() -> None:
    """Four segments of four tokens, of which one is clipped above, one below."""
    segments = torch.arange(8).expand(2, 8) // 4
    log_ratios = torch.tensor([[0.1] * 4 + [0.0] * 4, [0.0] * 4 + [-0.1] * 4])
    config = gk.LossConfig(ratio="segment")
    advantages = torch.tensor([[1.0] * 8, [-1.0] * 8])
    metrics = gk.policy_loss(log_ratios, torch.zeros(2, 8), advantages, config=config, segments=segments).metrics
    ours, theirs = metrics.trl(), metrics.verl()
    assert ours["clip_ratio/high_mean"] == ours["clip_ratio/low_mean"] == 0.25
    assert ours["clip_ratio/high_max"] == 0.5 and theirs["actor/pg_clipfrac"] == 0.5
