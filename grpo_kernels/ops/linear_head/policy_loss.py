"""The policy loss straight from hidden states, with the logits of only one chunk of tokens in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.linear_head.arguments import (
    check_banned,
    check_chunk_size,
    check_head,
    check_positions,
    check_reference,
    check_shard,
    check_weight_grad,
    shard_of,
)
from grpo_kernels.ops.linear_head.autograd import may_precompute, precomputed
from grpo_kernels.ops.linear_head.distillation import distill
from grpo_kernels.ops.linear_head.divergence import Distillation
from grpo_kernels.ops.linear_head.head import NOTHING_MORE, Head, LMHead, Shard, Want
from grpo_kernels.ops.linear_head.logprobs import logprobs_at, over_support
from grpo_kernels.ops.linear_head.loop import SUPPORTS, Call
from grpo_kernels.ops.linear_head.objectives.policy import PolicyTerms
from grpo_kernels.ops.linear_head.plan import plan_of, split_tokens
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
from grpo_kernels.ops.sampled_support import registration as sampled_support
from grpo_kernels.ops.sampled_support.arguments import check_support, check_support_alone
from grpo_kernels.ops.token_logprobs import TokenLogprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.shared_positions import add_up, check_term_index, gather

_OP = "linear_policy_loss"
# Calls that cannot add to a weight_grad.
_WITH_LOW_MEMORY = (
    "where memory='low' runs (see memory: in float16, for example; also with the reference backend and without "
    "gradients)"
)
_ONCE = (_OP, " with memory='fast'", ". memory='low' computes them each time")


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
    return_sum_pi_squared: bool = False,
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
            states; without chunk_size, one more and a wait for the size of the largest part. Where memory="low" runs
            and without gradients, one forward
        targets: -100 excludes a token, whatever the mask says
        old_logprobs, advantages, mask, policy_mask, cu_seqlens, segments, ref_logprobs: as in policy_loss
        term_index: integers [B, T], or [M] with cu_seqlens: the flattened position in targets of each token of the
            loss. Several may share one, whose log-prob is computed once. All other arguments of policy_loss have the
            shape of term_index; -1 is padding. positions must be None
        temperature, chunk_size, backend: as in linear_logprobs
        positions: the only tokens that take part: a mask, or integers [P] into the flattened targets
        support: token ids that sampling kept, as in linear_logprobs, for the reference model, too. Gradients are
            then computed by the backward, also into weight_grad; chunk_size, compact, and lora of both heads must be
            None, memory "fast"
        ref_hidden: hidden states [B, T, H'] of the reference model, instead of ref_logprobs, which are computed in the
            same chunks, at the temperature of the policy
        ref_head: the reference model's LMHead. A weight [V, H'] alone gets the softcap, scale and bans of `head`; None
            is `head` without its adapter
        is_weights, weights, normalizer, config: as in policy_loss. For a mask or weights that depend on the current
            log-probs, call linear_logprobs and policy_loss, in four products
        teacher: adds the divergence from a teacher's most probable tokens to the loss, for the tokens that take part,
            over the whole vocabulary. It has products of its own only with support and where memory="low" runs;
            then backward runs once, too, but in float16. metrics.distillation is that part of the loss as a
            DistillationLoss
        return_entropy: measure the entropy even if the config does not need it
        return_sum_pi_squared: measure the sum of squared probabilities, as in token_logprobs
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
            shape of targets, without a gradient and 0 for excluded tokens, and so are metrics.entropy and
            metrics.sum_pi_squared if they were measured
    """
    config = LossConfig.of(config, _OP)
    lm_head = LMHead.of(_OP, "head", head)
    inputs = check_head(_OP, hidden, lm_head, targets, temperature)
    checks.boolean(_OP, return_entropy=return_entropy, return_sum_pi_squared=return_sum_pi_squared)
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
    terms = PolicyTerms(policy, list(layout.shape), index, config.entropy_coef != 0)
    taught = _check_teacher(teacher, targets, inputs, lm_head, {"normalizer": normalizer, "weights": weights})
    call = Call(inputs, terms, taught, reference, None, want_entropy, return_sum_pi_squared)
    asked = _Asked(layout, config, call, weight_grad, targets.shape)
    if support is not None:
        is_low = memory if memory != "fast" else None
        ref_lora = None if reference is None else reference.lora
        only = {"chunk_size": chunk_size, "compact": compact, "memory": is_low, "ref_head.lora": ref_lora}
        check_support_alone(_OP, lm_head, **only)
        loss = _over_support(asked, lm_head, support, backend)
    else:
        loss = _over_vocabulary(asked, lm_head, at, memory, compact, size, backend)
    return loss


