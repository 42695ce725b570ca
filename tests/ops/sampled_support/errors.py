"""Errors of a support."""

from __future__ import annotations

from typing import Any

import torch

import grpo_kernels as gk
from tests.ops.error_rows import Call, Errors, Rows
from tests.ops.linear_head.errors import HIDDEN, WEIGHT, banning

IDS, OFFSETS, OF_IDS = torch.tensor([4, 0, 2, 3, 1, 6]), torch.tensor([0, 2, 3, 6]), torch.tensor([0, 2, 6])


def with_id(value: int, place: int = 3) -> dict[str, Any]:
    return {"support": (IDS.index_fill(0, torch.tensor(place), value), OFFSETS)}


def with_offsets(*values: int, count: int = 6) -> dict[str, Any]:
    return {"support": (IDS[:count], torch.tensor(values))}


OVER_IDS = {"hidden": HIDDEN[0], "head": WEIGHT, "targets": OF_IDS, "support": (IDS, OFFSETS)}
CALLS = {"linear_logprobs over a support": Call(gk.linear_logprobs, OVER_IDS)}
OF_SUPPORTS: Rows = {
    "support.token_ids must be on cpu ... got meta": {"support": (IDS.to("meta"), OFFSETS)},
    "support.offsets must be on cpu ... got meta": {"support": (IDS, OFFSETS.to("meta"))},
    "support.token_ids must have shape [E], got [1, 6]": {"support": (IDS[None], OFFSETS)},
    "support.offsets must have shape [4], one more than ... got [3]": {"support": (IDS, OFFSETS[:3])},
    "support.offsets must ascend from 0 to the number of token ids, 6, got 1 at 0": with_offsets(1, 2, 3, 6),
    "support.offsets must ascend from 0 to the number of token ids, 6, got 2 at 2": with_offsets(0, 3, 2, 6),
    "support.offsets must ascend from 0 to the number of token ids, 6, got 7 at 3": with_offsets(0, 2, 3, 7),
    "support.offsets must ascend from 0 to the number of token ids, 6, got 5 at 3": with_offsets(0, 2, 3, 5),
    "support.token_ids must be in [0, 7), got -1 in row 2": with_id(-1),
    "support.token_ids must be in [0, 7), got 7 in row 2": with_id(7),
    "support.token_ids must differ within a row, got 6 twice in row 2": with_id(6),
    "support.token_ids must differ within a row, got 0 twice in row 0": with_id(0, place=0),
    "targets must be in the support of their row, got 6 in row 2": with_offsets(0, 2, 3, 3, count=3),
    "targets must be in the support of their row, got 0 in row 0": with_offsets(0, 0, 0, 0, count=0),
    "targets must be in the support of their row, got 7 in row 1": {"targets": torch.tensor([0, 7, 6])},
    "support.token_ids must not be banned by the head, got 4 at [0]": banning(4),
}
ERRORS = [
    Errors(
        "linear_logprobs over a support",
        TypeError,
        {
            "support must be a pair (token_ids, offsets) of tensors, got int": {"support": 3},
            "support must be a pair (token_ids, offsets) of tensors, got list of 1": {"support": [IDS]},
            "support.token_ids must be a tensor, got list": {"support": (IDS.tolist(), OFFSETS)},
            "support.offsets must be of dtype ... got torch.float32": {"support": (IDS, OFFSETS.float())},
        },
    ),
    Errors("linear_logprobs over a support", ValueError, OF_SUPPORTS),
]
