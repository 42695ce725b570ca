"""Diversity of a response: its mean cosine distance to the other responses to the prompt, in [0, 2].

Meant for a small weight beside a reward for quality, since noise is diverse, too. Consecutive responses with equal
prompts form a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from grpo_trainer.embed import Embedder, load_embedder
from grpo_trainer.recipe import Similarity
from grpo_trainer.recipes import validated
from grpo_trainer.rewards.weighted import Parts, WeightedReward


def make(**options: Any) -> Diversity:
    """Creates the reward with options of `algorithm.similarity`: embedder, text, unfinished, tail, batch_size."""
    return Diversity(load_embedder(validated(Similarity, options)))


class Diversity(WeightedReward):
    def __init__(self, embedder: Embedder) -> None:
        super().__init__("diversity", {"distance": 1.0})
        self.embedder = embedder

    def _rows(self, prompts: Sequence[str], completions: Sequence[str], columns: Any) -> list[Parts | None]:
        rows: list[Parts | None] = []
        pairs = zip(prompts, completions, strict=True)
        for _prompt, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            rows += self._score_group([response for _, response in group])
        return rows

    def _score_group(self, responses: list[str]) -> list[Parts | None]:
        vectors = normalize(self.embedder(responses).double(), dim=-1)
        # an empty response differs from all others but adds nothing: its distance is 0
        is_nonempty = torch.tensor([bool(response.strip()) for response in responses])
        is_compared = ~vectors.isnan().any(-1) & is_nonempty
        compared = vectors[is_compared]
        others = max(len(compared) - 1, 1)
        distances = 1 - compared @ compared.T
        distances.fill_diagonal_(0)  # rounding leaves it slightly off
        means = iter((distances.sum(-1) / others).clamp_min(0).tolist())
        return [
            {"distance": next(means)} if compares else None if nonempty else {"distance": 0.0}
            for compares, nonempty in zip(is_compared.tolist(), is_nonempty.tolist(), strict=True)
        ]
