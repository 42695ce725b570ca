"""Diversity of the responses to one prompt, by their words and by their embeddings.

Each measure is computed per prompt and then averaged; pooled over prompts it would measure how much the prompts differ.
Undefined values, such as the similarity of a single text to others, are NaN and left out of averages.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

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
    grams = [[_ngrams(words, order) for order in _ORDERS] for words in tokenized]
    scores = []
    for i, words in enumerate(tokenized):
        lengths = [len(other) for j, other in enumerate(tokenized) if j != i]
        if not words:
            scores.append(float(0 in lengths))
            continue
        nearest = min(lengths, key=lambda length: (abs(length - len(words)), length))
        penalty = math.exp(min(0.0, 1 - nearest / len(words)))
        scores.append(penalty * _precision(grams[i], [other for j, other in enumerate(grams) if j != i]))
    return sum(scores) / len(scores)


def distinct(texts: Sequence[str], order: int) -> float:
    """Number of distinct n-grams divided by the number of n-grams of all texts; NaN without any."""
    grams: Counter[Words] = Counter()
    for text in texts:
        grams += _ngrams(words_of(text), order)
    return len(grams) / grams.total() if grams else math.nan


def rouge_diversity(texts: Sequence[str]) -> float:
    """1 minus the mean ROUGE-L F1 of all pairs of texts, from 0 (all equal) to 1 (no word in common).

    NaN below two texts. Two texts without words count as equal.
    """
    tokenized = [words_of(text) for text in texts]
    similarities = [rouge_l(a, b) for a, b in itertools.combinations(tokenized, 2)]
    return 1 - sum(similarities) / len(similarities) if similarities else math.nan


def rouge_l(a: Words, b: Words) -> float:
    """F1 of the longest common subsequence: 2 L / (words of a + words of b)."""
    return 2 * _common_length(a, b) / (len(a) + len(b)) if a or b else 1.0


def _common_length(a: Words, b: Words) -> int:
    """Length of the longest common subsequence; a column of the usual table is the bits of one integer."""
    positions: Counter[str] = Counter()
    for i, word in enumerate(a):
        positions[word] |= 1 << i
    every = (1 << len(a)) - 1
    unmatched = every
    for word in b:
        matched = unmatched & positions[word]
        unmatched = (unmatched + matched | unmatched - matched) & every
    return len(a) - unmatched.bit_count()


def diversity_efficiency(passes: Mapping[int, float]) -> dict[int, float]:
    """DER@k = pass@k / (k pass@1) for every k above 1: 1 if each further sample adds as much as the first.

    NaN if pass@1 is 0 or unknown; empty without pass@1.
    """
    first = passes.get(1)
    if first is None:
        return {}
    return {k: value / (k * first) if first > 0 else math.nan for k, value in sorted(passes.items()) if k > 1}


def collapse_point(steps: Sequence[float], values: Sequence[float], share: float = 0.5) -> float:
    """First step from which a measure stays below `share` of its first value.

    NaN if there is none, and if the first value is not positive. Steps without a value are left out.
    """
    if not 0 < share < 1:
        raise ValueError(f"collapse_point: share must be in (0, 1), got {share!r}")
    known = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not known or known[0][1] <= 0:
        return math.nan
    limit = share * known[0][1]
    below = list(itertools.takewhile(lambda pair: pair[1] < limit, reversed(known)))
    return below[-1][0] if below else math.nan


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point dominates, by ascending first coordinate.

    A point dominates another if it is at least as large in both coordinates and larger in one, so equal points stay
    together. Points with a coordinate that is not finite are on no front.
    """
    known = [i for i, point in enumerate(points) if all(map(math.isfinite, point))]

    def dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] >= b[0] and a[1] >= b[1] and a != b

    front = [i for i in known if not any(dominates(points[j], points[i]) for j in known)]
    return sorted(front, key=lambda i: points[i])


def medoids(embeddings: Tensor, size: int) -> list[int | None]:
    """Index of each prompt's response with the smallest mean cosine distance to the others; the first in a tie.

    Args:
        embeddings: [P * size, D]; rows that are not finite are left out.
        size: responses per prompt.

    Returns:
        Indices within the prompts; None where every row is left out.
    """
    distances = gk.pairwise_cosine(embeddings, size).double()
    present = distances.diagonal(dim1=1, dim2=2).isfinite()
    sums = torch.where(present[:, None, :], distances, 0).sum(2)
    # sums of equal distances in another order differ in their last bits
    sums = torch.where(present, sums.round(decimals=9), math.inf)
    chosen = sums.argmin(1).tolist()
    return [index if known else None for index, known in zip(chosen, present.any(1).tolist(), strict=True)]


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
        "rouge_diversity": [rouge_diversity(responses) for responses in texts],
    }
    if texts and texts[0]:
        size = min(len(texts[0]), MAX_EMBEDDED)
        measures |= {name: values.tolist() for name, values in measure_embeddings(embeddings, size).items()}
    return measures


def _ngrams(words: Words, order: int) -> Counter[Words]:
    return Counter(words[i : i + order] for i in range(len(words) - order + 1))


def _precision(own: list[Counter[Words]], others: list[list[Counter[Words]]]) -> float:
    """Geometric mean of the smoothed precisions of all orders that the text is long enough for."""
    logs, halvings = [], 0
    for order, grams in enumerate(own):
        total = grams.total()
        if total == 0:
            break
        matched = sum(min(count, max(other[order][gram] for other in others)) for gram, count in grams.items())
        if matched == 0:
            if order == 0:
                return 0.0
            halvings += 1
        logs.append(math.log(matched / total if matched else 1 / (2**halvings * total)))
    return math.exp(sum(logs) / len(logs))
