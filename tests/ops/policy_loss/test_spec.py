"""The policy loss against direct formulas: signs, KL, segments, sparse terms, weights, entropy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
CASES = [(backend, dtype) for dtype in (F64, torch.float32) for backend in runnable_backends(SUPPORTS, dtype)]
IDS = [f"{backend}-{str(dtype)[6:]}" for backend, dtype in CASES]
# One loss of each form, each with the policy term alone.
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {},
    "dual": {"dual_clip": 3.0, "log_ratio_clamp": (-20.0, 20.0)},
    "delta": {"delta": 1.5},
    "unclipped": {"clip_low": None, "clip_high": None},
    "sequence": {"ratio": "sequence"},
    "sequence_token": {"ratio": "sequence_token"},
    "cispo": {"loss": "cispo"},
    "cispo-sequence": {"loss": "cispo", "ratio": "sequence"},
    "sapo": {"loss": "sapo"},
    "vespo": {"loss": "vespo"},
    "geo_mean": {"loss": "geo_mean", "aggregation": "seq-mean-token-sum"},
    "dppo_tv": {"loss": "dppo_tv", "ratio_cap": 3.0},
    "dppo_kl": {"loss": "dppo_kl", "ratio_cap": 3.0},
    "reinforce": {"loss": "reinforce"},
    "dro": {"loss": "dro", "dro_beta": 0.1},
    "ipo": {"loss": "ipo"},
    "icepop-sequence": {"loss": "icepop", "ratio": "sequence"},
    "segment": {"ratio": "segment"},
    "segment_mean": {"ratio": "segment_mean"},
}
DETACHED = {"cispo", "cispo-sequence", "sequence_token", "vespo", "dppo_tv", "dppo_kl"}


def ragged(rows: int = 5, width: int = 8) -> Tensor:
    mask = torch.arange(width) < torch.randint(2, width + 1, (rows, 1))
    mask[0] = True
    return mask


def segments_of(mask: Tensor, share: float = 0.4) -> Tensor:
    """Segment ids that ascend from 0 in each row; some unmasked tokens are in no segment."""
    ids = (torch.rand(mask.shape) < share).int().cumsum(1).int()
    ids = torch.where(mask & (torch.rand(mask.shape) < 0.9), ids, -1)
    if ids.numel():
        first = torch.where(ids < 0, 99, ids).amin(1, keepdim=True)
        ids = torch.where(ids >= 0, ids - first, -1)
    return ids


def assert_near(got: Tensor, want: Tensor, what: str = "") -> None:
    """Checks agreement up to the rounding of a few operations on terms around 1."""
    unit = 64 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.cpu(), want.to(got.dtype).cpu(), rtol=unit, atol=unit, msg=lambda m: f"{what}: {m}")


def graded(backend: str, logprobs: Tensor, old: Tensor | None, advantages: Tensor, **options: Any) -> Any:
    """The result, and the gradient of the loss with respect to the log-probs."""
    device = device_of(backend)
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    leaf = logprobs.detach().to(device).requires_grad_()
    old = None if old is None else old.to(device)
    result = gk.policy_loss(leaf, old, advantages.to(device), backend=backend, **moved)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    return result, gradient.cpu()


# Direction


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_the_better_sample_becomes_more_probable(backend: str, dtype: torch.dtype, name: str) -> None:
    logprobs = -torch.rand(4, 6).to(dtype) - 0.5
    segments = torch.tensor([0, 0, 1, 1, 1, 2]).repeat(4, 1)
    options = {"segments": segments} if name.startswith("segment") else {}
    for old in (None, logprobs + 0.01 * torch.randn(4, 6).to(dtype)):
        _, gradient = graded(
            backend,
            logprobs,
            old,
            torch.tensor([1.0, -0.5, 0.2, -1.0]),
            config=gk.LossConfig(**LOSSES[name]),
            **options,
        )
        assert (gradient[[0, 2]] < 0).all() and (gradient[[1, 3]] > 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_advantage_zero_has_neither_loss_nor_gradient(backend: str, name: str) -> None:
    logprobs = -torch.rand(3, 6, dtype=F64) - 0.5
    options = {"segments": torch.arange(6).repeat(3, 1)} if name.startswith("segment") else {}
    result, gradient = graded(backend, logprobs, None, torch.zeros(3), config=gk.LossConfig(**LOSSES[name]), **options)
    assert float(result.loss) == 0 and not gradient.any()


# KL


def categorical() -> tuple[Tensor, Tensor]:
    logits = torch.randn(7, dtype=F64).requires_grad_()
    reference = (logits.detach() + 0.1 * torch.randn(7, dtype=F64)).log_softmax(0)
    return logits, reference


def expected_kl(backend: str, logits: Tensor, reference: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Expectation of the estimate and of its gradient over all outcomes, weighted by their probability."""
    logprobs = logits.log_softmax(0)
    device = device_of(backend)
    result = gk.policy_loss(
        logprobs[:, None].to(device),
        None,
        torch.zeros(7, device=device),
        ref_logprobs=reference[:, None].to(device),
        weights=logprobs.exp().detach()[:, None].to(device),
        backend=backend,
        config=gk.LossConfig(loss="reinforce", kl=name, kl_coef=1.0),
    )
    (gradient,) = torch.autograd.grad(result.loss, logits)
    return result.loss.detach().cpu(), gradient


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_expectation_of_the_estimate_is_the_kl(backend: str, name: str) -> None:
    logits, reference = categorical()
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    value, _ = expected_kl(backend, logits, reference, name)
    torch.testing.assert_close(value, exact.detach(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_expectation_of_k2_is_nearly_the_kl(backend: str) -> None:
    logits, reference = categorical()
    logprobs = logits.log_softmax(0)
    exact = float((logprobs.exp() * (logprobs - reference)).sum())
    value, _ = expected_kl(backend, logits, reference, "k2")
    assert float(value) != exact and abs(float(value) / exact - 1) < 0.2


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+", "abs+"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_expected_gradient_is_that_of_the_kl(backend: str, name: str) -> None:
    logits, reference = categorical()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    _, gradient = expected_kl(backend, logits, reference, name)
    torch.testing.assert_close(gradient, exact, rtol=1e-11, atol=1e-15)
    _, plain = expected_kl(backend, logits, reference, name.removesuffix("+"))
    assert name == "k2" or not torch.allclose(plain, exact)


@pytest.mark.parametrize("name", ["k1", "k3", "abs"])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_straight_through_has_the_value_of_its_base_and_the_gradient_of_k2(
    backend: str, dtype: torch.dtype, name: str
) -> None:
    logprobs, ref = -torch.rand(4, 6).to(dtype) - 0.5, -torch.rand(4, 6).to(dtype) - 0.5

    def of(kl: str) -> Any:
        config = gk.LossConfig(loss="reinforce", kl=kl, kl_coef=0.7)
        return graded(backend, logprobs, None, torch.zeros(4), ref_logprobs=ref, config=config)

    (base, _), (plus, gradient), (_, of_k2) = of(name), of(f"{name}+"), of("k2")
    assert_near(plus.loss, base.loss)
    assert torch.equal(gradient, of_k2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kl_that_is_only_measured_changes_nothing_even_if_it_overflows(backend: str) -> None:
    logprobs = -torch.rand(3, 4, dtype=F64)
    ref = torch.zeros(3, 4, dtype=F64).index_fill(1, torch.tensor([1]), 1e4)
    for kl in ("k1", "k2", "k3"):
        torch.manual_seed(0)
        result, measured = graded(
            backend, logprobs, None, torch.randn(3), ref_logprobs=ref, config=gk.LossConfig(kl=kl)
        )
        torch.manual_seed(0)
        plain, gradient = graded(backend, logprobs, None, torch.randn(3), config=gk.LossConfig())
        assert torch.equal(result.loss, plain.loss) and torch.equal(measured, gradient)
        assert float(result.metrics["kl_sum"].abs()) > 1


# Gradients

GRADCHECKED = {
    **{name: fields for name, fields in LOSSES.items() if name not in DETACHED},
    **{kl: {"loss": "reinforce", "kl": kl, "kl_coef": 0.5} for kl in ("k1", "k2", "k3", "abs")},
    "kl_unbiased": {"kl": "k3", "kl_coef": 0.5, "kl_unbiased": True},
    "kl_unbiased-sequence": {"kl": "k3", "kl_coef": 0.5, "kl_unbiased": True, "ratio": "sequence"},
    "kl-segment": {"kl": "k3", "kl_coef": 0.5, "ratio": "segment"},
    "entropy": {"entropy_coef": 0.3},
    "clamped": {"kl": "k3", "kl_coef": 0.5, "kl_clamp": (0.2, 0.01)},
}


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("name", GRADCHECKED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_is_the_derivative(backend: str, name: str, aggregation: str) -> None:
    fields = GRADCHECKED[name]
    if fields.get("loss") == "geo_mean" and aggregation != "seq-mean-token-sum":
        pytest.skip("its terms are rows")
    device, mask = device_of(backend), ragged()
    old = (-torch.rand(mask.shape, dtype=F64) - 0.5).to(device)
    logprobs = (old + 0.3 * torch.randn(mask.shape, dtype=F64).to(device)).requires_grad_()
    entropy = torch.rand(mask.shape, dtype=F64, device=device).requires_grad_()
    options: dict[str, Any] = {"mask": mask.to(device), "backend": backend}
    if "kl" in fields:
        options["ref_logprobs"] = old + 0.3 * torch.randn(mask.shape, dtype=F64).to(device)
    if str(fields.get("ratio")).startswith("segment"):
        options["segments"] = segments_of(mask).to(device)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.3, 0.8], dtype=F64, device=device)
    config = gk.LossConfig(**fields | {"aggregation": aggregation})

    def loss(lp: Tensor, h: Tensor) -> Tensor:
        return gk.policy_loss(lp, old, advantages, entropy=h, config=config, **options).loss

    # Checks every entry, or one random direction of slow stand-ins for a GPU: other tests compare every entry with the
    # reference. Finite differences of 1e-7 lose half of a double's digits.
    is_stand_in = backend in ("triton", "cuda") and not torch.cuda.is_available()
    assert torch.autograd.gradcheck(loss, (logprobs, entropy), eps=1e-7, atol=1e-7, rtol=1e-5, fast_mode=is_stand_in)


# Segments


def segment_loop(
    logprobs: Tensor, old: Tensor, advantages: Tensor, segments: Tensor, mask: Tensor, mean: bool, aggregation: str
) -> Tensor:
    """Clipped terms of each row's segments, in a loop."""
    per_row = []
    for row in range(len(logprobs)):
        terms = []
        for segment in range(int(segments[row].max()) + 1):
            where = ((segments[row] == segment) & mask[row]).nonzero().flatten()
            if len(where):
                d = (logprobs - old)[row, where]
                ratio = (d.mean() if mean else d.sum()).exp()
                advantage = advantages[row, where[-1]]
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        per_row.append(terms)
    flat = torch.stack([term for terms in per_row for term in terms])
    if aggregation == "token-mean":
        return flat.mean()
    rows = [torch.stack(terms) for terms in per_row if terms]
    means = [terms.mean() if aggregation == "seq-mean-token-mean" else terms.sum() for terms in rows]
    return torch.stack(means).mean()


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("ratio", ["segment", "segment_mean"])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_segments_equal_a_loop(backend: str, dtype: torch.dtype, ratio: str, aggregation: str) -> None:
    for _ in range(5):
        mask = ragged(6, 12)
        segments = segments_of(mask)
        old = -torch.rand(6, 12).to(dtype)
        logprobs = (old + 0.2 * torch.randn(6, 12).to(dtype)).requires_grad_()
        advantages = torch.randn(6, 12).to(dtype)
        want = segment_loop(logprobs, old, advantages, segments, mask, ratio == "segment_mean", aggregation)
        (of_loop,) = torch.autograd.grad(want, logprobs)
        config = gk.LossConfig(ratio=ratio, aggregation=aggregation)
        got, gradient = graded(backend, logprobs, old, advantages, mask=mask, segments=segments, config=config)
        assert_near(got.loss.detach(), want.detach(), "loss")
        assert_near(gradient, of_loop, "gradient")
        assert float(got.metrics["terms"]) == sum(len(row[row >= 0].unique()) for row in segments)


@pytest.mark.parametrize("aggregation", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_segments_of_one_token_are_the_token_loss(backend: str, dtype: torch.dtype, aggregation: str) -> None:
    mask = ragged()
    old = -torch.rand(mask.shape).to(dtype)
    logprobs = old + 0.2 * torch.randn(mask.shape).to(dtype)
    segments = torch.where(mask, torch.arange(mask.shape[1]), -1)
    advantages = torch.randn(len(mask))
    want, expected = graded(
        backend, logprobs, old, advantages, mask=mask, config=gk.LossConfig(aggregation=aggregation)
    )
    config = gk.LossConfig(ratio="segment", aggregation=aggregation)
    got, gradient = graded(backend, logprobs, old, advantages, mask=mask, segments=segments, config=config)
    assert_near(got.loss, want.loss)
    assert_near(gradient, expected)


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_one_segment_a_row_is_the_sequence_loss(backend: str, dtype: torch.dtype) -> None:
    mask = ragged()
    old = -torch.rand(mask.shape).to(dtype)
    logprobs = old + 0.2 * torch.randn(mask.shape).to(dtype)
    results = []
    for ratio, segments in (("sequence", None), ("segment_mean", torch.where(mask, 0, -1))):
        config = gk.LossConfig(ratio=ratio, aggregation="seq-mean-token-mean")
        results.append(
            graded(backend, logprobs, old, torch.arange(5.0) - 2, mask=mask, segments=segments, config=config)
        )
    (want, expected), (got, gradient) = results
    assert_near(got.loss, want.loss)
    assert_near(gradient, expected)


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_kl_and_entropy_stay_per_token_with_segments(backend: str, dtype: torch.dtype) -> None:
    mask = ragged()
    segments, old = segments_of(mask), -torch.rand(mask.shape).to(dtype)
    logprobs, ref, entropy = (old + 0.2 * torch.randn(mask.shape).to(dtype) for _ in range(3))
    options = {"mask": mask, "segments": segments, "entropy": entropy}
    used, d = mask & (segments >= 0), logprobs - ref
    plain, _ = graded(backend, logprobs, old, torch.ones(5), config=gk.LossConfig(ratio="segment"), **options)
    config = gk.LossConfig(ratio="segment", kl="k2", kl_coef=0.3, entropy_coef=0.1)
    got, _ = graded(backend, logprobs, old, torch.ones(5), ref_logprobs=ref, config=config, **options)
    assert_near(got.loss, plain.loss.cpu() + (0.15 * d.square() - 0.1 * entropy)[used].mean())


# Sparse terms and weights


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.startswith("segment")])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_mask_of_endpoints_is_the_loss_of_the_gathered_endpoints(backend: str, dtype: torch.dtype, name: str) -> None:
    mask = torch.rand(5, 9) < 0.3
    mask[:, 4] = True
    old = -torch.rand(5, 9).to(dtype) - 0.2
    logprobs, advantages = old + 0.2 * torch.randn(5, 9).to(dtype), torch.randn(5, 9)
    lengths = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)])
    config = gk.LossConfig(**LOSSES[name])
    sparse, gradient = graded(backend, logprobs, old, advantages, mask=mask, config=config)
    packed, gathered = graded(backend, logprobs[mask], old[mask], advantages[mask], cu_seqlens=lengths, config=config)
    assert_near(packed.loss, sparse.loss)
    assert_near(gathered, gradient[mask])
    assert not gradient[~mask].any()


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_weights_replace_the_aggregation(backend: str, dtype: torch.dtype) -> None:
    mask = ragged()
    old = -torch.rand(mask.shape).to(dtype)
    logprobs, ref = old + 0.2 * torch.randn(mask.shape).to(dtype), old + 0.2 * torch.randn(mask.shape).to(dtype)
    advantages, weights = torch.randn(mask.shape).to(dtype), torch.randn(mask.shape).to(dtype)
    fields = {"kl": "k3", "kl_coef": 0.3}
    options = {"mask": mask, "ref_logprobs": ref}
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        config = gk.LossConfig(aggregation=aggregation, **fields)
        got, _ = graded(backend, logprobs, old, advantages, weights=weights, config=config, **options)
        r, d = (logprobs - old).exp(), ref - logprobs
        terms = -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages) + 0.3 * (d.exp() - d - 1)
        assert_near(got.loss, torch.where(mask, terms * weights, 0).sum())
        ones = mask.to(dtype)
        shares = ones / ones.sum() if aggregation == "token-mean" else ones / ones.sum(1, keepdim=True) / len(mask)
        same, gradient = graded(backend, logprobs, old, advantages, weights=shares, config=config, **options)
        plain, expected = graded(backend, logprobs, old, advantages, config=config, **options)
        assert_near(same.loss, plain.loss)
        assert_near(gradient, expected)


