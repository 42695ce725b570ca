"""Diversity of the responses to one prompt, by their words and by their embeddings.

Each measure is computed per prompt and then averaged; pooled over prompts it would measure how much the prompts differ.
Undefined values, such as the similarity of a single text to others, are NaN and left out of averages.
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
MAX_EMBEDDED = gk.SimilarityConfig.max_rows  # responses per prompt that the clustering accepts


def words_of(text: str) -> Words:
    """Lower-cased runs of word characters; any other character that is not a space is a word of its own."""
    return tuple(_WORD.findall(text.lower()))


def self_bleu(texts: Sequence[str]) -> float:
    """Mean BLEU-4 of each text against all others, from 0 (nothing in common) to 1 (all equal). NaN below two texts.

    Follows sacrebleu's sentence BLEU: clipped precisions of 1- to 4-grams (fewer orders for shorter texts), exponential
    smoothing (the i-th order without a match counts as 1 / (2^i * n-grams)), and the brevity penalty against the other
    text that is closest in length, the shorter one in a tie.
    """
    if len(texts) < 2:
        return math.nan
    tokenized = [words_of(text) for text in texts]
    grams = [{order: _ngrams(words, order) for order in _ORDERS} for words in tokenized]
    scores = []
    for i, words in enumerate(tokenized):
        others = [j for j in range(len(tokenized)) if j != i]
        if not words:
            scores.append(float(any(not tokenized[j] for j in others)))
            continue
        precision = _precision(grams[i], [grams[j] for j in others])
        nearest = min((len(tokenized[j]) for j in others), key=lambda length: (abs(length - len(words)), length))
        scores.append(precision * math.exp(min(0.0, 1 - nearest / len(words))))
    return sum(scores) / len(scores)


def distinct(texts: Sequence[str], order: int) -> float:
    """Number of distinct n-grams divided by the number of n-grams of all texts; NaN without any."""
    grams: Counter[Words] = Counter()
    for text in texts:
        grams += _ngrams(words_of(text), order)
    return len(grams) / grams.total() if grams else math.nan


def measure_embeddings(embeddings: Tensor, size: int) -> dict[str, Tensor]:
    """Measures the embeddings of each prompt's responses.

    Args:
        embeddings: [P * size, D]; rows that are not finite are left out.
        size: responses per prompt.

    Returns:
        Measures [P] by name:
        semantic_diversity: mean cosine distance of two responses; NaN below two responses.
        vendi: effective number of distinct responses, `gk.diversity.vendi_score`; NaN without any.
        clusters: number of similarity groups; NaN without any.
        cluster_entropy: entropy of the responses' distribution over them, in nats; NaN without any.
    """
    distances = gk.pairwise_cosine(embeddings, size)
    clusters = gk.cluster_distances(distances)
    present = distances.diagonal(dim1=1, dim2=2).isfinite()
    count = present.sum(1)
    pairs = (count * (count - 1)).double()
    summed = torch.where(present[:, :, None] & present[:, None, :], distances, 0).double().sum((1, 2))
    measures = {
        "vendi": gk.diversity.vendi_score(distances).double(),
        "clusters": clusters.num_groups.double(),
        "cluster_entropy": gk.diversity.semantic_entropy(clusters.labels).double(),
    }
    measures = {name: torch.where(count > 0, values, torch.nan) for name, values in measures.items()}
    return {"semantic_diversity": torch.where(pairs > 0, summed / pairs, torch.nan)} | measures


def measure_prompts(texts: Sequence[Sequence[str]], embeddings: Tensor) -> dict[str, list[float]]:
    """Computes all measures per prompt.

    Args:
        texts: the responses to each prompt, equally many.
        embeddings: [rows, D] of the first MAX_EMBEDDED responses to each prompt.
    """
    measures = {
        "self_bleu": [self_bleu(responses) for responses in texts],
        "distinct_1": [distinct(responses, 1) for responses in texts],
        "distinct_2": [distinct(responses, 2) for responses in texts],
    }
    if texts and texts[0]:
        size = min(len(texts[0]), MAX_EMBEDDED)
        measures |= {name: values.tolist() for name, values in measure_embeddings(embeddings, size).items()}
    return measures


def _ngrams(words: Words, order: int) -> Counter[Words]:
    return Counter(words[i : i + order] for i in range(len(words) - order + 1))


def _precision(own: dict[int, Counter[Words]], others: list[dict[int, Counter[Words]]]) -> float:
    """Geometric mean of the smoothed precisions of all orders that the text is long enough for."""
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
