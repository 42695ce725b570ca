"""Right counting, for any trainer: cases that a trainer's own functions pass or fail.

    grpo-conformance grpo_kernels my_adapter.py        # or python -m grpo_conformance

An adapter is an object with a `name` and any of these methods; a case that needs another is not offered.

    class Mine:
        name = "mine"

        def advantages(self, batch):        # [N]
            return my_advantages(batch.rewards, batch.groups)

        def loss(self, batch):              # a scalar, or a scalar and its gradient by batch.logprobs
            tokens = batch.total.mask.sum()  # of all parts, where batch is one of several
            return my_loss(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask) / tokens

        def token_advantages(self, batch):  # [N, T], GAE before any whitening
            return my_gae(batch.token_rewards, batch.values, batch.mask, batch.gamma, batch.lam)

    adapter = Mine()

Losses of parts of a batch are added up, so each returns its share of the whole. A method raises NotOffered where the
trainer has no such thing as the batch asks for.
"""

from __future__ import annotations

from grpo_conformance.batch import PAD_GROUP, Batch, NotOffered
from grpo_conformance.cases import INVARIANTS
from grpo_conformance.conventions import CONVENTIONS
from grpo_conformance.run import Convention, Invariant, Result, run

__all__ = ["CONVENTIONS", "INVARIANTS", "PAD_GROUP", "Batch", "Convention", "Invariant", "NotOffered", "Result", "run"]