@pytest.mark.parametrize("loss", ["reinforce", "clip", "sapo"])
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_policy_mask_drops_policy_terms_and_nothing_else(backend: str, dtype: torch.dtype, loss: str) -> None:
    mask = ragged(6)
    policy_mask = torch.rand(mask.shape) < 0.6
    old = -torch.rand(mask.shape).to(dtype) - 0.5
    logprobs, advantages = old + 0.2 * torch.randn(mask.shape).to(dtype), torch.randn(mask.shape).to(dtype)
    ref, entropy, weights = old + 0.1, torch.rand(mask.shape).to(dtype), torch.rand(mask.shape).to(dtype)
    options = {"mask": mask, "ref_logprobs": ref, "entropy": entropy, "is_weights": weights}
    config = gk.LossConfig(loss=loss, kl="k2", kl_coef=0.3, entropy_coef=0.1)
    got, gradient = graded(backend, logprobs, old, advantages, policy_mask=policy_mask, config=config, **options)
    whole, _ = graded(backend, logprobs, old, advantages, config=config, **options)
    silent, expected = graded(backend, logprobs, old, advantages * policy_mask, config=config, **options)
    assert_near(got.loss, silent.loss)
    assert_near(gradient, expected)
    assert float(got.metrics["kept_tokens"]) == int((mask & policy_mask).sum())
    assert float(whole.metrics["kept_tokens"]) == int(mask.sum())
    for name in ("tokens", "kl_sum", "entropy_sum", "low_clipped", "high_clipped", "is_sum", "is_count", "ratio_sum"):
        assert float(got.metrics[name]) == float(whole.metrics[name]), name


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_clamps_of_the_kl(backend: str, dtype: torch.dtype) -> None:
    logprobs = -torch.ones(1, 6).to(dtype)
    d = torch.tensor([-4.0, -2.0, -0.5, 0.5, 2.0, 4.0]).to(dtype)

    def of(kl: str, *clamp: float) -> tuple[float, Tensor]:
        config = gk.LossConfig(loss="reinforce", kl=kl, kl_coef=1.0, kl_clamp=clamp, aggregation="token-sum")
        result, gradient = graded(
            backend, logprobs, None, torch.zeros(1), ref_logprobs=logprobs - d[None], config=config
        )
        return float(result.loss), gradient[0]

    value, gradient = of("k2", 3.0, 100.0)
    assert value == pytest.approx(float((d.clamp(-3, 3) ** 2 / 2).sum()))
    assert_near(gradient, torch.where(d.abs() > 3, 0, d))
    value, gradient = of("k2", 100.0, 1.0)
    assert value == pytest.approx(2 * (0.125 + 1 + 1)) and (gradient != 0).tolist() == (d.abs() < 1).tolist()
    value, gradient = of("k1", 3.0, 1.0)
    assert value == pytest.approx(0) and (gradient != 0).tolist() == (d.abs() < 1).tolist()


