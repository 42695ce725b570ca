"""Counting in TRL's generation batches: answers of several rows, and prompts whose answers have equal rewards."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk

FIELD = "rollout"  # of what a rollout_func returns
WEIGHTS = "loss_weights"  # of the inputs of a micro-batch
# Losses that TRL divides by the tokens of the whole generation batch instead of the micro-batch's.
BY_ALL_TOKENS = ("dapo", "cispo", "vespo")


class Rollouts:
    """The rollout of every row, where rollout_func tells it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._names = trainer, None
        if trainer.rollout_func is not None:
            trainer.rollout_func = self._noting(trainer.rollout_func)

    def _noting(self, rollout_func: Any) -> Any:
        @functools.wraps(rollout_func)
        def call(*arguments: Any, **options: Any) -> Any:
            output = rollout_func(*arguments, **options)
            self._names = output.get(FIELD)
            return output

        return call

    def gather(self, rows: Tensor) -> Tensor | None:
        """Ids of the rows of all processes, below their number, or None if each row is a rollout of its own."""
        if self._trainer.rollout_func is None:
            return None
        count, names = len(rows), self._names
        if names is not None and (not isinstance(names, list) or len(names) != count):
            got = f"{len(names)} ids" if isinstance(names, list) else type(names).__name__
            raise ValueError(
                f"FusedGRPOTrainer: {FIELD!r} of rollout_func must be a list with an id for each of {count} rows, "
                f"got {got}"
            )
        local = torch.full((count,), -1) if names is None else gk.group_ids(names)
        gathered: Tensor = self._trainer.accelerator.gather(local.to(rows.device))
        is_absent = gathered < 0
        if is_absent.all():
            return None
        if is_absent.any():  # known to every process, so that none waits for another
            raise ValueError(
                f"FusedGRPOTrainer: {FIELD!r} must be returned by rollout_func in all processes or in none, got both"
            )
        firsts = torch.arange(len(gathered), device=rows.device) // count * count
        return gathered + firsts  # a rollout is of one process, whose ids may be those of another


def check_rollouts(trainer: Any) -> None:
    """Refuses settings that read sequences, of which a process or a micro-batch may have a part."""
    config = trainer._loss_config(0.0)
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    mode = trainer.vllm_importance_sampling_mode
    rules = [
        ("segments", trainer.segments, trainer.segments is None, "must be None"),
        ("similarity", trainer.similarity, trainer.similarity is None, "must be None"),
        ("the ratio of the loss", config.ratio, config.ratio == "token", "must be that of a token"),
        ("loss_type", config.loss, config.loss != "vespo", "must not be 'vespo'"),
        (
            "off_policy_mask_threshold",
            trainer.off_policy_mask_threshold,
            trainer.off_policy_mask_threshold is None,
            "must be None",
        ),
        (
            "vllm_importance_sampling_mode",
            mode,
            not corrects or mode.startswith("token"),
            "must be of tokens",
        ),
    ]
    for name, value, holds, rule in rules:
        if not holds:
            raise ValueError(
                f"FusedGRPOTrainer: {name} {rule} where rollout_func returns {FIELD!r}, as the rows of a rollout are "
                f"not seen together, got {value!r}"
            )


def of_rollouts(counts: Tensor, rollouts: Tensor | None) -> Tensor:
    """The sum over the rollout of each row."""
    if rollouts is None:
        return counts
    return torch.zeros_like(counts).index_add(0, rollouts, counts)[rollouts]


def flat(advantages: Tensor, size: int) -> Tensor:
    """Rows of prompts whose rows all have advantage 0."""
    return (advantages.view(-1, size) == 0).all(1).repeat_interleave(size)


def of_all(trainer: Any, *tokens: Tensor) -> list[Tensor]:
    """The rows of all processes, padded to the longest completion."""
    accelerator = trainer.accelerator

    def gathered(values: Tensor) -> Tensor:
        # accelerate pads booleans as int64, and only in the processes that need padding
        numbers = values.long() if values.dtype == torch.bool else values
        rows: Tensor = accelerator.gather(accelerator.pad_across_processes(numbers, dim=1))
        return rows.to(values.dtype)

    return [gathered(values) for values in tokens]


def own(trainer: Any, values: Tensor) -> Tensor:
    """This process's part of the values of all rows."""
    count: int = len(values) // trainer.accelerator.num_processes
    first = trainer.accelerator.process_index * count
    return values[first : first + count]


def count_once(
    trainer: Any, output: dict[str, Any], rollouts: Tensor | None, is_flat: Tensor | None, batches: int
) -> None:
    """Takes flat groups out of a process's generation batch, and adds weights if the loss is a mean over sequences.

    TRL deals the rows to its `batches` micro-batches at random. The weights are therefore those of the whole generation
    batch of all processes, times its number of micro-batches, so that the loss of one is about the mean.
    """
    if is_flat is not None:
        output["completion_mask"] = output["completion_mask"] * ~own(trainer, is_flat)[:, None]
        output["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(output).sum()).sum()
    config = trainer._loss_config(0.0)
    if (rollouts is None and is_flat is None) or not config.aggregation.startswith("seq-mean"):
        return
    processes = trainer.accelerator.num_processes
    mask = loss_mask(output)
    if rollouts is None:
        rollouts = torch.arange(len(mask) * processes, device=mask.device)
    counts = torch.ones_like(rollouts) if is_flat is None else (~is_flat).long()
    # as in TRL, one without a token counts
    number = torch.zeros_like(rollouts).scatter_reduce(0, rollouts, counts, "amax").sum()
    shares = gk.token_shares(  # without the other processes, which have no row of these rollouts
        mask,
        rollouts=own(trainer, rollouts),
        aggregation=config.aggregation,
        count=number,
        max_length=config.max_length,
    )
    output[WEIGHTS] = (shares * (processes * batches)).float()


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
