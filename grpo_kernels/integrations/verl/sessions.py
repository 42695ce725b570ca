"""Sessions of verl's v1 trainer: one answer of the policy each, whose outputs are rows of the batch.

verl deals the rows to mini-batches, ranks and micro-batches without regard to sessions. The loss therefore reads what a
session has in the whole batch from two columns of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.integrations.verl.advantages import is_pad

TOKENS = "session_tokens"  # tokens in the loss of the row's session
ROWS = "rows_per_session"  # mean over the batch; verl's divisors count rows
COLUMNS = (TOKENS, ROWS)


def of_keys(keys: Sequence[str]) -> tuple[Tensor, list[int]]:
    """Number of each row's session [B], and the row of each session's last output; keys are uid_session_output."""
    numbers, rows, outputs = dict[str, int](), list[int](), list[int]()
    of_row = []
    for row, key in enumerate(keys):
        parts = key.rsplit("_", 2)
        if len(parts) != 3 or not parts[2].isdigit():
            raise ValueError(
                "compute_advantage_for_multi_trajectories: batch_keys must be of the form uid_session_output, got "
                f"{key!r}"
            )
        output = int(parts[2])
        number = numbers.setdefault(f"{parts[0]}_{parts[1]}", len(numbers))
        of_row.append(number)
        if number == len(rows):
            rows.append(row)
            outputs.append(output)
        elif outputs[number] < output:
            rows[number], outputs[number] = row, output
    return torch.tensor(of_row), rows


def rollouts(keys: Sequence[str]) -> Tensor | None:
    """Number of each row's session [B], or None if each has one output."""
    of_row, last = of_keys(keys)
    return None if len(last) == len(of_row) else of_row


def lengths(mask: Tensor, of_row: Tensor) -> Tensor:
    """Tokens of the session of each row [B] that are in the loss."""
    counts = mask.sum(1).long()
    return torch.zeros_like(counts).index_add(0, of_row, counts)[of_row]


def add_columns(data: Any, of_row: Tensor) -> None:
    """Adds the columns that the loss reads to a DataProto."""
    mask = data.batch["response_mask"]
    of_row = of_row.to(mask.device)
    is_row = ~is_pad(data.non_tensor_batch["uid"], mask.sum(1))
    sessions = torch.zeros_like(of_row).index_add(0, of_row, is_row.long()) > 0
    data.batch[TOKENS] = lengths(mask, of_row)
    data.batch[ROWS] = (is_row.sum() / sessions.sum().clamp(min=1)).float().expand(len(mask)).contiguous()
