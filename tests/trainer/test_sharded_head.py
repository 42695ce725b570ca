"""The fused head of a policy that FSDP2 shards over two processes: gradients, and what is communicated."""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_trainer import distributed
from grpo_trainer.data import Batch
from grpo_trainer.policy import Policy, load_policy
from grpo_trainer.recipe import Model, Tiny

from tests.communication import Communication

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

LAYERS, ROWS, PROMPTS, LENGTH = 2, 12, 3, 10
CHUNKS = (None, 8)  # all rows at once, and 15 chunks
SHARE = (True, False)  # with shared prompts a layer runs twice, first for the prompts
CORPUS = [f"Ann has {i} shells, sells {i % 9}. How many? {i - i % 9}" for i in range(60)]


def policy() -> Policy:
    torch.manual_seed(1)
    tiny = Tiny(architecture="causal", hidden=32, layers=LAYERS, heads=2, intermediate=64, vocabulary=100)
    return load_policy(Model(tiny=tiny), CORPUS, None)


def batch(rank: int, columns: int) -> tuple[Batch, dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(rank)
    tokens = torch.randint(columns, (ROWS, LENGTH), generator=random)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=random)
    prompts = torch.randint(columns, (PROMPTS, 5), generator=random)
    of_row = torch.arange(ROWS) % PROMPTS
    responses = Batch(prompts, torch.ones_like(prompts, dtype=torch.bool), tokens, mask, of_row)
    advantages = torch.randn(ROWS, generator=random)
    return responses, {"old_logprobs": -4 + 0.1 * torch.randn(ROWS, LENGTH, generator=random), "advantages": advantages}


def loss(of: Policy, rank: int, chunk_size: int | None, share: bool) -> torch.Tensor:
    responses, arguments = batch(rank, of.lm.config.vocab_size)
    return of("loss", responses, share=share, chunk_size=chunk_size, **arguments)[0].loss


def gradients(of: Policy) -> dict[str, torch.Tensor]:
    return {name: distributed.full_tensor(value.grad) for name, value in of.named_parameters()}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=limit)
    sharded = policy()
    distributed.shard(sharded, torch.device("cpu"))
    result: dict[Any, Any] = {}
    for share, chunk_size in itertools.product(SHARE, CHUNKS):
        sharded.zero_grad()
        with Communication() as communication:
            total = loss(sharded, rank, chunk_size, share)
            forward = communication.take()
            total.backward()
        result[share, chunk_size] = {"forward": forward, "backward": communication.take()}
        result[share, chunk_size] |= {"gradients": gradients(sharded), "loss": total.detach()}
    head = sharded.inner.get_output_embeddings().weight
    result["sizes"] = [
        sum(value.to_local().numel() for value in module.parameters())
        for module in (sharded.lm.model.layers[0], sharded)
    ]
    result["has a sharded head"] = distributed.is_sharded(head)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("share", SHARE)
def test_gradients_are_those_of_one_process(ranks: list[dict[Any, Any]], share: bool, chunk_size: int | None) -> None:
    alone = policy()
    for number, rank in enumerate(ranks):
        total = loss(alone, number, chunk_size, share)
        total.backward()
        torch.testing.assert_close(rank[share, chunk_size]["loss"], total.detach(), rtol=1e-5, atol=1e-6)
    for name, expected in gradients(alone).items():
        for rank in ranks:
            assert expected.any() and rank["has a sharded head"]
            # two processes' sums are added up in another order, in float32
            torch.testing.assert_close(rank[share, chunk_size]["gradients"][name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("share", SHARE)
def test_the_head_is_gathered_once_each_way(ranks: list[dict[Any, Any]], share: bool, chunk_size: int | None) -> None:
    """It is part of the outermost unit, whatever the number of chunks."""
    of_layer, of_all = ranks[0]["sizes"]  # the larger parts, which the others are padded to
    outermost = 4 * (of_all - LAYERS * of_layer)
    for rank in ranks:
        found = rank[share, chunk_size]
        layers = [("allgather_base", 4 * of_layer)] * LAYERS * (2 if share else 1)
        assert sorted(found["forward"]) == sorted([("allgather_base", outermost), *layers])
        scattered = [("reduce_scatter_base", 2 * outermost), *[("reduce_scatter_base", 8 * of_layer)] * LAYERS]
        assert sorted(found["backward"]) == sorted([("allgather_base", outermost), *layers, *scattered])
