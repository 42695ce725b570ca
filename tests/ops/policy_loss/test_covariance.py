"""Clip-Cov and KL-Cov: which tokens are chosen, and that the choice depends on these tokens alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.arguments import Layout, check_policy
from grpo_kernels.ops.policy_loss.config import COUNTED, CROSS_ENTROPY, POLICY, SELECTED
from grpo_kernels.ops.policy_loss.covariance import select_tokens
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import INDUCTOR, device_of, needs_cpu_kernels, runnable_backends
from tests.ops.policy_loss.test_spec import assert_near, graded

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
SHAPE = (4, 60)
CONFIGS = {
    "clip_cov": gk.LossConfig(loss="clip_cov", cov_ratio=0.05, cov_bounds=(-0.1, 0.4)),
    "kl_cov": gk.LossConfig(loss="kl_cov", cov_ratio=0.05, cov_kl_coef=0.5),
}


def draw(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(SHAPE, generator=random, dtype=F64)
    return {
        "logprobs": old + 0.3 * torch.randn(SHAPE, generator=random, dtype=F64),
        "old_logprobs": old,
        "advantages": torch.randn(SHAPE, generator=random, dtype=F64),
        "mask": torch.rand(SHAPE, generator=random) < 0.8,
    }


def run(backend: str, batch: dict[str, Tensor], **options: Any) -> tuple[Any, Tensor]:
    batch = batch | options
    return graded(backend, batch.pop("logprobs"), batch.pop("old_logprobs"), batch.pop("advantages"), **batch)


def covariance(batch: dict[str, Tensor]) -> Tensor:
    mask = batch["mask"]
    factors = [batch[name] - batch[name][mask].mean() for name in ("advantages", "logprobs")]
    return factors[0] * factors[1]


def dropped(batch: dict[str, Tensor], gradient: Tensor) -> Tensor:
    """Tokens without a gradient that PPO has not clipped either."""
    ratio, advantages = (batch["logprobs"] - batch["old_logprobs"]).exp(), batch["advantages"]
    is_clipped = -advantages * ratio.clamp(0.8, 1.2) > -advantages * ratio
    return batch["mask"] & ~is_clipped & (gradient == 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kl_cov_takes_the_highest_covariances(backend: str) -> None:
    batch, config = draw(), CONFIGS["kl_cov"]
    mask = batch["mask"]
    count = int(mask.sum() * config.cov_ratio)
    assert count > 1
    least = covariance(batch)[mask].topk(count).values[-1]
    chosen = mask & (covariance(batch) >= least)
    d = batch["logprobs"] - batch["old_logprobs"]
    terms = -batch["advantages"] * d.exp() + torch.where(chosen, 0.5 * d.abs(), 0)
    slopes = -batch["advantages"] * d.exp() + torch.where(chosen, 0.5 * d.sign(), 0)
    result, gradient = run(backend, batch, config=config)
    assert_near(result.loss, terms[mask].mean())
    assert_near(gradient, torch.where(mask, slopes / mask.sum(), 0))
    assert result.metrics.verl()["actor/ppo_kl"] == pytest.approx(float(d[mask].abs().mean()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_clip_cov_drops_tokens_within_the_bounds(backend: str) -> None:
    batch, config = draw(), CONFIGS["clip_cov"]
    low, high = config.cov_bounds
    cov = covariance(batch)
    eligible = dropped(batch, torch.zeros(SHAPE)) & (cov > low) & (cov < high)
    result, gradient = run(backend, batch, config=config)
    chosen = dropped(batch, gradient)
    count = int(batch["mask"].sum() * config.cov_ratio)
    assert 1 < count < eligible.sum() and chosen.sum() == count and not (chosen & ~eligible).any()
    assert result.metrics["clipped"] == count
    _, expected = run(backend, batch, config=gk.LossConfig())
    assert_near(gradient, torch.where(chosen, 0, expected))
    others, _ = run(backend, draw(1), config=config)
    assert others.metrics["clipped"] == int(draw(1)["mask"].sum() * config.cov_ratio)
    every, gradient = run(backend, batch, config=gk.LossConfig(loss="clip_cov", cov_ratio=1.0, cov_bounds=(low, high)))
    assert torch.equal(dropped(batch, gradient), eligible) and every.metrics["clipped"] == eligible.sum()


def test_clip_cov_drops_every_token_with_the_same_probability() -> None:
    """Over many batches, the number of times that a place is chosen is binomial: within five standard deviations."""
    tries, width = 400, 50
    config = gk.LossConfig(loss="clip_cov", cov_ratio=0.2, cov_bounds=(-9.0, 9.0))
    counts = torch.zeros(width)
    random = torch.Generator().manual_seed(0)
    for _ in range(tries):
        logprobs = (-torch.rand(1, width, generator=random)).requires_grad_()
        loss = gk.policy_loss(logprobs, None, torch.ones(1), config=config).loss
        counts += torch.autograd.grad(loss, logprobs)[0][0] == 0
    assert counts.sum() == 10 * tries
    deviation = (tries * 0.2 * 0.8) ** 0.5
    assert (counts - 0.2 * tries).abs().max() < 5 * deviation


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_choice_depends_on_the_tokens_alone(backend: str, name: str) -> None:
    """Not on the state of a generator, on padding or packing, nor on what masked slots hold."""
    batch, config = draw(), CONFIGS[name]
    mask = batch["mask"]
    want, expected = run(backend, batch, config=config)
    torch.manual_seed(7)
    again, gradient = run(backend, batch, config=config)
    assert torch.equal(again.loss, want.loss) and torch.equal(gradient, expected)
    for value in (float("nan"), float("inf")):
        planted = {key: torch.where(mask, batch[key], value) for key in ("logprobs", "old_logprobs", "advantages")}
        got, gradient = run(backend, batch | planted, config=config)
        assert torch.equal(got.loss, want.loss) and torch.equal(gradient, expected)
    lengths = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)])
    packed = {key: torch.cat([value[mask], value[:1, 0]]) for key, value in batch.items() if key != "mask"}
    got, gradient = run(backend, packed, cu_seqlens=lengths, config=config)
    assert_near(got.loss, want.loss)
    assert_near(gradient[:-1], expected[mask])


@needs_cpu_kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernel_chooses_as_a_sort_does(name: str) -> None:
    """Over more tokens than the kernel keeps at once, of which many have equal log-probs."""
    random = torch.Generator().manual_seed(0)
    for share in (0.0002, 0.01, 1.0):
        logprobs = -torch.randint(1, 40, (3, 3001), generator=random) / 16
        old = logprobs + 0.1 * torch.randn(3, 3001, generator=random)
        advantages = torch.randint(-3, 4, (3, 3001), generator=random).float()
        mask = torch.rand(3, 3001, generator=random) < 0.9
        config = dataclasses.replace(CONFIGS[name], cov_ratio=share)
        layout = Layout.of("policy_loss", logprobs, None)
        inputs = dict.fromkeys(("cu_seqlens", "segments", "kinds", "ref_logprobs", "sampling_logprobs", "is_weights"))
        inputs |= {"old_logprobs": old, "advantages": advantages, "mask": mask, "weights": None, "normalizer": None}
        policy = check_policy(layout, config, **inputs)
        want, got = (select_tokens(logprobs, policy, config, backend).kinds for backend in ("reference", "cpu"))
        assert want is not None and got is not None and (want == SELECTED).any() and torch.equal(got, want)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_advantages_of_rows(backend: str, name: str) -> None:
    batch, config = draw(), CONFIGS[name]
    batch["advantages"] = batch["advantages"][:, 0]
    got, gradient = run(backend, batch, config=config)
    wide = batch | {"advantages": batch["advantages"][:, None].expand(SHAPE).contiguous()}
    want, expected = run(backend, wide, config=config)
    assert_near(got.loss, want.loss)
    assert_near(gradient, expected)
    lengths = torch.arange(5) * SHAPE[1]
    flat = {key: value.reshape(-1) for key, value in batch.items()}
    packed, gradient = run(backend, flat, cu_seqlens=lengths, config=config)
    assert_near(packed.loss, want.loss)
    assert_near(gradient, expected.reshape(-1))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_other_kinds_are_not_chosen(backend: str, name: str) -> None:
    batch, config = draw(), CONFIGS[name]
    kinds = torch.tensor([POLICY, CROSS_ENTROPY, POLICY, COUNTED]).repeat(15).expand(SHAPE)
    mixed, gradient = run(backend, batch, kinds=kinds, config=config)
    alone, expected = run(backend, batch | {"mask": batch["mask"] & (kinds == POLICY)}, config=config)
    factor = alone.metrics["tokens"] / mixed.metrics["tokens"]
    assert_near(mixed.metrics["policy_loss"], alone.metrics["policy_loss"] * factor)
    assert_near(torch.where(kinds == POLICY, gradient, 0), expected * factor.cpu())
    assert mixed.metrics["clipped"] == alone.metrics["clipped"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_at_least_one_token_and_none_of_none(backend: str, name: str) -> None:
    fields = {"cov_ratio": 1e-6} | ({"cov_bounds": (-9.0, 9.0)} if name == "clip_cov" else {})
    config, batch = gk.LossConfig(loss=name, **fields), draw()
    _, gradient = run(backend, batch, config=config)
    unchosen = gk.LossConfig() if name == "clip_cov" else gk.LossConfig(clip_low=None, clip_high=None)
    _, plain = run(backend, batch, config=unchosen)
    assert ((gradient - plain).abs() > 1e-12).sum() == 1
    for shape in ((3, 4), (0, 4), (3, 0)):
        nothing = torch.zeros(shape, dtype=F64)
        result, gradient = run(
            backend,
            {"logprobs": nothing, "old_logprobs": nothing, "advantages": nothing},
            mask=torch.zeros(shape, dtype=torch.bool),
            config=config,
        )
        assert float(result.loss) == 0 and not gradient.any()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: str, name: str) -> None:
    batch = {key: value.to(device_of(backend)) for key, value in draw().items()}
    logprobs = batch.pop("logprobs").detach().requires_grad_()
    # of all tokens within the bounds, as the random choice changes with every bit of a log-prob
    config = dataclasses.replace(CONFIGS[name], cov_ratio=1.0 if name == "clip_cov" else 0.05)
    run = lambda lp: gk.policy_loss(lp, **batch, config=config, backend=backend).loss  # noqa: E731
    assert torch.autograd.gradcheck(run, (logprobs,), eps=1e-7, atol=1e-7, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None, name: str) -> None:
    batch = {key: value.to(device_of(backend or "cpu")) for key, value in draw().items()}
    names = ("logprobs", "old_logprobs", "advantages")

    def loss(lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return gk.policy_loss(lp, old, advantages, mask=mask, config=CONFIGS[name], backend=backend).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR)
    arguments = [*(batch[key] for key in names), batch["mask"]]
    assert_near(compiled(*arguments), loss(*arguments))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float32))
def test_from_logits_and_hidden_states(backend: str, name: str) -> None:
    device, config = device_of(backend), CONFIGS[name]
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 20, 8, device=device), torch.randn(13, 8, device=device)
    targets, advantages = torch.randint(13, (2, 20), device=device), torch.randn(2, 20, device=device)
    arguments = {"config": config, "backend": backend}
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    old = logprobs + 0.1 * torch.randn_like(logprobs)
    results = []
    for source in ("logprobs", "hidden", "compact"):
        leaf = hidden.clone().requires_grad_()
        if source == "logprobs":
            logprobs = (leaf @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            loss = gk.policy_loss(logprobs, old, advantages, **arguments).loss
        else:
            compact = source == "compact"
            loss = gk.linear_policy_loss(
                leaf, weight, targets, old, advantages, compact=compact, chunk_size=16, **arguments
            ).loss
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert results[0][1].any()
    for other in results[1:] if name == "kl_cov" else ():
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert all(loss.isfinite() for loss, _ in results)
