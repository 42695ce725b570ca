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
_reference = importlib.import_module(f"{__package__}.reference")

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "cpu": _WIDE, "reference": _WIDE}


class Policy(NamedTuple):
    """Everything a policy loss is computed from except log-probs and entropies, in the order of the schema.

    Tensors share one dtype, are contiguous and have no gradient. `counts` and `normalizers` are [3], for tokens, rows
    and segments; NaN where the batch is to be counted. `modes` and `coefficients` are the plan of a LossConfig.
    """

    old_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor | None
    policy_mask: Tensor | None
    cu_seqlens: Tensor | None
    segments: Tensor | None
    ref_logprobs: Tensor | None
    is_weights: Tensor | None
    weights: Tensor | None
    normalizers: Tensor | None
    counts: list[float]
    modes: list[int]
    coefficients: list[float]


POLICY_SCHEMA = (
    "Tensor? old_logprobs, Tensor advantages, Tensor? mask, Tensor? policy_mask, Tensor? cu_seqlens, "
    "Tensor? segments, Tensor? ref_logprobs, Tensor? is_weights, Tensor? weights, Tensor? normalizers, "
    "float[] counts, int[] modes, float[] coefficients"
)
SCHEMA = (
    f"(Tensor logprobs, Tensor? entropy, {POLICY_SCHEMA}, bool needs_entropy_gradient) "
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


def _backward(backend: str, ctx: Any, upstream: Tensor | None, *__: Any) -> tuple[Tensor | None, ...]:
    by_logprob = by_entropy = None
    if upstream is not None:
        gradients = ctx.saved_tensors
        needs_logprobs, needs_entropy = ctx.needs_input_grad[:2]
        is_owned = backend in SCALE and _owns_gradients(ctx)  # on the CPU an earlier backward may have handed them out
        if needs_logprobs:
            by_logprob = scaled("policy_loss", backend, gradients[0], upstream, is_owned).view(ctx.shape)
        if needs_entropy and ctx.needs_entropy_gradient:
            by_entropy = scaled("policy_loss", backend, gradients[1], upstream, is_owned).view(ctx.shape)
    return by_logprob, by_entropy, *(None,) * ctx.others


def _owns_gradients(ctx: Any) -> bool:
    """Whether nobody reads the saved gradients after this backward: no second one, and no caller of the torch op."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not getattr(ctx, "hides_outputs", False):
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def scaled(op: str, backend: str, gradient: Tensor, upstream: Tensor, is_owned: bool) -> Tensor:
    """The gradient of a forward pass times the upstream gradient of the loss; in its own memory where it is owned.

    Most trainers call loss.backward(), whose upstream gradient is 1. On the CPU it costs nothing to see that; on a GPU
    only the kernel sees it, and leaves the gradient as it is. Under tracing there is no value to see. With
    create_graph=True the product can be differentiated by the upstream gradient, and by nothing else.
    """
    gradient = registry.first_derivative(op, gradient)
    is_traced = type(upstream) is not Tensor or torch.compiler.is_compiling()
    is_real = not (is_traced or gradient.requires_grad or upstream.requires_grad)
    if is_real and backend == "cpu" and upstream.item() == 1:
        return gradient
    if not (is_real and is_owned):
        return gradient * upstream.to(gradient.dtype)
    if backend not in SCALE or not gradient.is_contiguous():
        return gradient.mul_(upstream)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    SCALE[backend](gradient, upstream.to(wide).contiguous())
    return gradient


def _cuda(logprobs: Tensor, entropy: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """Checks the bounds of packed rows and the order of segments; the rest is one compiled op."""
    policy, needs_entropy_gradient = Policy(*args[:-1]), args[-1]
    if policy.cu_seqlens is not None:
        policy = policy._replace(cu_seqlens=packed_bounds("policy_loss", policy.cu_seqlens, logprobs.numel()))
    op = registry.ops._policy_loss_cuda
    *results, ascends = op(logprobs, entropy, *policy, needs_entropy_gradient)
    if ascends.numel() > 0:
        torch._assert_async(ascends.all(), "policy_loss: segments must ascend from 0 along each row")
    return tuple(results)


_KERNELS = {name: dtypes for name, dtypes in SUPPORTS.items() if name != "reference"}
FORWARD = registry.define(
    "policy_loss", SCHEMA, _KERNELS, _fake, (_setup_context, _backward), folder=__package__, cuda=_cuda
)


SCALE = registry.define(
    "scale_gradient",
    "(Tensor(a!) gradient, Tensor upstream) -> ()",
    {"cuda": (torch.bfloat16, torch.float16, *_WIDE)},
    lambda gradient, upstream: None,
)


def apply(
    backend: str,
    logprobs: Tensor,
    entropy: Tensor | None,
    policy: Policy,
    needs_entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Loss and metrics. The loss has a gradient by log-probs and entropy."""
    if backend == "reference":
        return cast(tuple[Tensor, Tensor], _reference.forward(logprobs, entropy, *policy))
    loss, metrics, _, _ = FORWARD[backend](logprobs, entropy, *policy, needs_entropy_gradient)
    return loss, metrics


def apply_with_gradients(
    backend: str, logprobs: Tensor, entropy: Tensor | None, policy: Policy, needs_entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, metrics, and the gradients by log-probs and entropy, flat; for callers that are not traced."""
    if backend != "reference":
        results = FORWARD[backend](logprobs, entropy, *policy, needs_entropy_gradient)
        return cast(tuple[Tensor, Tensor, Tensor, Tensor], results)
    with torch.enable_grad():
        leaves = [logprobs.detach().requires_grad_()]
        if needs_entropy_gradient:
            entropy = cast(Tensor, entropy).detach().requires_grad_()
            leaves.append(entropy)
        loss, metrics = apply(backend, leaves[0], entropy, policy, needs_entropy_gradient)
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    by_logprob, *rest = (gradient.reshape(-1) for gradient in gradients)
    return loss.detach(), metrics, by_logprob, rest[0] if rest else by_logprob.new_empty(0)


def beside(head: str) -> str:
    """The backend of the loss where that of the LM head is `head`; Triton has none."""
    return "reference" if head == "triton" else head
