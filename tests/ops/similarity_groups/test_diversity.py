"""gk.diversity: every function against its formula in float64 NumPy, prompt by prompt; absent responses; order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import diversity

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.float64)
# Results are rounded once from float64, after at most a few hundred float64 operations.
TOLERANCE = {torch.float32: {"rtol": 2e-7, "atol": 1e-9}, torch.float64: {"rtol": 1e-10, "atol": 1e-12}}


class Case(NamedTuple):
    distances: Tensor
    rewards: Tensor
    labels: Tensor

    def present(self, p: int) -> list[int]:
        return [i for i in range(self.distances.shape[1]) if self.distances[p, i, i] == 0]

    def similarity(self, p: int) -> np.ndarray[Any, Any]:
        places = self.present(p)
        return 1 - self.distances[p][places][:, places].double().numpy()


def case(seed: int, dtype: torch.dtype, prompts: int = 7, size: int = 6) -> Case:
    """Ragged prompts, the first of them empty, with unused places, duplicates, and equal and missing rewards."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(prompts, size, 3)) + 0.7
    x[rng.random((prompts, size)) < 0.1] = 0
    for p, i in itertools.product(range(prompts), range(1, size)):
        if rng.random() < 0.25:
            x[p, i] = x[p, rng.integers(i)]
    present = rng.random((prompts, size)) < np.linspace(0, 1.3, prompts)[:, None]
    distances = np.full((prompts, size, size), INF)
    for p, i, j in itertools.product(range(prompts), range(size), range(size)):
        if present[p, i] and present[p, j]:
            same = i == j or ((x[p, i] == x[p, j]).all() and x[p, i].any())
            norms = math.sqrt(float(x[p, i] @ x[p, i]) * float(x[p, j] @ x[p, j]))
            cosine = float(x[p, min(i, j)] @ x[p, max(i, j)]) / norms if norms else 0.0
            distances[p, i, j] = 0.0 if same else min(max(1 - cosine, 0.0), 2.0)
    rewards = np.where(rng.random((prompts, size)) < 0.1, NAN, rng.normal(size=(prompts, size)).round(1))
    labels = np.where(present, 7 * rng.integers(0, 3, (prompts, size)), -1 - rng.integers(0, 3, (prompts, size)))
    d = torch.tensor(distances, dtype=dtype)
    return Case(torch.minimum(d, d.mT), torch.tensor(rewards, dtype=dtype), torch.tensor(labels))


CASES = [pytest.param(seed, dtype, id=f"{seed}-{str(dtype)[6:]}") for seed in range(4) for dtype in DTYPES]


def assert_per_place(got: Tensor, c: Case, expected: Callable[[int], Any], elsewhere: float = 0.0) -> None:
    """Checks per-place results; `expected` returns the values at a prompt's used places."""
    wanted = torch.full(c.labels.shape, elsewhere, dtype=torch.float64)
    for p in range(len(wanted)):
        wanted[p, c.present(p)] = torch.as_tensor(np.asarray(expected(p), dtype=np.float64))
    torch.testing.assert_close(got, wanted.to(got.dtype), equal_nan=True, **TOLERANCE[got.dtype])


def assert_per_prompt(got: Tensor, c: Case, expected: Callable[[int], float]) -> None:
    wanted = torch.tensor([expected(p) for p in range(len(c.labels))], dtype=torch.float64)
    torch.testing.assert_close(got, wanted.to(got.dtype), **TOLERANCE[got.dtype])


def sizes(c: Case, p: int) -> list[int]:
    own = c.labels[p, c.present(p)].tolist()
    return [own.count(label) for label in own]


@pytest.mark.parametrize(("seed", "dtype"), CASES)
def test_similarity_weights(seed: int, dtype: torch.dtype) -> None:
    c = case(seed, dtype)
    got = diversity.similarity_weights(c.distances)
    assert got.dtype == dtype
    assert_per_place(got, c, lambda p: 1 / (np.maximum(c.similarity(p).sum(1), 1.0) + 1e-6))
    tight = diversity.similarity_weights(c.distances, least=0.25, eps=0.5)
    assert_per_place(tight, c, lambda p: 1 / (np.maximum(c.similarity(p).sum(1), 0.25) + 0.5))


def test_similarity_weights_of_opposites_stay_positive() -> None:
    distances = gk.pairwise_cosine(torch.tensor([[1.0, 0], [-1, 0], [-1, 0]]), 3)
    # sums: -1, 1, 1
    assert diversity.similarity_weights(distances, eps=0.0).tolist() == [[1.0, 1.0, 1.0]]
    assert diversity.similarity_weights(distances, eps=0.0, least=0.5).tolist() == [[2.0, 1.0, 1.0]]


