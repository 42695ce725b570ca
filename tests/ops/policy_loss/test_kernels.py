"""policy_loss on every backend: random settings against the float64 reference, torch integration, repeatability."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.policy_loss import registration as op
from grpo_kernels.ops.policy_loss.config import _RATIOS_OF, AGGREGATIONS, KLS, LOSSES, METRICS
from tests.harness import (
    INDUCTOR,
    assert_within_budget,
    cpu_threads,
    device_of,
    needs_cpu_kernels,
    quick,
    runnable_backends,
)

BACKENDS = runnable_backends(op.SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
CASES = 30


def random_config(choose: random.Random) -> gk.LossConfig:
    """A random combination of compatible settings."""
    loss = choose.choice(["clip", "clip", "clip", *LOSSES])
    ratio = choose.choice(_RATIOS_OF[loss])
    fields: dict[str, Any] = {"loss": loss, "ratio": ratio}
    own = {
        "clip": {
            "dual_clip": choose.choice([None, 3.0]),
            "delta": choose.choice([None, 1.5, 4.0]),
            "clip_low": choose.choice([None, 0.2]),
            "clip_high": 0.28,
            "log_ratio_clamp": choose.choice([None, (-20.0, 20.0), (-0.3, 0.3)]),
        },
        "dro": {"dro_beta": 0.3},
        "ipo": {"clip_low": choose.choice([None, 0.02]), "clip_high": 0.03},
        "icepop": {"clip_low": choose.choice([None, 0.1]), "clip_high": 0.1, "log_ratio_clamp": (-0.3, 0.3)},
        "topr": {"ratio_cap": choose.choice([None, 1.1])},
    }
    trust = {"ratio_cap": 3.0, "clip_low": 0.05, "clip_high": 0.04, "log_ratio_clamp": (-20.0, 20.0)}
    fields |= trust if loss.startswith("dppo") else own.get(loss, {})
    kl = choose.choice(KLS)
    if kl != "none":
        unbiased = choose.random() < 0.5 and not kl.endswith("+") and ratio in ("token", "sequence")
        fields |= {"kl": kl, "kl_coef": choose.choice([0.0, 0.1]), "kl_unbiased": unbiased and loss != "geo_mean"}
        fields["kl_clamp"] = choose.choice([None, (20.0, 10.0), (0.2, 0.05)])
    rows = ["seq-mean-token-sum", "token-sum"]
    fields["aggregation"] = choose.choice(rows if loss == "geo_mean" else AGGREGATIONS[:-1])
    if fields["aggregation"].endswith("norm"):
        fields["max_length"] = 7
    fields["kl_aggregation"] = choose.choice([None, "token-mean", "local-token-mean"])
    fields["entropy_aggregation"] = choose.choice([None, "local-token-mean"])
    fields["entropy_coef"] = choose.choice([0.0, 0.1])
    fields["count_empty_rows"] = choose.random() < 0.5
    return gk.LossConfig(**fields)


def random_arguments(choose: random.Random, config: gk.LossConfig) -> dict[str, Any]:
    """A float64 batch with holes and empty rows; some log-ratios are large."""
    rows, width = choose.choice([(1, 1), (3, 5), (4, 17), (5, 33), (2, 600), (3, 0)])
    torch.manual_seed(choose.randrange(2**31))
    size = choose.choice([0.3, 0.3, 3.0])

    def noise(*shape: int) -> Tensor:
        return torch.randn(*(shape or (rows, width)), dtype=torch.float64)

    logprobs = -(noise().abs() * 0.7)
    old = (logprobs + size * noise()).clamp(max=-1e-3)
    mask = torch.rand(rows, width) > 0.3
    mask[rows // 2 :][:1] &= rows < 3
    segments = (torch.rand(rows, width) < 0.4).long().cumsum(1)
    segments = (segments - segments[:, :1]).masked_fill(torch.rand(rows, width) < 0.15, -1)
    arguments = {
        "logprobs": logprobs,
        "old_logprobs": old if choose.random() < 0.85 else None,
        "advantages": noise(rows) if choose.random() < 0.6 else noise(),
        "mask": mask if choose.random() < 0.8 else None,
        "segments": segments if config.ratio.startswith("segment") or choose.random() < 0.1 else None,
        "ref_logprobs": logprobs + size * noise() if config.kl != "none" else None,
        "policy_mask": torch.rand(rows, width) < 0.6 if config.loss != "geo_mean" and choose.random() < 0.4 else None,
        "entropy": noise().abs(),
    }
    if choose.random() < 0.4:
        by_row = choose.random() < 0.5 and config.loss != "vespo"
        arguments["is_weights"] = 2 * torch.rand(rows, 1 if by_row else width, dtype=torch.float64)
    if choose.random() < 0.15:
        arguments["weights"] = torch.rand(rows, width, dtype=torch.float64)
    elif choose.random() < 0.4:
        known: dict[str, Any] = {"tokens": 17.0, "rows": 3.0, "segments": 5.0}
        arguments["normalizer"] = choose.choice(
            [known, {"tokens": torch.tensor(11), "rows": 3.0, "segments": torch.tensor(5)}]
        )
    if choose.random() < 0.3:
        arguments["cu_seqlens"] = torch.arange(rows + 1) * width
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.shape == (rows, width):
                arguments[name] = value.reshape(-1)
    return arguments


def run(
    config: gk.LossConfig, arguments: dict[str, Any], backend: str, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    device = device_of(backend)

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(part) for name, part in value.items()}
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() and value.dim() else value.to(device)

    kwargs = {name: moved(value) for name, value in arguments.items()}
    logprobs, entropy = (
        kwargs.pop("logprobs").detach().requires_grad_(),
        kwargs.pop("entropy").detach().requires_grad_(),
    )
    old, advantages = kwargs.pop("old_logprobs"), kwargs.pop("advantages")
    result = gk.policy_loss(logprobs, old, advantages, entropy=entropy, config=config, backend=backend, **kwargs)
    (1.7 * result.loss).backward()
    zero = torch.zeros_like(logprobs)
    by_entropy = zero if entropy.grad is None else entropy.grad
    by_logprob = zero if logprobs.grad is None else logprobs.grad
    return {"value": result.loss.detach(), "gradient": by_logprob, "by entropy": by_entropy} | {
        name: result.metrics[name] for name in METRICS
    }


@pytest.mark.parametrize("seed", quick(range(20), *range(8)))
@pytest.mark.parametrize("backend", KERNELS)
def test_any_settings_equal_the_reference_in_float64(backend: str, seed: int) -> None:
    choose = random.Random(seed)
    for case in range(CASES):
        config = random_config(choose)
        arguments = random_arguments(choose, config)
        got, gold = (run(config, arguments, name, torch.float64) for name in (backend, "reference"))
        for name, expected in gold.items():
            # both sides round; an unbiased k3 cancels exponentials of up to e^10, so we scale by the largest ratio
            scale = float(expected.abs().nan_to_num(posinf=0).max()) if expected.numel() else 0
            extreme = float(gold["ratio_max"].nan_to_num()) + float(gold["kl_sum"].abs()) if config.kl_unbiased else 1
            torch.testing.assert_close(
                got[name].cpu(),
                expected.cpu(),
                rtol=1e-10,
                atol=1e-11 * max(scale, 1, extreme),
                equal_nan=True,
                msg=lambda text, n=name, c=case, s=config: f"{n} of case {c}, {s}: {text}",
            )


@needs_cpu_kernels
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kl", ["none", "k3"])
@pytest.mark.parametrize("loss", ["clip", "weighted clip", "reinforce"])
def test_specialised_walks_of_the_cpu(loss: str, kl: str, is_packed: bool) -> None:
    """With the plain inputs that they are for: log-probs, advantages, a mask, and the reference of a KL."""
    config = gk.LossConfig(loss=loss.split()[-1], kl=kl, kl_coef=0.1 if kl == "k3" else 0.0)
    random_numbers = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=random_numbers, dtype=torch.float64)  # noqa: E731
    shape = (6, 45)
    old = -0.1 - noise(*shape).abs()
    arguments: dict[str, Any] = {"logprobs": old + 0.3 * noise(*shape), "old_logprobs": old}
    arguments |= {"advantages": noise(6), "mask": noise(*shape) < 0.8}
    arguments |= {"ref_logprobs": old + 0.2 * noise(*shape)} if kl == "k3" else {}
    arguments |= {"is_weights": noise(*shape).abs()} if loss == "weighted clip" else {}
    if is_packed:
        flat = {name: value.reshape(-1) for name, value in arguments.items()}
        arguments = flat | {"cu_seqlens": torch.tensor([0, 7, 7, 98, 130, 258, 270])}
    leaf = arguments.pop("logprobs")
    results = []
    for backend in ("cpu", "reference"):
        lp = leaf.clone().requires_grad_()
        result = gk.policy_loss(lp, **arguments, config=config, backend=backend)
        results.append((result.loss.detach(), torch.autograd.grad(result.loss, lp)[0], result.metrics.tensor))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_the_spread_of_ratios(backend: str) -> None:
    device = device_of(backend)
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(3, 50, generator=generator, dtype=torch.float64) / 3 - 4 for _ in range(2))
    mask = torch.rand(3, 50, generator=generator) < 0.7
    result = gk.policy_loss(
        *(each.to(device) for each in (new, old, torch.ones(3))), mask=mask.to(device), backend=backend
    )
    m = result.metrics.to_dict()
    offset = m["ratio_sum"] / m["terms"] - 1
    expected = float((new - old).exp()[mask].var(correction=0))
    assert m["ratio_spread_sum"] / m["terms"] - offset**2 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.parametrize("backend", KERNELS)
def test_float32_loses_no_more_than_torch_does(backend: str, seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(CASES):
        config = random_config(choose)
        arguments = random_arguments(choose, config)
        arguments = {
            name: value.float().double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in arguments.items()
        }
        gold, working = (run(config, arguments, "reference", dtype) for dtype in (torch.float64, torch.float32))
        got = run(config, arguments, backend)
        counts = [name for name in METRICS if name.startswith(("low", "high", "clipped", "dual"))]
        if any(not torch.equal(gold[name], working[name]) for name in counts):
            continue
        for name in ("gradient", "by entropy"):
            assert got[name].dtype == torch.float32
            assert_within_budget(got[name], working[name], gold[name], f"{name} of {config}")
        # a sum can cancel, but its rounding is that of its terms; with advantages of one sign, terms do not cancel
        alike = run(config, arguments | {"advantages": -arguments["advantages"].abs()}, "reference", torch.float64)
        size = sum(float(alike[name].abs()) for name in ("policy_loss", "kl_loss", "entropy_loss"))
        error, budget = (abs(float(one["value"]) - float(gold["value"])) for one in (got, working))
        assert error <= 2 * budget + 16 * torch.finfo(torch.float32).eps * size, f"value of {config}"


def forward_arguments(config: gk.LossConfig, device: torch.device, packed: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    lp = -torch.rand(3, 7, device=device)
    old, ref, entropy = lp - 0.1, lp + 0.05 * torch.randn_like(lp), torch.rand_like(lp)
    mask, advantages = torch.rand(3, 7, device=device) > 0.3, torch.randn(3, device=device)
    # with these arguments no metric is NaN, which opcheck does not consider equal
    values: list[Any] = [lp, old, mask, ref, torch.rand_like(lp), entropy]
    if packed:
        values = [value.reshape(-1) for value in values]
    lp, old, mask, ref, weights, entropy = values
    cu_seqlens = torch.tensor([0, 7, 14, 21], device=device) if packed else None
    policy = op.Policy(
        old_logprobs=old,
        advantages=advantages,
        mask=mask,
        policy_mask=mask,
        cu_seqlens=cu_seqlens,
        segments=None,
        ref_logprobs=ref,
        is_weights=weights,
        weights=None,
        normalizers=None,
        counts=[float("nan")] * 3,
        modes=config.modes,
        coefficients=config.coefficients,
    )
    return lp.requires_grad_(), entropy.requires_grad_(), *policy, config.entropy_coef != 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("backend", KERNELS)
def test_opcheck(backend: str, level: str, packed: bool) -> None:
    config = gk.LossConfig.trl(loss_type="grpo", importance_sampling_level=level, beta=0.1, entropy_coef=0.1)
    torch.library.opcheck(
        registry.overload("policy_loss", backend), forward_arguments(config, device_of(backend), packed)
    )


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None) -> None:
    device = device_of(backend or "cpu")
    config = gk.LossConfig.trl(loss_type="dapo", beta=0.1, entropy_coef=0.1)

    def loss(lp: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor, entropy: Tensor) -> Tensor:
        options = {"mask": mask, "ref_logprobs": ref, "entropy": entropy, "config": config, "backend": backend}
        return gk.policy_loss(2 * lp, old, advantages, **options).loss * 3

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR, dynamic=True)
    for rows, width in ((3, 7), (4, 9)):
        lp = -torch.rand(rows, width, device=device)
        others = [lp - 0.1, lp + 0.1, torch.randn(rows, device=device), lp < -0.2, torch.rand_like(lp)]
        gradients = []
        for function in (loss, compiled):
            leaf, entropy = lp.clone().requires_grad_(), others[-1].clone().requires_grad_()
            value = function(leaf, *others[:-1], entropy)
            gradients.append((value.detach(), *torch.autograd.grad(value, (leaf, entropy))))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("backend", KERNELS)
def test_repeated_calls_agree_to_the_bit(backend: str, level: str) -> None:
    config = gk.LossConfig.trl(loss_type="grpo", importance_sampling_level=level, beta=0.1)
    arguments = random_arguments(random.Random(3), gk.LossConfig(kl="k3")) | {"normalizer": None, "is_weights": None}
    first, second = (run(config, arguments, backend) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value.nan_to_num(-1), second[name].nan_to_num(-1)), name


@needs_cpu_kernels
@pytest.mark.parametrize("config", ["dapo", "vespo"])
def test_number_of_threads_changes_no_bit(config: str) -> None:
    torch.manual_seed(0)
    lp = -torch.rand(9, 3000)
    old, mask = lp + 0.1 * torch.randn_like(lp), torch.rand(9, 3000) > 0.5
    results = []
    for count in (1, 2, 3):
        with cpu_threads(count):
            leaf = lp.clone().requires_grad_()
            result = gk.policy_loss(leaf, old, torch.arange(9.0) - 4, mask=mask, config=config, backend="cpu")
            results.append((torch.autograd.grad(result.loss, leaf)[0], result.metrics.tensor.nan_to_num(-1)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("backend", KERNELS)
def test_backward_can_run_twice_and_with_any_upstream_gradient(backend: str) -> None:
    lp = -torch.rand(3, 5, device=device_of(backend))
    leaf = lp.clone().requires_grad_()
    loss = gk.policy_loss(leaf, lp - 0.1, torch.ones(3, device=lp.device), backend=backend).loss
    one, again, scaled = (torch.autograd.grad(loss * s, leaf, retain_graph=True)[0] for s in (1.0, 1.0, -2.5))
    assert torch.equal(one, again)
    torch.testing.assert_close(scaled, -2.5 * one, rtol=1e-6, atol=0)
    (last,) = torch.autograd.grad(loss * -2.5, leaf)  # may reuse what the graph keeps
    assert torch.equal(last, scaled) and torch.equal(one, again)
