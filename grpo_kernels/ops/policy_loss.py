"""torch registration of policy_loss.

The reference is plain differentiable torch and needs none. The other backends compute the gradient together with the
loss, as further outputs, which the backward pass only multiplies.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels.ops import registry

# Not at the first call, as the others are: torch.compile traces through it.
_reference = importlib.import_module("grpo_kernels.reference.policy_loss")

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "triton": _WIDE, "cpu": _WIDE, "reference": _WIDE}
METRICS = 35

SCHEMA = (
    "(Tensor logprobs, Tensor? old_logprobs, Tensor advantages, Tensor? mask, Tensor? cu_seqlens, Tensor? segments, "
    "Tensor? ref_logprobs, Tensor? sampling_logprobs, Tensor? is_weights, Tensor? entropy, Tensor? entropy_floor, "
    "Tensor? weights, Tensor? normalizers, float[] counts, int[] modes, float[] coefficients, "
    "bool needs_entropy_gradient) -> (Tensor, Tensor, Tensor, Tensor)"
)
registry.define_compiled("_policy_loss_cuda" + SCHEMA)
_LOGPROBS, _ENTROPY, _ARGUMENTS = 0, 9, 17  # positions in it, and how many there are
_ENTROPY_COEF = 16  # position in the coefficients


def _fake(logprobs: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = logprobs.numel()
    loss, metrics = logprobs.new_empty(()), logprobs.new_empty(METRICS, dtype=torch.float64)
    return loss, metrics, logprobs.new_empty(tokens), logprobs.new_empty(tokens if args[-1] else 0)


def _setup_context(_: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    gradient, by_entropy = output[2:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gradient, by_entropy)
    ctx.shape = inputs[_LOGPROBS].shape
    ctx.has_entropy = inputs[-1]


def _backward(_: str, ctx: Any, upstream: Tensor | None, *__: Any) -> tuple[Any, ...]:
    results: list[Any] = [None] * _ARGUMENTS
    if upstream is None:
        return tuple(results)
    gradient, by_entropy = ctx.saved_tensors
    # Off the GPU it costs nothing to look, and most trainers call loss.backward() with nothing in between. Not while
    # something traces, with tensors of its own kind.
    is_real = type(upstream) is Tensor and not torch.compiler.is_compiling()
    one = is_real and upstream.device.type == "cpu" and upstream.item() == 1
    if ctx.needs_input_grad[_LOGPROBS]:
        results[_LOGPROBS] = (gradient if one else gradient * upstream).view(ctx.shape)
    if ctx.has_entropy and ctx.needs_input_grad[_ENTROPY]:
        results[_ENTROPY] = (by_entropy if one else by_entropy * upstream).view(ctx.shape)
    return tuple(results)


FORWARD = registry.define(
    "policy_loss", SCHEMA, {k: v for k, v in SUPPORTS.items() if k != "reference"}, _fake, (_setup_context, _backward)
)


def apply(backend: str, *args: Any) -> tuple[Tensor, Tensor]:
    """Loss, with gradient to log-probs and entropy, and metrics. The arguments of SCHEMA but the last."""
    if backend == "reference":
        return cast(tuple[Tensor, Tensor], _reference.forward(*args))
    entropy, coefficients = args[_ENTROPY], args[-1]
    needs = entropy is not None and entropy.requires_grad and coefficients[_ENTROPY_COEF] != 0
    loss, metrics, _, _ = FORWARD[backend](*args, needs)
    return loss, metrics
