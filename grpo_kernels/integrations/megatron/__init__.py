"""Log-probs or the policy loss in place of the logits of Megatron-core's GPTModel, for every trainer built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import checks

__all__ = ["output_processor"]
_WHERE = "output_processor"
_OF_HEAD = ("banned", "softcap")
# Arguments of the ops that Megatron's own arguments give.
_GIVEN = ("hidden", "head", "targets", "mask", "positions", "cu_seqlens")


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    config: Any,
    loss_mask: Tensor | None = None,
    packed_seq_params: Any = None,
    context: Mapping[str, Any] | None = None,
    **_: Any,
) -> gk.TokenLogprobs | gk.PolicyLoss:
    """Computes log-probs and entropies, or the policy loss, from hidden states and the vocabulary-parallel weight.

    It is the `output_processor` of a GPTModel of Megatron-core 0.18 and later, which calls it with these arguments and
    more, and returns what it returns. Tensor and sequence parallelism are those of the output layer. A Float16Module
    turns named tuples into plain ones.

    Args:
        hidden_states: [S, B, H], or a rank's part of it with sequence parallelism
        output_layer: the model's, a ColumnParallelLinear; its tp_group holds the other columns
        output_weight: the embedding's weight if it is shared, which gets both gradients; None takes the output layer's
        labels: [B, S], the token after each position; -100 counts as masked
        config: the model's TransformerConfig
        loss_mask: [B, S], positions to compute; None means all
        packed_seq_params: of packed rows, B = 1, whose bounds are those of the policy loss
        context: the model's output_processor_context: arguments of linear_logprobs, or with `advantages` of
            linear_policy_loss, tensors in the shape of the labels; and `banned` and `softcap` of the head. With context
            parallelism the loss needs `weights`, such as token_shares(..., process_group=) of this rank's tokens

    Returns:
        TokenLogprobs: [B, S], 0 where nothing is computed, or PolicyLoss
    """
    given = dict(context or {})
    for name in _GIVEN:
        if name in given:
            raise ValueError(f"{_WHERE}: context must leave out {name!r}, which the model gives, got {sorted(given)}")
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError(f"{_WHERE}: config.defer_embedding_wgrad_compute must be False, got True")
    options = {name: given.pop(name) for name in _OF_HEAD if name in given}
    if getattr(config, "use_mup", False):
        options["logit_scale"] = config.mup_output_mult
    head = _head_of(output_layer, output_weight, options)
    if getattr(output_layer, "sequence_parallel", False):
        hidden_states = _Gathered.apply(hidden_states, output_layer.tp_group)  # type: ignore[no-untyped-call]
    hidden, targets = hidden_states.transpose(0, 1), _check_labels(hidden_states, labels)
    counts = None
    if loss_mask is not None:
        kinds = (torch.bool, *checks.INTEGERS, *checks.FLOATS)
        checks.shaped(_WHERE, "loss_mask", loss_mask, kinds, targets.device, targets.shape, "labels")
        counts = checks.flags(_WHERE, "loss_mask", loss_mask)
    if "advantages" not in given:
        return gk.linear_logprobs(hidden, head, targets, positions=counts, **given)
    given = {"old_logprobs": None, "mask": counts} | given
    parts = getattr(config, "context_parallel_size", 1)
    if parts > 1:
        _check_parts(given)
    if packed_seq_params is None:
        return gk.linear_policy_loss(hidden, head, targets, **given)
    padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    bounds = (packed_seq_params.cu_seqlens_q if padded is None else padded) // parts
    of_tokens: dict[str, Any] = {
        name: value[0] if isinstance(value, Tensor) and value.shape == targets.shape else value
        for name, value in given.items()
    }
    return gk.linear_policy_loss(hidden[0], head, targets[0], cu_seqlens=bounds, **of_tokens)


def _head_of(output_layer: Any, output_weight: Tensor | None, options: dict[str, Any]) -> gk.LMHead:
    """The rank's columns of the output layer."""
    weight = getattr(output_layer, "weight", None) if output_weight is None else output_weight
    if hasattr(output_layer, "adapter") or weight is None:
        rule = "be a ColumnParallelLinear with a weight, without an adapter"
        raise ValueError(f"{_WHERE}: output_layer must {rule}, got {type(output_layer).__name__}")
    if type(weight) not in (Tensor, torch.nn.Parameter):
        rule = "be a plain tensor, neither quantised nor a DTensor"
        raise TypeError(f"{_WHERE}: the weight of output_layer must {rule}, got {type(weight).__name__}")
    group = output_layer.tp_group
    size = dist.get_world_size(group)
    if len(weight) * size != output_layer.output_size:
        raise ValueError(
            f"{_WHERE}: the weight must have the rows of one rank of output_layer.tp_group, "
            f"{output_layer.output_size} / {size}, got {len(weight)}"
        )
    split = {} if size == 1 else {"vocab_start": dist.get_rank(group) * len(weight), "process_group": group}
    return gk.LMHead(weight, getattr(output_layer, "bias", None), **split, **options)


def _check_labels(hidden: Tensor, labels: object) -> Tensor:
    if labels is None:
        raise ValueError(f"{_WHERE}: labels must be given, the token after each position, got None")
    targets = checks.tensor(_WHERE, "labels", labels, checks.INTEGERS)
    shape = (hidden.shape[1], hidden.shape[0])
    if targets.shape != shape:
        raise ValueError(
            f"{_WHERE}: labels must have shape {list(shape)} for hidden states [S, B, H] of all sequence-parallel "
            f"ranks, got {list(targets.shape)}"
        )
    return targets


def _check_parts(given: Mapping[str, Any]) -> None:
    """Refuses losses that need whole sequences, of which a context-parallel rank has a part."""
    config = gk.LossConfig.of(given.get("config", "grpo"), _WHERE)
    if config.couples_tokens:
        raise ValueError(
            f"{_WHERE}: config must have ratios of tokens with context parallelism, got ratio={config.ratio!r} and "
            f"loss={config.loss!r}; return log-probs, and use gk.rollout_logprobs(..., process_group=)"
        )
    if config.aggregation != "token-sum" and given.get("weights") is None:
        raise ValueError(
            f"{_WHERE}: context must have weights with context parallelism, as a rank cannot count the tokens of a "
            "sequence, got None; gk.token_shares(..., process_group=) makes them"
        )


class _Gathered(torch.autograd.Function):
    """The hidden states of all ranks. Their gradient is complete on each rank, which keeps its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.part, ctx.first = len(part), dist.get_rank(group) * len(part)
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.first : ctx.first + ctx.part], None
