"""Each row of the table "From another system" in docs/which_loss.md, against the formula of that system's source.

Faults it is there for: a mean over the wrong unit, a bound of the ratio for one of its distance to 1, a sampler's
log-prob in the place of an old one, a term that a system leaves out, a row of the page that no formula stands behind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.ops.policy_loss import peers
from tests.ops.policy_loss.cases import F64
from tests.ops.promises import Inputs

PAGE = Path(__file__).parents[3] / "docs" / "which_loss.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")
ROWS, WIDTH, GROUP = 24, 11, 4
NO_EMPTY_ROWS = "a row without tokens"


class Batch(NamedTuple):
    inputs: Inputs  # by the names of the page
    lp: Tensor
    old: Tensor
    sampled: Tensor
    ref: Tensor
    entropy: Tensor
    mask: Tensor
    advantage: Tensor  # one a row, as a column
    rewards: Tensor

    @property
    def ratio(self) -> Tensor:
        return (self.lp - self.old).exp()

    @property
    def bounded(self) -> Tensor:
        """The ratio within the bounds of SkyRL and cosmos-rl."""
        return (self.lp - self.old).clamp(-20, 20).exp()

    @property
    def of_sampler(self) -> Tensor:
        return (self.lp - self.sampled).exp()

    @property
    def weight(self) -> Tensor:
        return (self.old - self.sampled).exp()

    @property
    def row_ratio(self) -> Tensor:
        return self.mean_of_row(self.lp - self.old).exp()

    def row_ratio_of_tokens(self, most: float = math.inf) -> Tensor:
        """The ratio of the row with the gradient of the token's."""
        return (self.mean_of_row(self.lp - self.old).detach() + self.lp - self.lp.detach()).clamp(max=most).exp()

    def mean_of_row(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum(1, keepdim=True) / self.mask.sum(1, keepdim=True).clamp(min=1)

    def token_mean(self, terms: Tensor) -> Tensor:
        return (terms * self.mask).sum() / self.mask.sum()

    def row_mean(self, terms: Tensor) -> Tensor:
        return self.mean_of_row(terms).sum() / ROWS

    def active_mean(self, terms: Tensor) -> Tensor:
        """The mean over rows that have a token."""
        return self.mean_of_row(terms).sum() / self.mask.any(1).sum()

    def clip(self, ratio: Tensor, low: float = 0.2, high: float = 0.2, most: float = math.inf) -> Tensor:
        loss = -torch.minimum(ratio * self.advantage, ratio.clamp(1 - low, 1 + high) * self.advantage)
        return torch.where(self.advantage < 0, torch.minimum(loss, -self.advantage * most), loss)

    def sapo(self, ratio: Tensor, positive: float, negative: float) -> Tensor:
        tau = torch.where(self.advantage > 0, positive, torch.full_like(self.advantage, negative))
        return -self.advantage * (tau * (ratio - 1)).sigmoid() * 4 / tau

    def cispo(self, ratio: Tensor, low: float, high: float) -> Tensor:
        return -ratio.clamp(low, high).detach() * self.advantage * self.lp

    def k3(self) -> Tensor:
        d = self.ref - self.lp
        return (d.exp() - d - 1).clamp(max=10)


def draw(is_far: bool = False, has_empty_row: bool = True) -> Batch:
    """Ordinary tokens, or some of them beyond every bound of ratios and of the KL."""
    inputs = peers.make_batch(F64, repeats=4) | {"rewards": torch.randn(ROWS, dtype=F64), "groups": GROUP}
    names = ("logprobs", "old_logprobs", "sampling_logprobs", "ref_logprobs", "entropy", "mask")
    lp, old, sampled, ref, entropy, mask = (inputs[name] for name in names)
    mask[3] &= not has_empty_row
    if is_far:
        mask[:, :4] |= mask.any(1, keepdim=True)
        old[:, 0] = sampled[:, 0] = lp[:, 0] - 25
        lp[:, 1] = old[:, 1] - 25
        sampled[::2, 2] -= 2
        ref[:, 2], ref[:, 3] = lp[:, 2] + 3, lp[:, 3] - 12
        old[4:6] = lp[4:6] - 12  # of either sign of the advantage
    columns = (inputs[name][:, None] for name in ("advantages", "rewards"))
    return Batch(inputs, lp.requires_grad_(), old, sampled, ref, entropy.requires_grad_(), mask, *columns)


def covariance(b: Batch, advantages: Tensor) -> Tensor:
    def centred(values: Tensor) -> Tensor:
        return values - (values * b.mask).sum() / b.mask.sum()

    return centred(advantages.expand_as(b.lp)) * centred(b.lp.detach())


def clip_cov(b: Batch, low: float, high: float) -> Tensor:
    """SkyRL's, where every token within the bounds is drawn; its losses are sums of terms of divided advantages."""
    divided = b._replace(advantage=b.advantage / b.mask.sum())
    is_clipped = divided.clip(b.ratio) > -b.ratio * divided.advantage
    cov = covariance(b, divided.advantage)
    return (divided.clip(b.ratio) * (is_clipped | (cov <= low) | (cov >= high)) * b.mask).sum()


def kl_cov(b: Batch, share: float, coef: float) -> Tensor:
    advantage = b.advantage / b.mask.sum()
    cov = covariance(b, advantage).masked_fill(~b.mask, -math.inf).flatten()
    chosen = torch.zeros_like(b.mask).flatten()
    chosen[cov.topk(int(share * b.mask.sum())).indices] = True
    terms = -b.ratio * advantage + coef * chosen.view_as(b.mask) * (b.lp - b.old).abs()
    return (terms * b.mask).sum()


def dppo(b: Batch, distance: Tensor, low: float, high: float) -> Tensor:
    rises = b.lp > b.sampled
    far = ((b.advantage > 0) & rises & (distance > high)) | ((b.advantage < 0) & ~rises & (distance > low))
    return b.token_mean(-(b.lp - b.sampled).clamp(-20, 20).exp() * b.advantage * ~far)


def binary_kl(b: Batch) -> Tensor:
    p, q = b.lp.exp(), b.sampled.exp()
    return q * (b.sampled - b.lp) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()


def prompt_mean(b: Batch) -> Tensor:
    parts = [slice(first, first + GROUP) for first in range(0, ROWS, GROUP)]
    terms = b.clip(b.bounded)
    return torch.stack([(terms * b.mask)[rows].sum() / b.mask[rows].sum() for rows in parts]).mean()


def prime_rl(b: Batch, is_kept: Tensor, advantage: float = 1.0, kl: float = 0.0) -> Tensor:
    return b.token_mean(-advantage * b.advantage * b.of_sampler * is_kept + kl * (b.lp - b.sampled) ** 2)


def areal_rows(b: Batch) -> Tensor:
    return b._replace(advantage=b.mean_of_row(b.inputs["token_advantages"])).clip(b.row_ratio)


def areal_rows_without_rejected(b: Batch) -> Tensor:
    kept = b._replace(mask=b.mask & (b.weight >= 0.7) & (b.weight <= 1.3))
    return (areal_rows(kept) * b.weight * kept.mask).sum() / b.mask.sum()


def m2po(b: Batch, threshold: float) -> Tensor:
    """The mean over the tokens that are left when those of the largest squares are dropped."""
    squares = ((b.sampled - b.old) ** 2).masked_fill(~b.mask, math.inf).flatten()
    order = squares.argsort(descending=True).tolist()[int((~b.mask).sum()) :]
    while squares[order].mean() >= threshold:
        order = order[1:]
    return b.clip(b.ratio).flatten()[order].mean()


def cosmos_gspo(b: Batch) -> Tensor:
    d = (b.ref - b.lp).clamp(-20, 20)
    kl = (b.ratio * (d.exp() - d - 1)).clamp(-10, 10)
    return b.token_mean(b.clip(b.row_ratio.clamp(max=math.exp(10))) + 0.1 * kl)


def near(b: Batch, other: Tensor, delta: float) -> Tensor:
    """Rows whose mean log-prob has not fallen by more than delta, or whose advantage is not negative."""
    return (b.advantage >= 0) | (b.mean_of_row(other - b.lp.detach()) <= delta)


def swift_off_policy(b: Batch, tokens: int | None = None) -> Tensor:
    kept = b.mask & near(b, b.sampled, 0.1)
    return ((b.clip(b.ratio) + 0.04 * b.k3()) * kept).sum() / (tokens or kept.sum())


def high_entropy(b: Batch, share: float) -> Tensor:
    return b.entropy.detach() >= b.entropy.detach()[b.mask].quantile(1 - share)


def of_future(b: Batch, half_life: float, low: float, high: float, cap: float = math.inf) -> Tensor:
    """exp of the discounted sum of a token's and the later ones' log ratios, within bounds."""
    d = torch.where(b.mask & (b.ratio <= cap), b.lp - b.old, 0).detach()
    distance = torch.arange(WIDTH)[:, None] - torch.arange(WIDTH)
    return (d @ torch.where(distance >= 0, 0.5 ** (distance.double() / half_life), 0)).exp().clamp(low, high)


def safe_future(b: Batch) -> Tensor:
    weight = of_future(b, 32, 1.0, 1.2)
    return torch.where((b.ratio > 1.2) & (b.advantage < 0), weight.clamp(0.8, 1), weight)


def real(b: Batch, tau: float) -> Tensor:
    score, is_better = b.mean_of_row(b.lp - b.old).view(-1, GROUP) / tau, b.advantage.view(-1, GROUP) > 0
    worse = (1 + (score.exp() * ~is_better).sum(1)).log()
    better = (1 + ((-score).exp() * is_better).sum(1)).log()
    return torch.where(is_better.any(1) & ~is_better.all(1), worse + better, 0).mean()


# By words that a row begins with
FORMULAS: dict[str, Callable[[Batch], Tensor]] = {
    "SkyRL: regular": lambda b: b.token_mean(b.clip(b.bounded)) + 0.001 * b.row_mean(b.k3()),
    "SkyRL: regular without use_kl_loss": lambda b: b.row_mean(b.clip(b.bounded)) - 0.01 * b.token_mean(b.entropy),
    "SkyRL: loss_reduction: prompt_mean": prompt_mean,
    "SkyRL: dual_clip": lambda b: b.token_mean(b.clip(b.bounded, most=1.5)),
    "SkyRL: sapo": lambda b: b.row_mean(b.sapo(b.bounded, 1.0, 1.5)),
    "SkyRL: gspo": lambda b: (b.clip(b.row_ratio_of_tokens(10)) * b.mask).sum() / (ROWS * 50),
    "SkyRL: cispo": lambda b: b.token_mean(b.cispo(b.bounded, 0.9, 1.3)),
    "SkyRL: rollout_is": lambda b: b.token_mean(
        -torch.where((b.of_sampler - 1).abs() < 0.2, b.of_sampler, 0).detach() * b.advantage * b.lp
    ),
    "SkyRL: dppo, delta_low": lambda b: dppo(b, (b.lp.exp() - b.sampled.exp()).abs(), 0.05, 0.03),
    "SkyRL: dppo, dppo_type: binary_kl": lambda b: dppo(b, binary_kl(b), 0.05, 0.03),
    "SkyRL: clip_cov": lambda b: clip_cov(b, 0.0005, 0.005),
    "SkyRL: kl_cov": lambda b: kl_cov(b, 0.3, 1.0),
    "SkyRL: importance_sampling": lambda b: b.token_mean(-b.ratio * b.advantage),
    "SkyRL: importance_sampling by Tinker's API": lambda b: (-b.ratio * b.advantage * b.mask).sum(),
    "SkyRL: cross_entropy": lambda b: -(b.lp * b.mask).sum(),
    "SkyRL: tis_ratio_type: token": lambda b: b.token_mean(b.clip(b.bounded) * b.weight.clamp(max=1.2)),
    "SkyRL: tis_ratio_type: sequence": lambda b: b.token_mean(
        b.clip(b.bounded) * ((b.old - b.sampled) * b.mask).sum(1, keepdim=True).clamp(-20, 20).exp().clamp(max=5)
    ),
    "prime-rl: type: ipo, eps: 0.3": lambda b: prime_rl(b, (b.lp.exp() - b.sampled.exp()).abs() <= 0.3),
    "prime-rl: type: ipo, eps: 0.05": lambda b: prime_rl(b, (b.lp.exp() - b.sampled.exp()).abs() <= 0.05, 0.5, 0.1),
    "prime-rl: type: icepop": lambda b: prime_rl(b, (b.of_sampler >= 0.9) & (b.of_sampler <= 1.2)),
    "AReaL: eps_clip": lambda b: b.token_mean(b.clip(b.ratio)),
    "AReaL: eps_clip_higher": lambda b: b.token_mean(b.clip(b.ratio, high=0.3, most=1.4)),
    "AReaL: importance_sampling_level: sequence": lambda b: b.token_mean(areal_rows(b)),
    "AReaL: use_sapo_loss": lambda b: b.token_mean(b.sapo(b.ratio, 1.0, 1.2)),
    "AReaL: use_decoupled_loss, rejection_sampling: {upper: 1.3, lower: 0.7}": lambda b: b.token_mean(
        b.clip(b.ratio) * b.weight * (b.weight >= 0.7) * (b.weight <= 1.3)
    ),
    "AReaL: the same with importance_sampling_level: sequence": areal_rows_without_rejected,
    "AReaL: use_decoupled_loss, rejection_sampling: {level: sequence, action: clamp, upper: 1.05}": lambda b: (
        b.token_mean(b.clip(b.ratio) * b.mean_of_row(b.old - b.sampled).exp().clamp(max=1.05))
    ),
    "AReaL: m2_threshold": lambda b: m2po(b, 0.04),
    "ROLL: vanilla": lambda b: b.active_mean(-b.lp * b.advantage - 0.01 * b.entropy),
    "ROLL: loss_agg_mode: seq-mean-token-sum-norm": lambda b: (-b.lp * b.advantage * b.mask).sum() / WIDTH,
    "ROLL: ppo": lambda b: b.active_mean(b.clip(b.ratio, high=0.3, most=1.4)),
    "ROLL: tis": lambda b: b.active_mean(b.cispo(b.ratio, 0.3, 1.0) + 0.1 * b.k3()),
    "ROLL: topr": lambda b: b.active_mean(
        -torch.where(b.rewards > 0, 1, 0.5 * b.ratio.clamp(max=1)).detach() * b.advantage * b.lp
    ),
    "ROLL: cispo, loss_agg_mode": lambda b: b.token_mean(b.cispo(b.ratio, 0.9, 1.1)),
    "ROLL: cispo, cispo_use_unified_mask": lambda b: b.active_mean(
        b.cispo(b.ratio, 0.9, 1.1) * ~(((b.advantage > 0) & (b.ratio > 1.1)) | ((b.advantage < 0) & (b.ratio < 0.9)))
    ),
    "ROLL: kimi15": lambda b: b.active_mean(-b.advantage * b.lp + 0.05 * (b.lp - b.old) ** 2),
    "cosmos-rl: grpo": lambda b: b.token_mean(b.clip(b.bounded, most=1.5)),
    "cosmos-rl: gspo, epsilon_low": lambda b: b.row_mean(b.clip(b.row_ratio.clamp(max=math.exp(10)), low=1.0) * b.mask),
    "cosmos-rl: aipo_rho": lambda b: (-b.bounded.clamp(max=1.2) * b.advantage * b.mask).sum() / (ROWS * 30),
    "cosmos-rl: kl_beta": lambda b: b.token_mean(b.clip(b.bounded, most=3.0) + 0.1 * b.k3()),
    "cosmos-rl: gspo, kl_beta": cosmos_gspo,
    "cosmos-rl: the sampler's log-probs given": lambda b: b.token_mean(
        b.clip(b.bounded, most=3.0) * b.weight * (b.weight <= 1.3)
    ),
    "cosmos-rl: off_policy_masking_delta": lambda b: b.token_mean(b.clip(b.bounded, most=3.0) * near(b, b.old, 0.1)),
    "ART: cispo": lambda b: b.token_mean(b.cispo(b.ratio, 0, 5)),
    "ART: cispo, epsilon": lambda b: b.token_mean(b.cispo(b.ratio, 0.7, 1.3)),
    "ART: ppo, epsilon: 0.02": lambda b: b.token_mean(b.clip(b.row_ratio, 0.02, 0.02)),
    "ART: ppo, importance_sampling_level: average": lambda b: b.token_mean(b.clip((b.ratio + b.row_ratio) / 2)),
    "ART: cispo, importance_sampling_level: geometric_average": lambda b: b.token_mean(
        b.cispo(b.ratio.sqrt() * b.row_ratio.sqrt(), 0, 5)
    ),
    "ART: ppo, truncated_importance_sampling: 1.3, with original_logprobs": lambda b: b.token_mean(
        b.clip(b.ratio) * b.weight.clamp(max=1.3)
    ),
    "ART: ppo, truncated_importance_sampling: 1.3, without": lambda b: b.token_mean(
        b.clip(b.ratio) * b.ratio.clamp(max=1.3).detach()
    ),
    "ms-swift: grpo": lambda b: b.row_mean(b.clip(b.ratio.clamp(max=1.5), high=0.3) + 0.04 * b.k3()),
    "ms-swift: bnpo with beta": lambda b: b.token_mean(b.clip(b.ratio)),
    "ms-swift: dapo, beta: 0.0, importance_sampling_level: sequence_token": lambda b: b.token_mean(
        b.clip(b.row_ratio_of_tokens())
    ),
    "ms-swift: dr_grpo": lambda b: (b.clip(b.ratio) * b.mask).sum() / (ROWS * 30),
    "ms-swift: cispo": lambda b: b.token_mean(b.cispo(b.ratio, 0, 1.3)),
    "ms-swift: sapo": lambda b: b.row_mean(b.sapo(b.ratio, 2.0, 1.0)),
    "ms-swift: real": lambda b: real(b, 0.3) + 0.04 * b.token_mean(b.k3()),
    "ms-swift: fipo, beta": lambda b: b.token_mean(b.clip(b.ratio) * safe_future(b).detach()),
    "ms-swift: fipo, delta": lambda b: b.token_mean(
        b.clip(b.ratio.clamp(max=1.5)) * of_future(b, 3.0, 0.6, 1.4, cap=1.5) + 0.04 * b.k3()
    ),
    "ms-swift: dapo, top_entropy_quantile": lambda b: b.token_mean(
        b.clip(b.ratio) * high_entropy(b, 0.3) + 0.04 * b.k3()
    ),
    "ms-swift: bnpo, off_policy_sequence_mask_delta": swift_off_policy,
    "ms-swift: dapo, off_policy_sequence_mask_delta": lambda b: swift_off_policy(b, int(b.mask.sum())),
}


def rows_of_page() -> dict[str, tuple[str, list[str]]]:
    """The config and the further arguments and terms, by the first column."""
    section = PAGE.read_text().split("## From another system\n")[1].split("\n## ")[0] if PAGE.exists() else ""
    result = {}
    for line in re.findall(r"^\| (.* \|)$", section, re.MULTILINE)[1:]:
        name, config, more = line.removesuffix("|").split("|")
        (setting,) = re.findall(r"`([^`]+)`", config)
        result[name.replace("`", "").strip()] = setting, re.findall(r"`([^`]+)`", more)
    return result


TABLE = rows_of_page()


def formula_of(row: str) -> str:
    """The longest name of a formula that the row begins with."""
    return max((name for name in FORMULAS if re.match(re.escape(name) + r"(?!\w)", row)), key=len, default="")


def evaluate(row: str, b: Batch) -> Tensor:
    """The loss of a row of the page."""
    setting, spans = TABLE[row]
    names = {"gk": gk, "torch": torch, "math": math, "ratio": b.ratio.detach(), **b.inputs}
    arguments = {name: names[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")}
    total = torch.zeros((), dtype=F64)
    for span in spans:
        assigned = re.fullmatch(r"(\w+)( = |=)(.*)", span)
        if span.startswith("+ "):
            total = total + eval(span[2:], names)
        else:
            assert assigned is not None, span
            (names if assigned[2] == " = " else arguments)[assigned[1]] = eval(assigned[3], names)
    return total + gk.policy_loss(**arguments, config=eval(setting, names)).loss


def test_every_row_has_a_formula_and_every_formula_a_row() -> None:
    assert len(TABLE) > 50
    assert sorted(map(formula_of, TABLE)) == sorted(FORMULAS)


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("row", TABLE)
def test_row_is_the_systems_loss(row: str, is_far: bool) -> None:
    b = draw(is_far, has_empty_row=NO_EMPTY_ROWS not in row)
    want, got = FORMULAS[formula_of(row)](b), evaluate(row, b)
    gradients = [torch.autograd.grad(loss, (b.lp, b.entropy), materialize_grads=True) for loss in (want, got)]
    assert gradients[0][0].any()
    # some twenty roundings of terms below 100, in float64
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-12, atol=1e-13)


def test_rloo_of_trl() -> None:
    """A ratio of the row, and a mean over all rows, also over those without a token."""
    batch = draw()
    ratio = ((batch.lp - batch.old) * batch.mask).sum(1, keepdim=True).exp()
    want = (batch.clip(ratio) * batch.mask.any(1, keepdim=True)).mean()
    segments = torch.zeros(batch.mask.shape, dtype=torch.int32)
    config, normalizer = gk.LossConfig(ratio="segment"), {"segments": len(batch.mask)}
    arguments = batch.lp, batch.old, batch.advantage[:, 0]
    got = gk.policy_loss(*arguments, mask=batch.mask, segments=segments, normalizer=normalizer, config=config).loss
    gradients = [torch.autograd.grad(loss, batch.lp)[0] for loss in (got, want)]
    torch.testing.assert_close((got, gradients[0]), (want, gradients[1]), rtol=1e-12, atol=1e-14)
    assert not batch.mask.any(1).all()
