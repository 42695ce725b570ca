"""Sessions of verl's v1 trainer: one answer of the policy each, whose outputs are rows of the batch.

verl deals the rows to mini-batches, ranks and micro-batches without regard to sessions. The loss therefore reads what a
session has in the whole batch from columns of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.integrations.verl.advantages import is_pad

IDS = "session_ids"  # number of the row's session
TOKENS = "session_tokens"  # tokens in the loss of the row's session
ROWS = "rows_per_session"  # mean over the batch; verl's divisors count rows
COLUMNS = (IDS, TOKENS, ROWS)


class Sessions(NamedTuple):
    """The sessions of a batch of B rows."""

    of_row: Tensor  # [B] number of each row's session
    last: list[int]  # row of each session's last output
    order: Tensor  # [B] the rows, those of a session in the order of its outputs

    @property
    def has_several(self) -> bool:
        """Whether a session has several outputs."""
        return len(self.last) < len(self.of_row)


def of_keys(keys: Sequence[str]) -> Sessions:
    """Sessions of rows with keys of the form uid_session_output."""
    numbers, last = dict[str, int](), dict[int, int]()
    of_row, outputs = list[int](), list[int]()
    for row, key in enumerate(keys):
        parts = key.rsplit("_", 2)
        if len(parts) != 3 or not parts[2].isdigit():
            raise ValueError(
                "compute_advantage_for_multi_trajectories: batch_keys must be of the form uid_session_output, got "
                f"{key!r}"
            )
        number = numbers.setdefault(f"{parts[0]}_{parts[1]}", len(numbers))
        of_row.append(number)
        outputs.append(int(parts[2]))
        if number not in last or outputs[last[number]] < outputs[row]:
            last[number] = row
    return Sessions(torch.tensor(of_row), list(last.values()), torch.tensor(outputs).argsort(stable=True))


def rollouts(keys: Sequence[str]) -> Tensor | None:
    """Number of each row's session [B], or None if each has one output."""
    sessions = of_keys(keys)
    return sessions.of_row if sessions.has_several else None


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
    data.batch[IDS] = of_row
    data.batch[TOKENS] = lengths(mask, of_row)
    data.batch[ROWS] = (is_row.sum() / sessions.sum().clamp(min=1)).float().expand(len(mask)).contiguous()
