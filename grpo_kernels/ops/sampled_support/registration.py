"""Registers log-probs over a support with torch.

Logits of kept ids are dot products of rows that are gathered from the weight. Over these logits, the kernels are those
of token_logprobs with rows of several lengths. The gradient of the hidden states gathers the same rows again; that of
the weight goes through the entries by token id, so that every row of it is written once, in a fixed order of additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head.head import Head
from grpo_kernels.ops.sampled_support import reference
from grpo_kernels.ops.sampled_support.arguments import Entries
from grpo_kernels.ops.token_logprobs import registration as token_logprobs

_GPU = (torch.bfloat16, torch.float16, torch.float32)
_ALL = (*_GPU, torch.float64)
_IMPLEMENTED = {"triton": _GPU, "reference": _ALL}
# On a CPU there is no kernel: the reference computes the log-probs, and the CPU's kernels the loss of them.
SUPPORTS = {"triton": _GPU, "cpu": _ALL, "reference": _ALL}


def _define(
    name: str,
    inputs: type,
    results: str,
    fake: Callable[[Any], Any],
    mutated: tuple[str, ...] = (),
) -> registry.TorchOp:
    """An op of this file, by the functions of its name in triton.py and reference.py."""
    layout, function = registry.Layout(inputs), getattr(reference, name)
    return registry.TorchOp(
        f"sampled_support_{name}",
        inputs,
        results,
        _IMPLEMENTED,
        fake,
        triton=name,
        reference=lambda values: function(*layout.flat(values)),
        opaque_reference=True,
        mutated=mutated,
        folder=__package__,
    )


# Logits of kept ids


@op_inputs
class KeptLogits:
    """Hidden states [N, H], weight and bias of a head, and the entries of a support."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    token_ids: Tensor
    rows: Tensor
    bounds: Tensor
    order: Tensor


@op_inputs
class ToHidden:
    """Gradients by the logits of the entries, to multiply by rows of the weight."""

    by_logits: Tensor
    weight: Tensor
    token_ids: Tensor
    bounds: Tensor


@op_inputs
class AddWeight:
    """Gradients by the logits of the entries, and tensors that the gradients of weight and bias are added to."""

    by_logits: Tensor
    hidden: Tensor
    token_ids: Tensor
    rows: Tensor
    order: Tensor
    weight: Tensor | None
    bias: Tensor | None


@op_inputs
class KeptLogitsGradient:
    """Gradients by the logits of the entries, and whether hidden states, weight and bias need one."""

    by_logits: Tensor
    inputs: KeptLogits
    needs: list[bool]


LOGITS = _define(
    "logits",
    KeptLogits,
    "Tensor",
    lambda inputs: inputs.hidden.new_empty(inputs.token_ids.shape, dtype=_wide(inputs.hidden)),
)
TO_HIDDEN = _define(
    "to_hidden",
    ToHidden,
    "Tensor",
    lambda inputs: inputs.weight.new_empty(len(inputs.bounds) - 1, inputs.weight.shape[1]),
)
ADD_WEIGHT = _define("add_weight", AddWeight, "()", lambda inputs: None, mutated=("weight", "bias"))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _fake_backward(gradient: KeptLogitsGradient) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = gradient.inputs.hidden, gradient.inputs.weight
    needs_hidden, needs_weight, needs_bias = gradient.needs
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0, 0)),
        weight.new_empty(weight.shape[0] if needs_bias else 0),
    )


