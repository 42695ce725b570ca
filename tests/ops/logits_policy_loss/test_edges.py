"""Edge cases of logits_policy_loss: rows that are not read, the backward, overwritten logits, small gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.logits_policy_loss import registration as op
from grpo_kernels.ops.policy_loss.config import METRICS
from tests.harness import INDUCTOR, assert_within_budget, device_of, needs_cpu_kernels
from tests.ops.logits_policy_loss.batches import (
    BACKENDS,
    CONFIGS,
    F64,
    KERNELS,
    assert_close,
    assert_same,
    batch,
    cast,
    composed,
    run,
)

NAN = float("nan")


def loss_of(backend: str, name: str = "grpo", **options: Any) -> tuple[Tensor, Tensor]:
    """A loss and the leaf that it has a gradient for; the logits are not a leaf."""
    arguments = {k: v.to(device_of(backend)) for k, v in cast(batch(name), torch.float32).items()}
    leaf = arguments.pop("logits").detach().requires_grad_()
    options = {"config": CONFIGS[name], "backend": backend} | options
    return gk.logits_policy_loss(leaf * 1, **arguments, **options).loss, leaf


# Rows that are not read


@pytest.mark.parametrize("name", ["clip", "sequence", "entropy", "quantile"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_take_no_part_may_hold_anything(backend: str, name: str) -> None:
    arguments = cast(batch(name), torch.float32)
    segments = torch.zeros(4, 7).int()
    segments[2, 1] = -1
    arguments |= {"segments": segments, "config": CONFIGS[name]}
    expected = run(arguments, backend)
    left_out = ~arguments["mask"] | (arguments["targets"] == -100) | (segments < 0)
    poisoned = {k: torch.where(left_out, NAN, v) for k, v in arguments.items() if k.endswith("logprobs")}
    poisoned["logits"] = torch.where(left_out[..., None], NAN, arguments["logits"])
    got = run(arguments | poisoned, backend)
    assert_same(got, expected)
    assert not got["gradient"][left_out].any() and got["gradient"][0, 0].any()


@pytest.mark.parametrize("backend", KERNELS)
def test_clipped_tokens_have_a_gradient_of_exactly_0(backend: str) -> None:
    arguments = cast(batch("grpo"), torch.float32)
    arguments["advantages"] = torch.ones(4)
    arguments["old_logprobs"][1] -= 2  # ratios of e^2 with a positive advantage
    gradient = run(arguments, backend)["gradient"]
    assert not gradient[1].any() and gradient[0, 0].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
def test_no_tokens(backend: str, shape: tuple[int, int]) -> None:
    tokens = torch.zeros(shape)
    arguments = {"logits": torch.zeros(*shape, 5), "targets": tokens.long(), "old_logprobs": tokens}
    result = run(arguments | {"advantages": torch.ones(shape[0])}, backend)
    assert result["loss"] == 0 and result["gradient"].shape == (*shape, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_of_any_strides_are_overwritten(backend: str) -> None:
    device = device_of(backend)
    row, tokens = torch.zeros(5, device=device, requires_grad=True), torch.zeros(2, 0, device=device)
    advantages = torch.ones(2, device=device)
    with gk.use_backend(backend):
        loss = gk.logits_policy_loss(row.expand(2, 0, 5), tokens.long(), tokens, advantages, inplace=True).loss
    loss.backward()
    assert loss == 0 and torch.equal(row.grad, torch.zeros_like(row))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_takes_part(backend: str) -> None:
    result = run(cast(batch("grpo"), torch.float32) | {"mask": torch.zeros(4, 7)}, backend)
    assert result["loss"] == 0 and not result["gradient"].any()


# The backward


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("backend", KERNELS)
def test_the_backward_runs_once(backend: str, inplace: bool) -> None:
    loss, leaf = loss_of(backend, inplace=inplace)
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    with pytest.raises(RuntimeError, match="logits_policy_loss: backward must run once, got a second call"):
        loss.backward()
    assert torch.equal(leaf.grad, first)


@pytest.mark.parametrize("backend", KERNELS)
def test_an_upstream_gradient_scales(backend: str) -> None:
    one, leaf = loss_of(backend)
    torch.manual_seed(0)
    scaled, other = loss_of(backend)
    one.backward()
    (scaled * -2.5).backward()
    torch.testing.assert_close(other.grad, -2.5 * leaf.grad, rtol=1e-6, atol=0)


@needs_cpu_kernels
def test_the_gradient_is_handed_over_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = cast(batch("grpo"), torch.float32)
    logits = arguments.pop("logits").detach().requires_grad_()
    forward, addresses = op.forward, []

    def traced(*args: Any) -> tuple[Tensor, ...]:
        results = forward(*args)
        addresses.append(results[2].data_ptr())
        return results

    monkeypatch.setattr(op, "forward", traced)
    gk.logits_policy_loss(logits, **arguments).loss.backward()
    assert addresses == [logits.grad.data_ptr()]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_gradient_the_logits_are_only_read(backend: str, inplace: bool) -> None:
    arguments = {k: v.to(device_of(backend)) for k, v in cast(batch("entropy"), torch.float32).items()}
    options = {"config": CONFIGS["entropy"], "backend": backend}
    before = arguments["logits"].clone()
    loss = gk.logits_policy_loss(**arguments, inplace=inplace, **options).loss
    assert not loss.requires_grad and torch.equal(arguments["logits"], before)
    with torch.no_grad():
        logits = arguments.pop("logits").detach().requires_grad_() * 1
        again = gk.logits_policy_loss(logits, **arguments, inplace=inplace, **options).loss
    assert torch.equal(again, loss) and torch.equal(logits, before)
    logits = logits.requires_grad_() * 1
    assert torch.equal(gk.logits_policy_loss(logits, **arguments, inplace=inplace, **options).loss, loss)


# Overwritten logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_in_place_writes_over_the_logits_and_nothing_beside_them(backend: str, dtype: torch.dtype) -> None:
    arguments = {k: v.to(device_of(backend)) for k, v in cast(batch("grpo", width=7), torch.float32).items()}
    whole = arguments.pop("logits").to(dtype)
    tokens = {k: v[:, :-1] if v.dim() == 2 else v for k, v in arguments.items()}
    leaf = whole.clone().requires_grad_()
    expected = leaf.detach().clone().requires_grad_()
    gk.logits_policy_loss(expected[:, :-1], **tokens, backend=backend).loss.backward()
    computed = leaf * 1
    loss = gk.logits_policy_loss(computed[:, :-1], **tokens, inplace=True, backend=backend).loss
    assert torch.equal(computed[:, :-1], expected.grad[:, :-1]), "the memory of the logits, after the forward"
    assert torch.equal(computed[:, -1], whole[:, -1]), "beside it"
    loss.backward()
    assert torch.equal(leaf.grad, expected.grad)


@pytest.mark.parametrize("backend", KERNELS)
def test_in_place_tells_whoever_needs_the_logits(backend: str) -> None:
    arguments = {k: v.to(device_of(backend)) for k, v in cast(batch("grpo"), torch.float32).items()}
    computed = arguments.pop("logits").detach().requires_grad_() * 1
    other = computed.square().sum()  # saves the logits for its own backward
    gk.logits_policy_loss(computed, **arguments, inplace=True, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


# Numbers


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_scale_saves_the_small_gradients_of_float16(backend: str, inplace: bool) -> None:
    """Without it they are all below the smallest float16."""
    exact = cast(cast(batch("grpo"), torch.float16), F64)
    rounded = cast(exact, torch.float32) | {"logits": exact["logits"].half()}
    options = {"scale": 2.0**16, "normalizer": 1e8, "config": CONFIGS["clip"]}
    options["ref_logprobs"] = exact["old_logprobs"]
    got, gold = run(rounded, backend, inplace=inplace, **options), composed(exact, **options)
    working = run(rounded, "reference", **options)
    assert got["gradient"].any()
    assert_within_budget(got["gradient"], working["gradient"], gold["gradient"])


# Other parts of torch


@pytest.mark.parametrize("name", ["clip", "entropy", "sequence"])
@pytest.mark.parametrize("backend", [name for name in KERNELS if name == "cpu" or torch.cuda.is_available()])
def test_opcheck(monkeypatch: pytest.MonkeyPatch, backend: str, name: str) -> None:
    # with all of these arguments no metric is NaN, which opcheck does not consider equal
    arguments = cast(batch(name, rows=2), torch.float32)
    arguments |= {"sampling_logprobs": arguments["old_logprobs"] + 0.01, "is_weights": torch.rand(2, 7)}
    arguments = {k: v.to(device_of(backend)) for k, v in arguments.items()}
    calls: list[tuple[Any, ...]] = []
    once = op.apply
    monkeypatch.setattr(op, "apply", lambda *args: calls.append(args) or once(*args))
    arguments["logits"].requires_grad_()
    gk.logits_policy_loss(**arguments, config=CONFIGS[name], return_entropy=True, backend=backend)
    _, rows, policy, settings, _ = calls[0]
    torch.library.opcheck(registry.overload("logits_policy_loss", backend), (*rows, *policy, *settings))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (None, "clip"),
        (None, "quantile"),
        ("reference", "clip"),
        pytest.param("cpu", "sequence", marks=needs_cpu_kernels),
    ],
)
def test_compiles_into_one_graph(backend: str | None, name: str) -> None:
    torch.compiler.reset()
    arguments = {k: v.to(device_of(backend or "cpu")) for k, v in cast(batch(name), torch.float32).items()}
    logits = arguments.pop("logits")

    def loss(leaf: Tensor, **others: Tensor) -> Tensor:
        return gk.logits_policy_loss(leaf * 2, **others, config=CONFIGS[name], backend=backend).loss * 3

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=INDUCTOR)):
        leaf = logits.clone().requires_grad_()
        value = function(leaf, **arguments)
        value.backward()
        results.append({"loss": value.detach(), "gradient": leaf.grad})
    assert_close(*results, rtol=1e-5, atol=1e-6)
    assert results[0]["gradient"].any()


# Options

# Each option's value, and the other arguments of the calls with and without it.
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "old_logprobs": (torch.full((4, 7), -3.0, dtype=F64), {}),
    "advantages": (torch.ones(4, dtype=F64), {}),
    "temperature": (torch.full((4, 1), 1.5, dtype=F64), {}),
    "softcap": (1.5, {}),
    "logit_scale": (0.5, {}),
    "mask": (torch.arange(7) % 2 == torch.zeros(4, 1), {}),
    "segments": ((torch.arange(7) // 2).repeat(4, 1), {"config": CONFIGS["segment"]}),
    "kinds": ((torch.arange(7) % 4).repeat(4, 1), {}),
    "ref_logprobs": (torch.full((4, 7), -1.0, dtype=F64), {"config": CONFIGS["clip"]}),
    "sampling_logprobs": (torch.full((4, 7), -6.0, dtype=F64), {"config": CONFIGS["corrected"]}),
    "is_weights": (torch.linspace(0.5, 1, 4, dtype=F64), {}),
    "weights": (torch.full((4, 7), 0.5, dtype=F64), {}),
    "normalizer": (11.0, {}),
    "groups": (torch.arange(4) // 2, {"config": gk.LossConfig(loss="gvpo")}),
    "log_z": (
        torch.ones(4, dtype=F64),
        {"config": gk.LossConfig(loss="flowrl"), "ref_logprobs": torch.full((4, 7), -1.0, dtype=F64)},
    ),
    "config": (gk.LossConfig.trl(loss_type="dr_grpo", max_completion_length=9), {}),
}


def test_the_options_are_all_of_the_signature() -> None:
    # these have tests of their own; the last two must not change the result
    others = {"logits", "targets", "cu_seqlens", "return_entropy", "inplace", "backend"}
    assert set(inspect.signature(gk.logits_policy_loss).parameters) == others | set(OPTIONS)


@needs_cpu_kernels
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_the_result(name: str) -> None:
    value, others = OPTIONS[name]
    arguments = {k: v for k, v in batch("grpo").items() if k != "mask"} | others
    neutral: dict[str, Any] = {
        "old_logprobs": arguments["old_logprobs"],
        "advantages": arguments["advantages"],
        "temperature": 1.0,
        "logit_scale": 1.0,
        "config": "grpo",
        "segments": (torch.arange(7) // 3).repeat(4, 1),
        "ref_logprobs": arguments["old_logprobs"],
        "sampling_logprobs": arguments["old_logprobs"],
        "groups": torch.zeros(4).long(),
        "log_z": torch.zeros(4, dtype=F64),
    }
    before, after = (run(arguments | {name: each}, "cpu") for each in (neutral.get(name), value))
    assert after["loss"].isfinite() and after["loss"] != before["loss"]
    assert not torch.allclose(after["gradient"], before["gradient"], rtol=1e-6, atol=0)


@needs_cpu_kernels
def test_return_entropy_measures_it_and_changes_nothing_else() -> None:
    arguments, places = batch("grpo"), [METRICS.index(name) for name in ("entropy_sum", "entropy_loss")]
    without, result = run(arguments, "cpu"), run(arguments, "cpu", return_entropy=True)
    assert (result["metrics"][places] > 0).all() and not without["metrics"][places].any()
    result["metrics"][places] = 0
    assert_close(result, without, 1e-12, 1e-14)
