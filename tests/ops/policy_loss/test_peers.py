"""LossConfig's translations of systems whose packages tests do not install, against their formulas written out.

Compared are the gradients, and the values unless a peer's has the same gradient and another value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss import peers
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
ROWS, WIDTH = 12, 20


class Batch(NamedTuple):
    lp: Tensor
    old: Tensor
    sampled: Tensor
    ref: Tensor
    advantage: Tensor  # one a row, as a column
    mask: Tensor

    @property
    def ratio(self) -> Tensor:
        return (self.lp - self.old).clamp(-20, 20).exp()

    @property
    def weight(self) -> Tensor:
        return (self.old - self.sampled).exp()

    def mean_of_row(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum(1, keepdim=True) / self.mask.sum(1, keepdim=True).clamp(min=1)

    def token_mean(self, terms: Tensor) -> Tensor:
        return (terms * self.mask).sum() / self.mask.sum()

    def row_mean(self, terms: Tensor, active: bool = False) -> Tensor:
        return self.mean_of_row(terms).sum() / (self.mask.any(1).sum() if active else ROWS)

    def clip(self, ratio: Tensor, low: float = 0.2, high: float = 0.2, most: float = float("inf")) -> Tensor:
        loss = -torch.minimum(ratio * self.advantage, ratio.clamp(1 - low, 1 + high) * self.advantage)
        return torch.where(self.advantage < 0, torch.minimum(loss, -self.advantage * most), loss)

    def k3(self) -> Tensor:
        d = self.ref - self.lp
        return d.exp() - d - 1


def batch() -> Batch:
    random = torch.Generator().manual_seed(0)

    def noise(size: float) -> Tensor:
        return size * torch.randn(ROWS, WIDTH, generator=random, dtype=F64)

    old = -0.5 - torch.rand(ROWS, WIDTH, generator=random, dtype=F64)
    advantage = torch.randn(ROWS, 1, generator=random, dtype=F64)
    advantage[2] = 0
    mask = torch.rand(ROWS, WIDTH, generator=random) < 0.8
    mask[4] = False
    return Batch((old + noise(0.4)).requires_grad_(), old, old + noise(0.5), old + noise(0.3), advantage, mask)


def covariance(b: Batch) -> Tensor:
    def centred(values: Tensor) -> Tensor:
        return values - (values * b.mask).sum() / b.mask.sum()

    return centred(b.advantage.expand_as(b.lp)) * centred(b.lp.detach())


def outside_covariance(b: Batch) -> Tensor:
    """Tokens that keep their term under Clip-Cov if all tokens inside of the bounds may be drawn."""
    is_clipped = b.clip(b.ratio) > -b.ratio * b.advantage
    return is_clipped | (covariance(b) <= 0.05) | (covariance(b) >= 0.5)


def of_highest_covariance(b: Batch, share: float) -> Tensor:
    values = covariance(b).masked_fill(~b.mask, -torch.inf)
    return values >= values.flatten().sort(descending=True).values[int(share * b.mask.sum()) - 1]


Expected = Callable[[Batch], Tensor]
SKYRL: list[tuple[dict[str, Any], Expected]] = [
    ({}, lambda b: b.token_mean(b.clip(b.ratio)) + 0.001 * b.row_mean(b.k3())),
    ({"policy_loss_type": "dual_clip"}, lambda b: b.token_mean(b.clip(b.ratio, most=1.5))),
    (
        {"policy_loss_type": "sapo", "sapo": {"tau_neg": 1.5}, "loss_reduction": "sequence_mean"},
        lambda b: b.row_mean(
            -b.advantage
            * torch.where(b.advantage > 0, (b.ratio - 1).sigmoid() * 4, (1.5 * (b.ratio - 1)).sigmoid() * 4 / 1.5)
        ),
    ),
    (
        {"policy_loss_type": "gspo", "loss_reduction": "seq_mean_token_sum_norm", "max_seq_len": 50},
        lambda b: (
            (b.clip((b.mean_of_row(b.lp - b.old).detach() + b.lp - b.lp.detach()).exp()) * b.mask).sum() / (ROWS * 50)
        ),
    ),
    (
        {"policy_loss_type": "cispo", "cispo": {"cispo_eps_clip_low": 0.1, "cispo_eps_clip_high": 0.3}},
        lambda b: b.token_mean(-b.advantage * b.ratio.clamp(0.9, 1.3).detach() * b.lp),
    ),
    (
        {"policy_loss_type": "rollout_is"},
        lambda b: b.token_mean(-torch.where((b.ratio - 1).abs() < 0.2, b.ratio, 0).detach() * b.advantage * b.lp),
    ),
    (
        {"policy_loss_type": "dppo", "dppo": {"delta_low": 0.05, "delta_high": 0.03}},
        lambda b: b.token_mean(
            -b.ratio
            * b.advantage
            * ~((b.advantage > 0) & (b.lp.exp() - b.old.exp() > 0.03))
            * ~((b.advantage < 0) & (b.old.exp() - b.lp.exp() > 0.05))
        ),
    ),
    (
        {
            "policy_loss_type": "clip_cov",
            "clip_cov": {"clip_ratio": 1.0, "clip_cov_lb": 0.05, "clip_cov_ub": 0.5},
        },
        lambda b: b.token_mean(b.clip(b.ratio) * outside_covariance(b)),
    ),
    (
        {"policy_loss_type": "kl_cov", "kl_cov": {"kl_cov_frac": 0.3}},
        lambda b: b.token_mean(-b.ratio * b.advantage + of_highest_covariance(b, 0.3) * (b.lp - b.old).abs()),
    ),
    ({"policy_loss_type": "importance_sampling"}, lambda b: -(b.ratio * b.advantage * b.mask).sum()),
    (
        {"off_policy_correction": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2}},
        lambda b: b.token_mean(b.clip(b.ratio) * b.weight.clamp(max=1.2)),
    ),
    (
        {"off_policy_correction": {"tis_ratio_type": "sequence"}},
        lambda b: b.token_mean(
            b.clip(b.ratio) * ((b.old - b.sampled) * b.mask).sum(1, keepdim=True).exp().clamp(max=5)
        ),
    ),
]
AREAL: list[tuple[dict[str, Any], Expected]] = [
    ({}, lambda b: b.token_mean(b.clip(b.ratio))),
    ({"eps_clip_higher": 0.3, "c_clip": 1.4}, lambda b: b.token_mean(b.clip(b.ratio, high=0.3, most=1.4))),
    (
        {"importance_sampling_level": "sequence"},
        lambda b: b.token_mean(b.clip(b.mean_of_row(b.lp - b.old).exp()) * b.mask),
    ),
    (
        {"use_sapo_loss": True, "sapo_tau_neg": 1.0},
        lambda b: b.token_mean(-b.advantage * (b.ratio - 1).sigmoid() * 4),
    ),
    (
        {"rejection_sampling": {"upper": 1.3, "lower": 0.7}},
        lambda b: b.token_mean(b.clip(b.ratio) * b.weight * (b.weight >= 0.7) * (b.weight <= 1.3)),
    ),
    (
        {"rejection_sampling": {"level": "sequence", "action": "clamp", "upper": 1.05}},
        lambda b: b.token_mean(b.clip(b.ratio) * b.mean_of_row(b.old - b.sampled).exp().clamp(max=1.05)),
    ),
]
ROLL: list[tuple[dict[str, Any], Expected]] = [
    ({}, lambda b: b.row_mean(-b.lp * b.advantage, active=True)),
    (
        {"pg_variant": "ppo", "use_pg_clip_range": True, "pg_clip_high": 0.3, "dual_clip_loss": True},
        lambda b: b.row_mean(b.clip(b.ratio, high=0.3, most=1.4), active=True),
    ),
    (
        {"pg_variant": "tis", "tis_lower_bound": 0.3, "use_kl_loss": True, "kl_loss_coef": 0.1},
        lambda b: b.row_mean(-b.ratio.clamp(0.3, 1).detach() * b.advantage * b.lp + 0.1 * b.k3(), active=True),
    ),
    (
        {"pg_variant": "topr"},
        lambda b: b.row_mean(
            -torch.where(b.advantage > 0, 1, b.ratio.clamp(max=1)).detach() * b.advantage * b.lp, active=True
        ),
    ),
    (
        {"pg_variant": "cispo", "loss_agg_mode": "token-mean"},
        lambda b: b.token_mean(-b.ratio.clamp(0.9, 1.1).detach() * b.advantage * b.lp),
    ),
    (
        {"pg_variant": "kimi15"},
        lambda b: b.row_mean(-b.advantage * b.lp + 0.05 * (b.lp - b.old) ** 2, active=True),
    ),
]
COSMOS: list[tuple[dict[str, Any], Expected]] = [
    ({"lower_bound_ratio": 1.5}, lambda b: b.token_mean(b.clip(b.ratio, most=1.5))),
    (
        {"variant": "gspo", "epsilon_low": -1.0, "loss_type": "seq-mean-token-mean"},
        lambda b: b.row_mean(b.clip(b.mean_of_row(b.lp - b.old).exp(), low=1.0) * b.mask),
    ),
    (
        {"aipo_rho": 1.2, "loss_type": "seq-mean-token-mean", "unbiased_loss_max_tokens": 30},
        lambda b: (-b.ratio.clamp(max=1.2) * b.advantage * b.mask).sum() / (ROWS * 30),
    ),
    (
        {"kl_beta": 0.1, "unbiased_kl_estimate": True, "behav_imp_weight_cap": 1.3},
        lambda b: b.token_mean(b.clip(b.ratio, most=3.0) * b.weight * (b.weight <= 1.3) + 0.1 * b.ratio * b.k3()),
    ),
]
ART: list[tuple[dict[str, Any], Expected]] = [
    ({}, lambda b: b.token_mean(-b.ratio.clamp(0, 5).detach() * b.advantage * b.lp)),
    ({"ppo": True, "epsilon": 0.1}, lambda b: b.token_mean(b.clip(b.ratio, 0.1, 0.1))),
    (
        {"importance_sampling_level": "average", "ppo": True, "truncated_importance_sampling": 1.3},
        lambda b: b.token_mean(b.clip((b.ratio + b.mean_of_row(b.lp - b.old).exp()) / 2) * b.weight.clamp(max=1.3)),
    ),
]


def of_future(b: Batch, half_life: float, cap: float = float("inf")) -> Tensor:
    """exp of the discounted sum of a token's and the later ones' log ratios."""
    d = torch.where(b.mask & ((b.lp - b.old).exp() <= cap), b.lp - b.old, 0).detach()
    distance = torch.arange(WIDTH)[:, None] - torch.arange(WIDTH)
    return (d @ torch.where(distance >= 0, 0.5 ** (distance.double() / half_life), 0)).exp()


def real(b: Batch, tau: float) -> Tensor:
    """REAL over groups of four. A row without tokens takes no part, unlike in ms-swift."""
    total = torch.zeros((), dtype=F64)
    for first in range(0, ROWS, 4):
        rows = [i for i in range(first, first + 4) if b.mask[i].any()]
        score, is_better = b.mean_of_row(b.lp - b.old)[rows, 0] / tau, b.advantage[rows, 0] > 0
        if is_better.any() and not is_better.all():
            total = total + (1 + score[~is_better].exp().sum()).log() + (1 + (-score[is_better]).exp().sum()).log()
    return total / (ROWS // 4)


SWIFT: list[tuple[dict[str, Any], Expected]] = [
    (
        {"epsilon_high": 0.3, "delta": 1.5},
        lambda b: b.row_mean(b.clip(b.ratio.clamp(max=1.5), high=0.3) + 0.04 * b.k3()),
    ),
    ({"loss_type": "bnpo", "beta": 0.0}, lambda b: b.token_mean(b.clip(b.ratio))),
    ({"loss_type": "dapo", "kl_in_reward": True}, lambda b: b.token_mean(b.clip(b.ratio))),
    (
        {"loss_type": "dr_grpo", "beta": 0.0, "max_completion_length": 30},
        lambda b: (b.clip(b.ratio) * b.mask).sum() / (ROWS * 30),
    ),
    (
        {"loss_type": "cispo", "beta": 0.0, "epsilon_high": 1.3},
        lambda b: b.token_mean(-b.ratio.clamp(max=1.3).detach() * b.advantage * b.lp),
    ),
    (
        {"loss_type": "sapo", "beta": 0.0, "tau_pos": 2.0, "tau_neg": 1.0},
        lambda b: b.row_mean(
            -b.advantage * torch.where(b.advantage > 0, (2 * (b.ratio - 1)).sigmoid() * 2, (b.ratio - 1).sigmoid() * 4)
        ),
    ),
    ({"loss_type": "real", "real_tau": 0.3}, lambda b: real(b, 0.3) + 0.04 * b.token_mean(b.k3())),
    (
        {"loss_type": "fipo", "beta": 0.0, "fipo_safety_threshold": 1.2},
        lambda b: b.token_mean(
            b.clip(b.ratio)
            * torch.where(
                (b.ratio > 1.2) & (b.advantage < 0),
                of_future(b, 32).clamp(1, 1.2).clamp(0.8, 1),
                of_future(b, 32).clamp(1, 1.2),
            ).detach()
        ),
    ),
    (
        {
            "loss_type": "fipo",
            "delta": 1.5,
            "fipo_decay_rate": 3.0,
            "fipo_clip_range": 0.4,
            "fipo_clip_high_only": False,
            "fipo_safety_threshold": None,
        },
        lambda b: b.token_mean(
            b.clip(b.ratio.clamp(max=1.5)) * of_future(b, 3, cap=1.5).clamp(0.6, 1.4) + 0.04 * b.k3()
        ),
    ),
]
CASES = [
    pytest.param(name, fields, expected, id=f"{name}-{i}")
    for name, cases in (
        ("skyrl", SKYRL),
        ("areal", AREAL),
        ("roll", ROLL),
        ("cosmos", COSMOS),
        ("art", ART),
        ("swift", SWIFT),
    )
    for i, (fields, expected) in enumerate(cases)
]
OTHER_VALUE = ("rollout_is", "dppo")


@pytest.mark.parametrize(("name", "fields", "expected"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_of(backend: str, name: str, fields: dict[str, Any], expected: Expected) -> None:
    if name == "skyrl" and fields:  # its KL is compared once
        fields = {"use_kl_loss": False, "clip_ratio_c": 1.5, **fields}
    config = getattr(gk.LossConfig, name)(**fields)
    b = batch()
    want = expected(b)
    (want_gradient,) = torch.autograd.grad(want, b.lp)
    moved = Batch(*(value.detach().to(device_of(backend)) for value in b))
    leaf = moved.lp.detach().requires_grad_()
    result = gk.policy_loss(
        leaf,
        moved.old,
        moved.advantage.squeeze(1),
        mask=moved.mask,
        ref_logprobs=moved.ref if config.kl != "none" else None,
        sampling_logprobs=moved.sampled if config.correction != "none" else None,
        groups=4 if config.loss == "real" else None,
        config=config,
        backend=backend,
    )
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    # some twenty roundings of terms below 100, in float64
    torch.testing.assert_close(gradient.cpu(), want_gradient, rtol=1e-12, atol=1e-13)
    if fields.get("policy_loss_type") not in OTHER_VALUE:
        torch.testing.assert_close(result.loss.detach().cpu(), want.detach(), rtol=1e-12, atol=1e-13)


# Bounds that a batch of ordinary tokens does not reach: log ratio of a single token to the old policy and to the
# reference, its advantage, and the term.
FAR = [
    ("cosmos", {"variant": "gspo", "epsilon_low": -1.0}, (12.0, 0.0, -1.0), math.exp(10)),
    ("cosmos", {"variant": "gspo", "epsilon_high": -1.0}, (2.0, 0.0, -1.0), math.exp(2)),
    ("cosmos", {"epsilon_low": -1.0}, (25.0, 0.0, -1.0), 3.0),
    ("cosmos", {"kl_beta": 1.0}, (0.0, -8.0, 0.0), 10.0),
    ("roll", {"use_kl_loss": True, "kl_loss_coef": 1.0}, (0.0, 11.0, 0.0), 10.0),
    ("art", {}, (math.log(4.5), 0.0, -1.0), -4.5 * 5),
    ("art", {}, (math.log(6.0), 0.0, -1.0), -5.0 * 5),
]


@pytest.mark.parametrize(("name", "fields", "token", "term"), FAR)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_of_a_far_token(
    backend: str, name: str, fields: dict[str, Any], token: tuple[float, float, float], term: float
) -> None:
    to_old, to_reference, advantage = token
    config, device = getattr(gk.LossConfig, name)(**fields), device_of(backend)
    lp = torch.full((1, 1), -5.0, dtype=F64, device=device)
    result = gk.policy_loss(
        lp,
        lp - to_old,
        torch.tensor([advantage], dtype=F64, device=device),
        ref_logprobs=lp - to_reference if config.kl != "none" else None,
        config=config,
        backend=backend,
    )
    assert result.loss.item() == pytest.approx(term, rel=1e-12)


def test_every_loss_of_these_peers_is_compared() -> None:
    def named(cases: list[tuple[dict[str, Any], Expected]], field: str, default: str) -> set[str]:
        return {fields.get(field, default) for fields, _ in cases}

    assert named(SKYRL, "policy_loss_type", "regular") == {*peers.SKYRL_LOSSES}
    assert named(ROLL, "pg_variant", "vanilla") == {*peers.ROLL_VARIANTS}
    assert named(SWIFT, "loss_type", "grpo") == {*peers.SWIFT_LOSS_TYPES}
    assert named(COSMOS, "variant", "grpo") | {"dapo"} == {*peers.COSMOS_VARIANTS}  # dapo is grpo there


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("skyrl", {"policy_loss_type": "ppo"}, "policy_loss_type must be one of regular, .* got 'ppo'"),
        ("skyrl", {"policy_loss_type": "cross_entropy"}, "'cross_entropy' is not implemented: it has neither"),
        ("skyrl", {"loss_reduction": "prompt_mean"}, "'prompt_mean' is expressed with the argument weights"),
        ("skyrl", {"loss_reduction": "mean"}, "loss_reduction must be one of token_mean, .* got 'mean'"),
        ("skyrl", {"loss_reduction": "seq_mean_token_sum_norm"}, "max_seq_len must be given"),
        ("skyrl", {"sapo": {"tau": 1}}, "sapo: field must be one of tau_pos, tau_neg, got 'tau'"),
        ("skyrl", {"dppo": {"dppo_type": "tv"}}, None),
        ("skyrl", {"policy_loss_type": "dppo", "dppo": {"dppo_type": "tv"}}, "dppo_type must be one of .* got 'tv'"),
        ("skyrl", {"off_policy_correction": {"tis_ratio_type": "row"}}, "tis_ratio_type must be one of .* got 'row'"),
        ("skyrl", {"off_policy_correction": {"sequence_mask_metric": "product"}}, "got 'sequence_mask_metric'"),
        ("skyrl", {"kl_estimator_type": "k4"}, "kl_estimator_type must be one of .* got 'k4'"),
        ("areal", {"importance_sampling_level": "row"}, "importance_sampling_level must be one of .* got 'row'"),
        ("areal", {"m2_threshold": 0.1}, "m2_threshold must be None, got 0.1; .* sampling_correction"),
        ("areal", {"use_sapo_loss": True, "use_decoupled_loss": True}, "use_decoupled_loss must be False"),
        ("areal", {"rejection_sampling": {"metric": "kl_k1"}}, "metric must be 'ratio', .* got 'kl_k1' and 'mean'"),
        ("areal", {"rejection_sampling": {"level": "row"}}, "level must be one of token, sequence, got 'row'"),
        (
            "areal",
            {"rejection_sampling": {}, "importance_sampling_level": "sequence"},
            "importance_sampling_level must be token .* got 'sequence'",
        ),
        ("roll", {"pg_variant": "gspo"}, "pg_variant must be one of vanilla, .* got 'gspo'"),
        ("roll", {"loss_agg_mode": "seq-mean-token-sum-norm"}, "divides by the padded width"),
        ("roll", {"topr_positive_weight": 2.0}, "topr_positive_weight must be 1.0, got 2.0"),
        ("roll", {"cispo_use_unified_mask": True}, "cispo_use_unified_mask must be False, got True"),
        ("cosmos", {"variant": "ppo"}, "variant must be one of grpo, dapo, gspo, got 'ppo'"),
        ("cosmos", {"loss_type": "mean"}, "loss_type must be one of token-mean, .* got 'mean'"),
        ("swift", {"loss_type": "vespo"}, "loss_type must be one of grpo, .* got 'vespo'"),
        ("swift", {"importance_sampling_level": "row"}, "importance_sampling_level must be one of .* got 'row'"),
        ("swift", {"off_policy_sequence_mask_delta": 0.1}, "off_policy_sequence_mask_delta must be None, got 0.1"),
        (
            "swift",
            {"loss_type": "fipo", "importance_sampling_level": "sequence"},
            "importance_sampling_level must be token for loss_type 'fipo', got 'sequence'",
        ),
        ("art", {"importance_sampling_level": "mean"}, "importance_sampling_level must be one of .* got 'mean'"),
    ],
)
def test_refusals(name: str, fields: dict[str, Any], message: str | None) -> None:
    if message is None:  # a setting that the chosen loss does not read
        getattr(gk.LossConfig, name)(**fields)
        return
    with pytest.raises(ValueError, match=rf"LossConfig\.{name}: .*{message}"):
        getattr(gk.LossConfig, name)(**fields)
