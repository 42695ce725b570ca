"""Registers log-probs over a support with torch.

Logits of kept ids are dot products of rows that are gathered from the weight. Over these logits, the kernels are those
of token_logprobs with rows of several lengths. The gradient of the hidden states gathers the same rows again; that of
the weight goes through the entries by token id, so that every row of it is written once, in a fixed order of additions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.sampled_support.config import Entries
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.registration import Rows

_GPU = (torch.bfloat16, torch.float16, torch.float32)
_ALL = (*_GPU, torch.float64)
IMPLEMENTED = {"triton": _GPU, "reference": _ALL}
# On a CPU there is no kernel: the reference computes the log-probs, and the CPU's kernels the loss of them.
SUPPORTS = {"triton": _GPU, "cpu": _ALL, "reference": _ALL}

_ENTRIES = "Tensor token_ids, Tensor rows, Tensor bounds, Tensor order"
_SCALING = "Tensor? row_temperature, float temperature, float? softcap, float logit_scale"
LOGITS_SCHEMA = f"(Tensor hidden, Tensor weight, Tensor? bias, {_ENTRIES}) -> Tensor"
TO_HIDDEN_SCHEMA = "(Tensor by_logits, Tensor weight, Tensor token_ids, Tensor bounds) -> Tensor"
ADD_WEIGHT_SCHEMA = (
    "(Tensor by_logits, Tensor hidden, Tensor token_ids, Tensor rows, Tensor order, Tensor(a!)? weight, "
    "Tensor(b!)? bias) -> ()"
)
BACKWARD_SCHEMA = (
    f"(Tensor by_logits, Tensor hidden, Tensor weight, {_ENTRIES}, bool[] needs) -> (Tensor, Tensor, Tensor)"
)
LOGPROBS_SCHEMA = (
    f"(Tensor logits, Tensor places, Tensor bounds, {_SCALING}, bool want_entropy) -> (Tensor, Tensor, Tensor)"
)
LOGPROBS_BACKWARD_SCHEMA = (
    "(Tensor? grad_logprobs, Tensor? grad_entropy, Tensor logits, Tensor places, Tensor bounds, Tensor normalizer, "
    f"Tensor? entropy, {_SCALING}) -> Tensor"
)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _no_context(backend: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _no_second_derivative(backend: str, ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("sampled_support: a second derivative is not implemented; use create_graph=False")


# Logits of kept ids


def _fake_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, *entries: Tensor) -> Tensor:
    return hidden.new_empty(token_ids.shape, dtype=_wide(hidden))


def _fake_to_hidden(by_logits: Tensor, weight: Tensor, token_ids: Tensor, bounds: Tensor) -> Tensor:
    return weight.new_empty(bounds.shape[0] - 1, weight.shape[1])


def _fake_add_weight(*args: Any) -> None:
    return None


def _fake_backward(by_logits: Tensor, hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs_hidden, needs_weight, needs_bias = rest[-1]
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0, 0)),
        weight.new_empty(weight.shape[0] if needs_bias else 0),
    )


def _backward_op(
    backend: str,
    by_logits: Tensor,
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    bounds: Tensor,
    order: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden states, weight and bias; empty where they are not needed."""
    needs_hidden, needs_weight, needs_bias = needs
    by_hidden = TO_HIDDEN[backend](by_logits, weight, token_ids, bounds) if needs_hidden else hidden.new_empty(0)
    shape = tuple(weight.shape) if needs_weight else (0, 0)
    in_huge_pages = weight.device.type == "cpu" and registry.HAS_CPU_LIBRARY
    by_weight = token_logprobs.empty(weight, shape, weight.dtype, "cpu" if in_huge_pages else backend).zero_()
    by_bias = weight.new_zeros(weight.shape[0] if needs_bias else 0)
    if needs_weight or needs_bias:
        totals = by_weight if needs_weight else None, by_bias if needs_bias else None
        ADD_WEIGHT[backend](by_logits, hidden, token_ids, rows, order, *totals)
    return by_hidden, by_weight, by_bias


