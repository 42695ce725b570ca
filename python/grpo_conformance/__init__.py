"""Right counting, for any trainer: cases that a trainer's own functions pass or fail.

    grpo-conformance grpo_kernels my_adapter.py        # or python -m grpo_conformance

An adapter is an object with a `name` and any of these methods; docs/conformance.md shows one of each.

    advantages(batch)        -> [N]
    token_advantages(batch)  -> [N, T], GAE
    loss(batch)              -> a scalar, or a scalar and its gradient by batch.logprobs
    logprobs(logits, tokens, temperature) -> [N, L - 1]

Losses of parts of a batch are added up, so each returns its share of the whole. A case that needs another method is not
offered, nor is one that asks for something in the adapter's `lacks`, or for which a method raises NotOffered.
"""

from __future__ import annotations

from grpo_conformance.batch import PAD_GROUP, Batch, Logits, NotOffered
from grpo_conformance.cases import CONVENTIONS, INVARIANTS
from grpo_conformance.run import Convention, Invariant, Result, run

__all__ = [
    "CONVENTIONS",
    "INVARIANTS",
    "PAD_GROUP",
    "Batch",
    "Convention",
    "Invariant",
    "Logits",
    "NotOffered",
    "Result",
    "run",
]
