"""The policy loss straight from hidden states, with the logits of only one chunk of rows in memory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks

# modules, because their package imports this one
from grpo_kernels.ops.linear_distillation_loss import arguments as distillation
from grpo_kernels.ops.linear_distillation_loss import registration as distillation_op
from grpo_kernels.ops.linear_head import registration as op
from grpo_kernels.ops.linear_head.arguments import (
    check_chunk_size,
    check_head,
    check_positions,
    check_reference,
    check_shard,
    check_weight_grad,
    check_whole,
)
from grpo_kernels.ops.linear_head.chunking import chunking_of, split_rows
from grpo_kernels.ops.linear_head.head import Head, ReferenceHead, Shard
from grpo_kernels.ops.linear_head.logprobs import linear_logprobs
from grpo_kernels.ops.policy_loss import PolicyLoss, compute
from grpo_kernels.ops.policy_loss import registration as policy_loss
from grpo_kernels.ops.policy_loss.arguments import (
    Layout,
    Normalizer,
    check_entropy,
    check_policy,
    check_reads_reference,
    check_units,
    participants,
)
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.metrics import PolicyLossMetrics
from grpo_kernels.ops.policy_loss.registration import Policy
from grpo_kernels.ops.sampled_support import check_support
from grpo_kernels.ops.sampled_support import registration as sampled_support
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.shared_positions import add_up, check_term_index, gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from grpo_kernels.ops.linear_distillation_loss.arguments import Teacher

_OP = "linear_policy_loss"


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
    lora: tuple[Tensor, Tensor, float] | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    positions: Tensor | None = None,
    support: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    policy_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segments: Tensor | None = None,
    term_index: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    is_weights: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: Normalizer | None = None,
    teacher: Teacher | None = None,
    return_entropy: bool = False,
    config: LossConfig | str = "grpo",
    memory: str = "fast",
    compact: bool | None = None,
    chunk_size: int | None = None,
    weight_grad: Tensor | None = None,
    vocab_start: int | None = None,
    process_group: ProcessGroup | None = None,
    backend: str | None = None,
) -> PolicyLoss:
    """Computes policy_loss(linear_logprobs(hidden, weight, targets).logprobs, ...) in three matrix products, not four.

    Args:
        hidden: [B, T, H] with targets [B, T], packed [M, H] with targets [M] and cu_seqlens, [..., H] with term_index
        targets: -100 excludes a token, whatever the mask says
        weight, bias, lora, temperature, softcap, logit_scale, chunk_size, backend: as in linear_logprobs
        old_logprobs, advantages, mask, policy_mask, cu_seqlens, segments, ref_logprobs: as in policy_loss
        is_weights, weights, normalizer, config: as in policy_loss. For a mask or weights that depend on the current
            log-probs, call linear_logprobs and policy_loss, in four products
        ref_hidden, ref_weight, ref_bias: head of the reference model, instead of ref_logprobs: [B, T, H'], [V, H'] and
            [V]. Its log-probs are computed in the same chunks, with the temperature, softcap and scale of the policy.
            Without ref_weight its weight and bias are those of the policy, without the adapter
        positions: the only tokens that take part: a mask, or integers [P] into the flattened targets
        term_index: integers [B, T], or [M] with cu_seqlens: the flattened position in targets of each token of the
            loss. Several may share one, whose log-prob is computed once. All other arguments of policy_loss have the
            shape of term_index; -1 is padding. positions must be None
        support: token ids that sampling kept, as in linear_logprobs, for the reference model, too. Gradients are
            then computed by the backward, also into weight_grad; lora, chunk_size and compact must be None, memory
            "fast"
        teacher: adds the divergence from a teacher's most probable tokens to the loss, for the tokens that take part,
            over the whole vocabulary. It has products of its own only with support and where memory="low" runs;
            then backward runs once, too. metrics.distillation is that part of the loss as a DistillationLoss.
            vocab_start must be None
        return_entropy: measure the entropy even if the config does not need it
        memory: "fast" computes the gradient with the loss, and backward runs once. "low" recomputes the logits in the
            backward. "low" is also used if a sequence ratio needs more tokens at a time than a chunk has rows, and with
            term_index and a sequence ratio in more than one chunk
        compact: leave excluded tokens out of all products, and tokens without a gradient out of two in three; None
            means on the CPU. On a GPU it waits for the device once; unless it is False, integer positions leave the
            others out without that
        weight_grad: tensor that the gradient of the weight is added to in the forward pass, for accumulation over
            micro-batches; weight itself gets no gradient. The loss must then be given to backward() unscaled
        vocab_start: first column held by this rank, if the rows of weight, bias, ref_weight and ref_bias are split over
            process_group, as in linear_logprobs. All ranks give the same arguments otherwise, and get the same loss.
            One all-reduce per chunk forward, and one of the gradient of the hidden states; without chunk_size, one more
            and a wait for the size of the largest part
        process_group: ranks that hold the other columns
    """
    config = LossConfig.of(config, _OP)
    head = check_head(_OP, hidden, weight, targets, bias, temperature, softcap, logit_scale, lora)
    checks.boolean(_OP, return_entropy=return_entropy)
    size = check_chunk_size(_OP, chunk_size)
    _check_form(hidden, cu_seqlens, term_index, memory, compact)
    index = None if term_index is None else check_term_index(_OP, term_index, targets.numel(), targets.device)
    places = check_positions(_OP, positions, targets)
    layout, takes_part, head = _participants(head, targets, mask, cu_seqlens, segments, places, index)
    reference = check_reference(_OP, head, targets.shape, ref_hidden, ref_weight, ref_bias)
    if reference.hidden is not None:
        check_reads_reference(_OP, "ref_hidden", config)
        ref_logprobs = _placeholder(layout, head, ref_logprobs)
    policy = check_policy(
        layout,
        config,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=takes_part,
        policy_mask=policy_mask,
        cu_seqlens=cu_seqlens,
        segments=segments,
        ref_logprobs=ref_logprobs,
        is_weights=is_weights,
        weights=weights,
        normalizer=normalizer,
    )
    want_entropy = return_entropy or config.entropy_coef != 0
    check_entropy(layout, config, want_entropy)
    check_units(layout, config, policy, normalizer, want_entropy)
    lesson = _check_teacher(teacher, targets, head, vocab_start, normalizer)
    inputs = _Inputs(layout, config, head, reference, policy, want_entropy, index, weight_grad, lesson, backend)
    if support is not None:
        check_whole(_OP, lora=lora)
        _check_whole(chunk_size, compact, memory, vocab_start, process_group)
        chosen = _select(layout, head, sampled_support.SUPPORTS, backend)
        return _over_support(inputs, support, targets.shape, chosen)
    chosen = _select(layout, head, op.SUPPORTS, backend)
    shard = check_shard(_OP, vocab_start, process_group, head, chosen)
    is_compact = _is_compact(compact, layout)
    chosen_rows = None
    if places is not None and not is_compact and compact is not False and not torch.compiler.is_compiling():
        chosen_rows, head = _at_positions(head, places)
        inputs = inputs._replace(head=head)
    is_fast = memory == "fast" and chosen != "reference" and torch.is_grad_enabled() and any(head.needs_grad)
    chunking = None
    if is_fast and not (torch.compiler.is_compiling() and _needs_eager(lesson, chosen)):
        shares = None if lesson is None else lesson.shares
        split = split_rows(layout, head, policy, config, index, shares) if is_compact else (None, chosen_rows)
        chunking = chunking_of(layout, head, policy, config, want_entropy, split, index, size, shard)
    if chunking is None:
        otherwise = "where memory='low' runs (see memory; also with the reference backend and without gradients)"
        check_weight_grad(_OP, weight_grad, head, False, otherwise)
        measured = head.targets != IGNORED if is_compact else chosen_rows
        return _with_low_memory(inputs, measured, targets.shape, size, shard, chosen)
    return _in_chunks(inputs, chunking, targets.shape, shard, chosen)


def _needs_eager(lesson: distillation_op.Lesson | None, backend: str) -> bool:
    """Whether the chunks cannot be one traced op, in which neither a teacher nor the reference has a gradient."""
    return lesson is not None or policy_loss.beside(backend) == "reference"


class _Inputs(NamedTuple):
    """Checked arguments; `term_index` and `backend` as the op got them, `lesson` the rows of the teacher."""

    layout: Layout
    config: LossConfig
    head: Head
    reference: ReferenceHead
    policy: Policy
    want_entropy: bool
    term_index: Tensor | None
    weight_grad: Tensor | None
    lesson: distillation_op.Lesson | None
    backend: str | None


def _check_teacher(
    teacher: Teacher | None, targets: Tensor, head: Head, vocab_start: int | None, normalizer: Normalizer | None
) -> distillation_op.Lesson | None:
    if teacher is None:
        return None
    if not isinstance(teacher, distillation.Teacher):
        raise TypeError(f"{_OP}: teacher must be a Teacher, got {type(teacher).__name__}")
    if vocab_start is not None:
        raise ValueError(
            f"{_OP}: vocab_start must be None with teacher, whose ids may be columns of any rank, got {vocab_start}"
        )
    if normalizer is not None and teacher.weights is None and teacher.normalizer is None:
        raise ValueError(
            f"{_OP}: teacher.normalizer must be given with normalizer, as the teacher's tokens would be counted in "
            "this call alone, got None; or give teacher.weights"
        )
    fields = (field.name for field in dataclasses.fields(teacher))
    names = distillation.Naming(_OP, **{field: f"teacher.{field}" for field in fields})
    return distillation.check_lesson(names, teacher, targets.shape, head.targets != IGNORED, head)


def _in_chunks(
    inputs: _Inputs, chunking: op.Chunking, shape: torch.Size, shard: Shard | None, backend: str
) -> PolicyLoss:
    """The loss with its gradient, chunk by chunk; the divergence from a teacher shares its products."""
    head, policy, lesson = inputs.head, inputs.policy, inputs.lesson
    check_weight_grad(_OP, inputs.weight_grad, head, True, "")
    term = None if lesson is None else distillation_op.Term(lesson, head.targets)
    loss, metrics = op.apply_loss(backend, head, inputs.reference, policy, chunking, inputs.weight_grad, shard, term)
    by_row = policy.advantages.shape != inputs.layout.shape
    result = PolicyLoss(loss, PolicyLossMetrics(metrics, inputs.config, by_row, inputs.want_entropy))
    if term is not None:
        result.metrics.distillation = distillation.DistillationLoss(
            term.loss.to(loss.dtype), term.divergence.view(shape).to(loss.dtype), term.mass.view(shape).to(loss.dtype)
        )
    return result


def _add_divergence(
    result: PolicyLoss, inputs: _Inputs, shape: torch.Size, chunk_size: int | None, backend: str
) -> PolicyLoss:
    """Adds the divergence from a teacher by products of its own."""
    head, lesson = inputs.head, inputs.lesson
    if lesson is None:
        return result
    chunking = distillation_op.Chunking.of(lesson, head, chunk_size)
    into, only = inputs.weight_grad, " with teacher"
    loss, divergence, mass = distillation_op.apply(backend, head, lesson, chunking, into, _OP, only)
    measured = divergence.view(shape), mass.view(shape)
    result.metrics.distillation = distillation.DistillationLoss(loss.detach(), *measured)
    return result._replace(loss=result.loss + loss)


def _with_low_memory(
    inputs: _Inputs,
    measured: Tensor | None,
    shape: torch.Size,
    chunk_size: int | None,
    shard: Shard | None,
    backend: str,
) -> PolicyLoss:
    """The loss of log-probs that the backward computes again, for tokens of a mask, at positions, or for all."""

    def logprobs_of(head: Head, return_entropy: bool) -> tuple[Tensor, Tensor | None]:
        result = linear_logprobs(
            head.hidden,
            head.weight,
            head.targets,
            bias=head.bias,
            lora=head.lora,
            temperature=head.temperature if head.row_temperature is None else head.row_temperature,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            positions=measured,
            return_entropy=return_entropy,
            chunk_size=chunk_size,
            vocab_start=None if shard is None else shard.start,
            process_group=None if shard is None else shard.group,
            backend=inputs.backend,
        )
        return shaped(result.logprobs), None if result.entropy is None else shaped(result.entropy)

    def shaped(result: Tensor) -> Tensor:
        if measured is not None and measured.dtype != torch.bool:
            result = result.new_zeros(len(head.targets)).index_put((measured,), result)
        return _by_term(result, layout, inputs.term_index)

    layout, config, head, reference, policy, want_entropy, *_ = inputs
    if reference.hidden is not None and reference.weight is not None:
        other = head.of(reference)
        policy = policy._replace(ref_logprobs=logprobs_of(other, False)[0])
    logprobs, entropy = logprobs_of(head, want_entropy)
    result = compute(layout, config, logprobs, entropy, policy, policy_loss.beside(backend))
    return _add_divergence(result, inputs, shape, chunk_size, backend)


def _check_whole(chunk_size: object, compact: object, memory: str, vocab_start: object, group: object) -> None:
    """Refuses with support what divides rows or columns."""
    check_whole(_OP, chunk_size=chunk_size, compact=compact, memory=None if memory == "fast" else memory)
    check_whole(_OP, vocab_start=vocab_start, process_group=group)


def _over_support(inputs: _Inputs, support: tuple[Tensor, Tensor], shape: torch.Size, chosen: str) -> PolicyLoss:
    """The loss of log-probs over a support, which are cheap enough to be known all at once."""
    layout, config, head, reference, policy, want_entropy, index, weight_grad, *_ = inputs
    entries = check_support(_OP, support, head.targets, len(head.weight))
    is_added = chosen != "reference" and torch.is_grad_enabled()
    check_weight_grad(_OP, weight_grad, head, is_added, "with the reference backend and without gradients")
    if weight_grad is not None and not weight_grad.is_contiguous():
        raise ValueError(
            f"{_OP}: weight_grad must be contiguous with support, got strides {list(weight_grad.stride())}"
        )
    if reference.hidden is not None and reference.weight is not None:
        other = head.of(reference)
        ref_logprobs, _ = op.apply_support(chosen, other, entries, False)
        policy = policy._replace(ref_logprobs=_by_term(ref_logprobs, layout, index))
    logprobs, entropy = op.apply_support(chosen, head, entries, want_entropy, weight_grad)
    entropy_of_all = _by_term(entropy, layout, index) if want_entropy else None
    by_term, of_loss = _by_term(logprobs, layout, index), policy_loss.beside(chosen)
    device, dtype = layout.device, layout.dtype
    if chosen == "triton" and backends.refusal("cuda", device.type, dtype, policy_loss.SUPPORTS, device.index) is None:
        of_loss = "cuda"  # which a support has no kernel in
    result = compute(layout, config, by_term, entropy_of_all, policy, of_loss)
    return _add_divergence(result, inputs, shape, None, chosen)


def _placeholder(layout: Layout, head: Head, ref_logprobs: Tensor | None) -> Tensor:
    """Stands for the reference model's log-probs until they are computed."""
    if ref_logprobs is not None:
        raise ValueError(f"{_OP}: ref_logprobs must be None with ref_hidden, got a tensor")
    return torch.zeros(layout.shape, dtype=head.wide, device=layout.device)


