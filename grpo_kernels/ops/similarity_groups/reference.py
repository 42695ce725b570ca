"""The specification of similarity_groups in plain torch: float64, except that distances are rounded to float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.similarity_groups.config import AVERAGE, COMPLETE, SINGLE, WARD, Plan, RowStatus, Verdict
from grpo_kernels.plans import read

_LEAST_NORM = 1e-30  # squared; below, float32 loses digits


@op_inputs
class Responses:
    """Embeddings [N, D] of responses, and their prompts as in grpo_kernels.groups.GroupLayout; `valid` is [N]."""

    embeddings: Tensor
    order: Tensor | None
    offsets: Tensor | None
    num_groups: int
    size: int
    valid: Tensor | None


@op_inputs
class Grouping:
    """Responses to cluster; `settings` are a SimilarityConfig's."""

    responses: Responses
    settings: list[float]


@op_inputs
class Distances:
    """Distances [P, K, K] to cluster."""

    distances: Tensor
    settings: list[float]


@op_inputs
class Linked:
    """Distances [P, K, K] to build a tree from, by the code of a linkage."""

    distances: Tensor
    linkage: int


@op_inputs
class Labelled:
    """Distances [P, K, K], and labels [P, K] to score by them."""

    distances: Tensor
    labels: Tensor


def forward(inputs: Grouping) -> tuple[Tensor, ...]:
    responses = inputs.responses
    distances, status = pairwise_cosine(responses)
    of_prompts, *results = cluster_distances(Distances(distances, inputs.settings))
    labels = status.new_full(status.shape, -1, dtype=torch.int32)
    ids = status.new_full(status.shape, -1, dtype=torch.int64)
    for p, (first, rows) in enumerate(_prompts(responses)):
        labels[rows] = of_prompts[p, : len(rows)]
        ids[rows] = torch.where(labels[rows] < 0, -1, labels[rows].long() + first)
    return labels, ids, *results, status


def pairwise_cosine(inputs: Responses) -> tuple[Tensor, Tensor]:
    """Cosine distances [P, K, K], infinite for absent, masked and non-finite rows, and the status of each row."""
    embeddings, valid, size = inputs.embeddings, inputs.valid, inputs.size
    distances = embeddings.new_full((inputs.num_groups, size, size), torch.inf, dtype=torch.float32)
    status = torch.zeros(len(embeddings), dtype=torch.uint8, device=embeddings.device)
    for p, (_, rows) in enumerate(_prompts(inputs)):
        x = embeddings[rows].double()
        products = torch.stack([(x * row).sum(-1) for row in x]) if len(x) else x.new_zeros(0, 0)
        norms = products.diagonal()
        masked = torch.zeros_like(rows, dtype=torch.bool) if valid is None else ~valid[rows]
        infinite = ~(norms <= torch.finfo(torch.float32).max)  # of which the terms are elsewhere
        is_zero = norms < _LEAST_NORM
        status[rows] = torch.where(
            masked,
            RowStatus.MASKED,
            torch.where(infinite, RowStatus.NOT_FINITE, torch.where(is_zero, RowStatus.ZERO_VECTOR, 0)),
        ).to(torch.uint8)
        of_prompt = 1 - products / (norms[:, None] * norms).sqrt()
        of_prompt = torch.where(is_zero[:, None] | is_zero, 1, of_prompt.clamp(0, 2)).fill_diagonal_(0)
        present = ~masked & ~infinite
        of_prompt = torch.where(present[:, None] & present, of_prompt, torch.inf)
        distances[p, : len(rows), : len(rows)] = of_prompt.float()
    return distances, status


def cluster_distances(inputs: Distances) -> tuple[Tensor, ...]:
    """Labels [P, K], number of groups, silhouette, k with the best silhouette, verdict."""
    distances = inputs.distances
    prompts, size = distances.shape[:2]
    labels = distances.new_full((prompts, size), -1, dtype=torch.int32)
    groups, best_k = (labels.new_zeros(prompts) for _ in range(2))
    silhouettes = distances.new_zeros(prompts)
    verdicts = labels.new_zeros(prompts, dtype=torch.uint8)
    plan = read(Plan, inputs.settings)
    for p in range(prompts):
        places, d = _present(distances[p])
        merges, _ = _link(d, plan.linkage)
        groups[p], best_k[p], silhouettes[p], verdicts[p] = _choose(d, merges, plan)
        labels[p, places] = _labels(merges, len(d), int(groups[p])).to(labels)
    return labels, groups, silhouettes, best_k, verdicts


def agglomerate(inputs: Linked) -> tuple[Tensor, Tensor]:
    """Merges [P, K - 1, 2] as places of the lower and the higher item, -1 where there is none, and heights."""
    distances = inputs.distances
    prompts, size = distances.shape[:2]
    merges = distances.new_full((prompts, max(size - 1, 0), 2), -1, dtype=torch.int32)
    heights = distances.new_full((prompts, max(size - 1, 0)), torch.inf)
    for p in range(prompts):
        places, d = _present(distances[p])
        for m, ((low, high), height) in enumerate(zip(*_link(d, inputs.linkage), strict=True)):
            merges[p, m, 0], merges[p, m, 1], heights[p, m] = places[low], places[high], height
    return merges, heights


