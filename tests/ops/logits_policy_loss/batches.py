"""Batches of logits for the tests of logits_policy_loss, and the loss of their log-softmax as the gold."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.logits_policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends
from tests.ops.policy_loss.test_kernels import random_arguments

BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
VOCABULARY = 9
F64 = torch.float64

# One config of each kind: the gradient of a token depends on the token alone, on its row, its segment or all tokens.
CONFIGS: dict[str, gk.LossConfig] = {
    "clip": gk.LossConfig.trl(loss_type="dapo", beta=0.05, epsilon_high=0.28),
    "grpo": gk.LossConfig.of("grpo"),
    "cispo": gk.LossConfig(loss="cispo", kl="k2", kl_coef=0.1, aggregation="seq-mean-token-mean"),
    "entropy": gk.LossConfig(entropy_coef=0.1, dual_clip=3.0, aggregation="seq-mean-token-sum"),
    "local entropy": gk.LossConfig(entropy_coef=0.1, entropy_aggregation="local-token-mean"),
    "sequence": gk.LossConfig(ratio="sequence", kl="k3", kl_coef=0.1),
    "sequence token": gk.LossConfig(ratio="sequence_token", aggregation="seq-mean-token-mean"),
    "segment": gk.LossConfig(ratio="segment", entropy_coef=0.1),
    "vespo": gk.LossConfig(loss="vespo"),
    "geo_mean": gk.LossConfig(loss="geo_mean", aggregation="seq-mean-token-sum"),
    "dro": gk.LossConfig(loss="dro", dro_beta=0.3),
    "corrected": gk.LossConfig(correction="sequence_truncate", correction_max=1.2, off_policy_threshold=0.05),
    "quantile": gk.LossConfig(top_entropy_quantile=0.4, entropy_coef=0.1),
}


def logits_for(logprobs: Tensor, targets: Tensor, vocabulary: int = VOCABULARY) -> Tensor:
    """Random logits with these log-probs at the targets."""
    logits = torch.randn(*logprobs.shape, vocabulary, dtype=F64)
    is_target = torch.arange(vocabulary) == targets[..., None]
    others = logits.masked_fill(is_target, -torch.inf).logsumexp(-1)
    own = logprobs - torch.log(-torch.expm1(logprobs)) + others
    return torch.where(is_target, own[..., None], logits)


def random_batch(choose: random.Random, config: gk.LossConfig) -> dict[str, Any]:
    """Arguments of logits_policy_loss in float64, with holes and empty rows; some ratios are large."""
    arguments = random_arguments(choose, config)
    logprobs = arguments.pop("logprobs").clamp(max=-1e-3)
    arguments.pop("entropy")
    targets = torch.randint(VOCABULARY, logprobs.shape)
    return {"logits": logits_for(logprobs, targets), "targets": targets} | arguments


def batch(name: str = "clip", rows: int = 4, width: int = 7, vocabulary: int = 31) -> dict[str, Any]:
    """A padded float64 batch with the arguments that the config reads; rows differ in length, one target is ignored."""
    config = CONFIGS[name]

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=F64)

    old = -1 - noise(rows, width).abs()
    targets = torch.randint(vocabulary, (rows, width))
    lengths = torch.tensor([width, 3, 5, 1])[torch.arange(rows) % 4]
    arguments: dict[str, Any] = {
        "logits": logits_for(old + 0.2 * noise(rows, width).clamp(-3, 3), targets, vocabulary),
        "targets": targets,
        "old_logprobs": old,
        "advantages": noise(rows),
        "mask": torch.arange(width) < lengths[:, None],
    }
    targets[0, 2] = -100
    if config.kl != "none":
        arguments["ref_logprobs"] = old + 0.1 * noise(rows, width)
    if config.correction != "none":
        arguments["sampling_logprobs"] = old + 0.1 * noise(rows, width)
    if config.ratio == "segment":
        arguments["segments"] = (torch.arange(width) // 3).repeat(rows, 1)
    return arguments


def cast(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with numbers rounded to `dtype`, but not scalars."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() and value.dim() else value
        for name, value in given.items()
    }


def run(given: dict[str, Any], backend: str, scale: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """Loss, metrics and the gradient of the logits."""
    device = device_of(backend)
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in (given | options).items()}
    leaf = given.pop("logits").detach().clone().requires_grad_()
    logits = leaf * 1 if given.get("inplace") else leaf
    result = gk.logits_policy_loss(logits, backend=backend, **given)
    (result.loss * scale).backward()
    assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor, "gradient": leaf.grad}


def composed(
    given: dict[str, Any], scale: float = 1.0, offsets: Tensor | float = 0.0, **options: Any
) -> dict[str, Tensor]:
    """The reference of policy_loss on torch's log-softmax of the logits, with torch's own gradient.

    `offsets` are added to the log-probs.
    """
    given = given | options
    leaf = given.pop("logits").detach().clone().requires_grad_()
    targets, mask = given.pop("targets"), given.pop("mask", None)
    mask = targets != -100 if mask is None else mask & (targets != -100)
    softcap, temperature = given.pop("softcap", None), given.pop("temperature", 1.0)
    # NaN in a row that does not count would be NaN times 0 in its gradient
    z = torch.where(mask[..., None], leaf, 0) * given.pop("logit_scale", 1.0)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_softmax = (z / temperature).log_softmax(-1)
    logprobs = log_softmax.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    config = given["config"]
    has_entropy = given.pop("return_entropy", False) or config.entropy_coef != 0 or config.top_entropy_quantile < 1
    entropy = -(log_softmax.exp() * log_softmax).sum(-1) if has_entropy else None
    result = gk.policy_loss(logprobs + offsets, mask=mask, entropy=entropy, backend="reference", **given)
    (result.loss * scale).backward()
    assert leaf.grad is not None
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor, "gradient": leaf.grad}


def assert_close(got: dict[str, Tensor], gold: dict[str, Tensor], rtol: float, atol: float, where: object = "") -> None:
    """Compares loss, metrics and gradient; a tolerance is relative to the largest value of each if that is above 1."""
    for name, expected in gold.items():
        largest = float(expected.abs().nan_to_num(posinf=0).max()) if expected.numel() else 0
        torch.testing.assert_close(
            got[name].cpu(),
            expected.cpu(),
            rtol=rtol,
            atol=atol * max(largest, 1),
            equal_nan=True,
            msg=lambda text, n=name: f"{n}, {where}: {text}",
        )


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(got[name].nan_to_num(7e7), value.nan_to_num(7e7)), name
