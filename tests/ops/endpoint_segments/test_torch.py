"""endpoint_segments as a torch op: registration, compilation, no gradient, and losses computed from its results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.endpoint_segments.registration import FORWARD
from tests.harness import INDUCTOR, device_of
from tests.ops.endpoint_segments.batches import BACKENDS, CREDITS, F64, FAST, Batch, assert_same, batch_of, config_of

on_backends = pytest.mark.parametrize("backend", BACKENDS)


def width_for(backend: str, width: int) -> int:
    return width if backend in FAST else min(width, 12)


# torch


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_opcheck(backend: str, with_values: bool, packed: bool) -> None:
    batch = batch_of(1, 3, 9, values=with_values).to(F64 if packed == with_values else torch.float32)
    bounds = torch.tensor([0, 8, 8, 25]) if packed else None
    tokens = [batch.rewards, batch.logprobs, batch.old_logprobs, batch.mask]
    if packed:
        tokens = [x.reshape(-1) for x in tokens]
    values = torch.ones_like(tokens[0]) if with_values else None
    config = config_of(norm="prompt")
    more = (values, bounds, batch.groups, torch.tensor(1.0, dtype=F64))
    device = device_of(backend)
    on_device = [x if x is None else x.to(device) for x in (*tokens, *more)]
    torch.library.opcheck(FORWARD[backend], (*on_device, config.modes, config.coefficients))


@on_backends
def test_opcheck_without_tokens(backend: str) -> None:
    config = config_of()
    device = device_of(backend)
    for shape in ((0, 4), (3, 0)):
        nothing = torch.zeros(shape, device=device)
        tau = torch.tensor(1.0, dtype=F64, device=device)
        arguments = (nothing, nothing, nothing, nothing > 0, nothing, None, None, tau)
        torch.library.opcheck(FORWARD[backend], (*arguments, config.modes, config.coefficients))


@pytest.mark.parametrize(("with_values", "norm"), [(True, "batch"), (False, "prompt")])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None, with_values: bool, norm: str) -> None:
    torch.compiler.reset()
    device = device_of(backend or "cuda")
    config = config_of(norm=norm)
    batch = batch_of(1, 4, 12, values=with_values)
    groups = 2 if norm == "prompt" or not with_values else None

    def segments(rewards: Tensor, now: Tensor, old: Tensor, mask: Tensor, values: Tensor | None) -> Any:
        options: dict[str, Any] = {"values": values, "groups": groups, "config": config, "backend": backend}
        result = gk.endpoint_segments(rewards * 2, now, old, mask, **options)
        # torch 2.11 cannot return a tuple made by _replace
        return gk.EndpointSegments(result.advantages * 2, *result[1:])

    names = ("rewards", "logprobs", "old_logprobs", "mask", "values")
    tokens: list[Any] = [getattr(batch, name) for name in names]
    tokens = [None if x is None else x.to(device) for x in tokens]
    compiled = torch.compile(segments, fullgraph=True, backend=INDUCTOR)
    wanted = segments(*tokens)
    assert_same(compiled(*tokens), wanted)
    assert wanted.advantages.any() and wanted.num_segments.max() > 1


@on_backends
def test_packed_rows_and_a_loss_compile_into_one_graph(backend: str) -> None:
    torch.compiler.reset()
    batch = batch_of(1, 4, 12, empty=0.0).packed()
    device = device_of(backend)
    tokens = [x.to(device) for x in (batch.rewards, batch.logprobs, batch.old_logprobs, batch.mask)]
    assert batch.cu_seqlens is not None and batch.values is not None
    values, bounds = batch.values.to(device), batch.cu_seqlens.to(device)
    loss_config = gk.LossConfig(ratio="segment")

    def loss(rewards: Tensor, now: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        result = gk.endpoint_segments(rewards, now, old, mask, values=values, cu_seqlens=bounds, backend=backend)
        options: dict[str, Any] = {"segments": result.segment_ids, "cu_seqlens": bounds, "config": loss_config}
        return gk.policy_loss(now, old, result.advantages, **options).loss

    compiled = torch.compile(loss, fullgraph=True, backend=INDUCTOR)
    torch.testing.assert_close(compiled(*tokens), loss(*tokens), rtol=1e-12, atol=0)
    assert loss(*tokens) != 0


@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_results_have_no_gradient(backend: str, with_values: bool) -> None:
    batch = batch_of(1, 4, 12, values=with_values)
    wanted = batch.run(config_of(norm="batch"), backend)
    leaves = batch.map(lambda x: x if x.dtype == torch.bool else x.clone().requires_grad_())
    got = leaves.run(config_of(norm="batch"), backend)
    assert_same(got, wanted)
    assert not any(field.requires_grad for field in got)
    assert leaves.logprobs.requires_grad and leaves.logprobs.grad is None


# Losses of segments, by hand


def drifted(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Log-probs after some updates, and the log-probs at sampling time."""
    old = torch.where(batch.mask, batch.old_logprobs, 0.0)
    noise = 0.2 * torch.randn(old.shape, generator=torch.Generator().manual_seed(7), dtype=F64)
    return (old + noise).to(device).requires_grad_(), old.to(device)