def _by_term(values: Tensor, layout: Layout, index: Tensor | None) -> Tensor:
    """One value per token of the loss, from one per row."""
    return values.view(layout.shape) if index is None else gather(values, index)


def _participants(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: Tensor | None,
    places: Tensor | None,
    index: Tensor | None,
) -> tuple[Layout, Tensor, Head]:
    """The layout of the loss, which of its tokens take part, and the head whose other rows are ignored."""
    device = head.hidden.device
    if index is None:
        layout = Layout(_OP, targets.shape, head.wide, device, cu_seqlens)
        takes_part = participants(_OP, targets, mask, cu_seqlens, segments)
        if places is not None:
            selected = torch.zeros(targets.numel(), dtype=torch.bool, device=targets.device)
            takes_part = takes_part & selected.index_fill(0, places, True).view(targets.shape)
        is_row = takes_part.reshape(-1)
    else:
        if places is not None:
            raise ValueError(f"{_OP}: positions must be None with term_index, which names the only ones, got a tensor")
        layout = Layout(_OP, index.shape, head.wide, device, cu_seqlens, "term_index")
        takes_part = participants(_OP, gather(targets, index, IGNORED), mask, cu_seqlens, segments, "term_index")
        is_row = add_up(takes_part.long(), index, len(head.targets)) > 0
    return layout, takes_part, head._replace(targets=torch.where(is_row, head.targets, IGNORED))


