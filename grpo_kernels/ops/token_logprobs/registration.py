"""Registers token_logprobs and its backward with torch."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels import registry

_GPU = (torch.bfloat16, torch.float16, torch.float32)
_ALL = (*_GPU, torch.float64)
SUPPORTS = {"cuda": _GPU, "triton": _GPU, "cpu": _ALL, "reference": _ALL}


class Rows(NamedTuple):
    """Logits [A, B, V] with contiguous columns, targets and row_temperature [A, B], and the map of logits."""

    logits: Tensor
    targets: Tensor
    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float


# Logits are [A, B, V] with neighbouring columns, what belongs to a row is [A, B]. The results are log-probabilities,
# entropies (empty unless wanted) and, for the backward, the log-sum-exp of every row as float64: rounded to float32 it
# would be what limits the gradient.
_SCALING = "Tensor? row_temperature, float temperature, float? softcap, float logit_scale"
_SAVED = f"Tensor targets, Tensor normalizer, Tensor? entropy, {_SCALING}"
ROWS_SCHEMA = f"Tensor logits, Tensor targets, {_SCALING}"
SCHEMA = f"({ROWS_SCHEMA}, bool want_entropy, bool inplace_backward) -> (Tensor, Tensor, Tensor)"
BACKWARD_SCHEMA = f"(Tensor? grad_logprobs, Tensor? grad_entropy, Tensor logits, {_SAVED}) -> Tensor"
INPLACE_SCHEMA = f"(Tensor(a!) logits, Tensor? grad_logprobs, Tensor? grad_entropy, {_SAVED}) -> ()"
ROUNDED_SCHEMA = f"(Tensor(a!) gradient, Tensor? grad_logprobs, Tensor? grad_entropy, Tensor logits, {_SAVED}) -> ()"

registry.define_compiled(f"_token_logprobs_cuda({ROWS_SCHEMA}, bool want_entropy) -> (Tensor, Tensor, Tensor)")
registry.define_compiled(
    "_token_logprobs_backward_cuda(Tensor(a!) gradient, Tensor? grad_logprobs, Tensor? grad_entropy, Tensor logits, "
    f"{_SAVED}) -> ()"
)


# For the CPU only: asks for huge pages for a tensor that has not been written yet.
registry.define_compiled("_expect_large_tensor_cpu(Tensor tensor) -> ()")
_LARGE = 2**22  # bytes above which the first touch of memory costs as much as a pass over it


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> Tensor:
    """Uninitialised memory; on the CPU in huge pages where it is large."""
    memory = like.new_empty(shape, dtype=dtype)
    if backend == "cpu" and memory.numel() * memory.element_size() >= _LARGE:
        registry.ops._expect_large_tensor_cpu(memory)
    return memory


def _fake(
    logits: Tensor,
    targets: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    want_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.new_empty(targets.shape, dtype=torch.promote_types(logits.dtype, torch.float32))
    entropy = torch.empty_like(rows) if want_entropy else rows.new_empty(0)
    return rows, entropy, rows.new_empty(rows.shape, dtype=torch.float64)


def _fake_backward(grad_logprobs: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *saved: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_into(gradient: Tensor, *saved: Any) -> None:
    return None


def _setup_context(backend: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, row_temperature, temperature, softcap, logit_scale, want_entropy, inplace = inputs
    _, entropy, normalizer = output
    ctx.mark_non_differentiable(*((normalizer,) if want_entropy else (entropy, normalizer)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, normalizer, entropy if want_entropy else None, row_temperature)
    ctx.scaling = (temperature, softcap, logit_scale)
    ctx.inplace, ctx.spent = inplace, False


def _backward(
    backend: str, ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 7
    if grad_logprobs is None and grad_entropy is None:
        return None, *nothing
    if ctx.spent:
        raise RuntimeError(
            "token_logprobs: backward must run once with inplace_backward=True, got a second call; "
            "the first overwrote the logits with their gradient"
        )
    logits, targets, normalizer, entropy, row_temperature = ctx.saved_tensors
    grad_logprobs = None if grad_logprobs is None else grad_logprobs.contiguous()
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    saved = (targets, normalizer, entropy, row_temperature, *ctx.scaling)
    if not ctx.inplace:
        return BACKWARD[backend](grad_logprobs, grad_entropy, logits, *saved), *nothing
    if torch.is_grad_enabled():
        raise RuntimeError("token_logprobs: create_graph must be False with inplace_backward=True, got True")
    ctx.spent = True
    gradient = logits.detach()
    INPLACE[backend](gradient, grad_logprobs, grad_entropy, *saved)
    torch.autograd.graph.increment_version(gradient)  # whoever else kept the logits is told
    return gradient, *nothing


def _no_context(backend: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _no_second_derivative(backend: str, ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("token_logprobs: a second derivative is not implemented; use create_graph=False")


def _cuda(*args: Any) -> tuple[Tensor, ...]:
    *inputs, _ = args  # where the backward writes does not matter to the forward
    return cast(tuple[Tensor, ...], registry.ops._token_logprobs_cuda(*inputs))


def _cuda_backward(grad_logprobs: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *saved: Any) -> Tensor:
    gradient = logits.new_empty(logits.shape)
    registry.ops._token_logprobs_backward_cuda(gradient, grad_logprobs, grad_entropy, logits, *saved)
    return gradient


def _cuda_backward_inplace(
    logits: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *saved: Any
) -> None:
    registry.ops._token_logprobs_backward_cuda(logits, grad_logprobs, grad_entropy, logits, *saved)


def _cuda_backward_rounded(*args: Any) -> None:
    registry.ops._token_logprobs_backward_cuda(*args)


FORWARD = registry.define(
    "token_logprobs", SCHEMA, SUPPORTS, _fake, (_setup_context, _backward), folder=__package__, cuda=_cuda
)
BACKWARD = registry.define(
    "token_logprobs_backward",
    BACKWARD_SCHEMA,
    SUPPORTS,
    _fake_backward,
    (_no_context, _no_second_derivative),
    folder=__package__,
    function="backward",
    cuda=_cuda_backward,
)
INPLACE = registry.define(
    "token_logprobs_backward_inplace",
    INPLACE_SCHEMA,
    SUPPORTS,
    _fake_into,
    folder=__package__,
    function="backward_inplace",
    cuda=_cuda_backward_inplace,
)
# The gradient of float32 logits in the half precision of the matrix products that read it.
ROUNDED = registry.define(
    "token_logprobs_backward_rounded",
    ROUNDED_SCHEMA,
    {"cuda": _GPU, "triton": _GPU},
    _fake_into,
    folder=__package__,
    function="backward_rounded",
    cuda=_cuda_backward_rounded,
)
