"""torch registration of linear_policy_loss: the gradient is computed in the forward pass, in three products, not four.

A token's gradient depends on its own log-prob, and on those of its sequence if the ratio does. So a chunk can be
finished while its logits are there: policy_loss is asked for the whole batch, of which it knows the log-probs of the
chunks so far, and of its gradient what belongs to the chunk is right. That costs a thousandth of a product, and the
last time it is the loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels.ops import linear_logprobs, policy_loss, registry
from grpo_kernels.ops._head import Gradients, Head, Measured, Products, chunks, moving
from grpo_kernels.ops._head import rows_per_chunk as rows_per_chunk

SUPPORTS = linear_logprobs.SUPPORTS
BUILT_ON = ("token_logprobs", "policy_loss")  # whose kernels these are
_DENSE = 0.75  # above this share of rows with a gradient, leaving the others out costs more than it saves


class Policy(NamedTuple):
    """What policy_loss takes beside log-probs and entropies."""

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


class Chunking(NamedTuple):
    """Which rows are computed, and how many at a time."""

    shape: list[int]  # of the log-probs
    want_entropy: bool
    needs_entropy_gradient: bool
    ahead: Tensor | None  # rows without a gradient, before all others
    places: Tensor | None  # rows with one; None: all
    ends: list[int] | None  # of sequences, counted in `places`, where chunks may end; None: anywhere
    chunk_rows: int


_POLICY = (
    "Tensor? old_logprobs, Tensor advantages, Tensor? mask, Tensor? cu_seqlens, Tensor? segments, "
    "Tensor? ref_logprobs, Tensor? sampling_logprobs, Tensor? is_weights, Tensor? weights, Tensor? normalizers, "
    "float[] counts, int[] modes, float[] coefficients"
)
_CHUNKING = (
    "int[] shape, bool want_entropy, bool needs_entropy_gradient, Tensor? ahead, Tensor? places, int[]? ends, "
    "int chunk_rows"
)
SCHEMA = (
    f"({linear_logprobs.HEAD_SCHEMA}, {_POLICY}, {_CHUNKING}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_HEAD, _POLICY_END = len(Head._fields), len(Head._fields) + len(Policy._fields)


class _Batch:
    """The log-probs so far, and the policy loss of them."""

    def __init__(self, backend: str, head: Head, policy: Policy, chunking: Chunking) -> None:
        self.backend, self.policy, self.chunking = backend, policy, chunking
        rows = len(head.hidden)
        self.logprobs = head.hidden.new_zeros(rows, dtype=head.wide)
        self.entropy = torch.zeros_like(self.logprobs) if chunking.want_entropy else None

    def measure(self, products: Products, chosen: slice | Tensor) -> Measured:
        chunk = products.measure(chosen, self.entropy is not None)
        self.logprobs[chosen] = chunk.logprobs[0]
        if self.entropy is not None:
            self.entropy[chosen] = chunk.entropy[0]
        return chunk

    def loss(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        p, shape = self.policy, self.chunking.shape
        entropy = None if self.entropy is None else self.entropy.view(shape)
        found = policy_loss.FORWARD[self.backend](
            self.logprobs.view(shape), p.old_logprobs, p.advantages, p.mask, p.cu_seqlens, p.segments, p.ref_logprobs,
            p.sampling_logprobs, p.is_weights, entropy, None, p.weights, p.normalizers, p.counts, p.modes,
            p.coefficients, self.chunking.needs_entropy_gradient,
        )  # fmt: skip
        return cast(tuple[Tensor, Tensor, Tensor, Tensor], found)


def forward(backend: str, *args: Any, into: Tensor | None = None) -> tuple[Tensor, ...]:
    """Loss, metrics, and the gradients of hidden states, weight and bias. The arguments of SCHEMA."""
    head, policy = Head(*args[:_HEAD]), Policy(*args[_HEAD:_POLICY_END])
    chunking, needs = Chunking(*args[_POLICY_END:-1]), args[-1]
    rows = len(head.hidden) if chunking.places is None else len(chunking.places)
    ahead = 0 if chunking.ahead is None else len(chunking.ahead)
    size = chunking.chunk_rows
    if chunking.places is None and policy.mask is not None:
        head = head.clean(policy.mask.reshape(-1))
    batch = _Batch(backend, head, policy, chunking)
    products = Products(backend, head, min(size, max(rows, ahead)))
    on_cpu = head.hidden.device.type == "cpu"
    gradients = Gradients(products, needs, into, sparse=on_cpu or chunking.places is not None)
    result = None
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(ahead, size):
            batch.measure(products, cast(Tensor, chunking.ahead)[part])
        for part in chunks(rows, size, chunking.ends):
            chosen: slice | Tensor = part if chunking.places is None else chunking.places[part]
            chunk = batch.measure(products, chosen)
            result = batch.loss()
            by_logprob = result[2][chosen]
            by_entropy = result[3][chosen] if chunking.needs_entropy_gradient else None
            moves = moving(by_logprob, by_entropy)
            if moves is not None and len(moves) <= _DENSE * len(by_logprob):
                chunk, by_logprob = chunk.only(moves), by_logprob[moves]
                by_entropy = None if by_entropy is None else by_entropy[moves]
                chosen = moves + part.start if chunking.places is None else chunking.places[moves + part.start]
            gradients.add(products.differentiate(chunk, by_logprob, by_entropy), chunk.rows, chosen)
        loss, metrics = (batch.loss() if result is None else result)[:2]
        return loss, metrics, *gradients.finish()


def _fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    needs = rest[-1]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(policy_loss.METRICS, dtype=torch.float64),
        *linear_logprobs.fake_gradients(hidden, weight, bias, needs),
    )


def _setup_context(backend: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])
    ctx.arguments = len(inputs)


def _backward(backend: str, ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (ctx.arguments - 3)
    if upstream is None:
        return None, None, None, *nothing
    needs = ctx.needs_input_grad[:3]
    scaled = (
        gradient * upstream.to(gradient.dtype) if need else None
        for gradient, need in zip(ctx.saved_tensors, needs, strict=True)
    )
    return *scaled, *nothing


_KERNELS = {name: dtypes for name, dtypes in SUPPORTS.items() if name != "reference"}
FORWARD = registry.define("linear_policy_loss", SCHEMA, _KERNELS, _fake, (_setup_context, _backward), forward)


class _Once(torch.autograd.Function):
    """The op where nothing traces: its gradients are handed over in the backward, once, and never copied."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, backend: str, into: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        loss, metrics, *ctx.gradients = forward(backend, hidden, weight, bias, *rest, into=into)
        ctx.mark_non_differentiable(metrics)
        ctx.set_materialize_grads(False)
        ctx.has_added, ctx.arguments = into is not None, 5 + len(rest)
        return loss, metrics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None] * ctx.arguments
        if upstream is None:
            return tuple(results)
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_policy_loss: backward must run once with memory='fast', got a second call; "
                "the first handed out the gradients. memory='low' computes them each time"
            )
        gradients, ctx.gradients = ctx.gradients, None
        is_one = upstream.device.type == "cpu" and upstream.item() == 1
        if ctx.has_added and not is_one:
            rule = "linear_policy_loss: the loss must be given to backward unscaled with weight_grad"
            torch._assert_async((upstream == 1).all(), rule)
        for place in range(3):
            if ctx.needs_input_grad[place] and not (place == 1 and ctx.has_added):
                gradient = gradients[place]
                results[place] = gradient if is_one else gradient.mul_(upstream)
        return tuple(results)


def apply(backend: str, into: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    """Loss, with its gradient, and metrics. The arguments of SCHEMA."""
    if torch.compiler.is_compiling():
        return cast(tuple[Tensor, Tensor], FORWARD[backend](*args)[:2])
    head, rest = args[:3], args[3:]
    return cast(tuple[Tensor, Tensor], _Once.apply(*head, backend, into, *rest))  # type: ignore[no-untyped-call]
