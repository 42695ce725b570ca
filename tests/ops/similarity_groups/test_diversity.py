"""gk.diversity against its formulas in float64 NumPy, prompt by prompt; pad_rows; the example of its document.

Faults that this is for: an absent response that counts, or the responses to another prompt; a sum that leaves out the
response itself; K that is the number of places; a logarithm or a limit that is not exact at its ends; a tie that goes
to a later place; sets that are drawn with the wrong probability; a result in the wrong dtype.
"""

from __future__ import annotations

import doctest
import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import diversity as div
from tests.ops.similarity_groups.cases import INF, NAN, Diversity, everything

DOCUMENT = Path(__file__).parents[3] / "docs" / "diversity.md"


class Prompt(NamedTuple):
    """A prompt's responses that are present."""

    s: np.ndarray
    r: list[float]
    labels: list[int]

    @property
    def sizes(self) -> list[int]:
        return [self.labels.count(label) for label in self.labels]

    @property
    def entropy(self) -> float:
        n = len(self.labels)
        return math.log(n) if n and set(self.sizes) == {1} else -sum(math.log(m / n) for m in self.sizes) / max(n, 1)


def draw(seed: int, dtype: torch.dtype) -> tuple[Diversity, list[Prompt], list[Tensor]]:
    """Ragged prompts, the first of them empty, with duplicates, zeros, equal and missing rewards, and their places."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(49, 3, generator=random) + 0.7
    rows[torch.rand(49, generator=random) < 0.1] = 0
    rows[1::5] = rows[::5]
    valid = torch.rand(49, generator=random).view(7, 7) < torch.linspace(0, 1.3, 7)[:, None]
    d = gk.pairwise_cosine(rows, 7, valid=valid.flatten(), backend="reference").to(dtype)
    rewards = torch.randn(7, 7, generator=random).round(decimals=1)
    rewards = torch.where(torch.rand(7, 7, generator=random) < 0.1, NAN, rewards).to(dtype)
    labels = torch.where(valid, 7 * torch.randint(3, (7, 7), generator=random), -1 - torch.randint(3, (7, 7)))
    places = [row.nonzero().flatten() for row in valid]
    prompts = [
        Prompt(1 - d[p][at][:, at].double().numpy(), rewards[p, at].double().tolist(), labels[p, at].tolist())
        for p, at in enumerate(places)
    ]
    return Diversity(d, rewards, labels), prompts, places


def components(p: Prompt, threshold: float) -> list[int]:
    found: list[int] = [-1] * len(p.s)
    for i in range(len(found)):
        number, todo = max(found) + 1, [i] if found[i] < 0 else []
        while todo:
            at = todo.pop()
            found[at] = number
            todo += [j for j in range(len(found)) if 1 - p.s[at, j] <= threshold and found[j] < 0]
    return found


def logdet(p: Prompt, eps: float, without: int | None = None) -> float:
    keep = [i for i in range(len(p.s)) if i != without]
    return float(np.linalg.slogdet((p.s + eps * np.eye(len(p.s)))[keep][:, keep])[1]) if keep else 0.0


def marginals(p: Prompt, eps: float) -> list[float]:
    return [logdet(p, eps) - logdet(p, eps, i) for i in range(len(p.s))]


def greedy(p: Prompt, lam: float) -> list[float]:
    result, chosen = [NAN] * len(p.r), []
    while left := [i for i, r in enumerate(p.r) if not math.isnan(r) and i not in chosen]:
        score = {i: lam * p.r[i] - (1 - lam) * max(p.s[i][j] for j in chosen) if chosen else p.r[i] for i in left}
        best = max(left, key=lambda i: (score[i], -i))
        result[best] = score[best]
        chosen.append(best)
    return result


def of_sets(p: Prompt, n: int) -> list[float]:
    """By definition, over all sets of n responses with a reward."""
    scored = [i for i, r in enumerate(p.r) if not math.isnan(r)]
    worth = {
        chosen: math.fsum(p.r[i] for i in chosen) / n * len({p.labels[i] for i in chosen}) / n
        for chosen in itertools.combinations(scored, n)
    }
    result = [0.0] * len(p.r)
    for i in scored if worth else []:
        own = [value for chosen, value in worth.items() if i in chosen]
        result[i] = math.fsum(own) / len(own) - math.fsum(worth.values()) / len(worth)
    return result


def assert_rounded(got: Tensor, expected: Tensor) -> None:
    rounding = {"rtol": 1e-10, "atol": 1e-12} if got.dtype == torch.float64 else {"rtol": 2e-7, "atol": 1e-9}
    torch.testing.assert_close(got.double(), expected, equal_nan=True, **rounding)


def share(p: Prompt) -> float:
    return p.entropy / math.log(len(p.labels)) if len(p.labels) > 1 else 0.0


def distinctness(p: Prompt, least: float) -> list[float]:
    return [1.0 if m == 1 else max(least, (len(p.r) - m) / (len(p.r) - 1)) for m in p.sizes]


def bounded(p: Prompt, bound: float) -> list[float]:
    n = len(p.r)
    return [0.0 if p.entropy >= bound * math.log(n) else m / n for m in p.sizes]


FROM_LABELS = ("distinctness_weights", "uniqueness_weights", "agreement_weights", "semantic_entropy")
ARGUMENTS = {"mmr_rewards": ("rewards", "distances"), "set_advantages": ("rewards", "labels")}
ARGUMENTS |= dict.fromkeys(FROM_LABELS, ("labels",))
DTYPES = dict.fromkeys(FROM_LABELS, torch.float32) | {"threshold_components": torch.int32}
ABSENT = {"threshold_components": -1, "mmr_rewards": NAN}
# A function, its settings, and the formula for the values at the present responses, or of the prompt.
FORMULAS: list[tuple[str, dict[str, Any], Callable[[Prompt], Any]]] = [
    ("similarity_weights", {}, lambda p: 1 / (np.maximum(p.s.sum(1), 1.0) + 1e-6)),
    ("similarity_weights", {"least": 0.25, "eps": 0.5}, lambda p: 1 / (np.maximum(p.s.sum(1), 0.25) + 0.5)),
    *(("threshold_components", {"threshold": t}, partial(components, threshold=t)) for t in (0.0, 0.05, 0.4, 2.0)),
    ("distinctness_weights", {}, partial(distinctness, least=0.1)),
    ("distinctness_weights", {"least": 0.5}, partial(distinctness, least=0.5)),
    ("uniqueness_weights", {}, lambda p: [1 / m for m in p.sizes]),
    ("agreement_weights", {}, lambda p: [m / len(p.r) for m in p.sizes]),
    *(("agreement_weights", {"entropy_bound": b}, partial(bounded, bound=b)) for b in (0.6, 1.0)),
    ("semantic_entropy", {}, lambda p: p.entropy),
    ("semantic_entropy", {"normalize": True}, share),
    ("vendi_score", {}, lambda p: 1 / (np.linalg.eigvalsh(p.s / len(p.s)) ** 2).sum() if len(p.s) else 0.0),
    *(("leave_one_out_logdet", {"eps": eps}, partial(marginals, eps=eps)) for eps in (1e-3, 1.0)),
    *(("mmr_rewards", {"lam": lam}, partial(greedy, lam=lam)) for lam in (0.0, 0.6, 1.0)),
    *(("set_advantages", {"set_size": n}, partial(of_sets, n=n)) for n in range(1, 8)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("formula", FORMULAS, ids=[f"{name} {settings}" for name, settings, _ in FORMULAS])
def test_formulas(formula: tuple[str, dict[str, Any], Callable[[Prompt], Any]], dtype: torch.dtype) -> None:
    """Results are rounded once from float64, after at most a few hundred operations."""
    name, settings, values = formula
    for seed in range(4):
        case, prompts, places = draw(seed, dtype)
        got = getattr(div, name)(*(getattr(case, key) for key in ARGUMENTS.get(name, ("distances",))), **settings)
        if isinstance(got, div.LogDeterminants):
            totals = torch.tensor([logdet(prompt, **settings) for prompt in prompts], dtype=torch.float64)
            assert_rounded(got.total, totals)
            got = got.marginal
        expected = torch.full(got.shape, ABSENT.get(name, 0), dtype=torch.float64)
        for p, at in enumerate(places):
            value = torch.as_tensor(np.asarray(values(prompts[p]), dtype=np.float64))
            expected[(p, at) if got.dim() == 2 else p] = value
        assert got.dtype == DTYPES.get(name, dtype)
        assert_rounded(got, expected)


def test_everything_of_the_module_is_tested_here() -> None:
    assert {name for name, _, _ in FORMULAS} | {"LogDeterminants", "pad_rows", "unpad_rows"} == set(div.__all__)


@pytest.mark.parametrize("size", range(2, 40))
def test_components_of_a_chain_are_one(size: int) -> None:
    order = torch.randperm(size)
    d = torch.where((order[:, None] - order).abs() == 1, 0.1, 0.9).fill_diagonal_(0)[None]
    assert div.threshold_components(d, 0.1).tolist() == [[0] * size]
    assert div.threshold_components(d, 0.09).tolist() == [list(range(size))]


@pytest.mark.parametrize("size", range(1, 70))
def test_entropy_is_exact_at_its_ends(size: int) -> None:
    labels = torch.stack((torch.arange(size), torch.zeros(size, dtype=torch.int64)))
    assert div.semantic_entropy(labels)[1] == 0
    assert div.semantic_entropy(labels, normalize=True).tolist() == [float(size > 1), 0]
    assert div.agreement_weights(labels, entropy_bound=1.0).tolist() == [[0.0] * size, [float(size > 1)] * size]


def test_equal_sets_and_sets_without_choice_have_no_advantage() -> None:
    labels = torch.tensor([[3] * 7, list(range(7))])
    for n in range(1, 8):
        equal = torch.full((2, 7), 0.7, dtype=torch.float64)
        assert not div.set_advantages(equal, labels, set_size=n).any()
    assert not div.set_advantages(torch.rand(2, 7), labels, set_size=7).any()
    # binomials of 200 over 100 would overflow as products of factorials
    got = div.set_advantages(torch.rand(2, 200), torch.randint(0, 9, (2, 200)), set_size=100)
    assert got.isfinite().all() and (got != 0).all()
    rounding = torch.finfo(torch.float32).eps * got.double().abs().sum(1)
    assert (got.double().sum(1).abs() <= rounding).all()


def test_results_by_hand() -> None:
    opposite = gk.pairwise_cosine(torch.tensor([[1.0, 0], [-1, 0], [-1, 0]]), 3)
    assert div.similarity_weights(opposite, eps=0.0).tolist() == [[1.0, 1.0, 1.0]]  # sums are -1, 1, 1
    assert div.similarity_weights(opposite, eps=0.0, least=0.5).tolist() == [[2.0, 1.0, 1.0]]
    # 0 and 1 are alike, 1 and 2 are alike, 0 and 2 are opposite: no vectors have these cosines
    impossible = torch.tensor([[0.0, 0, 2], [0, 0, 0], [2, 0, 0]])
    logdets = div.leave_one_out_logdet(torch.stack((impossible, opposite[0])))
    assert logdets.total.isnan().tolist() == [True, False]
    assert logdets.marginal.isnan().tolist() == [[True] * 3, [False] * 3]
    pairs = gk.pairwise_cosine(torch.eye(3).repeat(1, 2).view(-1, 3), 6)  # 0, 0, 1, 1, 2, 2
    assert div.mmr_rewards(torch.ones(1, 6), pairs, lam=0.5).tolist() == [[1.0, 0.0, 0.5, 0.0, 0.5, 0.0]]


def test_mmr_has_a_lam_of_each_prompt() -> None:
    case, _, _ = draw(3, torch.float64)
    lam = torch.linspace(0, 1, 7)
    got = div.mmr_rewards(case.rewards, case.distances, lam=lam)
    alone = [div.mmr_rewards(case.rewards, case.distances, lam=value)[p] for p, value in enumerate(lam.tolist())]
    torch.testing.assert_close(got, torch.stack(alone), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [INF, -INF])
def test_an_infinite_reward_stays_in_its_prompt(bad: float) -> None:
    distances = gk.pairwise_cosine(torch.randn(12, 4), 4)
    rewards, labels = torch.rand(3, 4), torch.randint(0, 2, (3, 4))
    spoilt = rewards.clone()
    spoilt[1, 2] = bad
    for run, finite in (
        (lambda r: div.mmr_rewards(r, distances, lam=0.5), 3),
        (lambda r: div.mmr_rewards(r, distances, lam=0.0), 3),
        (lambda r: div.set_advantages(r, labels, set_size=2), 0),
    ):
        assert torch.equal(run(spoilt)[[0, 2]], run(rewards)[[0, 2]])
        assert run(spoilt)[1].isfinite().sum() == finite
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(run(rewards.to(dtype)), run(rewards.to(dtype).float()))


def test_few_places() -> None:
    for prompts, size in ((0, 0), (0, 3), (2, 0)):
        zeros = torch.zeros(prompts, size)
        result = everything(Diversity(zeros.new_zeros(prompts, size, size), zeros, zeros.int())._asdict())
        assert {value.shape for value in result.values()} == {(prompts,), (prompts, size)}
        assert not any(value.any() for value in result.values() if value.dim() == 1)
    alone = everything(Diversity(torch.zeros(1, 1, 1), torch.full((1, 1), 3.0), torch.full((1, 1), 5))._asdict())
    expected = dict.fromkeys(alone, 0.0) | {"similarity_weights": 1 / (1 + 1e-6), "mmr_rewards": 3.0}
    expected |= dict.fromkeys(("distinctness_weights", "uniqueness_weights", "vendi_score"), 1.0)
    expected |= dict.fromkeys(("total", "marginal"), math.log(1.001))
    assert {key: value.item() for key, value in alone.items()} == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(11,), (11, 2)])
def test_pad_rows_and_back(shape: tuple[int, ...]) -> None:
    """Groups by ascending id, rows in order; the layout of pairwise_cosine."""
    ids = torch.tensor([3, -1, 3, 9, 9, 3, -1, 9, 3, 2**40, 9])
    values = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    padded = div.pad_rows(values, ids)
    assert padded.shape == (4, 4, *shape[1:])
    for p, name in enumerate((-1, 3, 9, 2**40)):
        rows = values[ids == name]
        assert torch.equal(padded[p, : len(rows)], rows) and padded[p, len(rows) :].isnan().all()
    larger = div.pad_rows(values, ids, num_groups=6, max_size=5)
    assert larger.shape[:2] == (6, 5) and larger[4:].isnan().all()
    assert torch.equal(div.unpad_rows(padded, ids), values) and torch.equal(div.unpad_rows(larger, ids), values)
    assert torch.autograd.gradcheck(lambda v: div.unpad_rows(div.pad_rows(v, ids, fill=0) ** 2, ids), values)


def test_pad_rows_fills_with_what_absent_is() -> None:
    ids = torch.tensor([0, 1, 1])
    assert div.pad_rows(torch.arange(3), ids).tolist() == [[0, -1], [1, 2]]
    assert div.pad_rows(torch.ones(3, dtype=torch.bool), ids).tolist() == [[True, False], [True, True]]
    assert div.pad_rows(torch.ones(3, dtype=torch.uint8), ids, fill=9).tolist() == [[1, 9], [1, 1]]
    assert div.pad_rows(torch.arange(6), 3).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert div.unpad_rows(torch.arange(6).view(2, 3), 3).tolist() == list(range(6))
    assert div.pad_rows(torch.ones(0), ids[:0]).shape == (0, 0)
    assert div.unpad_rows(torch.ones(0, 0), ids[:0]).shape == (0,)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="tests are run from outside the checkout")
def test_the_example_of_the_document() -> None:
    blocks = "".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, DOCUMENT.name, str(DOCUMENT), 0)
    assert doctest.DocTestRunner().run(examples).failed == 0 and len(examples.examples) > 10
