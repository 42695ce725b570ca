"""torch registration of linear_logprobs and its backward, and the same over a vocabulary that is split among ranks."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.ops import registry, token_logprobs
from grpo_kernels.ops._head import Gradients, Head, Products, chunks, moving
from grpo_kernels.ops._head import rows_per_chunk as rows_per_chunk

# Not at the first call: torch.compile traces through it.
_reference = importlib.import_module("grpo_kernels.reference.linear_logprobs")

SUPPORTS = token_logprobs.SUPPORTS
BUILT_ON = ("token_logprobs",)  # whose kernels these are

HEAD_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? row_temperature, float temperature, "
    "float? softcap, float logit_scale"
)
SCHEMA = f"({HEAD_SCHEMA}, bool want_entropy, int chunk_rows) -> (Tensor, Tensor, Tensor)"
BACKWARD_SCHEMA = (
    f"(Tensor? grad_logprobs, Tensor? grad_entropy, {HEAD_SCHEMA}, Tensor normalizer, Tensor? entropy, bool[] needs, "
    "int chunk_rows) -> (Tensor, Tensor, Tensor)"
)
_HEAD_ARGUMENTS = len(Head._fields)


def forward(backend: str, *args: Any, ghost: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    head, (want_entropy, chunk_rows) = Head(*args[:_HEAD_ARGUMENTS]), args[_HEAD_ARGUMENTS:]
    rows = len(head.hidden)
    products = Products(backend, head, min(chunk_rows, rows), ghost)
    logprobs = head.hidden.new_empty(rows, dtype=head.wide)
    entropy = torch.empty_like(logprobs) if want_entropy else logprobs.new_empty(0)
    normalizer = logprobs.new_empty(rows, dtype=torch.float64)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for chosen in chunks(rows, chunk_rows):
            chunk = products.measure(chosen, want_entropy)
            logprobs[chosen], normalizer[chosen] = chunk.logprobs[0], chunk.normalizer[0]
            if want_entropy:
                entropy[chosen] = chunk.entropy[0]
    return logprobs, entropy, normalizer


def backward(
    backend: str, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *args: Any, ghost: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits are computed again, of the rows that have a gradient."""
    head, (normalizer, entropy, needs, chunk_rows) = Head(*args[:_HEAD_ARGUMENTS]), args[_HEAD_ARGUMENTS:]
    counts = head.targets != token_logprobs.IGNORED
    grad_logprobs = None if grad_logprobs is None else torch.where(counts, grad_logprobs, 0)
    grad_entropy = None if grad_entropy is None else torch.where(counts, grad_entropy, 0)
    places = moving(grad_logprobs, grad_entropy)
    if places is None:
        head = head.clean(counts)
    rows = len(head.hidden) if places is None else len(places)
    products = Products(backend, head, min(chunk_rows, rows), ghost)
    gradients = Gradients(products, needs, sparse=places is not None)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(rows, chunk_rows):
            chosen = part if places is None else places[part]
            chunk = products.remeasure(chosen, normalizer, entropy)
            by_logprob = None if grad_logprobs is None else grad_logprobs[chosen]
            by_entropy = None if grad_entropy is None else grad_entropy[chosen]
            gradients.add(products.differentiate(chunk, by_logprob, by_entropy), chunk.rows, chosen)
        return gradients.finish()


def _fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    want_entropy = rest[-2]
    logprobs = hidden.new_empty(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    entropy = torch.empty_like(logprobs) if want_entropy else logprobs.new_empty(0)
    return logprobs, entropy, logprobs.new_empty(logprobs.shape, dtype=torch.float64)


def _fake_backward(
    grad_logprobs: Tensor | None, grad_entropy: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return fake_gradients(hidden, weight, bias, rest[-2])


def fake_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool]) -> tuple[Tensor, ...]:
    needs_hidden, needs_weight, needs_bias = needs
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0, 0)),
        hidden.new_empty(weight.shape[0] if needs_bias else 0, dtype=wide if bias is None else bias.dtype),
    )


