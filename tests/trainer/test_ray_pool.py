"""Embedders in Ray actors, on a local cluster: order, whole prompts, dying actors, lack of resources."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray")

import ray
from grpo_trainer import ray_pool
from grpo_trainer.embed import hashed
from grpo_trainer.ray_pool import EmbedderError, RayEmbedderPool, batch_ranges
from grpo_trainer.train import train

from tests.trainer import small

TEXTS = [f"prompt {i // 4} response {i}" for i in range(24)]
MORE = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed, workers: 1}}"


def encode(texts: Sequence[str]) -> Any:
    """Embeds a text as its number, its process, and the number of the first text of the batch.

    The first text can also ask for a failure, as starting another actor would be slow.
    """
    what, _, place = texts[0].partition(" ")
    if what == "raise":
        with open(place, "a") as file:
            file.write("x")
        raise KeyError("no such word")
    if what == "wrong":
        return [[1.0]] * (len(texts) + 1)
    for text in texts:
        if text.startswith("die"):  # once for each file in the folder
            left = sorted(Path(text.split()[1]).glob("*"))
            if left:
                left[0].unlink()
                os._exit(7)
    numbers = [float(text.split()[-1]) for text in texts]
    return torch.tensor([[number, float(os.getpid()), numbers[0]] for number in numbers], dtype=torch.float64)


@pytest.fixture(scope="module")
def pool() -> Iterator[RayEmbedderPool]:
    """Two actors in a local cluster of four cores, without dashboard and usage reports, on the loopback device."""
    local: Any = {"address": "local", "include_dashboard": False, "log_to_driver": False}
    local |= {"_node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr(ray_pool, "BATCH", 8)
        patch.setattr(ray_pool, "RETRIES", 1)
        ray.init(num_cpus=4, num_gpus=0, **local)
        two = RayEmbedderPool(encode, 2)
        yield two
        two.close()
        ray.shutdown()


def test_results_are_in_order_and_prompts_are_whole(pool: RayEmbedderPool) -> None:
    rows = pool(TEXTS, groups=4)
    assert rows[:, 0].tolist() == list(range(24))
    of_prompts = rows.view(6, 4, 3)
    assert (of_prompts[:, :, 1:] == of_prompts[:, :1, 1:]).all(), "a prompt's texts are in one call of one actor"
    assert len(set(rows[:, 1].tolist())) == 2, "both actors have worked"
    # batches do not depend on the worker
    assert rows[:, 2].tolist() == [8.0 * (i // 8) for i in range(24)]
    assert pool(TEXTS, groups=[1, 9, 14])[:, 2].tolist() == [0.0] + [1.0] * 9 + [10.0] * 14


@pytest.mark.full
def test_batches_of_an_actor_that_died_are_repeated_but_not_for_ever(pool: RayEmbedderPool, tmp_path: Path) -> None:
    before = pool.restarts
    os.kill(int(pool(TEXTS[:1])[0, 1]), signal.SIGKILL)  # while it is idle
    assert pool(TEXTS, groups=4)[:, 0].tolist() == list(range(24))
    (tmp_path / "0").touch()
    texts = [*TEXTS[:13], f"die {tmp_path} 13", *TEXTS[14:]]
    assert pool(texts, groups=4)[:, 0].tolist() == list(range(24))
    assert pool.restarts == before + 2 and not list(tmp_path.iterdir())
    for i in range(9):
        (tmp_path / str(i)).touch()
    with pytest.raises(EmbedderError, match=r"an actor must live for one of 2 tries, got none for 1 texts, the first"):
        pool([f"die {tmp_path} 0"])
    assert len(list(tmp_path.iterdir())) == 7
    assert pool(TEXTS)[:, 0].tolist() == list(range(24)), "what gave up is not in the way of what comes next"


def test_what_fails_is_named_and_not_asked_again(
    pool: RayEmbedderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EmbedderError, match=r"encode raised KeyError for 2 texts, the first 'raise /"):
        pool([f"raise {tmp_path}/asked", "more"], groups=2)
    assert (tmp_path / "asked").read_text() == "x"
    with pytest.raises(EmbedderError, match=r"encode must return \[2, D\] for 2 texts, the first 'wrong', got \[3, 1"):
        pool(["wrong", "more"], groups=2)
    monkeypatch.setattr(ray_pool, "PLACE_SECONDS", 2.0)
    many = RayEmbedderPool(hashed, 3, gpus_per_worker=0.5)
    asked = r"must place 3 actors of \{'num_cpus': 1.0, 'num_gpus': 0.5\} within 2 s, got 0; 2 of 4 CPUs, 0 of 0 GPUs"
    with pytest.raises(EmbedderError, match=rf"^RayEmbedderPool: the cluster {asked} are free$"):
        many.start()
    assert many.actors == [] and ray.is_initialized()


@pytest.mark.full
def test_as_the_trainers_embedder(pool: RayEmbedderPool, tmp_path: Path) -> None:
    """Actors end with their run: the cluster has room for two more, and three runs in a row find it."""

    def run(name: str, workers: int) -> list[dict[str, Any]]:
        short = ("sft.steps=1", "rl.steps=2", "evaluation.every=0")
        train(small.recipe(tmp_path / name, *short, MORE, f"rl.algorithm.similarity.workers={workers}"))
        return small.timeless(small.lines(tmp_path / name))

    alone, pooled, _ = run("alone", 0), run("pooled", 1), run("again", 2)
    restarts = [line.pop("embedder/restarts") for line in pooled if "embedder/restarts" in line]
    assert restarts == [0, 0] and alone == pooled
    expected = small.weights(tmp_path / "alone")
    assert all(torch.equal(value, expected[name]) for name, value in small.weights(tmp_path / "pooled").items())


def test_wrong_arguments_and_a_cluster_that_does_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_ranges(10, [3, 3, 4], 6) == [(0, 6), (6, 10)] and batch_ranges(4, 4, 1) == [(0, 4)]
    for groups in (4, [4, 4], [11, -1]):
        with pytest.raises(ValueError, match="groups must divide 10 texts, or be sizes with that sum, got "):
            batch_ranges(10, groups, 8)
    with pytest.raises(ValueError, match="texts must not be empty"):
        RayEmbedderPool(hashed, 1)([])
    with pytest.raises(ValueError, match=r"^RayEmbedderPool: workers must be positive, got 0$"):
        RayEmbedderPool(hashed, 0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever other tests have started
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{unused.getsockname()[1]}")
        for start, name in (
            (RayEmbedderPool(hashed, 1).start, "RayEmbedderPool"),
            (lambda: train(small.recipe(Path("run"), MORE)), "rl.algorithm.similarity.workers"),
        ):
            with pytest.raises(EmbedderError, match=rf"^{name}: a Ray cluster must answer at RAY_ADDR.* got .*refused"):
                start()
        monkeypatch.setattr(ray, "is_initialized", lambda: True)  # by the caller, whose cluster is then used
        ray_pool.check_ray("here")
