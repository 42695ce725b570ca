"""The policy loss inside TRL's model forward, in place of the log-probs of its LM head.

TRL's forward ends in `_ChunkedLogProbFunction.apply`, which gets the hidden states of the scored tokens, the head's
weight and bias, and all that the model does with its logits. Here that call computes the loss. It must run within the
forward: DistributedDataParallel looks there for the parameters that a step uses. Where TRL only scores tokens, for the
old and the reference policy, it computes log-probs with the same products, so that a policy that has not changed has
ratios of 1 up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import trl.trainer.utils as host
from torch import Tensor, nn

import grpo_kernels as gk
from grpo_kernels.integrations.sharded import dtype_of, gathered, kept
from grpo_kernels.integrations.trl import adapters

HEADS = ("logprobs", "fused")
_IGNORED = -100


class HeadInputs(NamedTuple):
    hidden: Tensor  # [P, H], the scored tokens of all rows, without padding
    lm_head: gk.LMHead
    targets: Tensor  # [P]
    temperature: float


# Log-probs and possibly entropies of the scored tokens, from the head's inputs and the names of TRL's outputs.
HeadCall = Callable[[HeadInputs, Sequence[str]], tuple[Tensor, Tensor | None]]


class TokenInputs(NamedTuple):
    """Inputs of the loss beside the head, [B, T] unless noted; None where there is none."""

    old_logprobs: Tensor | None
    advantages: Tensor  # [B] or [B, T]
    mask: Tensor
    ref_logprobs: Tensor | None
    is_weights: Tensor | None  # [B, 1] or [B, T]
    segments: Tensor | None
    weights: Tensor | None = None  # in the place of the aggregation's mean


class Never:
    """Stands for DTensor in TRL's module of the fused head, so that TRL hands over a weight that FSDP2 shards.

    TRL's full_tensor() would keep each rank's part of its own gradient, and lose those of the other ranks.
    """


@contextlib.contextmanager
def head_calls(compute: HeadCall, model: nn.Module) -> Iterator[None]:
    """Within this context a forward of TRL's with this model ends in a call of `compute`."""

    class _Call:
        @staticmethod
        def apply(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            softcap: float | None,
            logit_scale: float,
            outputs: Sequence[str],
        ) -> tuple[Tensor | None, ...]:
            dtype = dtype_of(hidden)

            def whole(value: Any, dtype: torch.dtype | None = None) -> Any:
                return gathered("FusedGRPOTrainer", value, model.modules(), hidden.device, dtype)

            weight = kept(whole(weight, dtype)).to(dtype)
            bias = None if bias is None else kept(whole(bias, dtype)).to(dtype)
            lora = adapters.current().adapter
            if lora is not None:
                lora = adapters.of_dtype((whole(lora[0]), whole(lora[1]), lora[2]), dtype)
            lm_head = gk.LMHead(weight, bias, lora=lora, softcap=softcap, logit_scale=logit_scale)
            return *compute(HeadInputs(hidden.to(dtype), lm_head, targets, temperature), outputs), None, None, None

    # only the tokens that are scored
    names = {"_ChunkedLogProbFunction": _Call, "_use_triton": lambda device: True, "DTensor": Never}
    originals = {name: getattr(host, name) for name in names}
    for name, ours in names.items():
        setattr(host, name, ours)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(host, name, original)


def logprobs(head: HeadInputs, outputs: Sequence[str], backend: str | None = None) -> tuple[Tensor, Tensor | None]:
    result = gk.linear_logprobs(
        head.hidden,
        head.lm_head,
        head.targets,
        temperature=head.temperature,
        return_entropy="entropy" in outputs,
        backend=backend,
    )
    return result.logprobs, result.entropy


def _places(head: HeadInputs, scored: Tensor) -> Tensor:
    """The flattened places of the scored tokens of rows [B, T], whose number must be that of the head's rows."""
    places = scored.reshape(-1).nonzero().squeeze(1)
    if len(places) != len(head.targets):
        raise RuntimeError(
            f"FusedGRPOTrainer: head='fused' needs the hidden states of {len(places)} tokens from TRL's forward, got "
            f"{len(head.targets)}; use head='logprobs'"
        )
    return places


def padded_logprobs(head: HeadInputs, scored: Tensor, backend: str | None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T] of the scored tokens, 0 for the others."""
    places = _places(head, scored)
    values, entropy = logprobs(head, ("entropy",), backend)
    assert entropy is not None
    return _padded(values, places, scored), _padded(entropy, places, scored)


def _padded(values: Tensor, places: Tensor, scored: Tensor) -> Tensor:
    return values.new_zeros(scored.numel()).index_put((places,), values).view(scored.shape)


def padded_tokens(metrics: gk.PolicyLossMetrics, scored: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T] that packed_policy_loss measured."""
    assert metrics.logprobs is not None and metrics.entropy is not None
    # without the places of the tokens, for which the host would wait until the head is done
    none = metrics.logprobs.new_zeros(scored.shape)
    return none.masked_scatter(scored, metrics.logprobs), none.masked_scatter(scored, metrics.entropy)


def packed_policy_loss(head: HeadInputs, tokens: TokenInputs, scored: Tensor, **options: Any) -> gk.PolicyLoss:
    """linear_policy_loss over the scored tokens of rows [B, T]."""
    rows, count, places = len(scored), len(head.targets), _places(head, scored)
    lengths = scored.sum(1)
    # One more token after the last row. Otherwise as many tokens as rows would make values of rows those of tokens.
    extra = 1 if count == rows else 0

    def packed(value: Tensor | None) -> Tensor | None:
        if value is None or value.dim() == 1 or (value.shape[1] == 1 and scored.shape[1] != 1):
            return value  # one per row
        return F.pad(value.reshape(-1)[places], (0, extra))

    return gk.linear_policy_loss(
        F.pad(head.hidden, (0, 0, 0, extra)),
        head.lm_head,
        F.pad(head.targets, (0, extra), value=_IGNORED),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)),
        return_entropy=True,
        **{name: packed(value) for name, value in tokens._asdict().items()},  # type: ignore[arg-type]
        temperature=head.temperature,
        **options,
    )


def chosen(trainer: Any, head: str | None) -> str:
    """One of HEADS: what was asked for, or the fused one where nothing stands against it."""
    reason = None if head == "logprobs" else obstacle(trainer)
    if head == "fused" and reason is not None:
        raise ValueError(f"FusedGRPOTrainer: {reason}; leave head out, or use 'logprobs'")
    return head or ("fused" if reason is None else "logprobs")


def obstacle(trainer: Any) -> str | None:
    """A setting that the fused head cannot honour, the rule that it breaks, and why; None if there is none."""
    several = trainer.accelerator.num_processes > 1
    rules = [
        (
            "fsdp",
            "must have fsdp_version 2",
            trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2,
            "as the first has no head outside of its own forward",
        ),
        ("torch_compile", "must be False", trainer.args.torch_compile, "as the loss is computed within the forward"),
        (
            "top_entropy_quantile",
            "must be 1 with several processes",
            several and trainer.top_entropy_quantile < 1,
            "as the threshold needs the entropies of all before the loss of any",
        ),
    ]
    for name, rule, is_broken, reason in rules:
        if is_broken:
            return f"{name} {rule} for head='fused', {reason}, got {getattr(trainer.args, name, None)!r}"
    return None
