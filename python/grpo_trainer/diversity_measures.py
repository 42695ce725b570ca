"""How much the responses to one prompt differ: by their words, and by their embeddings.

Measures are of one prompt and then averaged over prompts; pooled, they would tell how much the prompts differ. What has
no value (a comparison of one text with none, a share of no words) is NaN, which averages leave out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

import grpo_kernels as gk

Words = tuple[str, ...]

_WORD = re.compile(r"\w+|[^\w\s]")
_ORDERS = (1, 2, 3, 4)
MOST_EMBEDDED = 256  # responses to a prompt that the clustering takes


def words_of(text: str) -> Words:
    """Lower-cased runs of letters, digits and underscores; any other sign that is not a space is a word by itself."""
    return tuple(_WORD.findall(text.lower()))


def self_bleu(texts: Sequence[str]) -> float:
    """Mean BLEU-4 of each text against all others, from 0 (nothing in common) to 1 (all the same). NaN below two texts.

    As sacrebleu's sentence BLEU has it: clipped precisions of 1- to 4-grams (of as many words as the text has, if these
    are fewer), the i-th that finds no match counted as 1 / (2^i n-grams), and the brevity penalty of the other text
    that is closest in length, the shorter of two.
    """
    if len(texts) < 2:
        return math.nan
    spoken = [words_of(text) for text in texts]
    grams = [{order: _ngrams(words, order) for order in _ORDERS} for words in spoken]
    scores = []
    for i, words in enumerate(spoken):
        others = [j for j in range(len(spoken)) if j != i]
        if not words:
            scores.append(float(any(not spoken[j] for j in others)))
            continue
        precision = _precision(grams[i], [grams[j] for j in others])
        nearest = min((len(spoken[j]) for j in others), key=lambda length: (abs(length - len(words)), length))
        scores.append(precision * math.exp(min(0.0, 1 - nearest / len(words))))
    return sum(scores) / len(scores)


def distinct(texts: Sequence[str], order: int) -> float:
    """Different n-grams over all n-grams of the texts together. NaN where there are none."""
    grams: Counter[Words] = Counter()
    for text in texts:
        grams += _ngrams(words_of(text), order)
    return len(grams) / grams.total() if grams else math.nan


def by_embeddings(embeddings: Tensor, size: int) -> dict[str, Tensor]:
    """Measures [P] of prompts with `size` neighbouring rows each; a row that is not finite is left out.

    semantic_diversity  mean cosine distance between two responses; NaN below two
    vendi               how many different ones there seem to be, gk.diversity.vendi_score; NaN without any
    clusters            groups that gk.similarity_groups finds; NaN without any
    cluster_entropy     of the responses' shares in them, in nats; NaN without any
    """
    distances = gk.pairwise_cosine(embeddings, size)
    found = gk.cluster_distances(distances)
    present = distances.diagonal(dim1=1, dim2=2).isfinite()
    count = present.sum(1)
    pairs = (count * (count - 1)).double()
    apart = torch.where(present[:, :, None] & present[:, None, :], distances, 0).double().sum((1, 2))
    measures = {
        "vendi": gk.diversity.vendi_score(distances).double(),
        "clusters": found.num_groups.double(),
        "cluster_entropy": gk.diversity.semantic_entropy(found.labels).double(),
    }
    measures = {name: torch.where(count > 0, values, torch.nan) for name, values in measures.items()}
    return {"semantic_diversity": torch.where(pairs > 0, apart / pairs, torch.nan)} | measures


def of_prompts(texts: Sequence[Sequence[str]], embeddings: Tensor) -> dict[str, list[float]]:
    """Every measure of every prompt; embeddings of the first MOST_EMBEDDED texts of each, in one tensor."""
    found = {
        "self_bleu": [self_bleu(of_one) for of_one in texts],
        "distinct_1": [distinct(of_one, 1) for of_one in texts],
        "distinct_2": [distinct(of_one, 2) for of_one in texts],
    }
    if texts and texts[0]:
        size = min(len(texts[0]), MOST_EMBEDDED)
        found |= {name: values.tolist() for name, values in by_embeddings(embeddings, size).items()}
    return found


def _ngrams(words: Words, order: int) -> Counter[Words]:
    return Counter(words[i : i + order] for i in range(len(words) - order + 1))


def _precision(own: dict[int, Counter[Words]], others: list[dict[int, Counter[Words]]]) -> float:
    """Geometric mean over the orders that the text is long enough for."""
    logs, halvings = [], 0
    for order in _ORDERS:
        total = own[order].total()
        if total == 0:
            break
        matched = sum(min(count, max(other[order][gram] for other in others)) for gram, count in own[order].items())
        if order == 1 and matched == 0:
            return 0.0
        if matched == 0:
            halvings += 1
        logs.append(math.log(matched / total if matched else 1 / (2**halvings * total)))
    return math.exp(sum(logs) / len(logs))
