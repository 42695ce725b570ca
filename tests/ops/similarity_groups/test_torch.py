"""similarity_groups and its parts as torch ops: registration, compilation, layouts, repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from tests.harness import INDUCTOR, device_of
from tests.ops.similarity_groups.prompts import (
    BACKENDS,
    DTYPES,
    INF,
    LINKAGES,
    NAN,
    assert_same,
    batch_of,
    grid_distances,
    sizes_for,
)

OPS = ("similarity_groups", "pairwise_cosine", "cluster_distances", "agglomerate", "silhouette")
Layout = tuple[Tensor | None, Tensor | None, int, int]


def distances_on(device: torch.device) -> Tensor:
    """Distances of two prompts, of five and of three rows."""
    rows = torch.randn(8, 7, device=device)
    return gk.pairwise_cosine(rows, torch.tensor([0] * 5 + [1] * 3, device=device), backend="reference")


def arguments_of(op: str, device: torch.device, full: bool) -> tuple[Any, ...]:
    """Arguments of the registered op; with `full`, ids in any order, an empty prompt and a mask."""
    config = gk.SimilarityConfig("ward", k_max=4)
    if op == "agglomerate":
        return distances_on(device), LINKAGES.index("average" if full else "single")
    if op == "cluster_distances":
        return distances_on(device), config.modes, config.coefficients
    if op == "silhouette":
        # opcheck does not consider NaN equal, so all places are in use
        labels = torch.tensor([[0, 1, 0, 2], [0, 0, 1, 1]], dtype=torch.int64, device=device)
        return grid_distances(2, 4, 9).to(device), labels
    rows = torch.randn(8, 7, device=device)
    layout: Layout = (None, None, 2, 4)
    if full:
        order = torch.tensor([3, 0, 1, 7, 6, 2, 5, 4], device=device)
        layout = order, torch.tensor([0, 5, 8, 8], device=device), 3, 5
    valid = torch.arange(8, device=device) != 2 if full else None
    settings = (config.modes, config.coefficients) if op == "similarity_groups" else ()
    return rows, *layout, valid, *settings


@pytest.mark.parametrize("full", [False, True], ids=["int", "ids"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str, op: str, full: bool) -> None:
    torch.library.opcheck(registry.overload(op, backend), arguments_of(op, device_of(backend), full))


def calls_of(backend: str | None, device: torch.device) -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    rows, distances = torch.randn(15, 9, device=device), distances_on(device)
    labels, valid = torch.tensor([[0, 1, 0, 1, 2]] * 2, device=device), torch.arange(15, device=device) != 3
    config = gk.SimilarityConfig("complete", different="singletons")

    def groups(rows: Tensor, valid: Tensor) -> gk.SimilarityGroups:
        return gk.similarity_groups(rows * 2, 5, valid=valid, config=config, backend=backend)

    return {
        "similarity_groups": (groups, (rows, valid)),
        "pairwise_cosine": (lambda x: gk.pairwise_cosine(x + 1, 5, backend=backend) * 2, (rows,)),
        "cluster_distances": (lambda d: gk.cluster_distances(d * 2, config="ward", backend=backend), (distances,)),
        "agglomerate": (lambda d: gk.agglomerate(d * 2, linkage="single", backend=backend), (distances,)),
        "silhouette": (lambda d, x: gk.silhouette(d * 2, x, backend=backend), (distances, labels)),
    }


def fields_of(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None, op: str) -> None:
    torch.compiler.reset()
    call, arguments = calls_of(backend, device_of(backend or "cuda"))[op]
    compiled = torch.compile(call, fullgraph=True, backend=INDUCTOR)
    for one, other in zip(fields_of(compiled(*arguments)), fields_of(call(*arguments)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=9), other.nan_to_num(nan=9))
        assert not one.requires_grad


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_labels_of_rows_and_advantages_compile_into_one_graph(backend: str | None) -> None:
    """The calls of a trainer, from embeddings to advantages, without a graph break."""
    torch.compiler.reset()
    device = device_of(backend or "cuda")
    rows, rewards = torch.randn(16, 9, device=device), torch.randn(16, device=device)

    def advantages(rows: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
        groups = gk.similarity_groups(rows, 8, config="ward", backend=backend)
        result = gk.silhouette(gk.pairwise_cosine(rows, 8, backend=backend), groups.labels, 8, backend=backend)
        return gk.group_advantages(rewards, 8, subgroups=groups.group_ids).advantages, result.samples

    compiled = torch.compile(advantages, fullgraph=True, backend=INDUCTOR)
    for one, other in zip(compiled(rows, rewards), advantages(rows, rewards), strict=True):
        assert torch.equal(one, other) and one.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_change_nothing(backend: str, dtype: torch.dtype) -> None:
    """The memory between the values holds NaN, or True for masks."""
    device = device_of(backend)
    batch = batch_of(4, ["mixture"], sizes_for(backend, 5, 9), width=21)
    rows, ids = batch.rows.to(device, dtype), batch.ids.to(device)
    valid = torch.rand(len(ids), device=device) < 0.8
    expected = gk.similarity_groups(rows, ids, valid=valid, backend=backend)
    near = gk.pairwise_cosine(rows, ids, valid=valid, backend=backend)
    wide = torch.full((len(ids), 44), NAN, dtype=dtype, device=device)
    wide[:, 1:43:2] = rows
    tall = torch.full((21, 2 * len(ids)), NAN, dtype=dtype, device=device)
    tall[:, ::2] = rows.T
    shifted = torch.cat((rows.new_zeros(1), rows.flatten()))[1:].view(rows.shape)
    spread_ids, spread_valid = ids.new_full((len(ids), 2), 77), valid.new_ones(len(ids), 3)
    spread_ids[:, 1], spread_valid[:, 1] = ids, valid
    for arguments in (wide[:, 1:43:2], tall[:, ::2].T, shifted):
        assert torch.equal(arguments, rows)
        options = {"valid": spread_valid[:, 1], "backend": backend}
        assert_same(gk.similarity_groups(arguments, spread_ids[:, 1], **options), expected)
        assert torch.equal(gk.pairwise_cosine(arguments, spread_ids[:, 1], **options), near)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_distances_and_labels_change_nothing(backend: str) -> None:
    distances = distances_on(device_of(backend))
    labels = torch.tensor([[0, 1, 0, 1, 2], [2, 2, 1, -1, 0]], device=distances.device)
    wide = torch.full((2, 11, 7), NAN, device=distances.device)
    wide[:, 1::2, 1:6] = distances
    columns = labels.T.contiguous().T
    turned = distances.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for arguments in (wide[:, 1::2, 1:6], turned, distances.mT):
        assert torch.equal(arguments, distances)
        for call in (gk.cluster_distances, gk.agglomerate):
            assert_same(call(arguments, backend=backend), call(distances, backend=backend))
        assert_same(
            gk.silhouette(arguments, columns, backend=backend), gk.silhouette(distances, labels, backend=backend)
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_integer_ids_equal_int64_ids(backend: str, dtype: torch.dtype) -> None:
    device = device_of(backend)
    rows, ids = torch.randn(20, 6, device=device), torch.randperm(20, device=device) % 4
    expected = gk.similarity_groups(rows, ids, backend=backend)
    assert_same(gk.similarity_groups(rows, ids.to(dtype), backend=backend), expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_calls_agree_to_the_bit_and_leave_their_arguments(backend: str, op: str) -> None:
    call, arguments = calls_of(backend, device_of(backend))[op]
    before = [argument.clone() for argument in arguments]
    first = fields_of(call(*arguments))
    for _ in range(3):
        for one, other in zip(fields_of(call(*arguments)), first, strict=True):
            assert torch.equal(one.nan_to_num(nan=9), other.nan_to_num(nan=9))
    for one, other in zip(arguments, before, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_on_the_device_of_their_arguments(backend: str) -> None:
    device = device_of(backend)
    for call, arguments in calls_of(backend, device).values():
        assert all(field.device.type == device.type for field in fields_of(call(*arguments)))


@pytest.mark.parametrize("op", ["cluster_distances", "agglomerate", "silhouette"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_prompts_give_empty_results(backend: str, op: str) -> None:
    none = torch.zeros(0, 4, 4, device=device_of(backend))
    if op == "silhouette":
        labels = torch.zeros(0, 4, dtype=torch.int64, device=none.device)
        got = gk.silhouette(none, labels, backend=backend)
        assert got.score.shape == (0,) and got.samples.shape == (0, 4)
        rows = gk.silhouette(none, labels.flatten(), 4, backend=backend)
        assert rows.score.shape == rows.samples.shape == (0,)
        return
    for field in getattr(gk, op)(none, backend=backend):
        assert field.shape[0] == 0
    masked = gk.cluster_distances(torch.full((2, 0, 0), INF, device=none.device), backend=backend)
    assert masked.verdict.tolist() == [gk.Verdict.EMPTY] * 2