def silhouette(inputs: Labelled) -> tuple[Tensor, Tensor]:
    """Silhouettes of labels [P, K], negative if absent: the mean [P] and the samples [P, K]."""
    distances, labels = inputs.distances, inputs.labels
    scores = distances.new_full(distances.shape[:1], torch.nan)
    samples = distances.new_full(distances.shape[:2], torch.nan)
    for p in range(len(distances)):
        places, _ = _present(distances[p])
        places = places[labels[p, places] >= 0]
        of_prompt = labels[p, places].tolist()
        cut = _Cut(distances[p][places][:, places].double())
        for i, label in enumerate(of_prompt):
            if of_prompt.index(label) < i:
                cut.join(of_prompt.index(label), i)
        if len(cut.live) >= 2:
            values = cut.silhouettes()
            samples[p, places] = values.float()
            scores[p] = _ordered_sum(values) / len(values)
    return scores, samples


def _prompts(inputs: Responses) -> list[tuple[int, Tensor]]:
    """The first place of each prompt, and its rows."""
    offsets, order, prompts = inputs.offsets, inputs.order, range(inputs.num_groups)
    bounds = [p * inputs.size for p in range(inputs.num_groups + 1)] if offsets is None else offsets.tolist()
    order = torch.arange(len(inputs.embeddings), device=inputs.embeddings.device) if order is None else order
    return [(bounds[p], order[bounds[p] : bounds[p + 1]]) for p in prompts]


def _present(distances: Tensor) -> tuple[Tensor, Tensor]:
    places = distances.diagonal().isfinite().nonzero().squeeze(1)
    return places, distances[places][:, places].double()


def _link(distances: Tensor, linkage: int) -> tuple[list[tuple[int, int]], list[float]]:
    """Always the pair with the smallest (distance, lower item, higher item); a cluster goes by its lowest item."""
    count = len(distances)
    d = distances * (2 if linkage == WARD else 1)
    d.fill_diagonal_(torch.inf)
    size = torch.ones(count, dtype=torch.float64, device=d.device)
    merges, heights = [], []
    for _ in range(count - 1):
        pairs = torch.where(torch.ones_like(d, dtype=torch.bool).triu(1), d, torch.inf)
        height = pairs.min()
        low, high = (pairs == height).nonzero()[0].tolist()
        a, b, na, nb = d[low], d[high], size[low], size[high]
        if linkage == SINGLE:
            row = torch.minimum(a, b)
        elif linkage == COMPLETE:
            row = torch.maximum(a, b)
        elif linkage == AVERAGE:
            row = (na * a + nb * b) / (na + nb)
        else:
            row = ((na + size) * a + (nb + size) * b - size * height) / (na + nb + size)
        size[low], size[high] = na + nb, 0
        d[low], d[:, low] = row, row
        d[high], d[:, high] = torch.inf, torch.inf
        d[low, low] = torch.inf
        merges.append((low, high))
        heights.append(max([height.item(), *heights[-1:]]))  # rounding may put an equal one below
    return merges, [math.sqrt(h) if linkage == WARD else h for h in heights]


class _Cut:
    """Clusters, and the sum of the distances of every item to each of them."""

    def __init__(self, distances: Tensor) -> None:
        self.sums = distances.clone()
        count = len(distances)
        self.own = torch.arange(count, device=distances.device)
        self.size = torch.ones(count, dtype=torch.float64, device=distances.device)
        self.live = list(range(count))

    def join(self, low: int, high: int) -> None:
        self.sums[low] += self.sums[high]
        self.size[low] += self.size[high].item()
        self.own[self.own == high] = low
        self.live.remove(high)

    def silhouettes(self) -> Tensor:
        items = torch.arange(len(self.own), device=self.own.device)
        mates = self.size[self.own] - 1
        within = self.sums[self.own, items] / mates
        means = self.sums * (1 / self.size)[:, None]
        means[self.own, items] = torch.inf
        nearest = means[self.live].min(0).values
        top = torch.maximum(within, nearest)
        return torch.where((mates == 0) | (top == 0), 0, (nearest - within) / top)


def _ordered_sum(values: Tensor) -> float:
    """In one order on every backend: 32 sums, then halves."""
    parts = torch.zeros(32, dtype=torch.float64, device=values.device)
    for first in range(0, len(values), 32):
        window = values[first : first + 32]
        parts[: len(window)] += window
    while len(parts) > 1:
        half = len(parts) // 2
        parts = parts[:half] + parts[half:]
    return parts.item()


def _choose(d: Tensor, merges: list[tuple[int, int]], plan: Plan) -> tuple[int, int, float, int]:
    """Number of groups, k with the best silhouette, that silhouette, verdict."""
    count = len(d)
    if count < 3:
        return min(count, 1), min(count, 1), 0.0, Verdict.SMALL if count else Verdict.EMPTY
    cut, scores = _Cut(d), {}
    for k, (low, high) in zip(range(count - 1, 0, -1), merges, strict=True):
        cut.join(low, high)
        if plan.k_min <= k <= plan.k_max:
            scores[k] = _ordered_sum(cut.silhouettes()) / count
    best_k, best = 1, 0.0
    if scores:
        top = max(scores.values())
        best_k = min(k for k, score in scores.items() if score >= top - plan.tie_tolerance)
        best = scores[best_k]
    others = d[~torch.eye(count, dtype=torch.bool, device=d.device)]
    if others.max() <= plan.distance_floor:
        return 1, best_k, best, Verdict.ALL_SAME
    if best_k > 1 and best >= plan.min_silhouette:
        return best_k, best_k, best, Verdict.CLUSTERED
    is_different = bool(others.min() > plan.different_at)
    becomes = plan.different if is_different else plan.collapse
    return count if becomes else 1, best_k, best, Verdict.ALL_DIFFERENT if is_different else Verdict.UNCLEAR


def _labels(merges: list[tuple[int, int]], count: int, groups: int) -> Tensor:
    root = list(range(count))
    for low, high in merges[: count - groups]:
        root = [low if r == high else r for r in root]
    return torch.tensor([sorted(set(root)).index(r) for r in root], dtype=torch.int32)
