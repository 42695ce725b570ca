"""Registers logits_policy_loss with torch.

The forward computes the log-probs of all tokens, the loss with its gradient by log-prob and entropy, and from those the
gradient of the logits. Logits are read once for their log-prob, and once more for their gradient, unless it is 0. In
one pass, a CUDA kernel computes the gradient of a row while it still has the row, and the loss comes last.

The gradient takes one of two routes. Traced, it is an output of a torch op that its backward scales. In eager mode an
autograd function keeps it and hands it over without a copy.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.policy_loss import registration as policy_loss
from grpo_kernels.ops.policy_loss.config import METRICS
from grpo_kernels.ops.policy_loss.registration import POLICY_SCHEMA, Policy
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.registration import ROWS_SCHEMA, Rows

SUPPORTS = token_logprobs.SUPPORTS
_KERNELS = {name: dtypes for name, dtypes in SUPPORTS.items() if name != "reference"}
_ROWS, _POLICY = len(Rows._fields), len(Policy._fields)
_INPUTS = f"{ROWS_SCHEMA}, {POLICY_SCHEMA}, bool want_entropy, bool needs_entropy_gradient"
SCHEMA = f"({_INPUTS}, bool one_pass) -> (Tensor, Tensor, Tensor)"
registry.define_compiled(f"_logits_policy_gradient_cuda(Tensor(a!) gradient, {_INPUTS}) -> (Tensor, Tensor)")


class Settings(NamedTuple):
    """Choice of what is computed, in the order of the schema; one_pass needs the CUDA kernel for bfloat16."""

    want_entropy: bool
    needs_entropy_gradient: bool
    one_pass: bool


def forward(
    backend: str, rows: Rows, policy: Policy, settings: Settings, inplace: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, metrics, and the gradient of the logits, which may overwrite them."""
    want_entropy, needs_entropy_gradient, one_pass = settings
    if one_pass:
        gradient = rows.logits if inplace else rows.logits.new_empty(rows.logits.shape)
        logprobs, entropy = registry.ops._logits_policy_gradient_cuda(gradient, *rows, *policy, *settings[:2])
        measured = entropy if want_entropy else None
        loss, metrics, *_ = policy_loss.FORWARD[backend](logprobs, measured, None, *policy, False)
        return loss, metrics, gradient
    logprobs, entropy, normalizer = token_logprobs.FORWARD[backend](*rows, want_entropy, False)
    shape = logprobs.shape if policy.cu_seqlens is None else logprobs.shape[1:]
    loss, metrics, by_logprob, by_entropy = policy_loss.FORWARD[backend](
        logprobs.view(shape), entropy.view(shape) if want_entropy else None, None, *policy, needs_entropy_gradient
    )
    upstream = by_logprob.view_as(logprobs), by_entropy.view_as(logprobs) if needs_entropy_gradient else None
    saved = rows.targets, normalizer, entropy if needs_entropy_gradient else None, *rows[2:]
    if not inplace:
        return loss, metrics, token_logprobs.BACKWARD[backend](*upstream, rows.logits, *saved)
    token_logprobs.INPLACE[backend](rows.logits, *upstream, *saved)
    return loss, metrics, rows.logits


def _op(backend: str, *args: Any) -> tuple[Tensor, ...]:
    rows, policy = Rows(*args[:_ROWS]), Policy(*args[_ROWS : _ROWS + _POLICY])
    return forward(backend, rows, policy, Settings(*args[_ROWS + _POLICY :]), inplace=False)


def _fake(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    loss = logits.new_empty((), dtype=torch.promote_types(logits.dtype, torch.float32))
    metrics = logits.new_empty(len(METRICS), dtype=torch.float64)
    return loss, metrics, logits.new_empty(logits.shape)


def _setup_context(_: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2])
    ctx.others = len(inputs) - 1


def _backward(backend: str, ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    if upstream is None:
        return None, *(None,) * ctx.others
    return policy_loss.scaled("logits_policy_loss", backend, gradient, upstream, is_owned=False), *(None,) * ctx.others


FORWARD = registry.define(
    "logits_policy_loss", SCHEMA, _KERNELS, _fake, (_setup_context, _backward), implementation=_op
)


class _PrecomputedGradient(torch.autograd.Function):
    """Hands over the gradient of the forward pass in the backward, once, without a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        backend: str,
        rows: Rows,
        policy: Policy,
        settings: Settings,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = rows._replace(logits=logits.detach())
        loss, metrics, ctx.gradient = forward(backend, rows, policy, settings, inplace)
        if inplace:
            torch.autograd.graph.increment_version(logits)  # whoever else kept the logits is told
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)
        ctx.backend = backend
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        others = (None,) * 5
        if upstream is None:
            return None, *others
        if ctx.gradient is None:
            raise RuntimeError(
                "logits_policy_loss: backward must run once, got a second call; the first handed out the gradient"
            )
        gradient, ctx.gradient = ctx.gradient, None
        return policy_loss.scaled("logits_policy_loss", ctx.backend, gradient, upstream, is_owned=True), *others


def apply(backend: str, rows: Rows, policy: Policy, settings: Settings, inplace: bool) -> tuple[Tensor, Tensor]:
    """Loss and metrics. The loss has a gradient by the logits."""
    if torch.compiler.is_compiling():
        return cast(tuple[Tensor, Tensor], FORWARD[backend](*rows, *policy, *settings)[:2])
    results = _PrecomputedGradient.apply(rows.logits, backend, rows, policy, settings, inplace)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], results)
