"""linear_policy_loss over a support: policy_loss of log-probs from dense logits, and the accumulated weight gradient.

Faults that this is for: a loss that is counted over other tokens; a reference model that is measured over the whole
vocabulary; a gradient of the weight that overwrites what it should be added to, ignores the scale of the loss, or
touches ids that no token keeps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_raises, assert_within_budget, device_of, runnable_backends
from tests.ops.linear_head import cases
from tests.ops.linear_head.cases import F32, F64, IGNORED, NAN, head_of
from tests.ops.promises import Inputs, Op, Results, run

BACKENDS = runnable_backends(cases.OF_SUPPORT)  # "cpu": log-probs of the reference, losses of the CPU's kernels
ADDING = [name for name in BACKENDS if name != "reference"]  # to weight_grad
LEAVES = ("hidden", "weight", "bias")
CONFIGS: dict[str, gk.LossConfig] = {
    "dapo": gk.LossConfig.trl(loss_type="dapo"),
    "kl": gk.LossConfig(kl="k3", kl_coef=0.1),
    "entropy": gk.LossConfig(entropy_coef=0.1),
    "gspo": gk.LossConfig(ratio="sequence"),
    "segment": gk.LossConfig(ratio="segment"),
    "vespo": gk.LossConfig.trl(loss_type="vespo"),
    "masked": gk.LossConfig(),
}
POLICY = ("old_logprobs", "advantages", "mask", "policy_mask", "segments", "ref_logprobs")
HEADS = ("ref_hidden", "cu_seqlens")


def draw(name: str = "dapo") -> Inputs:
    torch.manual_seed(3)
    inputs = cases.OPS["linear_logprobs over a support"].draw()
    inputs["old_logprobs"] = -2 * torch.rand(4, 5).double()
    inputs["advantages"] = torch.tensor([1.0, -0.5, 0.7, 0.0]).double()
    inputs["mask"] = torch.rand(4, 5) < 0.8
    if name == "kl":
        inputs["ref_logprobs"] = inputs["old_logprobs"] + 0.1
    if name == "masked":
        inputs["policy_mask"] = torch.rand(4, 5) < 0.6
    if name == "segment":
        inputs["segments"] = torch.tensor([[0, 0, 1, 1, 1]] * 4)
    return inputs


def loss_of(inputs: Inputs, backend: str | None, config: gk.LossConfig, **options: Any) -> Results:
    given = {name: inputs[name] for name in (*POLICY, *HEADS) if name in inputs}
    support = inputs["token_ids"], inputs["offsets"]
    temperature = inputs["temperature"]
    args = inputs["hidden"], head_of(inputs), inputs["targets"]
    options |= {"support": support, "temperature": temperature, "config": config, "backend": backend}
    result = gk.linear_policy_loss(*args, **given, **options)
    return {"loss": result.loss, "metrics": result.metrics.tensor}


def by_parts(inputs: Inputs, config: gk.LossConfig) -> Results:
    """policy_loss of log-probs from dense logits that are -inf outside of the support."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in LEAVES}
    cap = inputs["softcap"]
    logits = leaves["hidden"].flatten(0, 1) @ leaves["weight"].T + leaves["bias"]
    z = cap * torch.tanh(logits / cap) / inputs["temperature"].reshape(-1, 1)
    kept = torch.zeros_like(z, dtype=torch.bool)
    for row, ids in enumerate(cases.kept_by(inputs)):
        kept[row, ids] = True
    counts = (inputs["targets"] != IGNORED) & inputs["mask"]
    rows = z.where(kept, -1e4).log_softmax(-1)
    logprobs = rows.gather(1, inputs["targets"].clamp(min=0).view(-1, 1)).view(4, 5)
    entropy = -(rows.exp() * rows).sum(-1).view(4, 5)
    policy = {name: inputs[name] for name in POLICY if name in inputs} | {"mask": counts}
    given = {"entropy": torch.where(counts, entropy, 0) if config.entropy_coef != 0 else None}
    result = gk.policy_loss(torch.where(counts, logprobs, 0), **policy, **given, config=config, backend="reference")
    gradients = torch.autograd.grad(result.loss, list(leaves.values()))
    named = {f"d_{name}": by for name, by in zip(leaves, gradients, strict=True)}
    return {"loss": result.loss.detach(), "metrics": result.metrics.tensor} | named


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_policy_loss_of_log_probs_over_the_support(backend: str, name: str) -> None:
    inputs, config = cases.rounded(draw(name), F32), CONFIGS[name]
    op = Op(draw, lambda given, on: loss_of(given, on, config), cases.OF_SUPPORT, LEAVES)
    gold = by_parts(inputs, config)
    for dtype in (F64, F32) if backend != "triton" else (F32,):
        got, working = run(op, inputs, backend, dtype), run(op, inputs, "reference", dtype)
        for key, value in gold.items():
            if dtype == F64:
                torch.testing.assert_close(got[key], value.to(got[key].dtype), rtol=1e-10, atol=1e-10, equal_nan=True)
            else:
                assert_within_budget(got[key], working[key], value, key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_reference_model_has_the_same_support(backend: str) -> None:
    inputs = draw("kl") | {"ref_hidden": torch.randn(4, 5, 6).double()}
    of_reference = cases.call(inputs | {"hidden": inputs["ref_hidden"]}, "reference")["logprobs"]
    op = Op(draw, lambda given, on: loss_of(given, on, CONFIGS["kl"]), cases.OF_SUPPORT, LEAVES)
    with_logprobs = {name: value for name, value in inputs.items() if name != "ref_hidden"}
    with_head = {name: value for name, value in inputs.items() if name != "ref_logprobs"}
    expected = run(op, with_logprobs | {"ref_logprobs": of_reference}, "reference", F64)
    working = run(op, with_head, "reference", F32)
    for name, value in run(op, with_head, backend, F32).items():
        assert_within_budget(value, working[name], expected[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tokens_and_other_positions_are_not_read(backend: str) -> None:
    inputs, places = draw(), torch.tensor([0, 1, 3, 5, 6, 8, 9, 11, 12, 14, 19])
    is_taken = torch.zeros(20, dtype=torch.bool).index_fill(0, places, True).view(4, 5) & inputs["mask"]
    spoiled = inputs | {"hidden": torch.where(is_taken[..., None], inputs["hidden"], NAN)}
    positions = places.to(device_of(backend))
    call = lambda given, on: loss_of(given, on, CONFIGS["dapo"], positions=positions)  # noqa: E731
    got, expected = (run(Op(draw, call, cases.OF_SUPPORT, LEAVES), each, backend, F32) for each in (spoiled, inputs))
    assert not got["d_hidden"][~is_taken].any() and got["d_hidden"].any()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, equal_nan=True)


# Accumulation over micro-batches


def accumulated(inputs: Inputs, backend: str, dtype: torch.dtype, into: Tensor | None, scale: float = 1.0) -> Results:
    device = device_of(backend)
    given = {
        name: value.to(device, dtype if value.dtype == F64 else None) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    leaves = {name: given[name].requires_grad_() for name in LEAVES}
    (scale * loss_of(given, backend, CONFIGS["dapo"], weight_grad=into)["loss"]).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ADDING)
def test_the_gradient_of_the_weight_is_added(backend: str, dtype: torch.dtype) -> None:
    inputs, device = cases.rounded(draw(), dtype), device_of(backend)
    returned = accumulated(inputs, backend, dtype, None)
    for of_total in {dtype, F32}:
        start = torch.randn(101, 6, device=device).to(of_total)
        into, alone = start.clone(), torch.zeros(101, 6, device=device)
        accumulated(inputs, backend, dtype, into)
        others = accumulated(inputs, backend, dtype, alone)
        assert others.keys() == {"hidden", "bias"} and alone.any()
        assert all(torch.equal(value, returned[name]) for name, value in others.items())
        # one rounding to the dtype of the sum; Triton's interpreter truncates instead
        rtol = torch.finfo(of_total).eps if backend == "triton" else 0.0
        torch.testing.assert_close(into, (start.float() + alone).to(of_total), rtol=rtol, atol=0)
        untouched = ~alone.any(1)
        assert untouched.any() and torch.equal(into[untouched], start[untouched])
    scaled = torch.zeros(101, 6, device=device)
    accumulated(inputs, backend, dtype, scaled, scale=4.0)
    torch.testing.assert_close(scaled, 4 * alone, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="needs the CPU kernels")
def test_errors() -> None:
    inputs = {n: v.float() if isinstance(v, Tensor) and v.dtype == F64 else v for n, v in draw().items()}
    inputs["weight"].requires_grad_()
    total = torch.zeros(101, 6)
    adapted = gk.LMHead(inputs["weight"], lora=(total[:2], total[:, :2], 1.0))
    table: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (
            ValueError,
            "weight_grad must be contiguous with support, got strides [1, 101]",
            {"weight_grad": total.T.contiguous().T},
        ),
        (
            ValueError,
            "weight_grad must have the shape of the weight, [101, 6], got [100, 6]",
            {"weight_grad": total[1:]},
        ),
        (ValueError, "weight_grad must be None with the reference", {"weight_grad": total, "backend": "reference"}),
        (ValueError, "chunk_size must be None with support, got 2; only", {"chunk_size": 2}),
        (ValueError, "compact must be None with support, got True; only", {"compact": True}),
        (ValueError, "memory must be None with support, got 'low'; only", {"memory": "low"}),
        (ValueError, "head.lora must be None with support, got tuple; only", {"head": adapted}),
    ]
    for error, rule, changes in table:
        right = {"head": head_of(inputs), "old_logprobs": None, "advantages": inputs["advantages"], "backend": "cpu"}
        given = {"hidden": inputs["hidden"], "targets": inputs["targets"]} | right
        given["support"] = inputs["token_ids"], inputs["offsets"]
        assert_raises(
            error, f"linear_policy_loss: {rule}", (), lambda call=given | changes: gk.linear_policy_loss(**call)
        )
