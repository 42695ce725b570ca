"""similarity_groups against scikit-learn as it is used, fastcluster with every cut's silhouette from the one before,
and torch's batched product: `make bench`, or
pytest benchmarks/test_similarity_groups.py --benchmark-only -s -k ratio for the bars.

Work at the least, per prompt of K responses: K^2 D / 2 multiplications for the products, 2 K^2 additions for the cuts'
sums, K^3 / 2 comparisons (dense) for the nearest clusters. On a GPU the embeddings are what has to be read: at
P = 1,024, K = 64, D = 1,024 in bfloat16 134 MB.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk
from benchmarks.memory import peak_memory
from benchmarks.paired import paired, seconds
from benchmarks.similarity_peers import by_fastcluster, by_scikit_learn, mixture, partition

PROMPTS, DEPTH = 256, 1024
SIZES = (8, 16, 32, 64)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def assert_agree(size: int) -> None:
    """Nobody is timed who computes something else."""
    embeddings = mixture(12, size, DEPTH, seed=1)
    ours = gk.similarity_groups(embeddings, size, config=gk.SimilarityConfig(min_silhouette=-1))
    for function in (by_scikit_learn, by_fastcluster):
        for p, cut in enumerate(function(embeddings, size)):
            assert partition(ours.labels[p * size : (p + 1) * size]) == partition(cut.labels), function.__name__
            assert abs(float(ours.silhouette[p]) - cut.score) < 1e-6


# Few prompts for those who take seconds: they go through them one by one.
PEERS: dict[str, tuple[Any, int, float]] = {
    "scikit-learn": (by_scikit_learn, 4, 600),
    "fastcluster": (by_fastcluster, 16, 10),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PEERS)
def test_ratio(benchmark: Any, name: str, size: int) -> None:
    assert_agree(size)
    theirs, few, bar = PEERS[name]
    embeddings = mixture(PROMPTS, size, DEPTH)
    some = mixture(few, size, DEPTH)

    def ours() -> Any:
        return gk.similarity_groups(embeddings, size)

    result = benchmark.pedantic(lambda: paired(ours, lambda: theirs(some, size), pairs=7), rounds=1)
    ratio = result.ratio * PROMPTS / few
    print(
        f"\nK={size:2d} P={PROMPTS}: ours {result.ours / PROMPTS:6.2f} us a prompt, {name} {ratio:6.0f}x, bar {bar:.0f}"
    )
    assert ratio >= bar


def test_ratio_linear_in_prompts(benchmark: Any) -> None:
    size = 32
    few, many = (mixture(prompts, size, DEPTH) for prompts in (PROMPTS, 4 * PROMPTS))
    result = benchmark.pedantic(
        lambda: paired(lambda: gk.similarity_groups(few, size), lambda: gk.similarity_groups(many, size)), rounds=1
    )
    print(f"\nfour times the prompts: {result.ratio:.2f} times the time")
    assert 3.2 <= result.ratio <= 4.8


@pytest.mark.parametrize("size", SIZES)
def test_ratio_of_products(benchmark: Any, size: int) -> None:
    """Distances, against the products alone by torch."""
    embeddings = mixture(PROMPTS, size, DEPTH)
    by_prompt = embeddings.view(PROMPTS, size, DEPTH)
    result = benchmark.pedantic(
        lambda: paired(lambda: gk.pairwise_cosine(embeddings, size), lambda: by_prompt @ by_prompt.mT), rounds=1
    )
    print(f"\nK={size:2d}: pairwise_cosine at {result.ratio:.2f} of the speed of torch's batched product, bar 0.7")
    assert result.ratio >= 0.7


def test_ratio_of_memory() -> None:
    size = 64
    embeddings = mixture(4 * PROMPTS, size, DEPTH)
    chunk = PROMPTS * size * size * 4
    taken = peak_memory(lambda: gk.similarity_groups(embeddings, size))
    print(f"\nP={4 * PROMPTS}, K={size}: {taken / 2**20:.1f} MiB; distances of {PROMPTS}: {chunk / 2**20:.1f} MiB")
    assert taken <= chunk


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("size", "dtype", "target"), [(16, torch.bfloat16, 25), (64, torch.bfloat16, 80), (64, torch.float32, 110)]
)
def test_time_on_a_gpu(benchmark: Any, size: int, dtype: torch.dtype, target: float) -> None:
    """Targets are a model's, of an H200 with 1,024 prompts; nothing is asserted of them."""
    embeddings = mixture(1024, size, DEPTH).to(DEVICE, dtype)
    gk.similarity_groups(embeddings, size)
    taken = benchmark.pedantic(lambda: seconds(lambda: gk.similarity_groups(embeddings, size), 50), rounds=1)
    print(f"\nP=1024 K={size} {dtype}: {taken * 1e6:.1f} us, modelled {target}")
