"""unsloth-zoo: the loss that it puts in the place of TRL's."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from cutter import Source
from grpo_conformance import Batch, NotOffered
from grpo_conformance.adapters import refuse
from torch import Tensor

SOURCE = Source("unsloth-zoo", "2026.10.9")
FILE = "unsloth_zoo/rl_replacements.py"
losses = SOURCE.cut(FILE, "grpo_compute_loss", torch=torch, math=math)
KINDS = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "luspo", None: "dapo"}


class UnslothZoo:
    name = f"unsloth-zoo {SOURCE.version}"
    lacks = (
        *("rollouts of several rows", "uneven groups", "rows that pad a batch", "packed rows"),
        *("slices of the context", "parts of different sizes"),
    )
    where: ClassVar = {"loss": SOURCE.where(FILE, "def grpo_compute_loss(")}

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "entropy_coef", "teacher_coef", "value_coef", "auxiliary_coef", "mask_truncated")
        if batch.kl_coef and batch.kl not in ("k3", None):
            raise NotOffered(f"no KL of form {batch.kl}")
        loss = losses.grpo_compute_loss(
            batch.ref_logprobs if batch.kl_coef else None,
            batch.logprobs,
            batch.old_logprobs,
            None,
            torch.zeros_like(batch.mask, dtype=torch.long),
            batch.mask.double(),
            batch.kl_coef,
            batch.advantages,
            loss_type=KINDS[batch.aggregation],
            epsilon_low=batch.clip,
            epsilon_high=batch.clip,
            importance_sampling_level=batch.ratio,
            num_items_in_batch=batch.total.mask.sum(),  # as TRL counts them
            current_gradient_accumulation_steps=batch.steps,
            num_processes=batch.ranks,
        )[0]
        return loss / batch.ranks  # gradients are averaged over ranks


adapter = UnslothZoo()