class _Asked(NamedTuple):
    """Checked arguments."""

    layout: Layout
    config: LossConfig
    call: Call
    weight_grad: Tensor | None
    shape: torch.Size  # of the targets

    def select(self, supports: backends.Supports, backend: str | None) -> str:
        device = self.layout.device
        return backends.select(_OP, backend, device.type, self.call.head.hidden.dtype, supports, device.index)


def _over_vocabulary(
    asked: _Asked,
    lm_head: LMHead,
    at: Tensor | None,
    memory: str,
    compact: bool | None,
    chunk_size: int | None,
    backend: str | None,
) -> PolicyLoss:
    """The loss chunk by chunk with its gradient, or, where that cannot be known yet, of log-probs."""
    layout, config, call, weight_grad, _ = asked
    head, chosen, is_eager = call.head, asked.select(SUPPORTS, backend), not torch.compiler.is_compiling()
    shard = check_shard(_OP, lm_head, head, chosen)
    is_compact = is_eager and (layout.device.type == "cpu" if compact is None else compact)
    only = None  # the tokens to compute, as far as those are known without a wait for a GPU
    if at is not None and is_eager and compact is None and not is_compact:
        only, head = at.sort().values, head.without(head.targets == IGNORED)
        call = dataclasses.replace(call, head=head)
        asked = asked._replace(call=call)
    of_loss = policy_loss.beside(chosen, layout.device, layout.dtype)
    wants_grad = chosen != "reference" and torch.is_grad_enabled() and any(head.needs_grad)
    # the reference of policy_loss has no gradient within a traced op
    may_plan = memory == "fast" and wants_grad and may_precompute(head.hidden) and (is_eager or of_loss != "reference")
    plan = None
    if may_plan:
        tokens = split_tokens(layout, config, call) if is_compact else (None, only)
        plan = plan_of(layout, config, call, tokens, chunk_size, shard)
    check_weight_grad(_OP, weight_grad, head, plan is not None, _WITH_LOW_MEMORY)
    if plan is None:
        if is_compact:
            only = (head.targets != IGNORED).nonzero().squeeze(1)

        def logprobs_of(head: Head, want: Want) -> TokenLogprobs:
            return logprobs_at(chosen, head, only, want, chunk_size, shard)

        return _of_logprobs(asked, logprobs_of, chosen, chunk_size, shard)
    results = precomputed(chosen, dataclasses.replace(call, plan=plan), weight_grad, shard, _ONCE)
    by_row = call.policy is not None and call.policy.policy.advantages.shape != layout.shape
    metrics = PolicyLossMetrics(results["metrics"], config, by_row, call.want_entropy)
    taught = None
    if call.teacher is not None:
        taught = DistillationLoss(*(results[name] for name in ("distillation", "divergence", "mass")))
    measured = TokenLogprobs(results["logprobs"], results.get("entropy"), results.get("sum_pi_squared"))
    _add_tokens(metrics, measured, taught, asked.shape)
    return PolicyLoss(results["loss"], metrics)