def _check_form(
    hidden: Tensor, cu_seqlens: Tensor | None, term_index: Tensor | None, memory: str, compact: bool | None
) -> None:
    if term_index is None and hidden.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(
            f"{_OP}: hidden must have shape [B, T, H], or [M, H] with cu_seqlens, got {list(hidden.shape)}"
        )
    if memory not in ("fast", "low"):
        raise ValueError(f"{_OP}: memory must be 'fast' or 'low', got {memory!r}")
    if compact not in (None, True, False):
        raise ValueError(f"{_OP}: compact must be True, False or None, got {compact!r}")


def _select(layout: Layout, head: Head, supports: backends.Supports, backend: str | None) -> str:
    return backends.select(_OP, backend, layout.device.type, head.hidden.dtype, supports, layout.device.index)


def _is_compact(compact: bool | None, layout: Layout) -> bool:
    if compact is None:
        compact = layout.device.type == "cpu"
    return compact and not torch.compiler.is_compiling()


def _at_positions(head: Head, places: Tensor) -> tuple[Tensor, Head]:
    """The only rows to compute, ascending, found without a wait; those that take no part may hold NaN."""
    rows = places.sort().values
    torch._assert_async((rows.diff() > 0).all(), f"{_OP}: positions must be different places")
    return rows, head.without(head.targets == IGNORED)
