"""linear_policy_loss over a support: the policy loss of its log-probs, for every loss and every option of the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.sampled_support.batches import F64, HEAD, OF_LOSSES, assert_close, batch, cast, softmax_of, to

CONFIGS: dict[str, gk.LossConfig] = {
    "dapo": gk.LossConfig.trl(loss_type="dapo"),
    "kl": gk.LossConfig(kl="k3", kl_coef=0.1),
    "entropy": gk.LossConfig(entropy_coef=0.1),
    "gspo": gk.LossConfig(ratio="sequence"),
    "segment": gk.LossConfig(ratio="segment"),
    "vespo": gk.LossConfig.trl(loss_type="vespo"),
    "masked": gk.LossConfig(),
}


def arguments_of(name: str, dtype: torch.dtype = F64) -> dict[str, Any]:
    given = batch(dtype=dtype)
    generator = torch.Generator().manual_seed(9)
    old = (-2 * torch.rand(3, 4, generator=generator, dtype=F64)).to(dtype)
    more: dict[str, Any] = {
        "hidden": given["hidden"].view(3, 4, -1),
        "targets": given["targets"].view(3, 4),
        "old_logprobs": old,
        "advantages": torch.tensor([1.0, -0.5, 0.7], dtype=dtype),
        "mask": torch.rand(3, 4, generator=generator) < 0.8,
    }
    if name == "kl":
        more["ref_logprobs"] = (old + 0.1).to(dtype)
    if name == "masked":
        more["policy_mask"] = torch.rand(3, 4, generator=generator) < 0.6
    if name == "segment":
        more["segments"] = torch.tensor([[0, 0, 1, 1]] * 3)
    return given | more


def run(given: dict[str, Any], backend: str, **options: Any) -> dict[str, Tensor]:
    device = str(device_of(backend))
    arguments = cast(given, given["hidden"].dtype, device)
    leaves = {name: arguments[name].detach().requires_grad_() for name in HEAD}
    result = gk.linear_policy_loss(**arguments | leaves, **options, backend=backend)
    result.loss.backward()
    gradients = {f"by {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor} | gradients


def by_parts(given: dict[str, Any], config: gk.LossConfig, **head: Any) -> dict[str, Tensor]:
    """policy_loss of log-probs from dense logits."""
    policy = {k: v for k, v in given.items() if k not in (*HEAD, "targets", "support")}
    leaves = [given[name].clone().requires_grad_() for name in HEAD]
    logits = leaves[0].flatten(0, 1) @ leaves[1].T + leaves[2]
    logprobs, entropy = softmax_of(logits, given | head)
    counts = (given["targets"] != -100) & policy.pop("mask")
    want_entropy = config.entropy_coef != 0
    result = gk.policy_loss(
        torch.where(counts, logprobs.view(3, 4), 0),
        mask=counts,
        entropy=torch.where(counts, entropy.view(3, 4), 0) if want_entropy else None,
        config=config,
        backend="reference",
        **policy,
    )
    gradients = torch.autograd.grad(result.loss, leaves)
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor} | {
        f"by {name}": gradient for name, gradient in zip(HEAD, gradients, strict=True)
    }


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", OF_LOSSES)
def test_is_the_policy_loss_of_log_probs_over_the_support(backend: str, name: str) -> None:
    config, given = CONFIGS[name], arguments_of(name)
    options = {"softcap": 9.0, "temperature": 0.7}
    expected = by_parts(given, config, **options)
    if backend in ("reference", "cpu"):
        got, tolerance = run(given, backend, config=config, **options), 1e-10
    else:
        # float32: eps of 6e-8 times logits of up to 30 in a softmax, through the ratio's exponential
        got, tolerance = run(cast(given, torch.float32), backend, config=config, **options), 2e-5
    expected = {name: value.to(got[name].dtype) for name, value in expected.items()}
    got["metrics"], expected["metrics"] = got["metrics"].nan_to_num(-7), expected["metrics"].nan_to_num(-7)
    assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", OF_LOSSES)
def test_the_reference_model_has_the_same_support(backend: str) -> None:
    dtype = F64 if backend in ("reference", "cpu") else torch.float32
    given = cast(arguments_of("kl") | {"ref_logprobs": None}, dtype)
    torch.manual_seed(4)
    ref_hidden, ref_weight = torch.randn(3, 4, 5, dtype=dtype), torch.randn(31, 5, dtype=dtype)
    ref_bias = torch.randn(31, dtype=dtype)
    device, flat = device_of(backend), cast(batch(), dtype)
    moved = {k: to(v, device, dtype) for k, v in (flat | {"hidden": ref_hidden.flatten(0, 1)}).items()}
    ref = gk.linear_logprobs(
        moved["hidden"],
        ref_weight.to(device),
        moved["targets"],
        bias=ref_bias.to(device),
        support=moved["support"],
        backend=backend,
    ).logprobs
    heads = {"ref_hidden": ref_hidden, "ref_weight": ref_weight, "ref_bias": ref_bias}
    got = run(given | heads, backend, config=CONFIGS["kl"])
    expected = run(given | {"ref_logprobs": ref.view(3, 4).cpu()}, backend, config=CONFIGS["kl"])
    counts = ~got["metrics"].isnan()
    assert torch.equal(got.pop("metrics")[counts], expected.pop("metrics")[counts])
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", OF_LOSSES)
def test_masked_tokens_and_other_positions_are_not_read(backend: str) -> None:
    given = cast(arguments_of("dapo"), torch.float32)
    places = torch.tensor([0, 1, 4, 8])
    taken = torch.zeros(12, dtype=torch.bool).index_fill(0, places, True) & given["mask"].flatten()
    spoiled = given | {"hidden": given["hidden"].clone()}
    spoiled["hidden"].view(12, -1)[~taken] = float("nan")
    device = device_of(backend)
    got, expected = (run(which, backend, positions=places.to(device)) for which in (spoiled, given))
    assert all(torch.equal(got[name].nan_to_num(), expected[name].nan_to_num()) for name in expected)
    assert not got["by hidden"].cpu().view(12, -1)[~taken].any()


@pytest.mark.parametrize("backend", OF_LOSSES)
def test_packed_tokens(backend: str) -> None:
    given = cast(arguments_of("dapo"), torch.float32)
    bounds = torch.tensor([0, 4, 8, 12])
    packed = given | {name: given[name].flatten(0, 1) for name in ("hidden", "targets", "old_logprobs", "mask")}
    got, expected = run(packed | {"cu_seqlens": bounds}, backend), run(given, backend)
    torch.testing.assert_close(got["loss"], expected["loss"], rtol=1e-6, atol=1e-6)  # of sums in another order
    torch.testing.assert_close(got["by weight"], expected["by weight"], rtol=1e-5, atol=1e-6)
