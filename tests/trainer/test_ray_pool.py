"""Embedders in Ray actors, on a local cluster: order, whole prompts, dying actors, lack of resources."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import ray
from grpo_trainer import ray_pool
from grpo_trainer.embed import hashed, load_embedder
from grpo_trainer.ray_pool import EmbedderError, RayEmbedderPool, batch_ranges
from grpo_trainer.recipe import Similarity
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_train import lines, timeless, weights

TEXTS = [f"prompt {i // 4} response {i}" for i in range(24)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local cluster with two cores, without dashboard and usage reports, on the loopback device only."""
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=80 * 2**20,
    )
    yield
    ray.shutdown()
    os.environ.pop("RAY_USAGE_STATS_ENABLED") if before is None else os.environ.update(RAY_USAGE_STATS_ENABLED=before)


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
    if what == "flat":
        return torch.zeros(len(texts))
    for text in texts:
        if text.startswith("die"):  # once for each file in the folder
            left = sorted(Path(text.split()[1]).glob("*"))
            if left:
                left[0].unlink()
                os._exit(7)
    numbers = [float(text.split()[-1]) for text in texts]
    return torch.tensor([[number, float(os.getpid()), numbers[0]] for number in numbers], dtype=torch.float64)


@pytest.fixture(scope="module")
def pool(cluster: None) -> Iterator[RayEmbedderPool]:
    with RayEmbedderPool(encode, 2, cpus_per_worker=0.0, batch=8, retries=1) as pool_of_two:
        yield pool_of_two


