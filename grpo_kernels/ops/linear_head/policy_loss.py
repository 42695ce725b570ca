"""The policy loss straight from hidden states, with the logits of only one chunk of tokens in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.linear_head import distillation_op, logprobs_op, loss_op
from grpo_kernels.ops.linear_head.arguments import (
    check_banned,
    check_chunk_size,
    check_head,
    check_positions,
    check_reference,
    check_shard,
    check_weight_grad,
)
from grpo_kernels.ops.linear_head.chunking import chunking_of, split_tokens
from grpo_kernels.ops.linear_head.divergence import TeacherTokens
from grpo_kernels.ops.linear_head.head import Head, LMHead, Shard
from grpo_kernels.ops.linear_head.precomputed import may_precompute
from grpo_kernels.ops.linear_head.sizes import tokens_per_chunk
from grpo_kernels.ops.linear_head.teacher import DistillationLoss, Teacher, check_teacher
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
from grpo_kernels.ops.policy_loss.reference import Policy
from grpo_kernels.ops.sampled_support import registration as sampled_support
from grpo_kernels.ops.sampled_support.arguments import check_support, check_support_alone
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.shared_positions import add_up, check_term_index, gather

_OP = "linear_policy_loss"
# Calls that cannot add to a weight_grad.
_WITH_LOW_MEMORY = (
    "where memory='low' runs (see memory: in float16, for example; also with the reference backend and without "
    "gradients)"
)


def linear_policy_loss(
    hidden: Tensor,
    head: LMHead | Tensor,
    targets: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    mask: Tensor | None = None,
    policy_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    segments: Tensor | None = None,
    term_index: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    positions: Tensor | None = None,
    support: tuple[Tensor, Tensor] | None = None,
    ref_logprobs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_head: LMHead | Tensor | None = None,
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
    backend: str | None = None,
) -> PolicyLoss:
    """Computes policy_loss(linear_logprobs(hidden, head, targets).logprobs, ...) in three matrix products, not four.

    Args:
        hidden: [B, T, H] with targets [B, T], packed [M, H] with targets [M] and cu_seqlens, [..., H] with term_index.
            hidden[:, t] predicts targets[:, t]: a causal model's last_hidden_state[:, P - 1 : -1] for completions after
            prompts of P tokens
        head: an LMHead, or its weight [V, H]. If its columns are split over ranks, all ranks give the same arguments
            otherwise, and get the same loss. One all-reduce per chunk forward, and one of the gradient of the hidden
            states; without chunk_size, one more and a wait for the size of the largest part
        targets: -100 excludes a token, whatever the mask says
        old_logprobs, advantages, mask, policy_mask, cu_seqlens, segments, ref_logprobs: as in policy_loss
        term_index: integers [B, T], or [M] with cu_seqlens: the flattened position in targets of each token of the
            loss. Several may share one, whose log-prob is computed once. All other arguments of policy_loss have the
            shape of term_index; -1 is padding. positions must be None
        temperature, chunk_size, backend: as in linear_logprobs
        positions: the only tokens that take part: a mask, or integers [P] into the flattened targets
        support: token ids that sampling kept, as in linear_logprobs, for the reference model, too. Gradients are
            then computed by the backward, also into weight_grad; chunk_size, compact, vocab_start of the head, and lora
            of both heads must be None, memory "fast"
        ref_hidden: hidden states [B, T, H'] of the reference model, instead of ref_logprobs, which are computed in the
            same chunks, at the temperature of the policy
        ref_head: the reference model's LMHead. A weight [V, H'] alone gets the softcap, scale and bans of `head`; None
            is `head` without its adapter
        is_weights, weights, normalizer, config: as in policy_loss. For a mask or weights that depend on the current
            log-probs, call linear_logprobs and policy_loss, in four products
        teacher: adds the divergence from a teacher's most probable tokens to the loss, for the tokens that take part,
            over the whole vocabulary. It has products of its own only with support and where memory="low" runs;
            then backward runs once, too, but in float16. metrics.distillation is that part of the loss as a
            DistillationLoss. The head's vocab_start must be None
        return_entropy: measure the entropy even if the config does not need it
        memory: "fast" computes the gradient with the loss, and backward runs once. "low" recomputes the logits in the
            backward. "low" is also used in float16, where a loss scaler must come before the gradient, if a sequence
            ratio needs more tokens at a time than a chunk has, and with term_index and a sequence ratio in more than
            one chunk
        compact: leave excluded tokens out of all products, and tokens without a gradient out of two in three; None
            means on the CPU. On a GPU it waits for the device once; unless it is False, integer positions leave the
            others out without that
        weight_grad: tensor that the gradient of the weight is added to in the forward pass, for accumulation over
            micro-batches; weight itself gets no gradient. The loss must then be given to backward() unscaled. Not with
            memory="low"

    Returns:
        PolicyLoss: the scalar loss to call backward() on, and its metrics; metrics.logprobs are the log-probs in the
            shape of targets, without a gradient and 0 for excluded tokens, and so is metrics.entropy if it was measured
    """
    config = LossConfig.of(config, _OP)
    lm_head = LMHead.of(_OP, "head", head)
    inputs = check_head(_OP, hidden, lm_head, targets, temperature)
    checks.boolean(_OP, return_entropy=return_entropy)
    size = check_chunk_size(_OP, chunk_size)
    _check_form(hidden, cu_seqlens, term_index, memory, compact)
    index = None if term_index is None else check_term_index(_OP, term_index, targets.numel(), targets.device)
    at = check_positions(_OP, positions, targets)
    layout, takes_part, inputs = _participants(inputs, targets, mask, cu_seqlens, segments, at, index)
    check_banned(_OP, inputs)
    reference = check_reference(_OP, inputs, targets.shape, ref_hidden, ref_head, lm_head)
    if reference is not None:
        check_reads_reference(_OP, "ref_hidden", config)
        ref_logprobs = _placeholder(layout, inputs, ref_logprobs)
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
    taught = _check_teacher(teacher, targets, inputs, lm_head, {"normalizer": normalizer, "weights": weights})
    call = _Call(layout, config, inputs, reference, policy, want_entropy, index, weight_grad, taught, targets.shape)
    if support is not None:
        is_low = memory if memory != "fast" else None
        ref_lora = None if reference is None else reference.lora
        only = {"chunk_size": chunk_size, "compact": compact, "memory": is_low, "ref_head.lora": ref_lora}
        check_support_alone(_OP, lm_head, **only)
        return _over_support(call, support, _select(call, sampled_support.SUPPORTS, backend))
    chosen = _select(call, logprobs_op.SUPPORTS, backend)
    shard = check_shard(_OP, lm_head, inputs, chosen)
    is_compact = _is_compact(compact, layout)
    chosen_tokens = None
    if at is not None and not is_compact and compact is not False and not torch.compiler.is_compiling():
        chosen_tokens, inputs = _at_positions(inputs, at)
        call = call._replace(head=inputs)
    wants_grad = chosen != "reference" and torch.is_grad_enabled() and any(inputs.needs_grad)
    is_fast = memory == "fast" and wants_grad and may_precompute(inputs.hidden)
    chunking = None
    if is_fast and not (torch.compiler.is_compiling() and _needs_eager(taught, _backend_of_loss(layout, chosen))):
        shares = None if taught is None else taught.shares
        split = split_tokens(layout, inputs, policy, config, index, shares) if is_compact else (None, chosen_tokens)
        chunking = chunking_of(layout, inputs, policy, config, want_entropy, split, index, size, shard)
    if chunking is None:
        check_weight_grad(_OP, weight_grad, inputs, False, _WITH_LOW_MEMORY)
        measured = chosen_tokens
        if is_compact:
            measured = (inputs.targets != IGNORED).nonzero().squeeze(1)
        return _with_low_memory(call, measured, size, shard, chosen)
    return _in_chunks(call, chunking, shard, chosen)


class _Call(NamedTuple):
    """Checked arguments; `shape` is that of the targets."""

    layout: Layout
    config: LossConfig
    head: Head
    reference: Head | None
    policy: Policy
    want_entropy: bool
    term_index: Tensor | None
    weight_grad: Tensor | None
    teacher: TeacherTokens | None
    shape: torch.Size


def _needs_eager(teacher: TeacherTokens | None, of_loss: str) -> bool:
    """Whether the chunks cannot be one traced op, in which neither a teacher nor the reference has a gradient."""
    return teacher is not None or of_loss == "reference"


def _backend_of_loss(layout: Layout, of_head: str) -> str:
    return policy_loss.beside(of_head, layout.device, layout.dtype)


def _check_teacher(
    teacher: Teacher | None, targets: Tensor, head: Head, lm_head: LMHead, divisors: Mapping[str, object]
) -> TeacherTokens | None:
    if teacher is None:
        return None
    if isinstance(teacher, Teacher) and teacher.hidden is not None:
        raise ValueError(
            f"{_OP}: teacher must have ids and log-probs, got hidden states; linear_distillation_loss takes them"
        )
    tokens = check_teacher(_OP, teacher, targets.shape, head.targets != IGNORED, head)
    if lm_head.vocab_start is not None:
        raise ValueError(
            f"{_OP}: head.vocab_start must be None with teacher, whose ids may be columns of any rank, got "
            f"{lm_head.vocab_start}"
        )
    given = [name for name, divisor in divisors.items() if divisor is not None]
    if given and teacher.weights is None and teacher.normalizer is None:
        raise ValueError(
            f"{_OP}: teacher.normalizer must be given with {given[0]}, as the teacher's tokens would be counted in "
            "this call alone, got None; or give teacher.weights"
        )
    return tokens


# The ways to compute the loss


def _in_chunks(call: _Call, chunking: loss_op.Chunking, shard: Shard | None, backend: str) -> PolicyLoss:
    """The loss with its gradient, chunk by chunk; the divergence from a teacher shares its products."""
    head, policy = call.head, call.policy
    check_weight_grad(_OP, call.weight_grad, head, True, "")
    term = None if call.teacher is None else distillation_op.Term(backend, call.teacher, head.targets)
    inputs = loss_op.HeadLoss(head, call.reference, policy, chunking, head.needs_grad)
    loss, metrics, logprobs, entropy = loss_op.apply(backend, inputs, call.weight_grad, shard, term)
    by_row = policy.advantages.shape != call.layout.shape
    result = PolicyLoss(loss, PolicyLossMetrics(metrics, call.config, by_row, call.want_entropy))
    _add_tokens(result, call, logprobs, entropy)
    if term is not None:
        measured = (value.view(call.shape).to(loss.dtype) for value in (term.divergence, term.mass))
        result.metrics.distillation = DistillationLoss(term.loss.to(loss.dtype), *measured)
    return result


def _with_low_memory(
    call: _Call, measured: Tensor | None, chunk_size: int | None, shard: Shard | None, backend: str
) -> PolicyLoss:
    """The loss of log-probs that the backward computes again, at positions or for all tokens."""
    layout = call.layout

    def logprobs_of(head: Head, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
        part = head if measured is None else head.at(measured)
        if shard is not None:
            size = chunk_size or shard.tokens_per_chunk(len(part.hidden), part.weight)
        else:
            columns, device = len(part.weight), part.hidden.device
            size = chunk_size or tokens_per_chunk(len(part.hidden), columns, device.type, part.weight.dtype)
        inputs = logprobs_op.Logprobs(part, want_entropy, size, chunk_size or 0)
        logprobs, entropy = logprobs_op.apply_logprobs(backend, inputs, shard)
        return of_all(logprobs), of_all(entropy) if want_entropy else None

    def of_all(result: Tensor) -> Tensor:
        if measured is None:
            return result
        return result.new_zeros(len(call.head.targets)).index_put((measured,), result)

    policy = call.policy
    if call.reference is not None:
        ref_logprobs, _ = logprobs_of(call.reference.for_targets_of(call.head), False)
        policy = dataclasses.replace(policy, ref_logprobs=_by_term(ref_logprobs, layout, call.term_index))
    logprobs, entropy = logprobs_of(call.head, call.want_entropy)
    result = _of_logprobs(call, logprobs, entropy, policy, backend)
    return _add_divergence(result, call, chunk_size, backend)


def _over_support(call: _Call, support: tuple[Tensor, Tensor], chosen: str) -> PolicyLoss:
    """The loss of log-probs over a support, which are cheap enough to be known all at once."""
    layout, head, policy, weight_grad = call.layout, call.head, call.policy, call.weight_grad
    entries = check_support(_OP, support, head)
    is_added = chosen != "reference" and torch.is_grad_enabled()
    is_added = is_added and (call.teacher is None or may_precompute(head.hidden))
    otherwise = "with the reference backend, without gradients or with a teacher in float16"
    check_weight_grad(_OP, weight_grad, head, is_added, otherwise)
    if weight_grad is not None and not weight_grad.is_contiguous():
        raise ValueError(
            f"{_OP}: weight_grad must be contiguous with support, got strides {list(weight_grad.stride())}"
        )
    if call.reference is not None:
        reference = call.reference.for_targets_of(head)
        ref_logprobs, _ = sampled_support.apply(chosen, reference, entries, False, None)
        policy = dataclasses.replace(policy, ref_logprobs=_by_term(ref_logprobs, layout, call.term_index))
    logprobs, entropy = sampled_support.apply(chosen, head, entries, call.want_entropy, weight_grad)
    result = _of_logprobs(call, logprobs, entropy if call.want_entropy else None, policy, chosen)
    return _add_divergence(result, call, None, chosen)


def _of_logprobs(call: _Call, logprobs: Tensor, entropy: Tensor | None, policy: Policy, backend: str) -> PolicyLoss:
    """The loss of the log-probs and entropies of all tokens."""
    layout, index = call.layout, call.term_index
    by_term = None if entropy is None else _by_term(entropy, layout, index)
    of_loss = _backend_of_loss(layout, backend)
    result = compute(layout, call.config, _by_term(logprobs, layout, index), by_term, policy, of_loss)
    _add_tokens(result, call, logprobs, entropy)
    return result


def _add_tokens(result: PolicyLoss, call: _Call, logprobs: Tensor, entropy: Tensor | None) -> None:
    """Adds what was measured of each token to the metrics."""
    result.metrics.logprobs = logprobs.detach().view(call.shape)
    if call.want_entropy:
        assert entropy is not None
        result.metrics.entropy = entropy.detach().view(call.shape)


def _add_divergence(result: PolicyLoss, call: _Call, chunk_size: int | None, backend: str) -> PolicyLoss:
    """Adds the divergence from a teacher by products of its own."""
    if call.teacher is None:
        return result
    loss, divergence, mass = distillation_op.apply(
        backend, call.head, call.teacher, chunk_size, call.weight_grad, _OP, " with teacher"
    )
    measured = divergence.view(call.shape), mass.view(call.shape)
    result.metrics.distillation = DistillationLoss(loss.detach(), *measured)
    return result._replace(loss=result.loss + loss)


def _placeholder(layout: Layout, head: Head, ref_logprobs: Tensor | None) -> Tensor:
    """Stands for the reference model's log-probs until they are computed."""
    if ref_logprobs is not None:
        raise ValueError(f"{_OP}: ref_logprobs must be None with ref_hidden, got a tensor")
    return torch.zeros(layout.shape, dtype=head.wide, device=layout.device)