@pytest.mark.parametrize(("seed", "dtype"), CASES)
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.4, 2.0])
def test_threshold_components(seed: int, dtype: torch.dtype, threshold: float) -> None:
    c = case(seed, dtype)
    got = diversity.threshold_components(c.distances, threshold)
    assert got.dtype == torch.int32
    for p, result in enumerate(got.tolist()):
        expected = [-1] * len(result)
        for i in c.present(p):
            if expected[i] < 0:
                number, todo = max(expected) + 1, [i]
                while todo:
                    at = todo.pop()
                    expected[at] = number
                    near = (c.distances[p, at] <= torch.tensor(threshold, dtype=dtype)).tolist()
                    todo += [j for j in c.present(p) if near[j] and expected[j] < 0]
        assert result == expected


@pytest.mark.parametrize("seed", range(4))
def test_threshold_components_are_the_single_linkage_cut(seed: int) -> None:
    c = case(seed, torch.float32, prompts=5, size=9)
    tree = gk.agglomerate(c.distances, linkage="single", backend="reference")
    for height in [h for h in tree.heights.flatten().tolist() if math.isfinite(h)]:
        got = diversity.threshold_components(c.distances, height)
        for p in range(5):
            cluster = {i: {i} for i in c.present(p)}
            for (low, high), at in zip(tree.merges[p].tolist(), tree.heights[p].tolist(), strict=True):
                if at <= height:
                    cluster[low] |= cluster.pop(high)
            parts = sorted(cluster.values(), key=min)
            expected = [next((n for n, part in enumerate(parts) if i in part), -1) for i in range(9)]
            assert got[p].tolist() == expected


@pytest.mark.parametrize("size", range(2, 40))
def test_threshold_components_of_a_chain_are_one(size: int) -> None:
    order = torch.randperm(size)
    d = torch.where((order[:, None] - order).abs() == 1, 0.1, 0.9).fill_diagonal_(0)[None]
    assert diversity.threshold_components(d, 0.1).tolist() == [[0] * size]
    assert diversity.threshold_components(d, 0.09).tolist() == [list(range(size))]


@pytest.mark.parametrize("seed", range(6))
def test_weights_of_clusters(seed: int) -> None:
    c = case(seed, torch.float32)

    def distinctness(p: int, least: float) -> list[float]:
        n = len(c.present(p))
        return [1.0 if n == 1 else max(least, (n - m) / (n - 1)) for m in sizes(c, p)]

    assert_per_place(diversity.distinctness_weights(c.labels), c, lambda p: distinctness(p, 0.1))
    assert_per_place(diversity.distinctness_weights(c.labels, least=0.5), c, lambda p: distinctness(p, 0.5))
    assert_per_place(diversity.uniqueness_weights(c.labels), c, lambda p: [1 / m for m in sizes(c, p)])
    assert_per_place(diversity.agreement_weights(c.labels), c, lambda p: [m / len(sizes(c, p)) for m in sizes(c, p)])
    for bound in (0.6, 1.0):

        def bounded(p: int, bound: float = bound) -> list[float]:
            n = len(sizes(c, p))
            return [0.0 if entropy(c, p) >= bound * math.log(n) else m / n for m in sizes(c, p)]

        assert_per_place(diversity.agreement_weights(c.labels, entropy_bound=bound), c, bounded)


def entropy(c: Case, p: int) -> float:
    n = len(sizes(c, p))
    if set(sizes(c, p)) <= {1}:
        return math.log(max(n, 1))  # exactly
    return -sum(math.log(m / n) for m in sizes(c, p)) / n


@pytest.mark.parametrize("seed", range(6))
def test_semantic_entropy(seed: int) -> None:
    c = case(seed, torch.float32)
    assert_per_prompt(diversity.semantic_entropy(c.labels), c, lambda p: entropy(c, p))

    def share(p: int) -> float:
        return entropy(c, p) / math.log(len(sizes(c, p))) if len(sizes(c, p)) > 1 else 0.0

    assert_per_prompt(diversity.semantic_entropy(c.labels, normalize=True), c, share)


@pytest.mark.parametrize("size", range(1, 70))
def test_entropy_is_exact_at_its_ends(size: int) -> None:
    different = torch.stack((torch.arange(size), torch.zeros(size, dtype=torch.int64)))
    assert diversity.semantic_entropy(different)[1] == 0
    assert diversity.semantic_entropy(different, normalize=True).tolist() == [float(size > 1), 0]
    weights = diversity.agreement_weights(different, entropy_bound=1.0)
    assert weights[0].tolist() == [0.0] * size
    assert weights[1].tolist() == [float(size > 1)] * size


