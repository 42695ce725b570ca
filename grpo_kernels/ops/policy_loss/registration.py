"""Registers policy_loss with torch.

The kernels compute the gradient together with the loss, as additional outputs; the backward pass only multiplies them
by the upstream gradient. The reference is plain differentiable torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.groups import packed_bounds
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.policy_loss import reference
from grpo_kernels.ops.policy_loss.reference import PolicyInputs
from grpo_kernels.ops.policy_loss.reference.metrics import METRICS

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "cpu": _WIDE, "reference": _WIDE}
_RESULTS = "(Tensor, Tensor, Tensor)"  # loss, metrics, and the gradients by log-probs and entropies, if any
_LAYOUT = registry.Layout(PolicyInputs)


def _fake(inputs: PolicyInputs) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = inputs.logprobs
    metrics = logprobs.new_empty(len(METRICS), dtype=torch.float64)
    gradients = logprobs.new_empty((2, *logprobs.shape) if inputs.needs_entropy_gradient else logprobs.shape)
    return logprobs.new_empty(()), metrics, gradients


registry.define_compiled(
    f"_policy_loss_cuda({_LAYOUT.schema()}, Tensor(a!)? segments_ascend) -> {_RESULTS}",
    fake=lambda *values: _fake(_LAYOUT.build(iter(values[:-1]))),
)


def _cuda(inputs: PolicyInputs) -> tuple[Tensor, ...]:
    """Checks the bounds of packed rows and the order of segments; the rest is one compiled op."""
    policy = inputs.policy
    if policy.cu_seqlens is not None:
        bounds = packed_bounds("policy_loss", policy.cu_seqlens, inputs.logprobs.numel())
        inputs = dataclasses.replace(inputs, policy=dataclasses.replace(policy, cu_seqlens=bounds))
    ascend = None if policy.segments is None else policy.segments.new_empty(1, dtype=torch.bool)
    results: tuple[Tensor, ...] = registry.ops._policy_loss_cuda(*_LAYOUT.flat(inputs), ascend)
    if ascend is not None:
        torch._assert_async(ascend, "policy_loss: segments must ascend from 0 along each row")
    return results


def _cuda_of_flat(*args: Any) -> tuple[Tensor, ...]:
    return _cuda(_LAYOUT.build(iter(args)))


FORWARD = registry.TorchOp(
    "policy_loss", PolicyInputs, _RESULTS, SUPPORTS, _fake, cuda=_cuda_of_flat, reference=reference.forward
)


def _forward(backend: str, inputs: PolicyInputs) -> Any:
    """The op. Eager calls of the CUDA kernel do without it: its way through torch to Python takes 10 us."""
    if backend == "cuda" and type(inputs.logprobs) is Tensor and not torch.compiler.is_compiling():
        return _cuda(inputs)
    return FORWARD(backend, inputs)


class _PolicyLoss(torch.autograd.Function):
    """Loss and metrics; log-probs and entropies are also the first arguments."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor | None, inputs: PolicyInputs, backend: str
    ) -> tuple[Tensor, Tensor]:
        loss, metrics, gradients = _forward(backend, inputs)
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradients)
        ctx.needs_entropy_gradient = inputs.needs_entropy_gradient
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        by_logprob = by_entropy = None
        if upstream is not None:
            (gradients,) = ctx.saved_tensors
            by_logprob = scaled("policy_loss", gradients, upstream)
            if ctx.needs_entropy_gradient:
                by_logprob, by_entropy = by_logprob
        return by_logprob, by_entropy, None, None


def apply(backend: str, inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    """Loss and metrics. The loss has a gradient by log-probs and entropy."""
    if backend == "reference":
        return cast(tuple[Tensor, Tensor], FORWARD(backend, inputs))
    logprobs, entropy = inputs.logprobs, inputs.entropy
    has_leaf = logprobs.requires_grad or (entropy is not None and entropy.requires_grad)
    if has_leaf and torch.is_grad_enabled():
        loss, metrics = _PolicyLoss.apply(logprobs, entropy, inputs, backend)  # type: ignore[no-untyped-call]
    else:
        loss, metrics, _ = _forward(backend, inputs)
    return loss, metrics


def apply_with_gradients(backend: str, inputs: PolicyInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, metrics, and the gradients by log-probs and entropy, flat; for callers that are not traced."""
    if backend != "reference":
        loss, metrics, gradients = _forward(backend, inputs)
        by_logprob, *by_entropy = gradients.view(1 + inputs.needs_entropy_gradient, -1)
        return loss, metrics, by_logprob, by_entropy[0] if by_entropy else by_logprob.new_empty(0)
    with torch.enable_grad():
        logprobs, entropy = inputs.logprobs.detach().requires_grad_(), inputs.entropy
        leaves = [logprobs]
        if inputs.needs_entropy_gradient and entropy is not None:
            entropy = entropy.detach().requires_grad_()
            leaves.append(entropy)
        loss, metrics = FORWARD(backend, dataclasses.replace(inputs, logprobs=logprobs, entropy=entropy))
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    by_logprob, *rest = (gradient.reshape(-1) for gradient in gradients)
    return loss.detach(), metrics, by_logprob, rest[0] if rest else by_logprob.new_empty(0)


def beside(head: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend of the loss where that of the LM head is `head`: beside Triton CUDA, or else the reference."""
    if head != "triton":
        return head
    return "cuda" if FORWARD.runs("cuda", device, dtype) else "reference"


# The upstream gradient


@op_inputs
class Scaled:
    """A gradient to multiply in place, and the upstream gradient."""

    gradient: Tensor
    upstream: Tensor


def _cuda_scale(gradient: Tensor, upstream: Tensor) -> None:
    registry.ops._scale_gradient_cuda(gradient, upstream)


registry.define_compiled("_scale_gradient_cuda(Tensor(a!) gradient, Tensor upstream) -> ()")
SCALE = registry.TorchOp(
    "scale_gradient",
    Scaled,
    "()",
    {"cuda": (torch.bfloat16, torch.float16, *_WIDE)},
    lambda inputs: None,
    cuda=_cuda_scale,
    mutated=("gradient",),
)


def scaled(op: str, gradient: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of a forward pass times the upstream gradient of the loss.

    The caller gets a copy, as it may change its gradient before another backward. With create_graph=True the product
    can be differentiated by the upstream gradient, and by nothing else.
    """
    return registry.first_derivative(op, gradient) * upstream


def scaled_in_place(op: str, backend: str, gradient: Tensor, upstream: Tensor) -> Tensor:
    """The same for a gradient that nobody else reads. Our CUDA kernel sees an upstream of 1 and writes nothing."""
    if not _is_real(gradient, upstream) or torch.is_grad_enabled():
        return scaled(op, gradient, upstream)
    if backend == "cpu" and upstream.item() == 1:
        return gradient
    has_kernel = backend == "triton" and SCALE.runs("cuda", gradient.device, gradient.dtype)
    if not has_kernel or not gradient.is_contiguous():
        return gradient.mul_(upstream)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    SCALE("cuda", Scaled(gradient, upstream.to(wide).contiguous()))
    return gradient


def _is_real(gradient: Tensor, upstream: Tensor) -> bool:
    is_traced = type(upstream) is not Tensor or torch.compiler.is_compiling()
    return not (is_traced or gradient.requires_grad or upstream.requires_grad)
