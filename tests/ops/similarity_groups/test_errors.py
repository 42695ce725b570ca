"""Errors of similarity_groups, its parts, its config, its metrics and gk.diversity.

Faults that this is for: a check that is missing, comes too late or names another argument, and a message without the
rule, the value or the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import diversity as div
from tests.harness import assert_raises, needs_cpu_kernels
from tests.ops.similarity_groups.cases import INF, LINKAGES, NAN

Op = Callable[..., Any]
META = torch.device("meta")
ROWS, LEAF = torch.ones(6, 4), torch.ones(6, 4, requires_grad=True)
D, R, L = torch.zeros(2, 3, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
IDS = torch.tensor([0, 1, 1, 1, 5, 5])
ONE_BIG = torch.zeros(260).long().index_fill(0, torch.arange(3), 1)
FLAGS = IDS == IDS
THOSE = "groups must be those of the distances, 2 of at most 3 rows"

# Arguments of a call without errors.
ARGUMENTS: dict[Op, dict[str, Any]] = {
    gk.similarity_groups: {"embeddings": ROWS, "groups": 3},
    gk.pairwise_cosine: {"embeddings": ROWS, "groups": 3},
    gk.cluster_distances: {"distances": D},
    gk.agglomerate: {"distances": D},
    gk.silhouette: {"distances": D, "labels": L},
    gk.SimilarityConfig: {},
    gk.similarity_metrics: {},
    gk.similarity_advantages: {"rewards": ROWS[:, 0], "embeddings": ROWS, "groups": 3},
    div.similarity_weights: {"distances": D},
    div.threshold_components: {"distances": D, "threshold": 0.1},
    div.vendi_score: {"distances": D},
    div.leave_one_out_logdet: {"distances": D},
    div.distinctness_weights: {"labels": L},
    div.agreement_weights: {"labels": L},
    div.uniqueness_weights: {"labels": L},
    div.semantic_entropy: {"labels": L},
    div.mmr_rewards: {"rewards": R, "distances": D, "lam": 1},
    div.set_advantages: {"rewards": R, "labels": L, "set_size": 2},
    div.pad_rows: {"values": R[0], "groups": 3},
    div.unpad_rows: {"values": R, "groups": 3},
}
OF_ROWS = [gk.similarity_groups, gk.pairwise_cosine]
OF_DISTANCES = [op for op, arguments in ARGUMENTS.items() if "distances" in arguments]
CONFIGURED, REWARDED = [gk.similarity_groups, gk.cluster_distances], [div.mmr_rewards, div.set_advantages]
OF_LABELS = [op for op, arguments in ARGUMENTS.items() if [*arguments] == ["labels"]]


def one_wrong(i: int, j: int, value: float, mirrored: bool = True) -> Tensor:
    """Valid distances except for one entry of the second prompt, whose last place is unused."""
    distances = torch.ones(2, 4, 4) - torch.eye(4)
    distances[1, 3] = distances[1, :, 3] = INF
    distances[1, i, j] = value
    if mirrored:
        distances[1, j, i] = value
    return distances


class Case(NamedTuple):
    op: Op
    arguments: dict[str, Any]
    error: type[Exception]
    message: str  # parts, separated by " ... ", with {type}, {value}, {shape} or {dtype} of the wrong argument

    def check(self) -> None:
        given = ARGUMENTS[self.op] | self.arguments
        wrong = next(iter(self.arguments.values()))
        found = {"type": type(wrong).__name__, "value": repr(wrong)}
        if isinstance(wrong, Tensor):
            found = {"shape": str(list(wrong.shape)), "dtype": str(wrong.dtype)}
        message = self.message
        for name, text in found.items():
            message = message.replace("{" + name + "}", text)
        start, *parts = message.split(" ... ")
        assert_raises(self.error, f"{self.op.__name__}: {start}", parts, lambda: self.op(**given))


def cases(error: type[Exception], ops: list[Op], message: str, *values: Any, **others: Any) -> list[Case]:
    """A case for each function and value of the argument that the message begins with."""
    name = message.partition(" ")[0]
    return [Case(op, {name: value} | others, error, message) for op in ops for value in values]


types, values = partial(cases, TypeError), partial(cases, ValueError)


def zeros(*shapes: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def cast(value: Tensor, *dtypes: torch.dtype) -> list[Tensor]:
    return [value.to(dtype) for dtype in dtypes]


LABELLED, SHAPES = [gk.silhouette, *OF_LABELS], ([5], [0], [6, 1], [])
NARROW, EMPTY = (torch.float16, torch.bfloat16, torch.int64, torch.bool), {"embeddings": ROWS[:0], "groups": IDS[:0]}
METRIC = "distances must be 0 on the diagonal, or infinite ... got {} at [1, 1"
TABLE = [
    *types(OF_ROWS, "embeddings must be of dtype ... {dtype}", *cast(ROWS, torch.int64, torch.float8_e4m3fn)),
    *values(OF_ROWS, "embeddings must have shape [N, D] with D > 0, got {shape}", *zeros([6], [], [2, 3, 4], [6, 0])),
    *values(OF_ROWS, "embeddings must not require grad ... detach", LEAF),
    *types(OF_ROWS, "groups must be ... {type}", True, 2.0, None, "3", [0] * 6),
    *types(OF_ROWS, "groups must be of dtype ... {dtype}", *cast(IDS, torch.float32, torch.bool)),
    *values(OF_ROWS, "groups must have 1 to 256 rows each, got {value}", 0, -1, 257, 2**40),
    *values(OF_ROWS, "groups must divide the number of rows, 6, got {value} ... ids", 4, 7, 12),
    *values(OF_ROWS, "groups must have at most 256 rows each, got one of 257", ONE_BIG, embeddings=torch.ones(260, 2)),
    *values(OF_ROWS, "groups must have shape [6] ... {shape}", *zeros(*SHAPES, dtype=torch.int64)),
    *types(OF_ROWS, "valid must be of dtype ... {dtype}", *cast(FLAGS, torch.float32, torch.uint8)),
    *values(OF_ROWS, "valid must have shape [6] ... {shape}", *zeros(*SHAPES, dtype=torch.bool)),
    *(
        case
        for groups in (3, IDS)
        for name in ("num_groups", "max_size")
        for case in (
            *types(OF_ROWS, name + " must be an int, got {type} {value}", 2.0, True, "3", groups=groups),
            *values(OF_ROWS, name + " must not be negative, got -1", -1, groups=groups),
        )
    ),
    *values(OF_ROWS, "num_groups must be at least 3 ... got {value}", 2, 0, groups=IDS),
    *values(OF_ROWS, "max_size must be at least 3 ... got {value}", 2, 0, groups=IDS),
    *values(OF_ROWS, "max_size must be at most 256, got {value}", 257, 1000, groups=IDS),
    *values(OF_ROWS, "max_size must be at most 256, got {value}", 300, num_groups=2, **EMPTY),
    *values(OF_ROWS, "num_groups must be 2 ... got {value}", 3, 1),
    *values(OF_ROWS, "max_size must be 3 ... got {value}", 4),
    # distances
    *types(OF_DISTANCES[3:], "distances must be a tensor, got {type}", [[[0.0]]]),
    *types(OF_DISTANCES, "distances must be of dtype float32 or float64, got {dtype}", *cast(D, *NARROW)),
    *values(OF_DISTANCES, "distances must have shape [P, K, K], got {shape}", *zeros([3, 3], [2, 3, 4], [1, 2, 3, 3])),
    *values(OF_DISTANCES[:3], "distances must have at most 256 places, got 257", *zeros([1, 257, 257])),
    *values(OF_DISTANCES[3:], "distances must not require grad", D.clone().requires_grad_()),
    *(
        case
        for value in (-(2.0**-20), -INF, INF, NAN)
        for case in values(
            OF_DISTANCES,
            f"distances must be finite and at least 0 ... got {value} at [1, 0, 2]",
            one_wrong(0, 2, value),
        )
    ),
    *(
        case
        for value in (0.5, -1.0, 2.0**-100, NAN)
        for case in values(OF_DISTANCES, METRIC.format(value), one_wrong(1, 1, value))
    ),
    *values(OF_DISTANCES, "distances must be symmetric ... at [1, 0, 2]", one_wrong(0, 2, 1 + 2**-23, False)),
    *values(
        [gk.agglomerate], "linkage must be one of ... " + " ... ".join(LINKAGES), "centroid", "", None, 2, ["ward"]
    ),
    *values([gk.agglomerate], "linkage must be one of ... got {value} (did you mean 'ward'?)", "Ward"),
    # labels
    *types(LABELLED, "labels must be a tensor, got list", [[0, 1, 1]] * 2),
    *types(LABELLED, "labels must be of dtype ... {dtype}", *cast(L, torch.float32, torch.bool)),
    *values(OF_LABELS, "labels must have shape [P, K], got [3]", L[0]),
    *values([gk.silhouette], "labels must have shape [2, 3], or [N] with groups, got {shape}", L[:1], L[0], L[:, :2]),
    *values([gk.silhouette], "labels must have shape [N] with groups, got [2, 3]", L, groups=3),
    *(
        case
        for rows, groups in ((9, 3), (6, 2), (3, 3), (6, IDS[[0, 0, 0, 1, 1, 4]]), (6, IDS[[0, 0, 0, 0, 1, 1]]))
        for case in values([gk.silhouette], THOSE, groups, labels=L.new_zeros(rows))
    ),
    *types([gk.silhouette], "groups must be ... {type}", True, 3.0, "3", [0] * 6, labels=L[0].repeat(2)),
    # settings
    *values([gk.SimilarityConfig], "k_min must be at least 2, got {value}", 1, 0, -5),
    *values([gk.SimilarityConfig], "k_max must be at least k_min, 2, got 1", 1),
    *values([gk.SimilarityConfig], "k_max must be at least k_min, 4, got 3", 3, k_min=4),
    *values([gk.SimilarityConfig], "min_silhouette must be in [-1, 1], got {value}", -1.01, 1.01),
    *values([gk.SimilarityConfig], "tie_tolerance must be a finite number of at least 0, got -1e-06", -1e-6),
    *values([gk.SimilarityConfig], "distance_floor must be a finite number of at least 0, got -1e-06", -1e-6),
    *values([gk.SimilarityConfig], "different_at must be a finite number of at least 0, got -1e-06", -1e-6),
    Case(gk.SimilarityConfig, {"k": 3}, TypeError, "keywords must be one of linkage, k_min"),
    *values(CONFIGURED, "config must be one of ... got {value} (did you mean 'average'?)", "averge"),
    *values(CONFIGURED, "config must be one of " + ", ".join(LINKAGES) + ", got {value}", "zzz"),
    *types(CONFIGURED, "config must be a SimilarityConfig or a str, got {type}", None, 3, gk.SimilarityConfig),
    *types(CONFIGURED, "config must be ... got dict; pass SimilarityConfig(**config)", {"linkage": "ward"}),
    # metrics and advantages
    *types([gk.similarity_metrics], "result must be SimilarityGroups, got {type}", (), None),
    *values([gk.similarity_advantages], "embeddings must have one row per reward, 6, got [2, 4]", ROWS[:2]),
    *types([gk.similarity_advantages], "similarity must be a SimilarityConfig or a str, got {type}", 3),
    *values([gk.similarity_advantages], "similarity must be one of ... did you mean 'average'", "averag"),
    *values([gk.similarity_advantages], "config must be one of grpo ... did you mean 'grpo'", "grop"),
    # diversity
    *types([div.similarity_weights], "eps must be a number, got str '1'", "1"),
    *values([div.similarity_weights], "eps must be a finite number of at least 0, got {value}", -1.0),
    *values([div.similarity_weights], "least must be a finite number above 0, got {value}", 0.0),
    *values([div.leave_one_out_logdet], "eps must be a finite number above 0, got {value}", 0.0),
    *types([div.threshold_components], "threshold must be a number, got {type}", None),
    *values([div.threshold_components], "threshold must be a finite number of at least 0, got {value}", NAN, -1.0),
    *values([div.distinctness_weights], "least must be in [0, 1], got {value}", 1.5),
    *values([div.agreement_weights], "entropy_bound must be in [0, 1], got {value}", -0.1),
    *types(REWARDED, "rewards must be of dtype float32 or float64 or bfloat16 or float16, got {dtype}", L),
    *values(REWARDED, "rewards must have shape [2, 3], got [1, 3]", R[:1]),
    *values(REWARDED, "rewards must not require grad", R.clone().requires_grad_()),
    *types([div.mmr_rewards], "lam must be of dtype ... {dtype}", L[:, 0]),
    *values([div.mmr_rewards], "lam must be in [0, 1], got {value}", 1.1, -0.1),
    *values([div.mmr_rewards], "lam must have shape [2], one element per row, got [3]", R[0]),
    *types([div.set_advantages], "set_size must be an int, got {type} {value}", 1.5, True),
    *values([div.set_advantages], "set_size must be 1 to the 3 places of a prompt, got {value}", 4, 0),
    *types([div.pad_rows], "values must be a tensor, got list", [1.0]),
    *values([div.pad_rows], "values must have shape [N, ...], got []", torch.tensor(1.0)),
    *values([div.pad_rows], "fill must be given for uint8", None, values=L[0].to(torch.uint8)),
    *types([div.pad_rows], "groups must be an int or an integer tensor, got str '3'", "3"),
    *values([div.pad_rows], "groups must have shape [3], one element per row, got [2]", L[0, :2]),
    *values([div.pad_rows], "groups must divide the number of rows, 3, got 2", 2),
    *values([div.pad_rows], "max_size must be at least 3 for these groups, got 2", 2, groups=L[0]),
    *values([div.unpad_rows], "groups must be those of values, 2 of at most 3 rows, got 3 of at most 2", 2),
    *values(
        [div.unpad_rows], "groups must be those of values, 2 of at most 3 rows, got 1 of at most 4", L.new_zeros(4)
    ),
    *values(
        [div.unpad_rows], "groups must be those of values, 2 of at most 3 rows, got 3 of at most 1", torch.arange(3)
    ),
    *values([div.unpad_rows], "groups must have shape [N], got [2, 3]", L),
    *values([div.unpad_rows], "values must have shape [P, K, ...], got [3]", R[0]),
]


@pytest.mark.parametrize("op", ARGUMENTS, ids=lambda op: op.__name__)
def test_every_wrong_argument_is_named(op: Op) -> None:
    of_op = [case for case in TABLE if case.op is op]
    assert of_op
    for case in of_op:
        case.check()


def test_groups_and_lengths_of_advantages_are_those_of_both_steps() -> None:
    refused = partial(gk.similarity_advantages, ROWS[:, 0], ROWS)
    assert_raises(ValueError, "similarity_groups: groups must divide the number of rows, 6", (), lambda: refused(4))
    start = "group_advantages: lengths must be left out"
    assert_raises(ValueError, start, (), lambda: refused(3, lengths=ROWS[:, 0]))


@needs_cpu_kernels
@pytest.mark.parametrize("op", [gk.similarity_groups, gk.pairwise_cosine])
def test_kernels_take_no_float64(op: Op) -> None:
    start = f"{op.__name__}: backend 'kernel' cannot run here: "
    parts = ("float64", "use backend='reference'")
    assert_raises(RuntimeError, start, parts, lambda: op(ROWS.double(), 3, backend="kernel"))


def test_what_is_not_wrong() -> None:
    """Values at places not in use, and leaves where no gradient can be lost."""
    for op in OF_DISTANCES[:3]:
        call = partial(op, **{"labels": torch.arange(8).view(2, 4) % 3} if op is gk.silhouette else {})
        expected = call(one_wrong(3, 1, INF))
        for value in (NAN, -1.0, 5.0):
            torch.testing.assert_close(call(one_wrong(3, 1, value, False)), expected, rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        assert not gk.pairwise_cosine(LEAF, 3).requires_grad and not gk.similarity_groups(LEAF, 3).labels.any()