@pytest.mark.parametrize(("seed", "dtype"), CASES)
def test_vendi_score_is_that_of_the_eigenvalues(seed: int, dtype: torch.dtype) -> None:
    c = case(seed, dtype)

    def of_eigenvalues(p: int) -> float:
        s = c.similarity(p)
        return 1 / float((np.linalg.eigvalsh(s / len(s)) ** 2).sum()) if len(s) else 0.0

    got = diversity.vendi_score(c.distances)
    assert got.dtype == dtype
    assert_per_prompt(got, c, of_eigenvalues)


@pytest.mark.parametrize(("seed", "dtype"), CASES)
def test_leave_one_out_logdet(seed: int, dtype: torch.dtype) -> None:
    c = case(seed, dtype)
    for eps in (1e-3, 1.0):

        def logdet(p: int, without: int | None = None, eps: float = eps) -> float:
            s = c.similarity(p)
            s = s + eps * np.eye(len(s))
            keep = [i for i in range(len(s)) if i != without]
            return float(np.linalg.slogdet(s[keep][:, keep])[1]) if keep else 0.0

        def marginals(p: int, logdet: Callable[..., float] = logdet) -> list[float]:
            return [logdet(p) - logdet(p, i) for i in range(len(c.present(p)))]

        got = diversity.leave_one_out_logdet(c.distances, eps=eps)
        assert got.total.dtype == got.marginal.dtype == dtype
        assert_per_prompt(got.total, c, logdet)
        assert_per_place(got.marginal, c, marginals)


def test_leave_one_out_logdet_says_where_there_is_no_factor() -> None:
    # 0 and 1 are alike, 1 and 2 are alike, 0 and 2 are opposite: no vectors have these cosines
    impossible = torch.tensor([[0.0, 0, 2], [0, 0, 0], [2, 0, 0]])
    fine = gk.pairwise_cosine(torch.randn(3, 4), 3)[0]
    got = diversity.leave_one_out_logdet(torch.stack((impossible, fine)))
    assert got.total.isnan().tolist() == [True, False]
    assert got.marginal.isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize(("seed", "dtype"), CASES)
def test_mmr_rewards(seed: int, dtype: torch.dtype) -> None:
    c = case(seed, dtype)
    for lam in (0.0, 0.6, 1.0):

        def greedy(p: int, lam: float = lam) -> list[float]:
            s, r = c.similarity(p).tolist(), c.rewards[p, c.present(p)].double().tolist()
            result = [NAN] * len(r)
            left = [i for i in range(len(r)) if not math.isnan(r[i])]
            chosen: list[int] = []
            while left:
                score = {i: lam * r[i] - (1 - lam) * max(s[i][j] for j in chosen) if chosen else r[i] for i in left}
                best = max(left, key=lambda i: (score[i], -i))
                result[best] = score[best]
                chosen.append(best)
                left.remove(best)
            return result

        got = diversity.mmr_rewards(c.rewards, c.distances, lam=lam)
        assert got.dtype == dtype
        assert_per_place(got, c, greedy, elsewhere=NAN)
        per_prompt = torch.full((len(c.rewards),), lam, dtype=torch.float64)
        assert torch.equal(
            diversity.mmr_rewards(c.rewards, c.distances, lam=per_prompt).nan_to_num(9), got.nan_to_num(9)
        )


def test_mmr_takes_the_lowest_of_equals() -> None:
    distances = gk.pairwise_cosine(torch.eye(3).repeat(1, 2).view(-1, 3), 6)  # 0, 0, 1, 1, 2, 2
    got = diversity.mmr_rewards(torch.ones(1, 6), distances, lam=0.5)
    assert got.tolist() == [[1.0, 0.0, 0.5, 0.0, 0.5, 0.0]]


def test_mmr_has_a_lam_of_each_prompt() -> None:
    c = case(3, torch.float64)
    lam = torch.linspace(0, 1, len(c.rewards))
    got = diversity.mmr_rewards(c.rewards, c.distances, lam=lam)
    for p in range(len(lam)):
        alone = diversity.mmr_rewards(c.rewards[p : p + 1], c.distances[p : p + 1], lam=lam[p].item())
        torch.testing.assert_close(got[p : p + 1], alone, rtol=0, atol=0, equal_nan=True)