def _setup_context(backend: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, row_temperature, *scaling, want_entropy, ctx.chunk_rows = inputs
    entropy, normalizer = output[1:]
    ctx.mark_non_differentiable(*((normalizer,) if want_entropy else (entropy, normalizer)))
    ctx.set_materialize_grads(False)
    kept_entropy = entropy if want_entropy else None
    ctx.save_for_backward(hidden, weight, bias, targets, row_temperature, normalizer, kept_entropy)
    ctx.scaling = scaling


def _backward(
    backend: str, ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 7
    if grad_logprobs is None and grad_entropy is None:
        return None, None, None, *nothing
    *head, normalizer, entropy = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found = BACKWARD[backend](
        None if grad_logprobs is None else grad_logprobs.contiguous(),
        None if grad_entropy is None else grad_entropy.contiguous(),
        *head, *ctx.scaling, normalizer, entropy, needs, ctx.chunk_rows,
    )  # fmt: skip
    return *(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *nothing


def _no_context(backend: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _no_second_derivative(backend: str, ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("linear_logprobs: a second derivative is not implemented; use create_graph=False")


_KERNELS = {name: dtypes for name, dtypes in SUPPORTS.items() if name != "reference"}
FORWARD = registry.define("linear_logprobs", SCHEMA, _KERNELS, _fake, (_setup_context, _backward), forward)
BACKWARD = registry.define(
    "linear_logprobs_backward",
    BACKWARD_SCHEMA,
    _KERNELS,
    _fake_backward,
    (_no_context, _no_second_derivative),
    backward,
)


def apply(backend: str, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies, with gradients, and the log-sum-exp of every row. The arguments of SCHEMA."""
    if backend == "reference":
        return cast(tuple[Tensor, Tensor, Tensor], _reference.forward(*args[:-1]))
    return cast(tuple[Tensor, Tensor, Tensor], FORWARD[backend](*args))


def apply_sharded(
    backend: str, group: Any, start: int, head: tuple[Any, ...], want_entropy: bool, chunk_rows: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    found = _Sharded.apply(  # type: ignore[no-untyped-call]
        backend, group, start, Head(*head), want_entropy, chunk_rows, *head[:3]
    )
    return cast(tuple[Tensor, Tensor], found)


class _Sharded(torch.autograd.Function):
    """Over a vocabulary of which every rank of a group has some columns, from `start` on; hidden states are the same.

    Each rank's columns give a log-sum-exp, an entropy and perhaps the target's log-prob, as if they were all; one
    all-reduce, of a tensor with a place for each rank, brings them together. A target of another rank is that of a
    ghost column here. The gradient of the hidden states is the sum over ranks: one all-reduce in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, backend: str, group: Any, start: int, head: Head, want_entropy: bool, chunk_rows: int,
        *differentiable: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        columns = head.weight.shape[0]
        local = head.targets - start
        is_here = (local >= 0) & (local < columns)
        ignored = head.targets == token_logprobs.IGNORED
        targets = torch.where(ignored, token_logprobs.IGNORED, torch.where(is_here, local, columns))
        head = head._replace(targets=targets)
        own = forward(backend, *head, True, chunk_rows, ghost=True)
        logprobs, entropy, normalizer = _combine(group, own, is_here, ignored)
        ctx.save_for_backward(*head[:5], normalizer, entropy)
        ctx.scaling = head[5:]
        ctx.call = (backend, group, chunk_rows)
        ctx.set_materialize_grads(False)
        return logprobs, entropy if want_entropy else logprobs.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        backend, group, chunk_rows = ctx.call
        *tensors, normalizer, entropy = ctx.saved_tensors
        if grad_entropy is not None and grad_entropy.numel() == 0:
            grad_entropy = None
        needs = list(ctx.needs_input_grad[-3:])
        # whether hidden states need a gradient has to be the same on all ranks, or they would wait for each other
        hidden, *others = backward(
            backend,
            None if grad_logprobs is None else grad_logprobs.contiguous(),
            None if grad_entropy is None else grad_entropy.contiguous(),
            *tensors, *ctx.scaling, normalizer, entropy, needs, chunk_rows, ghost=True,
        )  # fmt: skip
        if needs[0]:
            dist.all_reduce(hidden, group=group)
        found = (gradient if need else None for gradient, need in zip((hidden, *others), needs, strict=True))
        return (None,) * 6 + tuple(found)


def _combine(
    group: Any, own: tuple[Tensor, Tensor, Tensor], is_here: Tensor, ignored: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, entropy, normalizer = own
    elsewhere = 1.0  # no log-prob: they are at most 0
    parts = normalizer.new_zeros(dist.get_world_size(group), 3, len(normalizer))
    mine = parts[dist.get_rank(group)]
    mine[0], mine[1], mine[2] = normalizer, torch.where(is_here, logprobs, elsewhere), entropy
    dist.all_reduce(parts, group=group)
    normalizers, candidates, entropies = parts.unbind(1)
    is_owner = candidates != elsewhere
    owners = is_owner.sum(0)
    if logprobs.device.type == "cpu" and not bool(((owners == 1) | ignored).all()):
        raise RuntimeError("linear_logprobs: targets must be columns of exactly one rank each, or -100")
    total = normalizers.logsumexp(0)
    of_owner = torch.where(is_owner, normalizers, 0).sum(0)
    # not the difference of two large numbers: exact where the target is nearly certain
    others = torch.where(is_owner, 0, torch.exp(normalizers - of_owner)).sum(0)
    of_target = torch.where(is_owner, candidates, 0).sum(0) - torch.log1p(others)
    of_target = torch.where(owners == 1, of_target, torch.nan)
    share = torch.exp(normalizers - total)
    of_row = torch.where(share == 0, 0, share * (entropies + (total - normalizers))).sum(0)

    def finished(value: Tensor) -> Tensor:
        return torch.where(ignored, 0, value).to(logprobs.dtype)

    return finished(of_target), finished(of_row), torch.where(ignored, 0, total)
