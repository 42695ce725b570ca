"""Registers the kernels of log-probs over a support with torch."""

from __future__ import annotations

import importlib
from typing import cast

import torch
from torch import Tensor

from grpo_kernels.ops.sampled_support.config import Entries
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.registration import Rows

# Imported here and not at the first call, because torch.compile traces through it.
_reference = importlib.import_module("grpo_kernels.ops.sampled_support.reference")

_ALL = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SUPPORTS = {"reference": _ALL}


def apply_logits(backend: str, rows: Rows, entries: Entries, want_entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (empty unless wanted) of logits [A, B, V] over a support of its A * B rows."""
    logits = _reference.masked(rows.logits.reshape(-1, rows.logits.shape[-1]), entries).view(rows.logits.shape)
    results = token_logprobs.FORWARD[backend](*rows._replace(logits=logits), want_entropy, False)
    return cast(tuple[Tensor, Tensor], results[:2])
