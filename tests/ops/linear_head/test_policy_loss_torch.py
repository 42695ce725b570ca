"""linear_policy_loss with other parts of torch, its options, and half precision."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.linear_head import registration as op
from grpo_kernels.ops.policy_loss.config import METRICS
from tests.harness import INDUCTOR, assert_within_budget, device_of, needs_cpu_kernels
from tests.ops.linear_head.test_policy_loss_edges import (
    CONFIGS,
    F64,
    HIDDEN,
    KERNELS,
    ROWS,
    VOCABULARY,
    WIDTH,
    assert_close,
    assert_same,
    batch,
    leaves_of,
    run,
)


# without a GPU the other kernels take seconds, and linear_logprobs covers the same ops
@pytest.mark.parametrize("name", ["dapo", "sequence"])
@pytest.mark.parametrize("backend", [name for name in KERNELS if name == "cpu" or torch.cuda.is_available()])
def test_opcheck(monkeypatch: pytest.MonkeyPatch, backend: str, name: str) -> None:
    # with all of these arguments no metric is NaN, which opcheck does not consider equal
    arguments = {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch(name, 2).items()
    }
    arguments |= {"policy_mask": torch.rand(2, WIDTH) < 0.8, "is_weights": torch.rand(2, WIDTH), "return_entropy": True}
    arguments = {k: v.to(device_of(backend)) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    calls: list[tuple[Any, ...]] = []
    once = op.apply_loss
    monkeypatch.setattr(op, "apply_loss", lambda *args: calls.append(args) or once(*args))
    options = {"config": CONFIGS[name], "chunk_size": 8, "backend": backend}
    metrics = gk.linear_policy_loss(**arguments | leaves_of(arguments), **options).metrics
    assert not metrics.tensor.isnan().any()
    _, head, reference, policy, chunking, *_ = calls[0]
    arguments = (*head, *reference, *policy, *chunking, head.needs_grad)
    torch.library.opcheck(registry.overload("linear_policy_loss", backend), arguments)


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize(
    ("backend", "name"), [(None, "dapo"), pytest.param("cpu", "sequence", marks=needs_cpu_kernels)]
)
def test_compiles_into_one_graph(backend: str | None, name: str, memory: str) -> None:
    torch.compiler.reset()
    arguments = {k: v.float() if v.is_floating_point() else v for k, v in batch(name).items()}
    arguments = {k: v.to(device_of(backend or "cpu")) for k, v in arguments.items()}
    options: dict[str, Any] = {"config": CONFIGS[name], "memory": memory, "chunk_size": 8, "backend": backend}

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, **others: Tensor) -> Tensor:
        return gk.linear_policy_loss(hidden * 2, weight, bias=bias, **others, **options).loss * 3

    result = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=INDUCTOR)):
        leaves = leaves_of(arguments)
        value = function(**arguments | leaves)
        value.backward()
        result.append({"loss": value.detach()} | {k: leaf.grad for k, leaf in leaves.items()})
    assert_close(*result, rtol=1e-5, atol=1e-6)
    assert result[0]["weight"].any()


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_autocast_is_casting_by_hand(memory: str) -> None:
    arguments = {k: v.float() if v.is_floating_point() else v for k, v in batch("dapo").items()}
    options = {"config": CONFIGS["dapo"], "memory": memory}
    cast, by_hand = leaves_of(arguments), leaves_of(arguments)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gk.linear_policy_loss(**arguments | cast, **options).loss
    outside = gk.linear_policy_loss(**arguments | {k: v.bfloat16() for k, v in by_hand.items()}, **options).loss
    assert inside.dtype == torch.float32 and torch.equal(inside, outside)
    inside.backward()
    outside.backward()
    for name in cast:
        assert cast[name].grad.dtype == torch.float32 and torch.equal(cast[name].grad, by_hand[name].grad), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dapo", "sequence"])
@pytest.mark.parametrize("backend", KERNELS)
def test_halves_lose_no_more_than_torch_does(backend: str, name: str, dtype: torch.dtype) -> None:
    exact = {k: v.to(dtype).double() if v.is_floating_point() else v for k, v in batch(name, 2).items()}
    arguments = {k: v.to(dtype) if v.is_floating_point() else v for k, v in exact.items()}
    options = {"config": CONFIGS[name], "chunk_size": 8}
    got, working = run(arguments, backend, **options), run(arguments, "reference", **options)
    gold = run(exact, "reference", **options)
    assert got["loss"].dtype == torch.float32 and got["by weight"].dtype == dtype
    for what in ("loss", "by hidden", "by weight", "by bias"):
        assert_within_budget(got[what], working[what], gold[what], what)


@pytest.mark.parametrize("backend", KERNELS)
def test_repeated_calls_agree_to_the_bit(backend: str) -> None:
    arguments = {k: v.float() if v.is_floating_point() else v for k, v in batch("sequence", 2).items()}
    first, second = (run(arguments, backend, config=CONFIGS["sequence"], chunk_size=8) for _ in range(2))
    assert_same(second, first)


# Options

# Each option's value, and the other arguments of the calls with and without it.
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "old_logprobs": (torch.full((ROWS, WIDTH), -3.0, dtype=F64), {}),
    "advantages": (torch.ones(ROWS, dtype=F64), {}),
    "bias": (torch.arange(VOCABULARY, dtype=F64), {}),
    "lora": ((torch.ones(2, HIDDEN, dtype=F64), torch.eye(VOCABULARY, 2, dtype=F64), 0.5), {}),
    "temperature": (torch.full((ROWS, 1), 1.5, dtype=F64), {}),
    "softcap": (1.5, {}),
    "logit_scale": (0.5, {}),
    "positions": (torch.tensor([0, 1, 9]), {}),
    "mask": (torch.arange(WIDTH) % 2 == torch.zeros(ROWS, 1), {}),
    "segments": ((torch.arange(WIDTH) // 2).repeat(ROWS, 1), {"config": CONFIGS["segment"]}),
    "policy_mask": (torch.arange(WIDTH) % 4 == torch.zeros(ROWS, 1), {}),
    "ref_logprobs": (torch.full((ROWS, WIDTH), -1.0, dtype=F64), {"config": CONFIGS["dapo"]}),
    "is_weights": (torch.linspace(0.5, 1, ROWS, dtype=F64), {}),
    "weights": (torch.full((ROWS, WIDTH), 0.5, dtype=F64), {}),
    "normalizer": (11.0, {}),
    "config": ("dr_grpo", {}),
}


def test_the_options_are_all_of_the_signature() -> None:
    required = {"hidden", "weight", "targets"}
    # these have tests of their own; the last three must not change the result
    others = {"ref_hidden", "ref_weight", "ref_bias", "cu_seqlens", "return_entropy", "weight_grad"}
    others |= {
        "support",
        "teacher",
        "term_index",
        "vocab_start",
        "process_group",
        "backend",
        "memory",
        "compact",
        "chunk_size",
    }
    assert set(inspect.signature(gk.linear_policy_loss).parameters) == required | others | set(OPTIONS)


@needs_cpu_kernels
@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_the_result(name: str, memory: str) -> None:
    value, others = OPTIONS[name]
    names = ("hidden", "weight", "targets", "old_logprobs", "advantages")
    arguments = {k: v for k, v in batch().items() if k in names} | others | {"memory": memory}
    neutral: dict[str, Any] = {
        "old_logprobs": arguments["old_logprobs"],
        "advantages": arguments["advantages"],
        "temperature": 1.0,
        "logit_scale": 1.0,
        "config": "grpo",
        "segments": (torch.arange(WIDTH) // 3).repeat(ROWS, 1),
        "ref_logprobs": arguments["old_logprobs"],
    }
    if name == "config":  # TRL's name for it, and max_length must follow
        value = gk.LossConfig.trl(loss_type="dr_grpo", max_completion_length=9)
    before, after = run(arguments | {name: neutral.get(name)}), run(arguments | {name: value})
    assert after["loss"].isfinite() and after["loss"] != before["loss"]
    assert not torch.allclose(after["by hidden"], before["by hidden"], rtol=1e-6, atol=0)


@needs_cpu_kernels
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_return_entropy_measures_it_and_changes_nothing_else(memory: str) -> None:
    arguments, places = batch(), [METRICS.index(name) for name in ("entropy_sum", "entropy_loss")]
    without, result = run(arguments, memory=memory), run(arguments, memory=memory, return_entropy=True)
    assert (result["metrics"][places] > 0).all() and not without["metrics"][places].any()
    result["metrics"][places] = 0
    assert_close(result, without, rtol=1e-12, atol=1e-14)
