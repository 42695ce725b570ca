"""Heuristic quality of a reply to a short post: six components in [0, 1], without a preference model.

The post is in the column `post`, or else it is the prompt. All components are 0 for replies of fewer than 3 characters,
and 0.3 for replies of more than 500. Words are matched whole: "this" does not occur in "thistle".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.nn.functional import cosine_similarity

from grpo_trainer.embed import Embedder, load_embedder
from grpo_trainer.messages import require_package
from grpo_trainer.recipe import Similarity
from grpo_trainer.rewards.base import Parts, Rows, WeightedReward, sums_to_one
from grpo_trainer.rewards.words import contains, words_of
from grpo_trainer.section import PathText, Rule, Section, Share

SHORTEST, LONGEST, TOO_LONG = 3, 500, 0.3
LENGTHS = ((20, 0.3), (50, 0.6), (151, 1.0), (281, 0.8))  # value of a reply with fewer characters
PUNCTUATION = ((0.0, 0.02, 0.08, 0.15, 0.30), (0.7, 1.0, 1.0, 0.8, 0.3))  # shares of the characters, values
GENERIC = frozenset(words_of("agree agreed cool exactly facts great lol nice no ok okay same thanks this true wow yes"))


class Weights(Section):
    relevance: Share = 0.30
    length: Share = 0.15
    sentiment: Share = 0.15
    lexical_diversity: Share = 0.10
    punctuation: Share = 0.10
    engagement: Share = 0.20


class Reply(WeightedReward):
    weights: Weights = Weights()
    """weights of the components, with sum 1"""
    embedder: PathText = "auto"
    """embedder of `relevance`, by its name in `algorithm.similarity`"""

    _embedder: Embedder

    def rules(self) -> Iterator[Rule]:
        yield sums_to_one(self.weights)

    def model_post_init(self, _: Any) -> None:
        require_package("reply", "vaderSentiment", "text")
        # embeds thoughts, too: a reader would see them
        self._embedder = load_embedder(Similarity(embedder=self.embedder, text="whole"))

    def rows(self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Any]) -> Rows:
        posts = columns.get("post") or [None] * len(prompts)
        posts = [prompt if post is None else post for post, prompt in zip(posts, prompts, strict=True)]
        vectors = self._embedder([*posts, *completions]).double()
        cosines = cosine_similarity(vectors[: len(posts)], vectors[len(posts) :], dim=1).tolist()
        return super().rows(prompts, completions, {"post": posts, "cosine": cosines})

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts:
        reply, post = response.strip(), row["post"]
        if len(reply) < SHORTEST:
            return dict.fromkeys(self.weight_of(), 0.0)
        if len(reply) > LONGEST:
            return dict.fromkeys(self.weight_of(), TOO_LONG)
        return {
            "relevance": relevance(post, response, row["cosine"]),
            "length": length(reply),
            "sentiment": sentiment(post, reply),
            "lexical_diversity": lexical_diversity(reply),
            "punctuation": punctuation(reply),
            "engagement": engagement(reply),
        }


def relevance(post: str, reply: str, cosine: float) -> float:
    """Cosine similarity of post and reply, clipped at 0; 0 for a reply that repeats the post."""
    reply_words, post_words = words_of(reply), words_of(post)
    if contains(reply_words, post_words) or (len(reply_words) > 3 and contains(post_words, reply_words)):
        return 0.0
    return min(1.0, max(0.0, cosine))


def length(reply: str) -> float:
    """Value by the number of characters, best from 50 to 150."""
    return next((value for limit, value in LENGTHS if len(reply) < limit), 0.4)


def sentiment(post: str, reply: str) -> float:
    """1 for the polarity of the post, 0 for the opposite one."""
    return 1 - abs(polarity(post) - polarity(reply)) / 2


def lexical_diversity(reply: str) -> float:
    """Share of distinct words, reduced if most words repeat."""
    words = words_of(reply)
    share = len(set(words)) / max(len(words), 1)
    return share if share >= 0.5 else 0.7 * share


def punctuation(reply: str) -> float:
    """Value by the share of !, ?, . and commas; piecewise linear through PUNCTUATION."""
    share = sum(reply.count(sign) for sign in "!?.,") / max(len(reply), 1)
    return float(np.interp(share, *PUNCTUATION))


def engagement(reply: str) -> float:
    """0.7, plus bonuses for a question and a second sentence; reduced for generic short and upper-case replies."""
    asks = re.search(r"\w\W{0,3}\?", reply) is not None
    sentences = sum(1 for sentence in re.split(r"[.!?]+(?:\s|$)", reply) if words_of(sentence))
    value = 0.7 + (0.2 if asks else 0.0) + (0.1 if sentences > 1 else 0.0)
    if len(reply) < 30 and not GENERIC.isdisjoint(words_of(reply)):
        value *= 0.5
    return value * 0.6 if len(reply) > 10 and reply.isupper() else value


@functools.lru_cache(maxsize=4096)
def polarity(text: str) -> float:
    """VADER's compound score in [-1, 1]."""
    return float(_analyzer().polarity_scores(text)["compound"])


@functools.cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
