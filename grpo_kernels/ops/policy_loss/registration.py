"""Registers policy_loss with torch.

The reference is plain differentiable torch and needs no registration. The other backends compute the gradient together
with the loss, as additional outputs; the backward pass only multiplies them by the upstream gradient.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.groups import packed_bounds
from grpo_kernels.ops.policy_loss.config import METRICS

# Imported here and not at the first call, because torch.compile traces through it.
_reference = importlib.import_module("grpo_kernels.ops.policy_loss.reference")

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "triton": _WIDE, "cpu": _WIDE, "reference": _WIDE}


class Policy(NamedTuple):
    """Everything a policy loss is computed from except log-probs and entropies, in the order of the schema.

    Tensors share one dtype, are contiguous and have no gradient. `normalizers` and `counts` are both [3], for tokens,
    rows and segments, NaN where the batch is to be counted. `modes` and `coefficients` are the plan of a LossConfig.
    """

    old_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    segments: Tensor | None
    ref_logprobs: Tensor | None
    sampling_logprobs: Tensor | None
    is_weights: Tensor | None
    weights: Tensor | None
    normalizers: Tensor | None
    counts: list[float]
    modes: list[int]
    coefficients: list[float]


POLICY_SCHEMA = (
    "Tensor? old_logprobs, Tensor advantages, Tensor? mask, Tensor? cu_seqlens, Tensor? segments, "
    "Tensor? ref_logprobs, Tensor? sampling_logprobs, Tensor? is_weights, Tensor? weights, Tensor? normalizers, "
    "float[] counts, int[] modes, float[] coefficients"
)
SCHEMA = (
    f"(Tensor logprobs, Tensor? entropy, Tensor? entropy_floor, {POLICY_SCHEMA}, bool needs_entropy_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
# One more result: whether segment ids ascend, [1] for ratios of segments, otherwise [0].
registry.define_compiled("_policy_loss_cuda" + SCHEMA.removesuffix(")") + ", Tensor)")


def _fake(logprobs: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, needs_entropy_gradient = logprobs.numel(), args[-1]
    loss, metrics = logprobs.new_empty(()), logprobs.new_empty(len(METRICS), dtype=torch.float64)
    return loss, metrics, logprobs.new_empty(tokens), logprobs.new_empty(tokens if needs_entropy_gradient else 0)


def _setup_context(_: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logprobs, *rest, ctx.needs_entropy_gradient = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])
    ctx.shape, ctx.others = logprobs.shape, len(rest)


def _backward(_: str, ctx: Any, upstream: Tensor | None, *__: Any) -> tuple[Tensor | None, ...]:
    by_logprob = by_entropy = None
    if upstream is not None:
        by_logprob, by_entropy = ctx.saved_tensors
        # Most trainers call loss.backward() directly, and off the GPU it costs nothing to see that. Under tracing there
        # is no value to see.
        is_real = type(upstream) is Tensor and not torch.compiler.is_compiling()
        is_one = is_real and upstream.device.type == "cpu" and upstream.item() == 1
        needs_logprobs, needs_entropy = ctx.needs_input_grad[:2]
        by_logprob = _scaled(by_logprob, upstream, is_one, ctx.shape) if needs_logprobs else None
        needs_entropy = needs_entropy and ctx.needs_entropy_gradient
        by_entropy = _scaled(by_entropy, upstream, is_one, ctx.shape) if needs_entropy else None
    return by_logprob, by_entropy, *(None,) * ctx.others


def _scaled(gradient: Tensor, upstream: Tensor, is_one: bool, shape: torch.Size) -> Tensor:
    return (gradient if is_one else gradient * upstream).view(shape)


def _cuda(logprobs: Tensor, entropy: Tensor | None, entropy_floor: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """Checks the bounds of packed rows and the order of segments; the rest is one compiled op."""
    policy, needs_entropy_gradient = Policy(*args[:-1]), args[-1]
    if policy.cu_seqlens is not None:
        policy = policy._replace(cu_seqlens=packed_bounds("policy_loss", policy.cu_seqlens, logprobs.numel()))
    op = torch.ops.grpo_kernels._policy_loss_cuda
    *results, ascends = op(logprobs, entropy, entropy_floor, *policy, needs_entropy_gradient)
    if ascends.numel() > 0:
        torch._assert_async(ascends.all(), "policy_loss: segments must ascend from 0 along each row")
    return tuple(results)


_KERNELS = {name: dtypes for name, dtypes in SUPPORTS.items() if name != "reference"}
FORWARD = registry.define(
    "policy_loss", SCHEMA, _KERNELS, _fake, (_setup_context, _backward), folder=__package__, cuda=_cuda
)


def apply(
    backend: str,
    logprobs: Tensor,
    entropy: Tensor | None,
    entropy_floor: Tensor | None,
    policy: Policy,
    needs_entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Loss and metrics. The loss has a gradient by log-probs and entropy."""
    if backend == "reference":
        return cast(tuple[Tensor, Tensor], _reference.forward(logprobs, entropy, entropy_floor, *policy))
    loss, metrics, _, _ = FORWARD[backend](logprobs, entropy, entropy_floor, *policy, needs_entropy_gradient)
    return loss, metrics