# For each field, base settings and values that must give different results.
ENTROPY = {"entropy_coef": 0.1, "aggregation": "token-sum"}
FIELDS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "loss": ({}, ("clip", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "reinforce", "ipo")),
    "ratio": ({}, ("token", "sequence", "segment", "segment_mean")),
    "clip_low": ({}, (0.1, 0.2, None)),
    "clip_high": ({}, (0.1, 0.2, None)),
    "dual_clip": ({}, (None, 1.01)),
    "delta": ({}, (None, 1.01)),
    "ratio_cap": ({"loss": "dppo_tv"}, (None, 1.01)),
    "sapo_temperatures": ({"loss": "sapo"}, ((1.0, 1.0), (1.0, 2.0), (2.0, 1.0))),
    "vespo_shape": ({"loss": "vespo"}, ((2, 3, 3, 2), (1, 3, 3, 2), (2, 1, 3, 2), (2, 3, 1, 2), (2, 3, 3, 1))),
    "dro_beta": ({"loss": "dro", "dro_beta": 0.1}, (0.1, 0.2)),
    "log_ratio_clamp": ({}, (None, (-0.01, 1.0), (-1.0, 0.01))),
    "kl": ({"kl_coef": 0.1}, ("k1", "k2", "k3", "abs")),
    "kl_coef": ({"kl": "k1"}, (0.0, 0.1)),
    "kl_clamp": ({"kl": "k3", "kl_coef": 0.1}, (None, (0.1, 10.0), (20.0, 0.01))),
    "kl_unbiased": ({"kl": "k1", "kl_coef": 0.1}, (False, True)),
    "entropy_coef": ({}, (0.0, 0.1)),
    "aggregation": ({}, ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")),
    "kl_aggregation": ({"kl": "k1", "kl_coef": 1.0}, (None, "token-sum", "seq-mean-token-mean")),
    "entropy_aggregation": (ENTROPY, (None, "seq-mean-token-mean", "local-token-mean")),
    "max_length": ({"aggregation": "seq-mean-token-sum-norm", "max_length": 5}, (5, 6)),
    "count_empty_rows": ({"aggregation": "seq-mean-token-mean"}, (False, True)),
}


def test_every_field_is_varied() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(gk.LossConfig) if field.init}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_field_is_ignored(backend: str, field: str) -> None:
    mask = ragged(6, 9)
    mask[3] = False
    old = -torch.rand(mask.shape, dtype=F64) - 0.7
    shift = torch.tensor([0.3, -0.35, -0.8, 0.0, 0.2, 0.1])[:, None]
    logprobs = old + 0.25 * torch.randn(mask.shape) + shift
    base, values = FIELDS[field]
    losses = []
    for value in values:
        config = gk.LossConfig(**base | {field: value})
        result, _ = graded(
            backend,
            logprobs,
            old,
            torch.tensor([1.0, -0.7, -1.0, 2.0, -1.2, 0.6]),
            mask=mask,
            segments=torch.where(mask, torch.arange(9) // 3, -1),
            entropy=-old,
            config=config,
            ref_logprobs=old - 0.1 if config.kl != "none" else None,
        )
        losses.append(float(result.loss))
    assert len({round(loss, 9) for loss in losses}) == len(values), dict(zip(values, losses, strict=True))
