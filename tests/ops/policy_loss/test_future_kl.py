"""FIPO's weights of tokens: against the formula of arXiv 2603.19835 in ms-swift's form, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import INDUCTOR, assert_within_budget, device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
ROWS, WIDTH = 6, 40
CONFIGS = {
    "published": {"future_kl_half_life": 32.0},
    "both sides": {"future_kl_half_life": 4.0, "future_kl_clip": (0.8, 1.2), "future_kl_safety": 1.05},
    "capped": {"future_kl_half_life": 8.0, "future_kl_cap": 1.1, "delta": 1.15, "future_kl_safety": 1.05},
    "unbounded": {"future_kl_half_life": 0.5, "future_kl_clip": None, "future_kl_safety": None},
}


def draw(seed: int = 0) -> dict[str, Tensor]:
    """Log-probs, one advantage a row, and a mask with holes and an empty row."""
    random = torch.Generator().manual_seed(seed)
    old = -0.1 - torch.rand(ROWS, WIDTH, generator=random, dtype=F64)
    mask = torch.rand(ROWS, WIDTH, generator=random) < 0.8
    mask[3] = False
    return {
        "logprobs": old + 0.08 * torch.randn(ROWS, WIDTH, generator=random, dtype=F64),
        "old_logprobs": old,
        "advantages": torch.randn(ROWS, generator=random, dtype=F64),
        "mask": mask,
    }


def weights_of(batch: dict[str, Tensor], config: gk.LossConfig) -> Tensor:
    assert config.future_kl_half_life is not None
    weights = torch.ones(ROWS, WIDTH, dtype=F64)
    for i in range(ROWS):
        for t in range(WIDTH):
            total = 0.0
            for k in range(t, WIDTH):
                moved = float(batch["logprobs"][i, k] - batch["old_logprobs"][i, k])
                is_left_out = config.future_kl_cap is not None and math.exp(moved) > config.future_kl_cap
                if batch["mask"][i, k] and not is_left_out:
                    total += 0.5 ** ((k - t) / config.future_kl_half_life) * moved
            weight = math.exp(total)
            if config.future_kl_clip is not None:
                weight = min(max(weight, config.future_kl_clip[0]), config.future_kl_clip[1])
            ratio = math.exp(float(batch["logprobs"][i, t] - batch["old_logprobs"][i, t]))
            is_risky = config.future_kl_safety is not None and ratio > config.future_kl_safety
            if is_risky and batch["advantages"][i] < 0:
                weight = min(max(weight, 0.8), 1.0)
            weights[i, t] = weight
    return weights


def run(
    backend: str, batch: dict[str, Any], config: gk.LossConfig, dtype: torch.dtype = F64
) -> tuple[gk.PolicyLoss, Tensor]:
    device = device_of(backend)
    moved = {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in batch.items()
    }
    leaf = moved.pop("logprobs").detach().requires_grad_()
    result = gk.policy_loss(leaf, **moved, config=config, backend=backend)
    return result, torch.autograd.grad(result.loss, leaf)[0].cpu()


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_published_formula(backend: str, name: str, layout: str) -> None:
    batch, config = draw(), gk.LossConfig(**CONFIGS[name])
    weights, mask = weights_of(batch, config), batch["mask"]
    leaf = batch["logprobs"].clone().requires_grad_()
    ratio, advantages = (leaf - batch["old_logprobs"]).exp(), batch["advantages"][:, None]
    terms = -torch.minimum(ratio.clamp(max=config.delta or math.inf) * advantages, ratio.clamp(0.8, 1.2) * advantages)
    want = (weights * terms)[mask].sum() / mask.sum()
    (wanted,) = torch.autograd.grad(want, leaf)
    arguments = dict(batch)
    for key in ("logprobs", "old_logprobs"):  # what masked slots hold has no effect
        arguments[key] = torch.where(mask, batch[key], math.nan)
    if layout == "packed":
        flat = lambda value: torch.cat([value.reshape(-1), torch.full((2,), math.nan).to(value)])  # noqa: E731
        arguments = {key: flat(value) if value.dim() == 2 else value for key, value in arguments.items()}
        arguments["cu_seqlens"] = torch.arange(ROWS + 1) * WIDTH
    result, gradient = run(backend, arguments, config)
    # log ratios of up to 2, summed over 40 tokens
    torch.testing.assert_close(result.loss.cpu(), want.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(gradient[: ROWS * WIDTH].reshape(ROWS, -1), wanted, rtol=1e-12, atol=1e-15)
    assert not gradient[ROWS * WIDTH :].any()
    m = result.metrics.to_dict()
    assert m["is_sum"] / m["is_count"] == pytest.approx(float(weights[mask].mean()))
    assert m["is_max"] == pytest.approx(float(weights[mask].max()))
    assert len(weights[mask].unique()) > 9  # not clipped everywhere


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_float32_loses_no_more_than_torch_does(backend: str, name: str) -> None:
    batch = {key: value.float().double() if value.is_floating_point() else value for key, value in draw(1).items()}
    config = gk.LossConfig(**CONFIGS[name])
    gold, working = (run("reference", batch, config, dtype) for dtype in (F64, torch.float32))
    got = run(backend, batch, config, torch.float32)
    assert_within_budget(got[1], working[1], gold[1], "gradient")
    assert_within_budget(got[0].loss, working[0].loss, gold[0].loss, "loss")


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, WIDTH)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_importance_weights_are_multiplied(backend: str, shape: tuple[int, ...]) -> None:
    batch, config = draw(), gk.LossConfig(**CONFIGS["both sides"])
    given = torch.rand(shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    weights = weights_of(batch, config) * given.reshape(ROWS, -1)
    got, gradient = run(backend, batch | {"is_weights": given}, config)
    want, wanted = run(backend, batch | {"is_weights": weights}, gk.LossConfig())
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_tokens_with_a_policy_term_are_summed(backend: str) -> None:
    """Advantages of tokens, kinds, and a KL, which has no such weight."""
    batch, config = draw(), gk.LossConfig(**CONFIGS["both sides"], kl="k3", kl_coef=0.3)
    random = torch.Generator().manual_seed(4)
    kinds = (torch.rand(ROWS, WIDTH, generator=random) < 0.3).to(torch.int8) * 3
    more = {
        "kinds": kinds,
        "ref_logprobs": batch["old_logprobs"] + 0.1,
        "advantages": batch["advantages"][:, None].expand(ROWS, WIDTH).contiguous(),
    }
    weights = weights_of(batch | {"mask": batch["mask"] & (kinds == 0)}, config)
    got, gradient = run(backend, batch | more, config)
    plain = gk.LossConfig(kl="k3", kl_coef=0.3)
    want, wanted = run(backend, batch | more | {"is_weights": weights}, plain)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_policy_and_nothing_at_all(backend: str) -> None:
    """On the policy nothing has moved, and every weight is 1."""
    batch, config = draw(), gk.LossConfig(**CONFIGS["both sides"])
    old = {"old_logprobs": batch["logprobs"]}
    got, gradient = run(backend, batch | old, config)
    want, wanted = run(backend, batch | old, gk.LossConfig())
    assert torch.equal(got.loss, want.loss) and torch.equal(gradient, wanted)
    for rows, width in ((ROWS, WIDTH), (0, WIDTH), (ROWS, 0)):
        nothing = {key: value[:rows, :width] if value.dim() == 2 else value[:rows] for key, value in batch.items()}
        nothing["mask"] = torch.zeros(rows, width, dtype=torch.bool)
        result, gradient = run(backend, nothing, config)
        assert float(result.loss.detach()) == 0 and not gradient.any()


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None) -> None:
    batch = {key: value.to(device_of(backend or "cpu")) for key, value in draw().items()}
    config = gk.LossConfig(**CONFIGS["capped"])

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return gk.policy_loss(**batch, config=config, backend=backend).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR)
    torch.testing.assert_close(compiled(batch), loss(batch), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float32))
def test_from_logits_and_hidden_states(backend: str) -> None:
    device, config = device_of(backend), gk.LossConfig(**CONFIGS["both sides"])
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 10, 8, device=device), torch.randn(13, 8, device=device)
    targets, advantages = torch.randint(13, (4, 10), device=device), torch.randn(4, device=device)
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    old = logprobs + 0.3 * torch.randn_like(logprobs)
    results = []
    for source in ("logprobs", "hidden"):
        leaf = hidden.clone().requires_grad_()
        if source == "logprobs":
            logprobs = (leaf @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            loss = gk.policy_loss(logprobs, old, advantages, config=config, backend=backend).loss
        else:
            loss = gk.linear_policy_loss(
                leaf, weight, targets, old, advantages, chunk_size=16, config=config, backend=backend
            ).loss
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert results[0][1].any()
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
