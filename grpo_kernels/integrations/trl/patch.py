"""Replaces TRL's log-probs from hidden states and from logits in all of its trainers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import trl.trainer.utils as host
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.kernels.chunked_logprob import _use_triton as uses_triton

import grpo_kernels as gk
from grpo_kernels.checks import boolean
from grpo_kernels.integrations.sharded import dtype_of, gathered, kept
from grpo_kernels.integrations.trl import adapters
from grpo_kernels.integrations.trl.head import Never
from grpo_kernels.integrations.trl.installed import refuse_other_trl

_HEAD, _COMPACT, _SHARDED = "_ChunkedLogProbFunction", "_use_triton", "DTensor"
_originals: dict[str, Any] = {}


def patch_trl(head: bool = True, logprobs: bool = True) -> None:
    """Replaces TRL's scoring functions.

    What only TRL computes (the accuracies, mean logits and sums of DPO, KTO and SFT) still comes from TRL, by a pass of
    its own without gradients.

    Args:
        head: log-probs and entropies from hidden states, as used by the GRPO, RLOO, SFT, DPO and KTO trainers. These
            then accept LoRA on the LM head, which TRL by itself does not compute
        logprobs: log-probs and entropies from logits, as used by the other trainers
    """
    refuse_other_trl("patch_trl")
    boolean("patch_trl", head=head, logprobs=logprobs)
    for name, wanted, ours in [
        (_HEAD, head, _Head),
        (_COMPACT, head, lambda device: True),  # compute only positions that count, on the CPU as well
        (_SHARDED, head, Never),
        ("selective_log_softmax", logprobs, selective_log_softmax),
        ("entropy_from_logits", logprobs, entropy_from_logits),
        ("selective_log_softmax_and_entropy", logprobs, selective_log_softmax_and_entropy),
    ]:
        if wanted and name not in _originals:
            _originals[name] = getattr(host, name)
            _replace(_originals[name], ours, name)
    if head:
        adapters.patch()


def unpatch_trl() -> None:
    """Restores TRL, including modules imported since."""
    while _originals:
        name, original = _originals.popitem()
        _replace(getattr(host, name), original, name)
    adapters.unpatch()


def _replace(old: Any, new: Any, name: str) -> None:
    """Replaces it in every module of TRL; switches of its fused head only in the module of its trainers."""
    paths = [path for path in sys.modules if path.split(".")[0] == "trl"]
    for module in [sys.modules[path] for path in paths if name not in (_COMPACT, _SHARDED) or path == host.__name__]:
        if vars(module).get(name) is old:
            setattr(module, name, new)


class _Head:
    """Replaces an autograd function, which is called by `apply`."""

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
        units, lora = adapters.current()
        if lora is not None and is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "patch_trl: the LM head must have no adapter under ZeRO-3, got one; only its weight is here"
            )
        # a rank without targets takes part in the others' collectives, and in their dtype
        dtype = dtype_of(hidden)
        weight, bias = (gathered("patch_trl", value, units, hidden.device, dtype) for value in (weight, bias))
        if lora is not None:
            lora = (*(gathered("patch_trl", factor, units, hidden.device) for factor in lora[:2]), lora[2])

        def of_trl(outputs: Sequence[str]) -> tuple[Tensor | None, ...]:
            whole = weight if lora is None else adapters.merged(weight, lora)
            results: tuple[Tensor | None, ...] = _originals[_HEAD].apply(
                hidden, whole, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs
            )
            return results

        if len(targets) == 0:
            return of_trl(outputs)
        hidden = hidden.to(dtype)
        result = gk.linear_logprobs(
            hidden,
            gk.LMHead(
                kept(weight).to(dtype),
                None if bias is None else kept(bias).to(dtype),
                lora=None if lora is None else adapters.of_dtype(lora, hidden.dtype),
                softcap=softcap,
                logit_scale=logit_scale,
            ),
            targets,
            temperature=temperature,
            return_entropy="entropy" in outputs,
            return_sum_pi_squared="log_sum_sq_probs" in outputs,
        )
        squares = result.sum_pi_squared
        if squares is not None:
            squares = torch.where(squares > 0, squares, 1).log()  # 0 where a target is ignored
        of_logits: tuple[Tensor | None, ...] = (None, None)
        if extra := [name for name in outputs if name in ("mean_logits", "is_top1")]:
            with torch.no_grad():
                of_logits = of_trl(extra)[3:]
        return result.logprobs, result.entropy, squares, *of_logits


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    if index.dim() == logits.dim():  # several targets per row
        original: Tensor = _originals["selective_log_softmax"](logits, index, temperature, row_mask)
        return original
    return _scored(logits, index, temperature, row_mask, False).logprobs


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    entropy = _scored(logits, first, 1.0, None, True).entropy
    assert entropy is not None
    return entropy


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logprobs, entropy, _ = _scored(logits, index, temperature, row_mask, True)
    assert entropy is not None
    return logprobs, entropy if entropy_requires_grad else entropy.detach()


def _scored(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, with_entropy: bool
) -> gk.TokenLogprobs:
    """Log-probs and entropies in the precision of TRL's: float32 from its Triton kernel, else that of the logits."""
    dtype = torch.promote_types(logits.dtype, torch.float32) if uses_triton(logits.device) else logits.dtype
    targets = index if row_mask is None else torch.where(row_mask != 0, index, -100)
    result = gk.token_logprobs(logits, targets, temperature=temperature, return_entropy=with_entropy)
    entropy = None if result.entropy is None else result.entropy.to(dtype)
    return gk.TokenLogprobs(result.logprobs.to(dtype), entropy)