def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def by_segment(now: Tensor, old: Tensor, result: gk.EndpointSegments, mean: bool = False) -> Tensor:
    """One clipped term per segment, from the joint ratio of its tokens."""
    terms = []
    for row in range(len(now)):
        for segment in range(int(result.num_segments[row])):
            own = result.segment_ids[row] == segment
            log_ratio = (now - old)[row, own]
            ratio = (log_ratio.mean() if mean else log_ratio.sum()).exp()
            (advantage,) = result.advantages[row, own & result.endpoint_mask[row]]
            terms.append(clipped(ratio, advantage))
    return torch.stack(terms).mean()


def assert_same_loss(got: Tensor, wanted: Tensor, leaves: Tensor | tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    gradients = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (got, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        assert other.any()


@pytest.mark.parametrize("ratio", ["segment", "segment_mean"])
@pytest.mark.parametrize("credit", CREDITS)
@on_backends
def test_policy_loss_of_segments(backend: str, credit: str, ratio: str) -> None:
    batch = batch_of(2, 4, width_for(backend, 40))
    result = batch.run(config_of(credit=credit, norm="batch"), backend)
    now, old = drifted(batch, result.advantages.device)
    config = gk.LossConfig(ratio=ratio)
    got = gk.policy_loss(now, old, result.advantages, segments=result.segment_ids, config=config)
    assert_same_loss(got.loss, by_segment(now, old, result, ratio == "segment_mean"), now)
    assert float(got.metrics["terms"]) == int(result.num_segments.sum())
    assert float(got.metrics["tokens"]) == int(batch.mask.sum())
    (gradient,) = torch.autograd.grad(got.loss, now)
    assert gradient[result.segment_ids >= 0].ne(0).sum() > result.num_segments.sum(), "tokens within segments learn"


@on_backends
def test_policy_loss_of_packed_segments(backend: str) -> None:
    batch = batch_of(2, 4, width_for(backend, 40), empty=0.0)
    config = gk.LossConfig(ratio="segment")
    padded = batch.run(config_of(), backend)
    now, old = drifted(batch, padded.advantages.device)
    wanted = by_segment(now, old, padded).detach()
    later = dataclasses.replace(batch, logprobs=now.detach().cpu(), old_logprobs=old.cpu()).packed()
    result = batch.packed().run(config_of(), backend)
    assert later.cu_seqlens is not None
    got = gk.policy_loss(
        later.logprobs.to(now.device),
        later.old_logprobs.to(now.device),
        result.advantages,
        segments=result.segment_ids,
        cu_seqlens=later.cu_seqlens.to(now.device),
        config=config,
    )
    torch.testing.assert_close(got.loss, wanted, rtol=1e-9, atol=1e-12)


@on_backends
def test_policy_loss_at_endpoints(backend: str) -> None:
    batch = batch_of(3, 4, width_for(backend, 40))
    result = batch.run(config_of(norm="batch"), backend)
    now, old = drifted(batch, result.advantages.device)
    got = gk.policy_loss(now, old, result.advantages, mask=result.endpoint_mask)
    by_default = gk.LossConfig.of("grpo")
    assert by_default.aggregation == "seq-mean-token-mean"
    terms = clipped((now - old).exp(), result.advantages)
    # TRL's loss counts rows without a token
    rows = [
        terms[row, ends].mean() if ends.any() else terms[row, :0].sum() for row, ends in enumerate(result.endpoint_mask)
    ]
    assert_same_loss(got.loss, torch.stack(rows).mean(), now)
    config = gk.LossConfig(aggregation="token-mean")
    got = gk.policy_loss(now, old, result.advantages, mask=result.endpoint_mask, config=config)
    assert_same_loss(got.loss, terms[result.endpoint_mask].mean(), now)
    assert float(got.metrics["tokens"]) == int(result.num_segments.sum())


@on_backends
def test_policy_loss_of_broadcast_advantages(backend: str) -> None:
    batch = batch_of(3, 4, width_for(backend, 40))
    result = batch.run(config_of(credit="broadcast"), backend)
    now, old = drifted(batch, result.advantages.device)
    counted = result.segment_ids >= 0
    config = gk.LossConfig(aggregation="token-mean")
    got = gk.policy_loss(now, old, result.advantages, mask=counted, config=config)
    assert_same_loss(got.loss, clipped((now - old).exp(), result.advantages)[counted].mean(), now)


HIDDEN, VOCABULARY = 6, 23


def head_of(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(11)
    shape = batch.mask.shape
    return {
        "hidden": torch.randn(*shape, HIDDEN, generator=random, dtype=F64).to(device).requires_grad_(),
        "weight": torch.randn(VOCABULARY, HIDDEN, generator=random, dtype=F64).to(device).requires_grad_(),
        "targets": torch.randint(VOCABULARY, shape, generator=random).to(device),
    }


def dense_logprobs(head: dict[str, Tensor]) -> Tensor:
    logits = head["hidden"] @ head["weight"].T
    return logits.log_softmax(-1).gather(-1, head["targets"][..., None])[..., 0]


@pytest.mark.parametrize("kind", ["mask", "places", "positions mask"])
@on_backends
def test_linear_policy_loss_at_endpoints(backend: str, kind: str) -> None:
    """The head is evaluated at endpoints alone, chosen by mask or by positions."""
    batch = batch_of(4, 4, width_for(backend, 20), empty=0.0)
    device = device_of(backend)
    head = head_of(batch, device)
    leaves = head["hidden"], head["weight"]
    now = dense_logprobs(head)
    old = (now + 0.2 * torch.randn_like(now)).detach()
    sampled = dataclasses.replace(batch, logprobs=now.detach().cpu(), old_logprobs=old.cpu())
    result = sampled.run(config_of(norm="batch"), backend)
    ends = result.endpoint_mask
    places = ends.flatten().nonzero()[:, 0] if kind == "places" else ends
    chosen: dict[str, Any] = {"mask" if kind == "mask" else "positions": places}
    config = gk.LossConfig(aggregation="token-mean")
    got = gk.linear_policy_loss(
        head["hidden"], head["weight"], head["targets"], old, result.advantages, config=config, **chosen
    )
    assert_same_loss(got.loss, clipped((now - old).exp(), result.advantages)[ends].mean(), leaves)
    assert float(got.metrics["tokens"]) == int(ends.sum())
    (of_hidden,) = torch.autograd.grad(clipped((now - old).exp(), result.advantages)[ends].mean(), leaves[:1])
    assert not of_hidden[~ends].any()


@on_backends
def test_linear_policy_loss_of_segments(backend: str) -> None:
    batch = batch_of(4, 4, width_for(backend, 20), empty=0.0)
    head = head_of(batch, device_of(backend))
    now = dense_logprobs(head)
    old = (now + 0.2 * torch.randn_like(now)).detach()
    sampled = dataclasses.replace(batch, logprobs=now.detach().cpu(), old_logprobs=old.cpu())
    result = sampled.run(config_of(), backend)
    got = gk.linear_policy_loss(
        head["hidden"],
        head["weight"],
        head["targets"],
        old,
        result.advantages,
        segments=result.segment_ids,
        config=gk.LossConfig(ratio="segment"),
    )
    assert_same_loss(got.loss, by_segment(now, old, result), (head["hidden"], head["weight"]))
