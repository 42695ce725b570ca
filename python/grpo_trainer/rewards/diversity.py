"""Diversity of a response: its mean cosine distance to the other responses to the prompt, in [0, 2].

Meant for a small weight beside a reward for quality, since noise is diverse, too. Consecutive responses with equal
prompts form a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.functional import normalize

from grpo_trainer.embed import Embedder, embedded_text, load_embedder
from grpo_trainer.recipe import Similarity
from grpo_trainer.rewards.base import Rows, WeightedReward
from grpo_trainer.section import Rule


class Diversity(WeightedReward, Similarity):
    """The reward. Its options are those of `algorithm.similarity` that say how texts are embedded."""

    unused: ClassVar[tuple[str, ...]] = ("config", "sharing", "within", "between")
    _embedder: Embedder

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        for name in self.unused:
            is_default = getattr(self, name) == getattr(Similarity(), name)
            yield name, is_default, "must be left out, as the reward only compares embeddings"

    def model_post_init(self, _: Any) -> None:
        self._embedder = load_embedder(self)

    def weight_of(self) -> Mapping[str, float]:
        return {"distance": 1.0}

    def rows(self, prompts: Sequence[str], completions: Sequence[str], columns: Any) -> Rows:
        pairs = zip(prompts, completions, strict=True)
        groups = itertools.groupby(pairs, key=lambda pair: pair[0])
        return [parts for _, group in groups for parts in self._score_group([response for _, response in group])]

    def _score_group(self, responses: list[str]) -> Rows:
        vectors = normalize(self._embedder(responses).double(), dim=-1)
        # an empty answer differs from all others but adds nothing: its distance is 0
        texts = [embedded_text(response, self) for response in responses]
        is_nonempty = torch.tensor([text is None or bool(text.strip()) for text in texts])
        is_compared = ~vectors.isnan().any(-1) & is_nonempty
        compared = vectors[is_compared]
        distances = 1 - compared @ compared.T
        distances.fill_diagonal_(0)  # rounding leaves it slightly off
        means = torch.where(is_nonempty, torch.nan, 0.0).double()
        means[is_compared] = (distances.sum(-1) / max(len(compared) - 1, 1)).clamp_min(0)
        return [None if mean != mean else {"distance": mean} for mean in means.tolist()]