def _over_support(asked: _Asked, lm_head: LMHead, support: tuple[Tensor, Tensor], backend: str | None) -> PolicyLoss:
    """The loss of log-probs over a support, which are cheap enough to be known all at once."""
    head, weight_grad, teacher = asked.call.head, asked.weight_grad, asked.call.teacher
    chosen = asked.select(sampled_support.SUPPORTS, backend)
    shard = shard_of(_OP, lm_head)
    entries = check_support(_OP, support, head, lm_head)
    is_added = chosen != "reference" and torch.is_grad_enabled()
    is_added = is_added and (teacher is None or may_precompute(head.hidden))
    otherwise = "with the reference backend, without gradients or with a teacher in float16"
    check_weight_grad(_OP, weight_grad, head, is_added, otherwise)
    if weight_grad is not None and not weight_grad.is_contiguous():
        raise ValueError(
            f"{_OP}: weight_grad must be contiguous with support, got strides {list(weight_grad.stride())}"
        )

    def logprobs_of(model: Head, want: Want) -> TokenLogprobs:
        into = weight_grad if model is head else None  # not for the reference model
        return over_support(chosen, model, entries, want, into, shard)

    return _of_logprobs(asked, logprobs_of, chosen, None, shard)


def _of_logprobs(
    asked: _Asked,
    logprobs_of: Callable[[Head, Want], TokenLogprobs],
    backend: str,
    chunk_size: int | None,
    shard: Shard | None,
) -> PolicyLoss:
    """The loss of log-probs that are known all at once; the divergence from a teacher has products of its own."""
    layout, config, call, weight_grad, _ = asked
    terms = call.policy
    assert terms is not None
    policy = terms.policy
    if call.other is not None:
        of_reference = logprobs_of(call.other.for_targets_of(call.head), NOTHING_MORE)
        policy = dataclasses.replace(policy, ref_logprobs=terms.by_term(of_reference.logprobs))
    measured = logprobs_of(call.head, call.want)
    by_term = None if measured.entropy is None else terms.by_term(measured.entropy)
    of_loss = policy_loss.beside(backend, layout.device, layout.dtype)
    result = compute(layout, config, terms.by_term(measured.logprobs), by_term, policy, of_loss)
    if call.teacher is None:
        _add_tokens(result.metrics, measured, None, asked.shape)
        return result
    of_teacher, once = Call(call.head, teacher=call.teacher), (_OP, " with teacher", "")
    taught = distill(backend, of_teacher, chunk_size, weight_grad, shard, once)
    _add_tokens(result.metrics, measured, taught, asked.shape)
    return result._replace(loss=result.loss + taught.loss)


def _check_teacher(
    teacher: Teacher | None, targets: Tensor, head: Head, lm_head: LMHead, divisors: Mapping[str, object]
) -> Distillation | None:
    if teacher is None:
        return None
    if isinstance(teacher, Teacher) and teacher.hidden is not None:
        raise ValueError(
            f"{_OP}: teacher must have ids and log-probs, got hidden states; linear_distillation_loss takes them"
        )
    tokens = check_teacher(_OP, teacher, targets.shape, head.targets != IGNORED, head, lm_head)
    given = [name for name, divisor in divisors.items() if divisor is not None]
    if given and teacher.weights is None and teacher.normalizer is None:
        raise ValueError(
            f"{_OP}: teacher.normalizer must be given with {given[0]}, as the teacher's tokens would be counted in "
            "this call alone, got None; or give teacher.weights"
        )
    return tokens


def _add_tokens(
    metrics: PolicyLossMetrics, measured: TokenLogprobs, taught: DistillationLoss | None, shape: torch.Size
) -> None:
    """Adds what was measured of each token, without gradients."""
    for name, value in measured._asdict().items():
        setattr(metrics, name, None if value is None else value.detach().view(shape))
    if taught is not None:
        loss, *of_tokens = taught
        metrics.distillation = DistillationLoss(loss.detach(), *(value.view(shape) for value in of_tokens))


def _placeholder(layout: Layout, head: Head, ref_logprobs: Tensor | None) -> Tensor:
    """Stands for the reference model's log-probs until they are computed."""
    if ref_logprobs is not None:
        raise ValueError(f"{_OP}: ref_logprobs must be None with ref_hidden, got a tensor")
    return torch.zeros(layout.shape, dtype=head.wide, device=layout.device)


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
