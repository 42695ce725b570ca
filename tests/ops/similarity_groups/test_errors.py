"""Errors of similarity_groups, its parts and its config: the exception type and the parts of its message."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.backends import runs_on
from grpo_kernels.ops.similarity_groups.config import COLLAPSES
from tests.harness import assert_raises, needs_cpu_kernels
from tests.ops.similarity_groups.prompts import BACKENDS, INF, LINKAGES, NAN

OF_EMBEDDINGS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (gk.similarity_groups, gk.pairwise_cosine)}
OF_DISTANCES: dict[str, Callable[..., Any]] = {
    "cluster_distances": gk.cluster_distances,
    "agglomerate": gk.agglomerate,
    "silhouette": lambda distances, **options: gk.silhouette(
        distances, torch.zeros(getattr(distances, "shape", (1, 1))[:2], dtype=torch.int64), **options
    ),
}
embeddings_ops = pytest.mark.parametrize("op", OF_EMBEDDINGS)
distances_ops = pytest.mark.parametrize("op", OF_DISTANCES)


def assert_refused(error: type[Exception], op: str, parts: tuple[str, ...], call: Callable[..., Any]) -> None:
    """Checks that every backend raises exactly this type, with a message that begins with the op and has each part."""
    for backend in (None, *(name for name in BACKENDS if runs_on(name, "cpu"))):
        assert_raises(error, f"{op}: ", parts, functools.partial(call, backend=backend))


def refused(
    error: type[Exception], op: str, *parts: str, embeddings: Any = None, groups: Any = 3, **options: Any
) -> None:
    embeddings = torch.randn(6, 4) if embeddings is None else embeddings
    assert_refused(error, op, parts, lambda **more: OF_EMBEDDINGS[op](embeddings, groups, **options, **more))


def distances_refused(error: type[Exception], op: str, *parts: str, distances: Any) -> None:
    assert_refused(error, op, parts, lambda **more: OF_DISTANCES[op](distances, **more))


# Embeddings


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@embeddings_ops
def test_embeddings_of_another_dtype(op: str, dtype: torch.dtype) -> None:
    refused(TypeError, op, "embeddings", str(dtype), embeddings=torch.ones(6, 4).to(dtype))


@pytest.mark.parametrize("value", [[[1.0, 2.0]], 1.0, None])
@embeddings_ops
def test_embeddings_that_are_no_tensor(op: str, value: Any) -> None:
    for backend in (None, *BACKENDS):
        with pytest.raises(TypeError, match=f"^{op}: embeddings must be a tensor, got {type(value).__name__}"):
            OF_EMBEDDINGS[op](value, 3, backend=backend)


@pytest.mark.parametrize("shape", [(6,), (), (2, 3, 4), (6, 0), (0, 0)], ids=str)
@embeddings_ops
def test_embeddings_of_another_shape(op: str, shape: tuple[int, ...]) -> None:
    refused(ValueError, op, "embeddings", "D > 0", str(list(shape)), embeddings=torch.zeros(shape))


@embeddings_ops
def test_embeddings_that_require_grad_with_the_advice_to_detach(op: str) -> None:
    leaf = torch.randn(6, 4, requires_grad=True)
    refused(ValueError, op, "embeddings", "requires_grad=True", "detach", embeddings=leaf)
    with torch.no_grad():  # with gradients disabled, none can be lost
        result = OF_EMBEDDINGS[op](leaf, 3)
    assert not (result if op == "pairwise_cosine" else result.silhouette).requires_grad


# Groups


@pytest.mark.parametrize("groups", [True, False, 2.0, None, "3", [0, 0, 0, 1, 1, 1]])
@embeddings_ops
def test_groups_of_another_type(op: str, groups: Any) -> None:
    refused(TypeError, op, "groups", type(groups).__name__, groups=groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
@embeddings_ops
def test_group_ids_of_another_dtype(op: str, dtype: torch.dtype) -> None:
    refused(TypeError, op, "groups", str(dtype), groups=torch.ones(6, dtype=dtype))


@pytest.mark.parametrize("groups", [0, -1, 257, 2**40])
@embeddings_ops
def test_group_size_below_one_or_above_256(op: str, groups: int) -> None:
    refused(ValueError, op, "groups", "1 to 256", str(groups), groups=groups)


@pytest.mark.parametrize("groups", [4, 5, 7, 12])
@embeddings_ops
def test_group_size_that_does_not_divide_the_rows_with_the_way_out(op: str, groups: int) -> None:
    refused(ValueError, op, "groups", "6", str(groups), "ids", groups=groups)


@embeddings_ops
def test_prompt_of_more_than_256_rows(op: str) -> None:
    ids = torch.zeros(260, dtype=torch.int64)
    ids[:3] = 1
    refused(ValueError, op, "groups", "256", "257", embeddings=torch.randn(260, 2), groups=ids)
    refused(ValueError, op, "groups", "256", "257", embeddings=torch.randn(257, 2), groups=257)


@pytest.mark.parametrize("name", ["groups", "valid"])
@pytest.mark.parametrize("shape", [(5,), (7,), (0,), (6, 1), (1, 6), ()], ids=str)
@embeddings_ops
def test_argument_of_another_length_than_the_rows(op: str, shape: tuple[int, ...], name: str) -> None:
    value = torch.ones(shape, dtype=torch.bool if name == "valid" else torch.int64)
    refused(ValueError, op, name, "[6]", str(list(shape)), **{name: value})


@pytest.mark.parametrize("name", ["groups", "valid"])
@embeddings_ops
def test_argument_on_another_device(op: str, name: str) -> None:
    value = torch.ones(6, dtype=torch.bool if name == "valid" else torch.int64, device="meta")
    refused(ValueError, op, name, "meta", "cpu", **{name: value})


@pytest.mark.parametrize("valid", [[True] * 6, 1, torch.ones(6), torch.ones(6, dtype=torch.uint8)], ids=str)
@embeddings_ops
def test_valid_of_another_type(op: str, valid: Any) -> None:
    kind = str(valid.dtype) if isinstance(valid, torch.Tensor) else type(valid).__name__
    refused(TypeError, op, "valid", kind, valid=valid)


# Known sizes

IDS = torch.tensor([0, 1, 1, 1, 5, 5])


@pytest.mark.parametrize("value", [2.0, True, "3"])
@pytest.mark.parametrize("name", ["num_groups", "max_size"])
@embeddings_ops
def test_sizes_of_another_type(op: str, name: str, value: Any) -> None:
    for groups in (3, IDS):
        refused(TypeError, op, name, type(value).__name__, repr(value), groups=groups, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "least"), [("num_groups", 2, 3), ("num_groups", 0, 3), ("max_size", 2, 3), ("max_size", 0, 3)]
)
@embeddings_ops
def test_sizes_that_are_too_small(op: str, name: str, value: int, least: int) -> None:
    refused(ValueError, op, name, f"at least {least}", f"got {value}", groups=IDS, **{name: value})


@pytest.mark.parametrize("name", ["num_groups", "max_size"])
@embeddings_ops
def test_sizes_below_zero(op: str, name: str) -> None:
    for groups in (3, IDS):
        refused(ValueError, op, name, "negative", "-1", groups=groups, **{name: -1})


@pytest.mark.parametrize("size", [257, 1000])
@embeddings_ops
def test_max_size_above_256(op: str, size: int) -> None:
    refused(ValueError, op, "256", str(size), groups=IDS, max_size=size)


@embeddings_ops
def test_max_size_above_256_of_no_rows(op: str) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    refused(ValueError, op, "256", "300", embeddings=torch.zeros(0, 4), groups=nothing, num_groups=2, max_size=300)


@pytest.mark.parametrize(("name", "value", "found"), [("num_groups", 3, 2), ("num_groups", 1, 2), ("max_size", 4, 3)])
@embeddings_ops
def test_sizes_that_contradict_groups_of_neighbours(op: str, name: str, value: int, found: int) -> None:
    refused(ValueError, op, name, f"must be {found}", f"got {value}", groups=3, **{name: value})


# Distances


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
@distances_ops
def test_distances_of_another_dtype(op: str, dtype: torch.dtype) -> None:
    distances_refused(TypeError, op, "distances", str(dtype), distances=torch.zeros(2, 3, 3, dtype=dtype))


@pytest.mark.parametrize("value", [[[[0.0]]], None, 1.0])
@distances_ops
def test_distances_that_are_no_tensor(op: str, value: Any) -> None:
    distances_refused(TypeError, op, "distances", type(value).__name__, distances=value)


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 4), (1, 2, 3, 3), (9,)], ids=str)
@distances_ops
def test_distances_of_another_shape(op: str, shape: tuple[int, ...]) -> None:
    distances_refused(ValueError, op, "distances", "[P, K, K]", str(list(shape)), distances=torch.zeros(shape))


@distances_ops
def test_distances_of_more_than_256_places(op: str) -> None:
    distances_refused(ValueError, op, "distances", "256", "257", distances=torch.zeros(1, 257, 257))


def one_wrong(i: int, j: int, value: float, mirrored: bool = True) -> torch.Tensor:
    """Valid distances except for one entry of the second prompt, whose last place is unused."""
    distances = torch.ones(2, 4, 4) - torch.eye(4)
    distances[1, 3] = distances[1, :, 3] = INF
    distances[1, i, j] = value
    if mirrored:
        distances[1, j, i] = value
    return distances


@pytest.mark.parametrize("value", [-(2.0**-20), -INF, INF, NAN])
@distances_ops
def test_distances_that_are_none(op: str, value: float) -> None:
    distances_refused(
        ValueError,
        op,
        "distances",
        "at least 0",
        "finite",
        repr(value),
        "[1, 0, 2]",
        distances=one_wrong(0, 2, value),
    )


@distances_ops
def test_distances_that_differ_there_and_back(op: str) -> None:
    apart = one_wrong(0, 2, 1 + 2**-23, mirrored=False)
    distances_refused(ValueError, op, "distances", "symmetric", "[1, 0, 2]", distances=apart)


@pytest.mark.parametrize("value", [0.5, -1.0, 2.0**-100, NAN])
@distances_ops
def test_distances_to_oneself_that_are_not_zero(op: str, value: float) -> None:
    parts = ("distances", "0 on the diagonal", repr(value), "[1, 1")
    distances_refused(ValueError, op, *parts, distances=one_wrong(1, 1, value))


@distances_ops
def test_what_places_that_are_not_in_use_hold_is_not_looked_at(op: str) -> None:
    for value in (NAN, -1.0, 5.0):
        result = OF_DISTANCES[op](one_wrong(3, 1, value, mirrored=False))
        expected = OF_DISTANCES[op](one_wrong(3, 1, INF))
        for one, other in zip(result, expected, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


# Linkages and labels


@pytest.mark.parametrize("value", ["centroid", "Ward", "", None, 2, ["ward"]], ids=repr)
def test_linkage_that_does_not_exist_lists_those_that_do(value: Any) -> None:
    call = lambda **more: gk.agglomerate(torch.zeros(1, 3, 3), linkage=value, **more)  # noqa: E731
    assert_refused(ValueError, "agglomerate", ("linkage", repr(value), *LINKAGES), call)


def labels_refused(error: type[Exception], *parts: str, labels: Any, groups: Any = None) -> None:
    call = lambda **more: gk.silhouette(torch.zeros(2, 3, 3), labels, groups, **more)  # noqa: E731
    assert_refused(error, "silhouette", parts, call)


@pytest.mark.parametrize("labels", [[[0, 1, 1]] * 2, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)], ids=str)
def test_labels_of_another_type(labels: Any) -> None:
    kind = str(labels.dtype) if isinstance(labels, torch.Tensor) else "list"
    labels_refused(TypeError, "labels", kind, labels=labels)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (6,), (), (2, 3, 1)], ids=str)
def test_labels_of_another_shape(shape: tuple[int, ...]) -> None:
    labels_refused(ValueError, "labels", "[2, 3]", str(list(shape)), labels=torch.zeros(shape, dtype=torch.int64))


def test_labels_on_another_device() -> None:
    away = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    labels_refused(ValueError, "labels", "meta", "cpu", labels=away)


def test_labels_of_places_with_groups() -> None:
    labels_refused(ValueError, "labels", "[N]", "[2, 3]", labels=torch.zeros(2, 3, dtype=torch.int64), groups=3)


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        (9, 3),
        (6, 2),
        (3, 3),
        (6, torch.tensor([0, 0, 0, 1, 1, 2])),
        (6, torch.tensor([0, 0, 0, 0, 1, 1])),
        (3, torch.tensor([0, 1, 2])),
    ],
    ids=str,
)
def test_groups_that_are_not_those_of_the_distances(rows: int, groups: Any) -> None:
    """The message must fit silhouette, which has no argument num_groups."""
    labels = torch.zeros(rows, dtype=torch.int64)
    labels_refused(ValueError, "silhouette: groups must be those of the distances", labels=labels, groups=groups)


@pytest.mark.parametrize("groups", [True, 3.0, "3", [0] * 6])
def test_groups_of_labels_of_another_type(groups: Any) -> None:
    labels = torch.zeros(6, dtype=torch.int64)
    labels_refused(TypeError, "groups", type(groups).__name__, labels=labels, groups=groups)


# Config


def of_config(op: str, config: Any) -> Callable[..., Any]:
    if op == "similarity_groups":
        return lambda **more: gk.similarity_groups(torch.randn(6, 4), 3, config=config, **more)
    return lambda **more: gk.cluster_distances(torch.zeros(1, 3, 3), config=config, **more)


@pytest.mark.parametrize("op", ["similarity_groups", "cluster_distances"])
def test_config_that_does_not_exist(op: str) -> None:
    parts = ("config", "'averge'", "did you mean 'average'?")
    assert_refused(ValueError, op, parts, of_config(op, "averge"))
    assert_refused(ValueError, op, ("config", "'zzz'", *LINKAGES), of_config(op, "zzz"))
    for config in (None, 3, {"linkage": "ward"}, gk.SimilarityConfig):
        assert_refused(TypeError, op, ("config", type(config).__name__), of_config(op, config))


def config_refused(error: type[Exception], *parts: str, **settings: Any) -> None:
    assert_raises(error, "SimilarityConfig: ", parts, lambda: gk.SimilarityConfig(**settings))


@pytest.mark.parametrize("value", ["parent", "", 1, True, ["one"]], ids=repr)
@pytest.mark.parametrize("field", ["linkage", "collapse", "different"])
def test_choice_that_does_not_exist_lists_those_that_do(field: str, value: Any) -> None:
    config_refused(ValueError, field, repr(value), *(LINKAGES if field == "linkage" else COLLAPSES), **{field: value})


@pytest.mark.parametrize("field", ["linkage", "collapse"])
def test_only_different_may_be_left_open(field: str) -> None:
    config_refused(ValueError, field, "None", **{field: None})
    assert gk.SimilarityConfig(different=None) == gk.SimilarityConfig()


@pytest.mark.parametrize("value", [2.0, True, "3", NAN], ids=repr)
@pytest.mark.parametrize("field", ["k_min", "k_max"])
def test_limits_of_k_of_another_type(field: str, value: Any) -> None:
    config_refused(TypeError, field, type(value).__name__, repr(value), **{field: value})


@pytest.mark.parametrize(
    "settings", [{"k_min": 1}, {"k_min": 0}, {"k_min": -5}, {"k_max": 1}, {"k_min": 4, "k_max": 3}]
)
def test_limits_of_k_that_leave_nothing(settings: dict[str, int]) -> None:
    name, value = list(settings.items())[-1]
    config_refused(ValueError, name, "at least", str(value), **settings)


NUMBERS = ("min_silhouette", "tie_tolerance", "distance_floor", "different_at")


@pytest.mark.parametrize("value", ["0.1", None, True, [0.1], torch.tensor(0.1)], ids=repr)
@pytest.mark.parametrize("field", NUMBERS)
def test_number_of_another_type(field: str, value: Any) -> None:
    config_refused(TypeError, field, type(value).__name__, **{field: value})


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=repr)
@pytest.mark.parametrize("field", NUMBERS)
def test_number_that_is_not_finite(field: str, value: float) -> None:
    config_refused(ValueError, field, repr(value), **{field: value})


@pytest.mark.parametrize("field", NUMBERS)
def test_number_out_of_range(field: str) -> None:
    if field == "min_silhouette":
        config_refused(ValueError, field, "[-1, 1]", "-1.01", **{field: -1.01})
        config_refused(ValueError, field, "[-1, 1]", "1.01", **{field: 1.01})
    else:
        config_refused(ValueError, field, "at least 0", "-1e-06", **{field: -1e-6})


def test_config_is_frozen_and_compares_by_its_settings() -> None:
    config = gk.SimilarityConfig("ward", k_max=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.k_max = 6  # type: ignore[misc]
    assert config == gk.SimilarityConfig(linkage="ward", k_max=5) != gk.SimilarityConfig("ward")
    assert hash(config) == hash(gk.SimilarityConfig("ward", k_max=5))
    assert dataclasses.replace(config, k_max=None) == gk.SimilarityConfig("ward")
    assert gk.SimilarityConfig.names() == LINKAGES
    for name in LINKAGES:
        assert gk.SimilarityConfig.of(name, "test") == gk.SimilarityConfig(name)


@needs_cpu_kernels
@embeddings_ops
def test_dtype_that_a_backend_does_not_take(op: str) -> None:
    with pytest.raises(
        RuntimeError, match=f"^{op}: backend 'kernel' cannot run here: .*64\\); use backend='reference'"
    ):
        OF_EMBEDDINGS[op](torch.zeros(6, 4, dtype=torch.float64), 3, backend="kernel")
