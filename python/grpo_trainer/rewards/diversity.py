"""How unlike the other responses to its prompt a response is: its mean cosine distance to them, from 0 to 2.

For a small weight beside a reward of what responses are worth, since noise is diverse. Neighbours in the list with
equal prompts are one group, as a rollout has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from grpo_trainer.embed import Embedder, load_embedder
from grpo_trainer.recipe import Similarity
from grpo_trainer.rewards.weighted import Parts, WeightedReward
from grpo_trainer.settings import build


def make(**options: Any) -> Diversity:
    """Options as `algorithm.similarity` has them: embedder, text, unfinished, tail, cache."""
    return Diversity(load_embedder(build(Similarity, options, "diversity")))


class Diversity(WeightedReward):
    def __init__(self, embedder: Embedder) -> None:
        super().__init__("diversity", {"distance": 1.0})
        self.embedder = embedder

    def _rows(self, prompts: Sequence[str], completions: Sequence[str], columns: Any) -> list[Parts | None]:
        found: list[Parts | None] = []
        pairs = zip(prompts, completions, strict=True)
        for _prompt, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
            found += self._of_group([response for _, response in group])
        return found

    def _of_group(self, responses: list[str]) -> list[Parts | None]:
        vectors = normalize(self.embedder(responses).double(), dim=-1)
        # nothing is unlike anything else, and says nothing new
        says = torch.tensor([bool(response.strip()) for response in responses])
        embedded = ~vectors.isnan().any(-1) & says
        some = vectors[embedded]
        others = max(len(some) - 1, 1)
        # the distance of a response to itself, all but 0, must not count
        distances = 1 - some @ some.T
        distances.fill_diagonal_(0)
        means = iter((distances.sum(-1) / others).clamp_min(0).tolist())
        return [
            {"distance": next(means)} if known else None if said else {"distance": 0.0}
            for known, said in zip(embedded.tolist(), says.tolist(), strict=True)
        ]