def by_enumeration(rewards: list[float], labels: list[int], n: int) -> list[float]:
    """The value by definition, over all sets of n responses with a label and a reward."""
    scored = [i for i, (r, label) in enumerate(zip(rewards, labels, strict=True)) if label >= 0 and not math.isnan(r)]
    worth: dict[tuple[int, ...], float] = {}
    for chosen in itertools.combinations(scored, n):
        distinct = len({labels[i] for i in chosen})
        worth[chosen] = math.fsum(rewards[i] for i in chosen) / n * distinct / n
    result = [0.0] * len(rewards)
    if worth:
        for i in scored:
            own = [w for chosen, w in worth.items() if i in chosen]
            result[i] = math.fsum(own) / len(own) - math.fsum(worth.values()) / len(worth)
    return result


@pytest.mark.parametrize(("seed", "dtype"), CASES)
def test_set_advantages(seed: int, dtype: torch.dtype) -> None:
    c = case(seed, dtype, size=7)
    for n in range(1, 8):
        got = diversity.set_advantages(c.rewards, c.labels, set_size=n)
        assert got.dtype == dtype
        wanted = [
            by_enumeration(r, label, n) for r, label in zip(c.rewards.double().tolist(), c.labels.tolist(), strict=True)
        ]
        torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64).to(dtype), **TOLERANCE[dtype])


def test_set_advantages_of_equals_and_of_sets_without_choice_are_exactly_zero() -> None:
    rewards = torch.full((2, 7), 0.7, dtype=torch.float64)
    labels = torch.tensor([[3] * 7, list(range(7))])
    for n in range(1, 8):
        assert diversity.set_advantages(rewards, labels, set_size=n).abs().max() == 0
    assert diversity.set_advantages(torch.rand(2, 7), labels, set_size=7).abs().max() == 0


def test_set_advantages_of_large_prompts_are_finite() -> None:
    # binomials of 200 over 100 would overflow as products of factorials
    got = diversity.set_advantages(torch.rand(2, 200), torch.randint(0, 9, (2, 200)), set_size=100)
    assert got.isfinite().all() and (got != 0).all()
    torch.testing.assert_close(got.sum(1), torch.zeros(2), rtol=0, atol=1e-5)


def everything(c: Case) -> dict[str, Tensor]:
    logdet = diversity.leave_one_out_logdet(c.distances)
    return {
        "similarity_weights": diversity.similarity_weights(c.distances),
        "threshold_components": diversity.threshold_components(c.distances, 0.2),
        "distinctness_weights": diversity.distinctness_weights(c.labels),
        "agreement_weights": diversity.agreement_weights(c.labels, entropy_bound=1),
        "uniqueness_weights": diversity.uniqueness_weights(c.labels),
        "semantic_entropy": diversity.semantic_entropy(c.labels),
        "vendi_score": diversity.vendi_score(c.distances),
        "total": logdet.total,
        "marginal": logdet.marginal,
        "mmr_rewards": diversity.mmr_rewards(c.rewards, c.distances, lam=0.7),
        "set_advantages": diversity.set_advantages(c.rewards, c.labels, set_size=min(max(c.labels.shape[1], 1), 2)),
    }


def test_everything_of_the_module_is_tested_here() -> None:
    tested = {*everything(case(0, torch.float64)), "LogDeterminants", "leave_one_out_logdet", "pad_rows", "unpad_rows"}
    assert tested - {"total", "marginal"} == set(diversity.__all__)


@pytest.mark.parametrize("seed", range(4))
def test_order_of_the_responses_does_not_matter(seed: int) -> None:
    c = case(seed, torch.float64)
    c = c._replace(rewards=torch.rand(c.rewards.shape, dtype=torch.float64))  # mmr: no ties
    order = torch.randperm(6)
    moved = everything(Case(c.distances[:, order][:, :, order], c.rewards[:, order], c.labels[:, order]))
    for name, value in everything(c).items():
        got, wanted = moved[name], value if value.dim() == 1 else value[:, order]
        if name == "threshold_components":  # numbered by first appearance
            got, wanted = (v[:, :, None] == v[:, None] for v in (got, wanted))
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("seed", range(4))
def test_prompts_and_padding_do_not_matter(seed: int) -> None:
    c = case(seed, torch.float64)
    together = everything(c)
    for p in range(len(c.labels)):
        places = c.present(p)
        if len(places) < 2:
            continue
        alone = Case(c.distances[p][places][:, places][None], c.rewards[p, places][None], c.labels[p, places][None])
        for name, value in everything(alone).items():
            wanted = together[name][p : p + 1]
            wanted = wanted if wanted.dim() == 1 else wanted[:, places]
            torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("value", [NAN, 0.0, -INF])
