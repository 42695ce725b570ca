"""Batches of similarity_groups, of its parts and of the functions that read their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import diversity
from grpo_kernels.ops.similarity_groups.registration import SUPPORTS
from tests.harness import runnable_backends
from tests.ops.promises import Inputs, Op, Results, Same
from tests.strategies import LAYOUTS, ids, laid_out

BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
LINKAGES = ("single", "complete", "average", "ward")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")

# Rows of one prompt


def mixture(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    centres = random.normal(size=(random.integers(1, 5), width))
    return centres[random.integers(len(centres), size=size)] + 0.4 * random.normal(size=(size, width))


def duplicates(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    distinct = random.normal(size=(random.integers(1, size + 1), width))
    return distinct[random.integers(len(distinct), size=size)]


def some_bad(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    rows = mixture(size, width, random)
    for row in np.flatnonzero(random.random(size) < 0.3):
        rows[row, random.integers(width)] = random.choice([np.nan, np.inf, -np.inf])
    return rows


KINDS: dict[str, Callable[[int, int, np.random.Generator], np.ndarray]] = {
    "mixture": mixture,
    "isotropic": lambda size, width, random: random.normal(size=(size, width)),
    "duplicates": duplicates,
    "noise": lambda size, width, random: random.normal(size=width) + 1e-6 * random.normal(size=(size, width)),
    "scaled": lambda size, width, random: (
        mixture(size, width, random) * 2.0 ** random.integers(-6, 7, size=(size, 1)).astype(float)
    ),
    "zeros": lambda size, width, random: mixture(size, width, random) * (random.random((size, 1)) < 0.7),
    "bad": some_bad,
}


class Batch(NamedTuple):
    rows: Tensor  # [N, D]
    ids: Tensor  # [N]
    valid: Tensor  # [N]

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))

    def prompts(self) -> list[Tensor]:
        """Rows of each prompt, in ascending order of the ids."""
        return [self.rows[self.ids == name] for name in self.ids.unique()]


@st.composite
def batches(
    draw: st.DrawFn,
    max_size: int = 24,
    widths: tuple[int, ...] = (1, 7, 8, 33, 130, 1030),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    kinds: tuple[str, ...] = tuple(KINDS),
) -> Batch:
    """The op's strategy: prompts of all kinds, with ids of any integer type, in any order and memory layout."""
    names = draw(ids(draw(st.lists(st.integers(1, max_size), min_size=1, max_size=5))))
    width = draw(st.sampled_from(widths))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = torch.empty(len(names), width)
    for name in names.unique():
        kind = KINDS[draw(st.sampled_from(kinds))]
        rows[names == name] = torch.from_numpy(kind(int((names == name).sum()), width, random)).float()
    valid = torch.from_numpy(random.random(len(names)) < draw(st.sampled_from((1.0, 1.0, 0.7, 0.0))))
    if draw(st.booleans()):
        small = draw(st.sampled_from((torch.int32, torch.int16, torch.int8, torch.uint8)))
        names = names.unique(return_inverse=True)[1].to(small)
    layout = draw(st.sampled_from(LAYOUTS))
    return Batch(*(laid_out(tensor, layout) for tensor in (rows.to(draw(st.sampled_from(dtypes))), names, valid)))


