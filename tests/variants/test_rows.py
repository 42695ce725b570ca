"""GVPO, REAL and FlowRL against their published formulas written out, group by group and row by row.

Faults they are there for: a row without tokens that votes, a mean over the wrong units, a weight with a gradient,
an exponential that overflows, a group that depends on its order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import variants
from tests.harness import assert_close_to_rounding

F64 = torch.float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, WIDTH = 9, 14
GROUPS = torch.tensor([7, -2, 7, 40, -2, 7, 40, 7, 5])  # of four, two, two and one rows, in no order
Batch = dict[str, Tensor]
Formula = Callable[[Tensor, Batch], Tensor]


def draw(seed: int = 0) -> Batch:
    """Log-probs, one advantage a row, and a mask with holes and an empty row, whose advantage is NaN."""
    random = torch.Generator().manual_seed(seed)
    old = -0.1 - torch.rand(ROWS, WIDTH, generator=random, dtype=F64)
    noise = lambda: 0.3 * torch.randn(ROWS, WIDTH, generator=random, dtype=F64)  # noqa: E731
    mask = torch.rand(ROWS, WIDTH, generator=random) < 0.7
    mask[2] = False
    advantages = torch.randn(ROWS, generator=random, dtype=F64)
    advantages[2] = math.nan
    return {
        "logprobs": old + noise(),
        "old_logprobs": old,
        "ref_logprobs": old + noise(),
        "advantages": advantages,
        "mask": mask,
        "log_z": torch.randn(ROWS, generator=random, dtype=F64),
        "is_weights": 0.5 + torch.rand(ROWS, generator=random, dtype=F64),
        "groups": GROUPS,
    }


def active_groups(batch: Batch) -> list[list[int]]:
    """The rows with tokens of every group that has one."""
    has_tokens = batch["mask"].any(1)
    rows = [[i for i in range(ROWS) if GROUPS[i] == g and has_tokens[i]] for g in GROUPS.unique()]
    return [group for group in rows if group]


def gvpo(lp: Tensor, batch: Batch, base: str = "old_logprobs", beta: float = 0.1) -> Tensor:
    """The mean over prompts of the published code's 0.5 * sum((beta s - its mean) - (R - its mean))^2 / (k - 1)."""
    total = lp.new_zeros(())
    groups = active_groups(batch)
    for rows in groups:
        mask = batch["mask"][rows]
        score = beta * torch.where(mask, lp[rows] - batch[base][rows], 0).sum(1)
        reward = batch["advantages"][rows]
        excess = (score - score.detach().mean()) - (reward - reward.mean())
        total = total + 0.5 * excess.square().sum() / max(len(rows) - 1, 1)
    return total / len(groups)


def real(lp: Tensor, batch: Batch, tau: float = 0.5) -> Tensor:
    """ms-swift's form of arXiv 2602.05630."""
    total = lp.new_zeros(())
    groups = active_groups(batch)
    for rows in groups:
        mask, is_better = batch["mask"][rows], batch["advantages"][rows] > 0
        score = torch.where(mask, lp[rows] - batch["old_logprobs"][rows], 0).sum(1) / mask.sum(1) / tau
        if is_better.any() and not is_better.all():
            total = (
                total + torch.log(1 + score[~is_better].exp().sum()) + torch.log(1 + (-score[is_better]).exp().sum())
            )
    return total / len(groups)


def flowrl(lp: Tensor, batch: Batch, clip: str = "product", cap: float = math.inf, beta: float = 15) -> Tensor:
    """The forms of verl's recipe: a clipped product or geometric mean of ratios, or a clipped mean log-prob."""
    rows = batch["mask"].any(1).nonzero()[:, 0]
    mask = batch["mask"][rows]
    mean = lambda values: torch.where(mask, values[rows], 0).sum(1) / mask.sum(1)  # noqa: E731
    now, old, ref = mean(lp), mean(batch["old_logprobs"]), mean(batch["ref_logprobs"])
    log_ratio = (now - old) * (1 if clip == "geometric" else mask.sum(1))
    weight = log_ratio.exp().detach()
    if clip == "logprob":
        now = torch.minimum(torch.maximum(now, old + math.log(0.9)), old + math.log(1.2))
    else:
        weight = weight.clamp(0.9, 1.2)
    weight = weight.clamp(max=cap) * batch["is_weights"][rows]
    residual = batch["log_z"][rows] + now - beta * batch["advantages"][rows] - ref
    return (weight * residual.square()).mean()


BOUNDS = {"clip_low": 0.1, "clip_high": 0.2}
OF_GROUPS = ("old_logprobs", "advantages", "groups")
OF_FLOWS = ("old_logprobs", "ref_logprobs", "advantages", "log_z")
# the function, its inputs after logprobs, its settings, and the published formula
CASES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], dict[str, Any], Formula]] = {
    "gvpo": (variants.gvpo_loss, OF_GROUPS, {}, gvpo),
    "gvpo of a reference": (
        variants.gvpo_loss,
        ("ref_logprobs", *OF_GROUPS[1:]),
        {"beta": 0.4},
        lambda lp, batch: gvpo(lp, batch, "ref_logprobs", 0.4),
    ),
    "real": (variants.real_loss, OF_GROUPS, {}, real),
    "real at 0.05": (variants.real_loss, OF_GROUPS, {"tau": 0.05}, lambda lp, batch: real(lp, batch, 0.05)),
    "flowrl": (variants.flowrl_loss, OF_FLOWS, BOUNDS, flowrl),
    "flowrl of geometric means": (
        variants.flowrl_loss,
        OF_FLOWS,
        BOUNDS | {"clip": "geometric"},
        lambda lp, batch: flowrl(lp, batch, "geometric"),
    ),
    "flowrl of clipped log-probs": (
        variants.flowrl_loss,
        OF_FLOWS,
        BOUNDS | {"clip": "logprob", "ratio_cap": 1.3, "beta": 4.0},
        lambda lp, batch: flowrl(lp, batch, "logprob", 1.3, 4.0),
    ),
}