def test_what_stands_at_absent_places_does_not_matter(value: float) -> None:
    c = case(5, torch.float32)
    diagonal = torch.eye(6, dtype=torch.bool)
    spoilt = torch.where(c.distances.isfinite() | diagonal, c.distances, value)
    wanted = everything(c)
    for name, got in everything(c._replace(distances=spoilt)).items():
        torch.testing.assert_close(got, wanted[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_places(dtype: torch.dtype) -> None:
    for size in (0, 1, 3):
        zeros = torch.zeros(0, size, dtype=dtype)
        nobody = everything(Case(torch.zeros(0, size, size, dtype=dtype), zeros, zeros.int()))
        assert {value.shape for value in nobody.values()} == {(0,), (0, size)}
    empty = Case(torch.zeros(2, 0, 0, dtype=dtype), torch.zeros(2, 0, dtype=dtype), torch.zeros(2, 0).int())
    assert diversity.vendi_score(empty.distances).tolist() == [0, 0]
    assert diversity.leave_one_out_logdet(empty.distances).total.tolist() == [0, 0]
    assert diversity.semantic_entropy(empty.labels).tolist() == [0, 0]
    assert diversity.threshold_components(empty.distances, 0.1).shape == (2, 0)
    assert diversity.mmr_rewards(empty.rewards, empty.distances, lam=0.5).shape == (2, 0)
    assert diversity.set_advantages(empty.rewards, empty.labels, set_size=4).shape == (2, 0)
    one = everything(
        Case(torch.zeros(1, 1, 1, dtype=dtype), torch.full((1, 1), 3.0, dtype=dtype), torch.full((1, 1), 5))
    )
    ridge = pytest.approx(math.log(1.001))
    assert {k: v.flatten().tolist() for k, v in one.items()} == {
        "similarity_weights": [pytest.approx(1 / (1 + 1e-6))],
        "threshold_components": [0],
        "distinctness_weights": [1],
        "agreement_weights": [0],
        "uniqueness_weights": [1],
        "semantic_entropy": [0],
        "vendi_score": [1],
        "total": [ridge],
        "marginal": [ridge],
        "mmr_rewards": [3],
        "set_advantages": [0],
    }
    opposite = torch.tensor([[[0.0, 2], [2, 0]]], dtype=dtype)
    assert diversity.vendi_score(opposite).tolist() == [1]
    assert diversity.threshold_components(opposite, 1.99).tolist() == [[0, 1]]
    rewards = torch.tensor([[1.0, 2]], dtype=dtype)
    assert diversity.mmr_rewards(rewards, opposite, lam=0.5).tolist() == [[1, 2]]  # 0.5 * 1 + 0.5 * 1
    assert diversity.set_advantages(rewards, torch.tensor([[0, 1]]), set_size=1).tolist() == [[-0.5, 0.5]]


@pytest.mark.parametrize("bad", [INF, -INF])
def test_an_infinite_reward_stays_in_its_prompt(bad: float) -> None:
    distances = gk.pairwise_cosine(torch.randn(12, 4), 4)
    rewards, labels = torch.rand(3, 4), torch.randint(0, 2, (3, 4))
    spoilt = rewards.clone()
    spoilt[1, 2] = bad
    for run, finite in (
        (lambda r: diversity.mmr_rewards(r, distances, lam=0.5), 3),
        (lambda r: diversity.mmr_rewards(r, distances, lam=0.0), 3),
        (lambda r: diversity.set_advantages(r, labels, set_size=2), 0),
    ):
        assert torch.equal(run(spoilt)[[0, 2]], run(rewards)[[0, 2]])
        assert run(spoilt)[1].isfinite().sum() == finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rewards_give_float32(dtype: torch.dtype) -> None:
    c = case(1, torch.float32)
    rewards = c.rewards.to(dtype)
    for run in (
        lambda r: diversity.mmr_rewards(r, c.distances, lam=0.5),
        lambda r: diversity.set_advantages(r, c.labels, set_size=3),
    ):
        assert run(rewards).dtype == torch.float32
        torch.testing.assert_close(run(rewards), run(rewards.float()), rtol=0, atol=0, equal_nan=True)


def test_nothing_waits_for_a_device() -> None:
    c = case(2, torch.float32)
    # reading a value of a meta tensor would raise
    assert all(value.is_meta for value in everything(Case(*(t.to("meta") for t in c))).values())


def test_torch_compile_sees_one_graph() -> None:
    c = case(2, torch.float32)
    compiled = torch.compile(everything, backend="eager", fullgraph=True)(c)
    for name, value in everything(c).items():
        torch.testing.assert_close(compiled[name], value, rtol=0, atol=0, equal_nan=True)