@st.composite
def distances(draw: st.DrawFn, max_size: int = 17) -> Tensor:
    """Distances [P, K, K] with few levels, among them -0, or of rows; some places are not in use."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(0, max_size)))
    levels = draw(st.sampled_from((1, 2, 5, None)))
    return of_levels(*shape, levels, draw(st.integers(0, 2**31)), draw(st.sampled_from((0.0, 0.3))))


def of_levels(prompts: int, size: int, levels: int | None, seed: int, absent: float = 0.0) -> Tensor:
    """Symmetric distances with so many different values, or those of rows, and a share of places not in use."""
    random = torch.Generator().manual_seed(seed)
    if levels is None:
        centres = torch.randn(prompts, 5, 6, generator=random)
        rows = centres.repeat(1, size // 5 + 1, 1)[:, :size] + 0.3 * torch.randn(prompts, size, 6, generator=random)
        result = gk.pairwise_cosine(rows.view(-1, 6), max(size, 1), backend="reference").view(prompts, size, size)
    else:
        upper = torch.randint(0, levels + 1, (prompts, size, size), generator=random).triu(1) / 8
        result = torch.where(upper + upper.mT == 0, -0.0, upper + upper.mT)
    left_out = torch.rand(prompts, size, generator=random) < absent
    return result.masked_fill(left_out[:, :, None] | left_out[:, None], INF)


configs = st.builds(
    gk.SimilarityConfig,
    linkage=st.sampled_from(LINKAGES),
    k_min=st.integers(2, 4),
    k_max=st.none() | st.integers(4, 9),
    min_silhouette=st.sampled_from((-1.0, 0.1, 0.5)),
    tie_tolerance=st.sampled_from((0.0, 0.05)),
    distance_floor=st.sampled_from((0.0, 1e-4, 0.25)),
    different_at=st.sampled_from((0.0, 0.3, 0.5)),
    collapse=st.sampled_from(("one", "singletons")),
    different=st.sampled_from((None, "one", "singletons")),
)


def symmetric(size: int, value: float, pairs: dict[tuple[int, int], float] | None = None) -> Tensor:
    """Distances [1, K, K] that equal `value` except for some pairs."""
    result = torch.full((size, size), value)
    for (i, j), apart in (pairs or {}).items():
        result[i, j] = result[j, i] = apart
    return result.fill_diagonal_(0)[None]


def assert_same(result: NamedTuple, expected: NamedTuple) -> None:
    """Checks that results agree to the last bit, also across devices."""
    for field, one, other in zip(result._fields, result, expected, strict=True):
        assert one.dtype == other.dtype, field
        torch.testing.assert_close(
            one.cpu(), other.cpu(), rtol=0, atol=0, equal_nan=True, msg=lambda text, of=field: f"{of}: {text}"
        )


# Promises

PROMPTS, SIZE = 4, 6
CONFIG = gk.SimilarityConfig("ward", k_max=4, different="singletons")
PER_ROW = ("labels", "status")


def draw_rows() -> Inputs:
    centres = torch.randn(PROMPTS, 3, 33, dtype=torch.float64)
    rows = centres.repeat_interleave(2, 1).flatten(0, 1) + 0.1 * torch.randn(PROMPTS * SIZE, 33, dtype=torch.float64)
    rows[2], rows[7], rows[10] = rows[0], INF, 0.0
    return {"embeddings": rows, "groups": SIZE, "valid": torch.arange(PROMPTS * SIZE) % 7 != 3}


def groups_of(inputs: Inputs, backend: str | None) -> Results:
    results = gk.similarity_groups(**inputs, config=CONFIG, backend=backend)._asdict()
    return results | {"distances": gk.pairwise_cosine(**inputs, backend=backend)}


def rearranged(inputs: Inputs, order: Tensor, names: Tensor, **sizes: int) -> Inputs:
    """Row i of the batch at place order[i], in prompts of these names."""
    at = order.argsort()
    moved = {key: inputs[key][at] for key in ("embeddings", "valid")}
    return moved | {"groups": names.repeat_interleave(SIZE)[at]} | sizes


def shuffled_within_order() -> Tensor:
    """A place for each row, such that the rows of a prompt keep their order."""
    return torch.randperm(PROMPTS).repeat(SIZE)[torch.randperm(PROMPTS * SIZE)].argsort(stable=True)


def with_ids_in_any_order(inputs: Inputs) -> Same:
    """Prompts come in the order of their ids, wherever their rows are; further prompts and places are empty."""
    order = shuffled_within_order()
    names = torch.tensor([2**62, 5, -1, -(2**40)])

    def restored(results: list[Results]) -> Results:
        (result,) = results
        assert result["verdict"][PROMPTS:].tolist() == [gk.Verdict.EMPTY] * 2
        rows = {key: result[key][order] for key in PER_ROW}
        distances = result["distances"][:PROMPTS, :SIZE, :SIZE].flip(0)
        prompts = {key: result[key][:PROMPTS].flip(0) for key in ("num_groups", "silhouette", "best_k", "verdict")}
        return rows | prompts | {"distances": distances}

    return Same([rearranged(inputs, order, names, num_groups=6, max_size=9)], restored, is_exact=True)


def in_prompts(inputs: Inputs) -> Same:
    def part(prompt: int) -> Inputs:
        rows = slice(prompt * SIZE, (prompt + 1) * SIZE)
        return inputs | {key: inputs[key][rows] for key in ("embeddings", "valid")}

    def joined(results: list[Results]) -> Results:
        return {key: torch.cat([result[key] for result in results]) for key in results[0] if key != "group_ids"}

    return Same([part(prompt) for prompt in range(PROMPTS)], joined, is_exact=True)


def seed() -> int:
    return int(torch.randint(1000, ()))


def draw_distances() -> Inputs:
    return {"distances": of_levels(3, 9, 5, seed(), absent=0.3).double()}


def clusters_of(inputs: Inputs, backend: str | None) -> Results:
    return gk.cluster_distances(inputs["distances"], config=CONFIG, backend=backend)._asdict()


def absent_pairs(inputs: Inputs) -> dict[str, Tensor]:
    diagonal = torch.eye(inputs["distances"].shape[1], dtype=torch.bool)
    return {"distances": inputs["distances"].isinf() & ~diagonal}


def draw_labels() -> Inputs:
    """No NaN, which opcheck takes for different from itself."""
    return {"distances": of_levels(3, 8, None, seed()).double(), "labels": torch.randint(4, (3, 8)) * 2**32}


def draw_labels_of_rows() -> Inputs:
    inputs = draw_labels()
    return inputs | {"labels": inputs["labels"].flatten(), "groups": torch.arange(3).repeat_interleave(8)}


def silhouette_of(inputs: Inputs, backend: str | None) -> Results:
    return gk.silhouette(**inputs, backend=backend)._asdict()


def draw_whole_batch() -> Inputs:
    rewards = torch.randn(PROMPTS * SIZE, dtype=torch.float64)
    rewards[1] = NAN
    return {"rewards": rewards, "lengths": torch.randint(1, 9, (PROMPTS * SIZE,))} | draw_shuffled()


def draw_baselines() -> Inputs:
    rewards, baselines = torch.randn(2, PROMPTS * SIZE, dtype=torch.float64)
    return {"rewards": rewards, "baselines": baselines} | draw_rows()


def advantages_of(inputs: Inputs, backend: str | None) -> Results:
    config = "opo" if "lengths" in inputs else "remax"
    result = gk.similarity_advantages(**inputs, similarity=CONFIG, config=config, backend=backend)
    return {"advantages": result.advantages, "std": result.std, "labels": result.groups.labels}


class Diversity(NamedTuple):
    """Arguments of the functions of gk.diversity."""

    distances: Tensor
    rewards: Tensor
    labels: Tensor


def draw_diversity() -> Inputs:
    """Three prompts of up to six responses, with duplicates and without ties of rewards."""
    rows = torch.randn(18, 3)
    rows[1], rows[8] = rows[0], rows[7]
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
    distances = gk.pairwise_cosine(rows, 6, valid=valid, backend="reference").double()
    labels = torch.where(valid.view(3, 6), torch.randint(3, (3, 6)), -2)
    return {"distances": distances, "rewards": torch.randn(3, 6, dtype=torch.float64), "labels": labels}


def everything(inputs: Inputs, backend: str | None = None) -> Results:
    d, rewards, labels = inputs["distances"], inputs["rewards"], inputs["labels"]
    return {
        "similarity_weights": diversity.similarity_weights(d),
        "threshold_components": diversity.threshold_components(d, 0.2),
        "distinctness_weights": diversity.distinctness_weights(labels),
        "agreement_weights": diversity.agreement_weights(labels, entropy_bound=1),
        "uniqueness_weights": diversity.uniqueness_weights(labels),
        "semantic_entropy": diversity.semantic_entropy(labels),
        "vendi_score": diversity.vendi_score(d),
        "mmr_rewards": diversity.mmr_rewards(rewards, d, lam=0.7),
        "set_advantages": diversity.set_advantages(rewards, labels, set_size=min(max(labels.shape[1], 1), 2)),
        **diversity.leave_one_out_logdet(d)._asdict(),
    }


def absent_responses(inputs: Inputs) -> dict[str, Tensor]:
    return absent_pairs(inputs) | {"rewards": inputs["labels"] < 0}


def masked(*names: str) -> Callable[[Inputs], dict[str, Tensor]]:
    return lambda inputs: dict.fromkeys(names, ~inputs["valid"])


def draw_shuffled() -> Inputs:
    return rearranged(draw_rows(), torch.randperm(PROMPTS * SIZE), torch.arange(PROMPTS), num_groups=5, max_size=7)


def groups_of_ids(inputs: Inputs, backend: str | None) -> Results:
    return gk.similarity_groups(**inputs, backend=backend)._asdict()


def distances_of_ids(inputs: Inputs, backend: str | None) -> Results:
    return {"distances": gk.pairwise_cosine(**inputs, backend=backend)}


def tree_of(inputs: Inputs, backend: str | None) -> Results:
    return gk.agglomerate(inputs["distances"], linkage="complete", backend=backend)._asdict()


OF_ROWS = {"ids in any order": with_ids_in_any_order, "one prompt a call": in_prompts}
OF_DISTANCES = dict.fromkeys(SUPPORTS, (torch.float32,))
OF_DIVERSITY = {"reference": (torch.float32, torch.float64)}
OPS = {
    "similarity_groups": Op(draw_rows, groups_of, SUPPORTS, (), masked("embeddings"), OF_ROWS),
    "similarity_groups of ids": Op(draw_shuffled, groups_of_ids, SUPPORTS, (), masked("embeddings")),
    "pairwise_cosine of ids": Op(draw_shuffled, distances_of_ids, SUPPORTS, (), masked("embeddings")),
    "similarity_advantages by length": Op(draw_whole_batch, advantages_of, SUPPORTS, (), masked("rewards", "lengths")),
    "similarity_advantages of baselines": Op(draw_baselines, advantages_of, SUPPORTS, (), masked("embeddings")),
    "silhouette of rows": Op(draw_labels_of_rows, silhouette_of, OF_DISTANCES),
    "cluster_distances": Op(draw_distances, clusters_of, OF_DISTANCES, (), absent_pairs),
    "agglomerate": Op(draw_distances, tree_of, OF_DISTANCES, (), absent_pairs),
    "silhouette": Op(draw_labels, silhouette_of, OF_DISTANCES),
    "diversity": Op(draw_diversity, everything, OF_DIVERSITY, (), absent_responses),
}
