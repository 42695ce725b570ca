"""What a reply to a short post is worth by rules: six components within 0 and 1, without a model of preferences.

The post is in the column `post`; without one it is the prompt. A reply of under 3 characters is worth 0 and one of over
500 is worth 0.3, so is each of its components. Words are matched whole: "this" is not in "thistle".
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.functional import cosine_similarity

from grpo_trainer.embed import Embedder, load_embedder
from grpo_trainer.recipe import Similarity
from grpo_trainer.rewards.weighted import Parts, WeightedReward, checked_weights
from grpo_trainer.rewards.words import contains, words_of

WEIGHTS = {
    "relevance": 0.30, "length": 0.15, "sentiment": 0.15, "lexical_diversity": 0.10, "punctuation": 0.10,
    "engagement": 0.20,
}  # fmt: skip
SHORTEST, LONGEST, WORTH_OF_TOO_LONG = 3, 500, 0.3
LENGTHS = ((20, 0.3), (50, 0.6), (151, 1.0), (281, 0.8))  # worth of fewer characters than that
PUNCTUATION = ((0.0, 0.7), (0.02, 1.0), (0.08, 1.0), (0.15, 0.8), (0.30, 0.3))  # share of characters, worth
GENERIC = frozenset(
    ("agree", "agreed", "cool", "exactly", "facts", "great", "lol", "nice", "no", "ok", "okay", "same", "thanks",
     "this", "true", "wow", "yes")
)  # fmt: skip


def make(*, weights: Mapping[str, float] | None = None, embedder: str = "auto", cache: int = 4096) -> Reply:
    """Weights of the components; the embedder is named as that of `algorithm.similarity`, and keeps so many texts."""
    # both whole: what a reply thinks is said, too
    settings = Similarity(embedder=embedder, text="whole", cache=cache)
    return Reply(checked_weights("reply.weights", weights, WEIGHTS), load_embedder(settings))


class Reply(WeightedReward):
    def __init__(self, weights: Mapping[str, float], embedder: Embedder) -> None:
        super().__init__("reply", weights)
        self.embedder = embedder
        polarity("")  # a package that is not there is an error now

    def _rows(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Any]
    ) -> list[Parts | None]:
        # in two batches; `parts` finds them in the cache
        self.embedder([post for post in columns.get("post") or prompts if post is not None])
        self.embedder(completions)
        return super()._rows(prompts, completions, columns)

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts:
        reply, post = response.strip(), row.get("post")
        if len(reply) < SHORTEST:
            return dict.fromkeys(self.weights, 0.0)
        if len(reply) > LONGEST:
            return dict.fromkeys(self.weights, WORTH_OF_TOO_LONG)
        post = prompt if post is None else post
        return {
            "relevance": relevance(post, response, self.embedder),
            "length": length(reply),
            "sentiment": sentiment(post, reply),
            "lexical_diversity": lexical_diversity(reply),
            "punctuation": punctuation(reply),
            "engagement": engagement(reply),
        }


def relevance(post: str, reply: str, embedder: Embedder) -> float:
    """The cosine of the embeddings, 0 for what has nothing in common; a reply that repeats the post says nothing."""
    said, posted = words_of(reply), words_of(post)
    if contains(said, posted) or (len(said) > 3 and contains(posted, said)):
        return 0.0
    vectors = embedder([post, reply]).double()
    return min(1.0, max(0.0, float(cosine_similarity(vectors[0], vectors[1], dim=0))))


def length(reply: str) -> float:
    """By characters, best from 50 to 150."""
    return next((worth for limit, worth in LENGTHS if len(reply) < limit), 0.4)


def sentiment(post: str, reply: str) -> float:
    """1 for the same polarity as the post has, 0 for the opposite."""
    return 1 - abs(polarity(post) - polarity(reply)) / 2


def lexical_diversity(reply: str) -> float:
    """Share of the words that are different, less where most repeat."""
    words = words_of(reply)
    share = len(set(words)) / max(len(words), 1)
    return share if share >= 0.5 else 0.7 * share


def punctuation(reply: str) -> float:
    """By the share of characters that are ! ? . or a comma, straight lines between the points of PUNCTUATION."""
    share = sum(reply.count(sign) for sign in "!?.,") / max(len(reply), 1)
    for (left, low), (right, high) in itertools.pairwise(PUNCTUATION):
        if share < right:
            return low + (high - low) * (share - left) / (right - left)
    return PUNCTUATION[-1][1]


def engagement(reply: str) -> float:
    """0.7, more with a question or a second sentence; half in a short reply with a generic word, 0.6 if shouted."""
    asks = re.search(r"\w\W{0,3}\?", reply) is not None
    sentences = sum(1 for some in re.split(r"[.!?]+(?:\s|$)", reply) if words_of(some))
    worth = 0.7 + (0.2 if asks else 0.0) + (0.1 if sentences > 1 else 0.0)
    if len(reply) < 30 and not GENERIC.isdisjoint(words_of(reply)):
        worth *= 0.5
    return worth * 0.6 if len(reply) > 10 and reply.isupper() else worth


@functools.lru_cache(maxsize=4096)
def polarity(text: str) -> float:
    """From -1 to 1, by VADER."""
    return float(_analyzer().polarity_scores(text)["compound"])


@functools.cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()