def test_results_are_in_order_and_prompts_are_whole(pool: RayEmbedderPool) -> None:
    rows = pool(TEXTS, groups=4)
    assert rows[:, 0].tolist() == list(range(24))
    of_prompts = rows.view(6, 4, 3)
    assert (of_prompts[:, :, 1:] == of_prompts[:, :1, 1:]).all(), "a prompt's texts are in one call of one actor"
    assert len(set(rows[:, 1].tolist())) == 2, "both actors have worked"
    # batches do not depend on the worker
    assert rows[:, 2].tolist() == [8.0 * (i // 8) for i in range(24)]
    uneven = pool(TEXTS, groups=[1, 9, 14])
    assert uneven[:, 2].tolist() == [0.0] + [1.0] * 9 + [10.0] * 14


@pytest.mark.full
def test_batches_of_an_actor_that_died_are_repeated(
    pool: RayEmbedderPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0").touch()
    before = pool.restarts
    texts = [*TEXTS[:13], f"die {tmp_path} 13", *TEXTS[14:]]
    assert pool(texts, groups=4)[:, 0].tolist() == list(range(24))
    assert pool.restarts == before + 1 and not list(tmp_path.iterdir())
    assert "RayEmbedderPool: worker" in caplog.text and f"restart {pool.restarts}, its batch is repeated" in caplog.text


@pytest.mark.full
def test_an_actor_that_died_while_it_was_idle(pool: RayEmbedderPool) -> None:
    before = pool.restarts
    ray.kill(pool.actors[0])
    assert pool(TEXTS, groups=4)[:, 0].tolist() == list(range(24))
    assert pool.restarts == before + 1


@pytest.mark.full
def test_batches_are_not_repeated_for_ever(pool: RayEmbedderPool, tmp_path: Path) -> None:
    for i in range(9):
        (tmp_path / str(i)).touch()
    before = pool.restarts
    with pytest.raises(EmbedderError, match=r"must succeed within 1 retries, and its actor died 2 times: "):
        pool([f"die {tmp_path} 0"])
    assert pool.restarts == before + 1 and len(list(tmp_path.iterdir())) == 7
    assert pool(TEXTS)[:, 0].tolist() == list(range(24)), "what gave up is not in the way of what comes next"


def test_an_embedder_that_raises_is_named_with_its_text_and_not_asked_again(
    pool: RayEmbedderPool, tmp_path: Path
) -> None:
    before = pool.restarts
    with pytest.raises(EmbedderError, match=r"encode raised KeyError on worker \d for 2 texts, the first 'raise /"):
        pool([f"raise {tmp_path}/asked", "more"], groups=2)
    assert (tmp_path / "asked").read_text() == "x" and pool.restarts == before


@pytest.mark.parametrize(("text", "shape"), [("wrong", r"\[3, 1\]"), ("flat", r"\[2\]")])
def test_another_number_of_vectors_is_refused(pool: RayEmbedderPool, text: str, shape: str) -> None:
    with pytest.raises(EmbedderError, match=rf"encode must return \[2, D\] for 2 texts, got {shape}$"):
        pool([text, "more"], groups=2)


def test_actors_that_cannot_be_placed_are_an_error(cluster: None) -> None:
    said = (
        r"^RayEmbedderPool: the cluster must place 3 actors "
        r"of \{'num_cpus': 1.0, 'num_gpus': 0.5\} within 2 s, and "
        r"placed 0; it has \{'CPU': 2.0, 'GPU': 0.0\}, of which \{'CPU': 2.0, 'GPU': 0.0\} are free$"
    )
    pool = RayEmbedderPool(hashed, 3, gpus_per_worker=0.5, timeout=2)
    with pytest.raises(EmbedderError, match=said):
        pool.start()
    assert pool.actors == [] and ray.is_initialized()


@pytest.mark.full
def test_as_the_trainers_embedder(cluster: None, tmp_path: Path) -> None:
    """Actors end with their run: the cluster has room for two, and three runs in a row find it."""

    def run(name: str, workers: int) -> list[dict[str, Any]]:
        algorithm = f"{{name: similarity_group_grpo, similarity: {{embedder: hashed, workers: {workers}}}}}"
        short = ("sft.steps=1", "rl.steps=2", "evaluation.every=0")
        train(small.recipe(tmp_path / name, *short, f"rl.algorithm={algorithm}"))
        return timeless(lines(tmp_path / name))

    alone, pooled, _ = run("alone", 0), run("pooled", 1), run("again", 2)
    assert [entry.pop("embedder/restarts") for entry in pooled if entry["kind"] == "train" and e["phase"] == "rl"] == [
        0.0,
        0.0,
    ]
    assert alone == pooled
    a, b = weights(tmp_path / "alone"), weights(tmp_path / "pooled")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_cache_asks_for_the_missing_texts_of_a_prompt_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(self: RayEmbedderPool, texts: Sequence[str], groups: Any = 1) -> torch.Tensor:
        asked.append((list(texts), groups))
        return hashed(texts)

    monkeypatch.setattr(RayEmbedderPool, "__call__", noted)
    embedder = load_embedder(Similarity(embedder="hashed", workers=2))
    embedder(["a", "b", "a", "c", "b", "d", "e", "f"], 4)
    embedder(["a", "x", "b", "y"], 2)
    assert asked == [(["a", "b", "c", "d", "e", "f"], [3, 3]), (["x", "y"], [1, 1])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers must be a positive int, got 0"),
        ({"workers": True}, "workers must be a positive int, got True"),
        ({"workers": 1, "gpus_per_worker": -1}, "gpus_per_worker must not be negative, got -1"),
        ({"workers": 1, "retries": -1}, "retries must be a non-negative int, got -1"),
        ({"workers": 1, "timeout": 0}, "timeout must be positive, got 0"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^RayEmbedderPool: {message}$"):
        RayEmbedderPool(hashed, **arguments)


def test_groups_must_be_of_the_texts() -> None:
    assert batch_ranges(10, [3, 3, 4], 6) == [(0, 6), (6, 10)] and batch_ranges(4, 4, 1) == [(0, 4)]
    with pytest.raises(ValueError, match="groups must divide the number of texts, 10, got 4"):
        batch_ranges(10, 4, 8)
    with pytest.raises(ValueError, match=r"groups must be sizes with the sum 10, got \[4, 4\]"):
        batch_ranges(10, [4, 4], 8)
    with pytest.raises(ValueError, match="texts must not be empty"):
        RayEmbedderPool(hashed, 1)([])


def test_a_cluster_that_does_not_answer_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whatever other tests have started
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(EmbedderError, match=r"^RayEmbedderPool: a Ray cluster must answer at '127.* got .*refused"):
            RayEmbedderPool(hashed, 1).start()
        more = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed, workers: 1}}"
        with pytest.raises(EmbedderError, match=r"^rl.algorithm.similarity.workers: a Ray cluster must"):
            train(small.recipe(Path("run"), more))
        monkeypatch.setattr(ray, "is_initialized", lambda: True)  # by the caller, whose cluster is then used
        ray_pool.check_ray("here")


def test_without_ray_the_recipe_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ray_pool.importlib.util.find_spec
    monkeypatch.setattr(ray_pool.importlib.util, "find_spec", lambda name: None if name == "ray" else real(name))
    more = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed, workers: 1}}"
    with pytest.raises(ValueError, match=r"^rl.algorithm.similarity.workers: needs the package ray, which"):
        train(small.recipe(tmp_path, more))
