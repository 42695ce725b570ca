"""Means and ratios of rollouts do not depend on which ranks hold their tokens: two and four processes against one.

Faults: a count, or the length of a rollout or a group, of one rank alone; rows of other ranks that are taken for one's
own where ranks have different numbers of them, or none; a gradient through a ratio that leaves out the other ranks.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels as gk

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()) or torch.cuda.is_available(), reason="needs gloo"
)
F64 = torch.float64
ROWS, WIDTH = 7, 12
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-sum-norm": {"max_length": 9},
    "group-mean-token-mean": {"groups": torch.tensor([4, 4, -2, 4, -2, 9, 9])},
}
ROLLOUTS = torch.tensor([3, 3, 0, -7, 0, 12, 12])
# Rows and columns of each rank: neighbouring rows, of which one rank has none; slices of the context.
PARTS: dict[str, dict[int, list[tuple[slice, slice]]]] = {
    "rows": {
        2: [(slice(0, 1), slice(None)), (slice(1, 7), slice(None))],
        4: [(slice(first, last), slice(None)) for first, last in ((0, 3), (3, 3), (3, 4), (4, 7))],
    },
    "slices of rows": {
        size: [(slice(None), slice(WIDTH * rank // size, WIDTH * (rank + 1) // size)) for rank in range(size)]
        for size in (2, 4)
    },
}


def drawn() -> dict[str, Tensor]:
    torch.manual_seed(0)
    mask = torch.rand(ROWS, WIDTH) < 0.7
    mask[5:] = False  # a rollout and a group without tokens
    old = -torch.rand(ROWS, WIDTH, dtype=F64)
    return {
        "mask": mask,
        "old": old,
        "lp": old + 0.3 * torch.randn_like(old),
        "advantages": torch.randn(ROWS, 1).double(),
    }


def losses(rows: slice, columns: slice, group: Any) -> dict[str, Tensor]:
    """For each aggregation the loss of a part, its gradient, and the shares."""
    batch = drawn()
    mask, old = (batch[name][rows, columns] for name in ("mask", "old"))
    results = {}
    for name, options in AGGREGATIONS.items():
        own = {key: value[rows] if isinstance(value, Tensor) else value for key, value in options.items()}
        rollouts = ROLLOUTS[rows]
        own |= {"rollouts": rollouts} if name.startswith("seq-mean") else {}
        shares = gk.token_shares(mask, aggregation=name, process_group=group, **own)
        leaf = batch["lp"][rows, columns].clone().requires_grad_()
        logprobs = gk.rollout_logprobs(leaf, old, rollouts, mask=mask, process_group=group)
        loss = gk.policy_loss(logprobs, old, batch["advantages"][rows], mask=mask, weights=shares).loss
        loss.backward()
        results |= {f"{name} loss": loss.detach(), f"{name} gradient": leaf.grad, f"{name} shares": shares}
    of_rows = gk.token_shares(mask, aggregation="seq-mean-token-mean", process_group=group)
    return results | {"shares of rows": of_rows}


def worker(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=limit)
    results = {kind: losses(*parts[size][rank], dist.group.WORLD) for kind, parts in PARTS.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_are_one_batch(size: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (size, str(tmp_path)), nprocs=size)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    want = losses(slice(None), slice(None), None)
    for kind, parts in PARTS.items():
        for name in AGGREGATIONS:
            total = sum(results[kind][f"{name} loss"] for results in of_ranks)
            torch.testing.assert_close(total, want[f"{name} loss"], msg=lambda text, of=(kind, name): f"{of}: {text}")
            tensors = [f"{name} gradient", f"{name} shares", *(["shares of rows"] if kind == "rows" else [])]
            for result in tensors:
                for (rows, columns), results in zip(parts[size], of_ranks, strict=True):
                    torch.testing.assert_close(
                        results[kind][result],
                        want[result][rows, columns],
                        msg=lambda text, of=(kind, result): f"{of}: {text}",
                    )