def _set_up_logits(backend: str, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, _, *entries = inputs
    ctx.save_for_backward(hidden, weight, *entries)


def _differentiate_logits(backend: str, ctx: Any, by_logits: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    gradients = BACKWARD[backend](by_logits.contiguous(), *ctx.saved_tensors, needs)
    return *(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), *(None,) * 4


LOGITS = registry.define(
    "sampled_support_logits",
    LOGITS_SCHEMA,
    IMPLEMENTED,
    _fake_logits,
    (_set_up_logits, _differentiate_logits),
    folder=__package__,
    function="logits",
)
TO_HIDDEN = registry.define(
    "sampled_support_to_hidden",
    TO_HIDDEN_SCHEMA,
    IMPLEMENTED,
    _fake_to_hidden,
    folder=__package__,
    function="to_hidden",
)
ADD_WEIGHT = registry.define(
    "sampled_support_add_weight",
    ADD_WEIGHT_SCHEMA,
    IMPLEMENTED,
    _fake_add_weight,
    folder=__package__,
    function="add_weight",
)
BACKWARD = registry.define(
    "sampled_support_backward",
    BACKWARD_SCHEMA,
    IMPLEMENTED,
    _fake_backward,
    (_no_context, _no_second_derivative),
    implementation=_backward_op,
)


class _LogitsInto(torch.autograd.Function):
    """Logits whose gradient by the weight is added to a tensor, in the backward, instead of returned."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, backend: str, entries: Entries, into: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.backend, ctx.entries, ctx.into = backend, entries, into
        return cast(Tensor, LOGITS[backend](hidden, weight, bias, *_indices(entries)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_logits: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight), entries = ctx.saved_tensors, ctx.entries
        by_logits = by_logits.contiguous()
        needs = [ctx.needs_input_grad[0], False, ctx.needs_input_grad[2]]
        by_hidden, _, by_bias = BACKWARD[ctx.backend](by_logits, hidden, weight, *_indices(entries), needs)
        ADD_WEIGHT[ctx.backend](by_logits, hidden, entries.token_ids, entries.rows, entries.order, ctx.into, None)
        return by_hidden if needs[0] else None, None, by_bias if needs[2] else None, None, None, None


# Log-probs from logits in rows of several lengths


def _fake_logprobs(logits: Tensor, places: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.new_empty(places.shape)
    entropy = torch.empty_like(logprobs) if rest[-1] else logprobs.new_empty(0)
    return logprobs, entropy, logprobs.new_empty(places.shape, dtype=torch.float64)


def _fake_logprobs_backward(_: Tensor | None, __: Tensor | None, logits: Tensor, *saved: Any) -> Tensor:
    return torch.empty_like(logits)


def _set_up_logprobs(backend: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, places, bounds, row_temperature, *ctx.scaling, want_entropy = inputs
    _, entropy, normalizer = output
    ctx.mark_non_differentiable(*((normalizer,) if want_entropy else (entropy, normalizer)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, places, bounds, normalizer, entropy if want_entropy else None, row_temperature)


def _differentiate_logprobs(
    backend: str, ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 7
    if grad_logprobs is None and grad_entropy is None:
        return None, *nothing
    upstream = (None if gradient is None else gradient.contiguous() for gradient in (grad_logprobs, grad_entropy))
    return LOGPROBS_BACKWARD[backend](*upstream, *ctx.saved_tensors, *ctx.scaling), *nothing


LOGPROBS = registry.define(
    "sampled_support_logprobs",
    LOGPROBS_SCHEMA,
    IMPLEMENTED,
    _fake_logprobs,
    (_set_up_logprobs, _differentiate_logprobs),
    folder=__package__,
    function="logprobs",
)
LOGPROBS_BACKWARD = registry.define(
    "sampled_support_logprobs_backward",
    LOGPROBS_BACKWARD_SCHEMA,
    IMPLEMENTED,
    _fake_logprobs_backward,
    (_no_context, _no_second_derivative),
    folder=__package__,
    function="logprobs_backward",
)


def apply_head(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    entries: Entries,
    scaling: tuple[Tensor | None, float, float | None, float],
    want_entropy: bool,
    into: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (empty unless wanted) of hidden states [N, H]; `into` takes the weight's gradient."""
    backend = _implementation(backend)
    hidden, weight = (x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous() for x in (hidden, weight))
    bias = None if bias is None else bias.contiguous()
    if into is None:
        logits = LOGITS[backend](hidden, weight, bias, *_indices(entries))
    else:
        logits = _LogitsInto.apply(hidden, weight, bias, backend, entries, into)  # type: ignore[no-untyped-call]
    results = LOGPROBS[backend](logits, entries.places, entries.bounds, *scaling, want_entropy)
    return cast(tuple[Tensor, Tensor], results[:2])


def apply_logits(backend: str, rows: Rows, entries: Entries, want_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (empty unless wanted) of logits [A, B, V] over a support of its A * B rows."""
    inner = max(rows.logits.shape[1], 1)
    row = entries.rows.clamp(min=0)
    kept = rows.logits[row // inner, row % inner, entries.token_ids].to(_wide(rows.logits))
    kept = torch.where(entries.rows >= 0, kept, 0)  # rows that take no part may hold anything
    temperature = None if rows.row_temperature is None else rows.row_temperature.reshape(-1)
    scaling = (temperature, rows.temperature, rows.softcap, rows.logit_scale)
    results = LOGPROBS[_implementation(backend)](kept, entries.places, entries.bounds, *scaling, want_entropy)
    return cast(tuple[Tensor, Tensor], results[:2])


def _implementation(backend: str) -> str:
    return "reference" if backend == "cpu" else backend


def _indices(entries: Entries) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return entries.token_ids, entries.rows, entries.bounds, entries.order
