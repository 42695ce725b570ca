"""similarity_groups against scikit-learn as it is commonly used, trees of fastcluster and SciPy with incrementally
updated silhouettes, and torch's batched product.

Lower bound on the work per prompt of K responses: K^2 D / 2 multiplications for the products, 2 K^2 additions for the
sums of the cuts, K^3 / 2 comparisons (dense) for the nearest clusters. On a GPU the op is bound by reading the
embeddings: 134 MB at P = 1,024, K = 64, D = 1,024 in bfloat16.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import DEVICES, Bar, Case, Floor, Make, Provider, Same, Sweep, sized
from benchmarks.similarity_peers import Cut, by_scikit_learn, by_tree, mixture, partition

OP, PROMPTS, DEPTH = "similarity_groups", sized(256), 1024


class Embeddings(NamedTuple):
    rows: Tensor
    size: int
    config: gk.SimilarityConfig | None = None


def of(prompts: int, size: int, config: gk.SimilarityConfig | None = None, dtype: torch.dtype = torch.float32) -> Make:
    return lambda device, seed: Embeddings(mixture(prompts, size, DEPTH, seed, device).to(dtype), size, config)


def ours(e: Embeddings) -> gk.SimilarityGroups:
    return gk.similarity_groups(e.rows, e.size, **({} if e.config is None else {"config": e.config}))


def distances(e: Embeddings) -> Tensor:
    return gk.pairwise_cosine(e.rows, e.size)


def batched_product(e: Embeddings) -> Tensor:
    by_prompt = e.rows.view(-1, e.size, DEPTH)
    return by_prompt @ by_prompt.mT


def unit_product(e: Embeddings) -> Tensor:
    by_prompt = torch.nn.functional.normalize(e.rows, dim=1).view(-1, e.size, DEPTH)
    return 1 - by_prompt @ by_prompt.mT


def same(cuts: list[Cut], gold: gk.SimilarityGroups) -> None:
    size = len(gold.labels) // len(cuts)
    for p, cut in enumerate(cuts):
        assert partition(gold.labels[p * size : (p + 1) * size]) == partition(cut.labels), (
            f"prompt {p}: different groups"
        )
        assert abs(float(gold.silhouette[p]) - cut.score) < 1e-6, f"prompt {p}: different silhouette"


def floor(prompts: int, size: int, width: int = 4) -> Floor:
    """Counts a multiplication and its addition as two flops, and comparisons not at all."""
    return Floor(bytes=width * prompts * size * DEPTH, flops=prompts * (size**2 * DEPTH + 2 * size**2))


# The peers iterate over prompts and take seconds, so they get few.
PEERS = {
    "scikit-learn": (by_scikit_learn, 4, "sklearn"),
    "fastcluster": (functools.partial(by_tree, "fastcluster:linkage"), 16, "fastcluster"),
    "scipy": (functools.partial(by_tree, "scipy.cluster.hierarchy:linkage"), 16, "scipy"),
}


def peers(size: int) -> tuple[Provider, ...]:
    return tuple(
        Provider(name, lambda e, call=call: call(e.rows, e.size), package, few=of(few, size), share=few / PROMPTS)
        for name, (call, few, package) in PEERS.items()
    )


# Users of a GPU have up to 16 responses.
DEVICES_OF = {8: DEVICES, 16: DEVICES, 32: ("cpu",), 64: ("cpu",)}


def groups_case(size: int) -> Case:
    return Case(
        OP,
        f"K={size}",
        f"256 prompts, {size} responses each, 1,024 numbers an embedding",
        floor(PROMPTS, size),
        of(PROMPTS, size),
        ours,
        peers(size),
        (Bar("ratio at least", 600, "scikit-learn"), Bar("ratio at least", 10, "fastcluster")),
        # the peers have no verdicts, so that only groups and scores are compared
        same=same,
        checked=of(12, size, gk.SimilarityConfig(min_silhouette=-1)),
        devices=DEVICES_OF[size],
        pairs=7,
        quick=("fastcluster",) if size in (16, 64) else (),
    )


def distances_case(size: int) -> Case:
    return Case(
        OP,
        f"pairwise_cosine K={size}",
        f"256 prompts, {size} responses each",
        floor(PROMPTS, size),
        of(PROMPTS, size),
        distances,
        (
            Provider("torch's batched product", batched_product, agrees=False),
            Provider("torch, normalize + batched product", unit_product),
        ),
        (Bar("ratio at least", 0.7, "torch's batched product"),),
        same=Same(atol=1e-5),  # a few units in the last place of 1, for sums of 1,024 products
        devices=DEVICES_OF[size],
    )


MANY = 4 * PROMPTS
CASES = [
    *(groups_case(size) for size in DEVICES_OF),
    *(distances_case(size) for size in DEVICES_OF),
    Case(
        OP,
        "K=32, linear in prompts",
        "256 prompts against 1,024",
        floor(PROMPTS, 32),
        of(PROMPTS, 32),
        ours,
        (Provider("four times the prompts", ours, agrees=False, few=of(MANY, 32)),),
        devices=("cpu",),
        bars=(
            Bar("ratio at least", 3.2, "four times the prompts"),
            Bar("ratio at most", 4.8, "four times the prompts"),
        ),
    ),
    Case(
        OP,
        "K=64, many prompts",
        "1,024 prompts",
        floor(MANY, 64),
        of(MANY, 64),
        ours,
        devices=("cpu",),
        pairs=5,
        arrays={"distances of 256 prompts": lambda e: PROMPTS * e.size**2 * 4},
        bars=(Bar("memory below", 1, "distances of 256 prompts"),),
    ),
    Case(
        OP,
        "K=16, bfloat16, many prompts",
        "1,024 prompts",
        floor(MANY, 16, 2),
        of(MANY, 16, dtype=torch.bfloat16),
        ours,
        devices=("cuda",),
        dtype="bfloat16",
        bars=(Bar("microseconds at most", 25),),  # an estimate for an H200
    ),
]
SWEEPS = [
    Sweep(
        OP,
        "K = 8, D = 1,024",
        "prompts",
        (1, 10, 100, 1000, 10_000),
        lambda device, size: of(size, 8)(device, 0),
        ours,
        floor(1, 8),
        fit_from=100,
    )
]
