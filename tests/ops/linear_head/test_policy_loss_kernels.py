"""linear_policy_loss on every backend against its float64 reference, for every way of splitting rows into chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import (
    assert_within_budget,
    device_of,
    logprob_error,
    needs_cpu_kernels,
    reach,
    runnable_backends,
)

KERNELS = [name for name in runnable_backends(SUPPORTS) if name != "reference"]
F64 = torch.float64
ROWS, WIDTH, HIDDEN, VOCABULARY = 3, 7, 5, 31
CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "kl": {"kl": "k3", "kl_coef": 0.1, "aggregation": "token-mean"},
    "rows": {"aggregation": "seq-mean-token-mean", "count_empty_rows": True},
    "sequence": {"ratio": "sequence"},
    "sequence_token": {"ratio": "sequence_token"},
    "entropy": {"entropy_coef": 0.1, "entropy_aggregation": "local-token-mean"},
    "vespo": {"loss": "vespo"},
    "geo_mean": {"loss": "geo_mean", "aggregation": "seq-mean-token-sum"},
    "segment": {"ratio": "segment"},
    "dro": {"loss": "dro", "dro_beta": 0.3},
    "weighted": {"ratio": "sequence", "aggregation": "seq-mean-token-mean"},
    "masked": {"kl": "k3", "kl_coef": 0.1},
}
EXTRAS = ("plain", "mask", "positions", "by token", "scaled")


def batch(name: str, extra: str = "plain", seed: int = 0) -> dict[str, Any]:
    """Float64 tensors by name, with one ignored target and one row without an advantage."""
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=F64)

    targets = torch.randint(VOCABULARY, (ROWS, WIDTH), generator=random)
    targets[0, 1] = -100
    old = -noise(ROWS, WIDTH).abs() * 2 - 1
    advantages = noise(ROWS)
    advantages[-1] = 0
    arguments = {
        "hidden": noise(ROWS, WIDTH, HIDDEN),
        "weight": noise(VOCABULARY, HIDDEN),
        "bias": noise(VOCABULARY),
        "targets": targets,
        "old_logprobs": old,
        "advantages": advantages,
    }
    if name in ("kl", "masked"):
        arguments["ref_logprobs"] = old + 0.1 * noise(ROWS, WIDTH)
    if name == "weighted":
        arguments["is_weights"] = noise(ROWS).abs()
    if name == "masked":
        arguments["policy_mask"] = noise(ROWS, WIDTH) > -0.3
    if name == "segment":
        arguments["segments"] = (torch.arange(WIDTH) // 3).expand(ROWS, WIDTH)
    if extra == "mask":
        arguments["mask"] = noise(ROWS, WIDTH) > -0.3
    if extra == "positions":
        arguments["positions"] = torch.tensor([0, 3, 4, 9, 20, 15])
    if extra == "by token":
        arguments["advantages"] = noise(ROWS, WIDTH)
        arguments["advantages"][:, 2:4] = 0
    if extra == "scaled":
        temperature = torch.rand(ROWS, WIDTH, generator=random, dtype=F64) + 0.5
        arguments |= {"softcap": 5.0, "temperature": temperature, "logit_scale": 0.7}
    return arguments


def run(given: dict[str, Any], backend: str, dtype: torch.dtype = F64, **options: Any) -> dict[str, Tensor]:
    device = device_of(backend)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    arguments = {name: moved(value) for name, value in given.items()}
    # leaves of their own: a second call with the same tensors would add to the first one's gradients
    leaves = {name: arguments[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")}
    result = gk.linear_policy_loss(backend=backend, **arguments | leaves, **options)
    (result.loss * 1.5).backward()
    results = {"loss": result.loss, "metrics": result.metrics.tensor} | {n: leaf.grad for n, leaf in leaves.items()}
    return {name: value if value is None else value.cpu() for name, value in results.items()}


@needs_cpu_kernels
@pytest.mark.parametrize("chunk_size", [None, 1, 3, 7, 8, 100])
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", CONFIGS)
def test_float64_is_the_reference(name: str, memory: str, chunk_size: int | None) -> None:
    for extra in EXTRAS:
        arguments = batch(name, extra)
        config = gk.LossConfig(**CONFIGS[name])
        got = run(arguments, "cpu", config=config, memory=memory, chunk_size=chunk_size)
        gold = run(arguments, "reference", config=config)
        for what in gold:
            torch.testing.assert_close(got[what], gold[what], rtol=1e-9, atol=1e-11, equal_nan=True, msg=what)


def inherited_errors(
    given: dict[str, Any], config: gk.LossConfig, backend: str, scale: float = 1.0
) -> dict[str, float]:
    """Errors of the loss and of its gradients, times `scale`, from those of a kernel's log-probs.

    VESPO's weight of a row is a power of its ratio, whose logarithm has the errors of all of its tokens. The loss may
    be a small difference of terms that have these errors.
    """
    leaves = {name: given[name].detach().clone().requires_grad_() for name in ("hidden", "weight", "bias")}
    counts = given["mask"] & (given["targets"] != -100)
    others = {name: value for name, value in given.items() if name not in ("targets", "mask", *leaves)}

    def rows(dtype: torch.dtype) -> gk.TokenLogprobs:
        logits = torch.nn.functional.linear(*(leaf.to(dtype) for leaf in leaves.values()))
        return gk.token_logprobs(logits, given["targets"], return_entropy=True, backend="reference")

    def results(offsets: Tensor) -> dict[str, Tensor]:
        logprobs, entropy = rows(F64)
        moved = {"mask": counts, "entropy": entropy, "config": config, "backend": "reference"}
        loss = gk.policy_loss(logprobs + offsets, **others, **moved).loss
        gradients = torch.autograd.grad(loss * scale, list(leaves.values()))
        return {"loss": loss.detach(), **dict(zip(leaves, gradients, strict=True))}

    working, gold = (rows(dtype).logprobs.detach() for dtype in (torch.float32, F64))
    return reach(results, gold.shape, logprob_error(backend, working, gold))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", KERNELS)
def test_float32_loses_no_more_than_torch_does(backend: str, name: str) -> None:
    config = gk.LossConfig(**CONFIGS[name])
    arguments = {
        key: value.float().double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in batch(name, "mask").items()
    }
    got = run(arguments, backend, torch.float32, config=config, chunk_size=14)
    working = run(arguments, "reference", torch.float32, config=config)
    gold = run(arguments, "reference", config=config)
    inherited = inherited_errors(arguments, config, backend, scale=1.5)
    for what in ("loss", "hidden", "weight", "bias"):
        assert_within_budget(got[what], working[what], gold[what], what, inherited.get(what, 0.0))