def _backward(backend: str, gradient: KeptLogitsGradient, into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden states, weight and bias; empty where they are not needed, or added to `into`."""
    inputs, by_logits = gradient.inputs, gradient.by_logits
    hidden, weight = inputs.hidden, inputs.weight
    needs_hidden, needs_weight, needs_bias = gradient.needs
    by_hidden = hidden.new_empty(0)
    if needs_hidden:
        by_hidden = TO_HIDDEN(backend, ToHidden(by_logits, weight, inputs.token_ids, inputs.bounds))
    shape = tuple(weight.shape) if needs_weight and into is None else (0, 0)
    in_huge_pages = weight.device.type == "cpu" and registry.HAS_CPU_LIBRARY
    by_weight = token_logprobs.empty(weight, shape, weight.dtype, "cpu" if in_huge_pages else backend).zero_()
    by_bias = weight.new_zeros(weight.shape[0] if needs_bias else 0)
    if needs_weight or needs_bias:
        total = (by_weight if into is None else into) if needs_weight else None
        indices = inputs.token_ids, inputs.rows, inputs.order
        ADD_WEIGHT(backend, AddWeight(by_logits, hidden, *indices, total, by_bias if needs_bias else None))
    return by_hidden, by_weight, by_bias


BACKWARD = registry.ComposedOp(
    "sampled_support_backward",
    KeptLogitsGradient,
    "(Tensor, Tensor, Tensor)",
    _IMPLEMENTED,
    _fake_backward,
    _backward,
)


class _Logits(torch.autograd.Function):
    """Logits of kept ids. The gradient by the weight may be added to a tensor, in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        entries: Entries,
        into: Tensor | None,
        backend: str,
    ) -> Tensor:
        inputs = KeptLogits(hidden, weight, bias, entries.token_ids, entries.rows, entries.bounds, entries.order)
        registry.save(ctx, LOGITS.layout, inputs)
        ctx.into, ctx.backend = into, backend
        return cast(Tensor, LOGITS(backend, inputs))

    @staticmethod
    def backward(ctx: Any, by_logits: Tensor) -> tuple[Tensor | None, ...]:
        inputs, _ = registry.saved(ctx, LOGITS.layout)
        needs = list(ctx.needs_input_grad[:3])
        gradient = KeptLogitsGradient(by_logits.detach().contiguous(), inputs, needs)
        if ctx.into is None:
            results = BACKWARD(ctx.backend, gradient)
        else:
            results = _backward(ctx.backend, gradient, ctx.into)
            needs[1] = False
        finished = (registry.first_derivative("sampled_support", result) for result in results)
        return *(result if need else None for result, need in zip(finished, needs, strict=True)), None, None, None


# Log-probs from logits in rows of several lengths


@op_inputs
class RaggedRows:
    """Logits [E] of kept ids, and of each row the place of the target, bounds and temperature."""

    logits: Tensor
    places: Tensor
    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float
    want_entropy: bool
    bounds: Tensor


@op_inputs
class RaggedGradient:
    """Upstream gradients, and arguments and results of the forward pass."""

    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None
    normalizer: Tensor
    entropy: Tensor | None
    logits: Tensor
    places: Tensor
    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float
    bounds: Tensor


def _fake_logprobs(inputs: RaggedRows) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = inputs.logits.new_empty(inputs.places.shape)
    entropy = torch.empty_like(logprobs) if inputs.want_entropy else logprobs.new_empty(0)
    return logprobs, entropy, torch.empty_like(logprobs, dtype=torch.float64)


LOGPROBS = _define("logprobs", RaggedRows, "(Tensor, Tensor, Tensor)", _fake_logprobs)
LOGPROBS_BACKWARD = _define(
    "logprobs_backward", RaggedGradient, "Tensor", lambda inputs: torch.empty_like(inputs.logits)
)


class _Logprobs(torch.autograd.Function):
    """Log-probs and entropies (empty unless wanted) of rows, whose logits are the first argument."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, inputs: RaggedRows, backend: str) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normalizer = LOGPROBS(backend, inputs)
        if not inputs.want_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        registry.save(ctx, LOGPROBS.layout, inputs, normalizer, entropy if inputs.want_entropy else None)
        ctx.backend = backend
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if by_logprobs is None and by_entropy is None:
            return None, None, None
        rows, (normalizer, entropy) = registry.saved(ctx, LOGPROBS.layout)
        assert normalizer is not None
        upstream = registry.upstream(by_logprobs), registry.upstream(by_entropy if rows.want_entropy else None)
        gradient = RaggedGradient(
            *upstream,
            normalizer,
            entropy,
            rows.logits,
            rows.places,
            rows.row_temperature,
            rows.temperature,
            rows.softcap,
            rows.logit_scale,
            rows.bounds,
        )
        result = LOGPROBS_BACKWARD(ctx.backend, gradient)
        return registry.first_derivative("sampled_support", result), None, None


def apply(backend: str, head: Head, entries: Entries, want_entropy: bool, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (empty unless wanted) over the entries; `into` takes the gradient of the weight."""
    backend = "reference" if backend == "cpu" else backend
    hidden, weight = (x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous() for x in (head.hidden, head.weight))
    bias = None if head.bias is None else head.bias.contiguous()
    logits = _Logits.apply(hidden, weight, bias, entries, into, backend)  # type: ignore[no-untyped-call]
    rows = RaggedRows(logits, entries.places, head.row_temperature, *head.scaling, want_entropy, entries.bounds)
    results = _Logprobs.apply(logits, rows, backend)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], results)
