"""gk.diversity: errors, conversion between rows and the padded layout, and the example of its document."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import diversity as div

DOCUMENT = Path(__file__).parents[3] / "docs" / "diversity.md"
D = torch.zeros(2, 3, 3)
R, L = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)

TYPES: list[tuple[Callable[[], object], str]] = [
    (lambda: div.vendi_score([0.0]), "vendi_score: distances must be a tensor, got list"),
    (
        lambda: div.vendi_score(D.half()),
        "vendi_score: distances must be of dtype float32 or float64, got torch.float16",
    ),
    (lambda: div.similarity_weights(D, eps="1"), "similarity_weights: eps must be a number, got str '1'"),
    (lambda: div.threshold_components(D, None), "threshold_components: threshold must be a number, got NoneType None"),
    (lambda: div.uniqueness_weights(R), "uniqueness_weights: labels must be of dtype int64"),
    (lambda: div.mmr_rewards(L, D, lam=1), "mmr_rewards: rewards must be of dtype float32"),
    (lambda: div.mmr_rewards(R, D, lam=L[:, 0]), "mmr_rewards: lam must be of dtype float32"),
    (lambda: div.set_advantages(R, L, set_size=1.5), "set_advantages: set_size must be an int, got float 1.5"),
    (lambda: div.set_advantages(R, L, set_size=True), "set_advantages: set_size must be an int, got bool True"),
    (lambda: div.pad_rows([1.0], 1), "pad_rows: values must be a tensor, got list"),
    (lambda: div.pad_rows(R[0], "3"), "pad_rows: groups must be an int or an integer tensor, got str '3'"),
]
VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: div.similarity_weights(D[0]), "distances must have shape [P, K, K], got [3, 3]"),
    (lambda: div.threshold_components(D[:, 1:], 1), "distances must have shape [P, K, K], got [2, 2, 3]"),
    (lambda: div.leave_one_out_logdet(D + 1), "leave_one_out_logdet: distances must be 0 on the diagonal, or infinite"),
    (lambda: div.mmr_rewards(R, torch.eye(3) - 1 + D, lam=1), "mmr_rewards: distances must be finite and at least 0"),
    (lambda: div.vendi_score(D + torch.ones(3, 3).triu(1)), "vendi_score: distances must be symmetric"),
    (lambda: div.vendi_score(D.clone().requires_grad_()), "vendi_score: distances must not require grad"),
    (lambda: div.similarity_weights(D, least=0.0), "least must be a finite number above 0, got 0.0"),
    (lambda: div.similarity_weights(D, eps=-1.0), "eps must be a finite number of at least 0, got -1.0"),
    (lambda: div.leave_one_out_logdet(D, eps=0.0), "eps must be a finite number above 0, got 0.0"),
    (lambda: div.threshold_components(D, float("nan")), "threshold must be a finite number of at least 0, got nan"),
    (lambda: div.semantic_entropy(L[0]), "semantic_entropy: labels must have shape [P, K], got [3]"),
    (lambda: div.distinctness_weights(L, least=1.5), "distinctness_weights: least must be in [0, 1], got 1.5"),
    (
        lambda: div.agreement_weights(L, entropy_bound=-0.1),
        "agreement_weights: entropy_bound must be in [0, 1], got -0.1",
    ),
    (lambda: div.mmr_rewards(R, D, lam=1.1), "mmr_rewards: lam must be in [0, 1], got 1.1"),
    (lambda: div.mmr_rewards(R, D, lam=R[0]), "mmr_rewards: lam must have shape [2], one element per row, got [3]"),
    (lambda: div.mmr_rewards(R[:1], D, lam=1), "mmr_rewards: rewards must have shape [2, 3], got [1, 3]"),
    (lambda: div.set_advantages(R.clone().requires_grad_(), L, set_size=2), "rewards must not require grad"),
    (
        lambda: div.set_advantages(R.to("meta"), L, set_size=2),
        "rewards must be on cpu like the first argument, got meta",
    ),
    (lambda: div.set_advantages(R, L, set_size=4), "set_size must be 1 to the 3 places of a prompt, got 4"),
    (lambda: div.set_advantages(R, L, set_size=0), "set_size must be 1 to the 3 places of a prompt, got 0"),
    (lambda: div.pad_rows(torch.tensor(1.0), 1), "pad_rows: values must have shape [N, ...], got []"),
    (lambda: div.pad_rows(L[0].to(torch.uint8), 1), "pad_rows: fill must be given for uint8"),
    (lambda: div.pad_rows(R[0], L[0, :2]), "pad_rows: groups must have shape [3], one element per row, got [2]"),
    (lambda: div.pad_rows(R[0], 2), "pad_rows: groups must divide the number of rows, 3, got 2"),
    (lambda: div.pad_rows(R[0], L[0], max_size=2), "pad_rows: max_size must be at least 3 for these groups, got 2"),
    (lambda: div.unpad_rows(R[0], 1), "unpad_rows: values must have shape [P, K, ...], got [3]"),
    (
        lambda: div.unpad_rows(R, 2),
        "unpad_rows: groups must be those of values, 2 of at most 3 rows, got 3 of at most 2",
    ),
    (lambda: div.unpad_rows(R, L), "unpad_rows: groups must have shape [N], got [2, 3]"),
    (
        lambda: div.unpad_rows(R, torch.arange(3)),
        "those of values, 2 of at most 3 rows, got 3 of at most 1",
    ),
    (lambda: div.unpad_rows(R, L.new_zeros(4)), "those of values, 2 of at most 3 rows, got 1 of at most 4"),
]


@pytest.mark.parametrize(("run", "message"), TYPES, ids=[m for _, m in TYPES])
def test_wrong_types(run: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        run()


@pytest.mark.parametrize(("run", "message"), VALUES, ids=[m for _, m in VALUES])
def test_wrong_values(run: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run()


@pytest.mark.parametrize("shape", [(11,), (11, 2)])
def test_pad_rows_and_back(shape: tuple[int, ...]) -> None:
    ids = torch.tensor([3, -1, 3, 9, 9, 3, -1, 9, 3, 2**40, 9])
    values = torch.rand(shape)
    padded = div.pad_rows(values, ids)
    assert padded.shape == (4, 4, *shape[1:])
    for p, one in enumerate((-1, 3, 9, 2**40)):
        rows = values[ids == one]
        assert torch.equal(padded[p, : len(rows)], rows)
        assert padded[p, len(rows) :].isnan().all()
    assert torch.equal(div.unpad_rows(padded, ids), values)
    larger = div.pad_rows(values, ids, num_groups=6, max_size=5)
    assert larger.shape[:2] == (6, 5) and larger[4:].isnan().all()
    assert torch.equal(larger[:4, :4].nan_to_num(7), padded.nan_to_num(7))
    assert torch.equal(div.unpad_rows(larger, ids), values)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="tests are run from outside the checkout")
def test_the_example_of_the_document() -> None:
    blocks = "".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, DOCUMENT.name, str(DOCUMENT), 0)
    assert doctest.DocTestRunner().run(examples).failed == 0
    assert len(examples.examples) > 10


def test_pad_rows_of_neighbours() -> None:
    values = torch.arange(6)
    padded = div.pad_rows(values, 3)
    assert padded.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(div.unpad_rows(padded, 3), values)


def test_pad_rows_fills_with_what_absent_is() -> None:
    ids = torch.tensor([0, 1, 1])
    assert div.pad_rows(torch.arange(3), ids).tolist() == [[0, -1], [1, 2]]
    assert div.pad_rows(torch.ones(3, dtype=torch.bool), ids).tolist() == [[True, False], [True, True]]
    assert div.pad_rows(torch.ones(3, dtype=torch.uint8), ids, fill=9).tolist() == [[1, 9], [1, 1]]
    assert div.pad_rows(torch.ones(3), ids, fill=0).tolist() == [[1, 0], [1, 1]]
    assert div.pad_rows(torch.ones(0), ids[:0]).shape == (0, 0)
    assert div.unpad_rows(torch.ones(0, 0), ids[:0]).shape == (0,)


def test_the_layout_is_that_of_the_distances() -> None:
    x, ids = torch.randn(9, 5), torch.tensor([4, 1, 4, 4, 0, 1, 1, 1, 0])
    rows = gk.similarity_groups(x, ids).labels
    places = gk.cluster_distances(gk.pairwise_cosine(x, ids)).labels
    assert torch.equal(div.pad_rows(rows, ids), places)
    assert torch.equal(div.unpad_rows(places, ids), rows)


def test_pad_rows_keeps_gradients() -> None:
    values = torch.rand(3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([1, 0, 1])
    assert torch.autograd.gradcheck(lambda v: div.unpad_rows(div.pad_rows(v, ids, fill=0) ** 2, ids), values)