def _by_term(values: Tensor, layout: Layout, index: Tensor | None) -> Tensor:
    """One value per token of the loss, from one per position."""
    return values.view(layout.shape) if index is None else gather(values, index)


def _participants(
    head: Head,
    targets: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: Tensor | None,
    at: Tensor | None,
    index: Tensor | None,
) -> tuple[Layout, Tensor, Head]:
    """The layout of the loss, which of its tokens take part, and the head whose other targets are ignored."""
    device, targets = head.hidden.device, head.targets.view(targets.shape)  # int64, which holds the ignored one
    if index is None:
        layout = Layout(_OP, targets.shape, head.wide, device, cu_seqlens)
        takes_part = participants(_OP, targets, mask, cu_seqlens, segments)
        if at is not None:
            selected = torch.zeros(targets.numel(), dtype=torch.bool, device=targets.device)
            takes_part = takes_part & selected.index_fill(0, at, True).view(targets.shape)
        is_read = takes_part.reshape(-1)
    else:
        if at is not None:
            raise ValueError(f"{_OP}: positions must be None with term_index, which names the only ones, got a tensor")
        layout = Layout(_OP, index.shape, head.wide, device, cu_seqlens, "term_index")
        takes_part = participants(_OP, gather(targets, index, IGNORED), mask, cu_seqlens, segments, "term_index")
        is_read = add_up(takes_part.long(), index, len(head.targets)) > 0
    return layout, takes_part, dataclasses.replace(head, targets=torch.where(is_read, head.targets, IGNORED))


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


def _select(call: _Call, supports: backends.Supports, backend: str | None) -> str:
    device = call.layout.device
    return backends.select(_OP, backend, device.type, call.head.hidden.dtype, supports, device.index)


def _is_compact(compact: bool | None, layout: Layout) -> bool:
    if compact is None:
        compact = layout.device.type == "cpu"
    return compact and not torch.compiler.is_compiling()


def _at_positions(head: Head, at: Tensor) -> tuple[Tensor, Head]:
    """The only tokens to compute, ascending, found without a wait; those that take no part may hold NaN."""
    tokens = at.sort().values
    return tokens, head.without(head.targets == IGNORED)
