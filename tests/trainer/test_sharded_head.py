"""The fused head of a policy that FSDP2 shards over two processes: gradients, and what is communicated."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grpo_trainer import distributed
from grpo_trainer.data import Batch
from grpo_trainer.policy import Policy

from tests.communication import Communication
from tests.trainer.test_policy import policy_of

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

LAYERS, ROWS, PROMPTS, LENGTH = 2, 12, 3, 10
# with shared prompts a layer runs twice, first for the prompts; all rows at once, and 15 chunks
CASES = tuple(itertools.product((True, False), (None, 8)))


def loss(of: Policy, rank: int, share: bool, chunk_size: int | None) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    columns = of.lm.config.vocab_size
    tokens = torch.randint(columns, (ROWS, LENGTH), generator=random)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=random)
    prompts = torch.randint(columns, (PROMPTS, 5), generator=random)
    batch = Batch(prompts, torch.ones_like(prompts, dtype=torch.bool), tokens, mask, torch.arange(ROWS) % PROMPTS)
    old = -4 + 0.1 * torch.randn(ROWS, LENGTH, generator=random)
    arguments = {"old_logprobs": old, "advantages": torch.randn(ROWS, generator=random)}
    return of("loss", batch, share=share, chunk_size=chunk_size, **arguments)[0].loss


def gradients(of: Policy) -> dict[str, torch.Tensor]:
    return {name: distributed.full_tensor(value.grad) for name, value in of.named_parameters()}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=limit)
    sharded = policy_of()
    distributed.shard(sharded, torch.device("cpu"))
    result: dict[Any, Any] = {}
    for case in CASES:
        sharded.zero_grad()
        with Communication() as communication:
            total = loss(sharded, rank, *case)
            forward = communication.take()
            total.backward()
        result[case] = {"forward": forward, "backward": communication.take()}
        result[case] |= {"gradients": gradients(sharded), "loss": total.detach()}
    parts = (sharded.lm.model.layers[0], sharded)
    result["sizes"] = [sum(value.to_local().numel() for value in part.parameters()) for part in parts]
    result["has a sharded head"] = distributed.is_sharded(sharded.inner.get_output_embeddings().weight)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process_and_the_head_is_gathered_once_each_way(
    ranks: list[dict[Any, Any]], case: tuple[bool, int | None]
) -> None:
    """The head is part of the outermost unit, whatever the number of chunks."""
    alone = policy_of()
    of_layer, of_all = ranks[0]["sizes"]  # the larger parts, which the others are padded to
    outermost = 4 * (of_all - LAYERS * of_layer)
    layers = [("allgather_base", 4 * of_layer)] * LAYERS * (2 if case[0] else 1)
    scattered = [("reduce_scatter_base", 2 * outermost), *[("reduce_scatter_base", 8 * of_layer)] * LAYERS]
    for number, rank in enumerate(ranks):
        total = loss(alone, number, *case)
        total.backward()
        torch.testing.assert_close(rank[case]["loss"], total.detach(), rtol=1e-5, atol=1e-6)
        assert sorted(rank[case]["forward"]) == sorted([("allgather_base", outermost), *layers])
        assert sorted(rank[case]["backward"]) == sorted([("allgather_base", outermost), *layers, *scattered])
    for name, expected in gradients(alone).items():
        for rank in ranks:
            assert expected.any() and rank["has a sharded head"]
            # two processes' sums are added up in another order, in float32
            torch.testing.assert_close(rank[case]["gradients"][name], expected, rtol=1e-4, atol=1e-6)