def call(name: str, batch: Batch, lp: Tensor, **more: Any) -> Tensor:
    function, inputs, settings, _ = CASES[name]
    if name.startswith("flowrl"):
        more = {"is_weights": batch["is_weights"]} | more
    return function(lp, *(batch[key] for key in inputs), mask=batch["mask"], **settings, **more)


def graded(name: str, batch: Batch, **more: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss, and its gradients by log-probs and log_z."""
    batch = {key: value.detach().to(DEVICE) for key, value in batch.items()}
    leaf, batch["log_z"] = batch["logprobs"].requires_grad_(), batch["log_z"].requires_grad_()
    loss = call(name, batch, leaf, **more)
    gradient, by_log_z = torch.autograd.grad(loss, (leaf, batch["log_z"]), allow_unused=True)
    return loss.detach().cpu(), gradient.cpu(), None if by_log_z is None else by_log_z.cpu()


@pytest.mark.parametrize("name", CASES)
def test_published_formula(name: str) -> None:
    batch = draw()
    leaves = {key: batch[key].clone().requires_grad_() for key in ("logprobs", "log_z")}
    want = CASES[name][3](leaves["logprobs"], batch | {"log_z": leaves["log_z"]})
    wanted = torch.autograd.grad(want, list(leaves.values()), allow_unused=True)
    loss, gradient, by_log_z = graded(name, batch)
    # rounding of sums of a few hundred terms of up to 15^2
    torch.testing.assert_close(loss, want.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(gradient, wanted[0], rtol=1e-11, atol=1e-14)
    assert gradient.any()
    if wanted[1] is not None:
        torch.testing.assert_close(by_log_z, wanted[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_close_to_float64(name: str) -> None:
    """Row sums are in float64, so that the result has the rounding of its inputs alone."""
    batch = {key: value.float().double() if value.is_floating_point() else value for key, value in draw(1).items()}
    gold = graded(name, batch)
    got = graded(name, {k: v.float() if v.is_floating_point() else v for k, v in batch.items()})
    assert got[0].dtype == got[1].dtype == torch.float32
    assert_close_to_rounding(got, gold, lambda: graded(name, batch), F64)


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_of_whole_groups_add_up(name: str) -> None:
    batch = draw()
    whole, gradient, _ = graded(name, batch)
    count = int(batch["mask"].any(1).sum()) if name.startswith("flowrl") else len(active_groups(batch))
    first = (GROUPS == 7) | (GROUPS == 40)
    loss, parts = 0.0, torch.zeros_like(gradient)
    for part, known in ((first, float(count)), (~first, torch.tensor(count, device=DEVICE))):
        own, parts[part], _ = graded(name, {key: value[part] for key, value in batch.items()}, count=known)
        loss += float(own)
    assert loss == pytest.approx(float(whole), rel=1e-12)
    torch.testing.assert_close(parts, gradient, rtol=1e-11, atol=1e-15)


def test_groups_of_one_size_and_by_id() -> None:
    batch = draw()
    del batch["log_z"]
    lp, old, advantages, mask = (batch[key].to(DEVICE) for key in ("logprobs", "old_logprobs", "advantages", "mask"))
    by_size = variants.gvpo_loss(lp, old, advantages, 3, mask=mask)
    by_id = variants.gvpo_loss(lp, old, advantages, torch.arange(ROWS, device=DEVICE) // 3, mask=mask)
    assert torch.equal(by_size, by_id)


@pytest.mark.parametrize("name", ["gvpo", "real", "flowrl"])
def test_on_policy(name: str) -> None:
    batch = draw()
    own, gradient, _ = graded(name, batch | {"old_logprobs": batch["logprobs"]})
    moved = {key: value.to(DEVICE) for key, value in batch.items()}
    leaf = moved["logprobs"].requires_grad_()
    loss = call(name, moved | {"old_logprobs": None}, leaf)  # type: ignore[dict-item]
    (without_old,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(own, loss.detach().cpu()) and torch.equal(gradient, without_old.cpu()) and gradient.any()


def test_real_does_not_overflow() -> None:
    lp = torch.zeros(4, 3, device=DEVICE, requires_grad=True)
    old = torch.tensor([[-800.0], [800.0], [0.0], [1e30]], device=DEVICE).expand(4, 3)
    loss = variants.real_loss(lp, old, torch.tensor([-1.0, 1.0, 1.0, -1.0], device=DEVICE), 2)
    (gradient,) = torch.autograd.grad(loss, lp)
    assert float(loss.detach()) == pytest.approx((1600 + 1600 + math.log(2)) / 2) and gradient.isfinite().all()
    assert torch.allclose(gradient[:2].cpu(), torch.tensor([[1.0], [-1.0]]).expand(2, 3) / 3)
