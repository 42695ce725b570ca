"""Registers token_logprobs and its gradient with torch."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.token_logprobs import reference
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import Gradient, GradientInto, LogitRows, Measured

_GPU = (torch.bfloat16, torch.float16, torch.float32)
_ALL = (*_GPU, torch.float64)
SUPPORTS = {"triton": _GPU, "cpu": _ALL, "reference": _ALL}

# For the CPU only: asks for huge pages for a tensor that has not been written yet.
registry.define_compiled("_expect_large_tensor_cpu(Tensor tensor) -> ()")
_LARGE = 2**22  # bytes above which the first touch of memory costs as much as a pass over it


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> Tensor:
    """Uninitialised memory; on the CPU in huge pages where it is large."""
    memory = like.new_empty(shape, dtype=dtype)
    if backend == "cpu" and memory.numel() * memory.element_size() >= _LARGE:
        registry.ops._expect_large_tensor_cpu(memory)
    return memory


def _fake(inputs: Measured) -> tuple[Tensor, Tensor, Tensor]:
    rows = inputs.rows
    logprobs = rows.logits.new_empty(rows.targets.shape, dtype=torch.promote_types(rows.logits.dtype, torch.float32))
    entropy = torch.empty_like(logprobs) if inputs.want_entropy else logprobs.new_empty(0)
    return logprobs, entropy, torch.empty_like(logprobs, dtype=torch.float64)


def _fake_backward(inputs: Gradient) -> Tensor:
    return inputs.rows.logits.new_empty(inputs.rows.logits.shape)


FORWARD = registry.TorchOp(
    "token_logprobs",
    Measured,
    "(Tensor, Tensor, Tensor)",
    SUPPORTS,
    _fake,
    triton="forward",
    reference=reference.forward,
    folder=__package__,
)
BACKWARD = registry.TorchOp(
    "token_logprobs_backward",
    Gradient,
    "Tensor",
    SUPPORTS,
    _fake_backward,
    triton="backward",
    reference=reference.backward,
    folder=__package__,
)
# Over the logits themselves, or in the half precision of the matrix products that read it (on a CPU in bfloat16).
BACKWARD_INTO = registry.TorchOp(
    "token_logprobs_backward_into",
    GradientInto,
    "()",
    SUPPORTS,
    lambda inputs: None,
    triton="backward_into",
    reference=reference.backward_into,
    mutated=("gradient",),
    folder=__package__,
)

# A kernel of Triton's alone: log-probs, and in the same read what the gradient by the logits is a multiple of.
EXPONENTIALS = registry.lazy("exponentials", __package__)


def sum_of_squares(backend: str, rows: LogitRows, normalizer: Tensor) -> Tensor:
    """The sum of the squared probabilities of each row: at half the temperature they are what is normalised."""
    row_temperature = None if rows.row_temperature is None else rows.row_temperature / 2
    halved = dataclasses.replace(rows, row_temperature=row_temperature, temperature=rows.temperature / 2)
    _, _, of_squares = FORWARD(backend, Measured(halved, False))
    squares = (of_squares - 2 * normalizer).exp().clamp(max=1)
    return torch.where(rows.targets == IGNORED, 0, squares)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs, entropies (empty unless wanted) and log-sum-exps of rows, whose logits are the first argument."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, inputs: Measured, inplace: bool, backend: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, normalizer = FORWARD(backend, inputs)
        ctx.mark_non_differentiable(*((normalizer,) if inputs.want_entropy else (entropy, normalizer)))
        ctx.set_materialize_grads(False)
        rows = inputs.rows
        saved_entropy = entropy if inputs.want_entropy else None
        ctx.save_for_backward(logits, rows.targets, rows.row_temperature, normalizer, saved_entropy)
        ctx.scaling = (rows.temperature, rows.softcap, rows.logit_scale)
        ctx.inplace, ctx.is_spent, ctx.backend = inplace, False, backend
        return logprobs, entropy, normalizer

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if by_logprobs is None and by_entropy is None:
            return None, None, None, None
        if ctx.is_spent:
            raise RuntimeError(
                "token_logprobs: backward must run once with inplace_backward=True, got a second call; "
                "the first overwrote the logits with their gradient"
            )
        logits, targets, row_temperature, normalizer, entropy = ctx.saved_tensors
        upstream = registry.upstream(by_logprobs), registry.upstream(None if entropy is None else by_entropy)
        rows = LogitRows(logits.detach(), targets, row_temperature, *ctx.scaling)
        inputs = Gradient(*upstream, normalizer, entropy, rows)
        if not ctx.inplace:
            gradient = registry.first_derivative("token_logprobs", BACKWARD(ctx.backend, inputs))
            return gradient, None, None, None
        if torch.is_grad_enabled():
            raise RuntimeError("token_logprobs: create_graph must be False with inplace_backward=True, got True")
        ctx.is_spent = True
        gradient = logits.detach()
        BACKWARD_INTO(ctx.backend, GradientInto(gradient, inputs))
        torch.autograd.graph.increment_version(gradient)  # whoever else kept the logits is told
        return gradient, None, None, None


def apply(backend: str, inputs: Measured, inplace: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies (empty unless wanted), both differentiable by the logits, and log-sum-exps."""
    results = _TokenLogprobs.apply(inputs.rows.logits, inputs, inplace, backend)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], results)
