"""Every documented error of endpoint_segments, SegmentConfig, SegmentThreshold and segment_metrics.

test_promises.py gives each argument values that are no tensor, of a wrong dtype and on another device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_raises, needs_cpu_kernels
from tests.ops.endpoint_segments.cases import INF, NAN

TENSORS = ("rewards", "logprobs", "old_logprobs", "values")
LIKE_REWARDS = (*TENSORS[1:], "mask")
IDS, BOUNDS = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 2, 3, 4])
FIELDS = tuple(field.name for field in dataclasses.fields(gk.SegmentConfig) if field.init)
Row = tuple[type[Exception], dict[str, Any], list[str]]


def rows(error: type[Exception], names: str, values: Iterable[Any], rule: str, *parts: str) -> list[Row]:
    """A row of the table for each argument and value. The message has the rule, of the argument {}, and the value."""

    def shown(value: Any) -> str:
        if isinstance(value, Tensor):
            return str(list(value.shape)) if error is ValueError else str(value.dtype)
        return f"got {type(value).__name__}" if error is TypeError else repr(value)

    return [(error, {n: v}, [rule.replace("{}", n), *parts, shown(v)]) for n in names.split() for v in values]


def segments(*shape: int, **changes: Any) -> Any:
    """A valid call but for the changes."""
    tokens = dict.fromkeys(TENSORS, -torch.rand(*(shape or (4, 5))))
    return gk.endpoint_segments(**tokens | {"config": {"norm": "none"}} | changes)


def metrics(packed: bool = False, **arguments: Any) -> dict[str, float]:
    result = segments(6, cu_seqlens=torch.tensor([0, 2, 6])) if packed else segments(2, 3)
    return gk.segment_metrics(arguments.pop("result", result), **arguments)


def zeros(*shapes: tuple[int, ...], **options: Any) -> list[Tensor]:
    return [torch.zeros(shape, **options) for shape in shapes]


OP = [
    *rows(TypeError, " ".join(TENSORS), zeros((4, 5), dtype=torch.int64), "{} must be of dtype float32"),
    *rows(ValueError, " ".join(LIKE_REWARDS), zeros((5, 4), (20,)), "{} must have the shape of rewards, [4, 5]"),
    *rows(ValueError, "rewards", zeros((20,), (2, 2, 5)), "rewards must have shape [B, T]"),
    (ValueError, {"cu_seqlens": BOUNDS}, ["rewards must have shape [B, T], or [M] with cu_seqlens", "[4, 5]"]),
    (ValueError, {"config": {"norm": "prompt"}}, ["groups must be given", "norm='prompt'", "None"]),
    (ValueError, {"groups": 2}, ["groups must be left out", "values", "norm", "int"]),
    (ValueError, {"groups": IDS, "config": {"norm": "batch"}}, ["groups must be left out", "Tensor"]),
    *rows(TypeError, "threshold", (True, "1"), "threshold must be a number or a SegmentThreshold"),
    (TypeError, {"threshold": BOUNDS}, ["threshold must be a number or a SegmentThreshold", "Tensor"]),
    *rows(
        ValueError,
        "threshold",
        (0, -1.0, 0.0999, 10.01, INF, NAN),
        "threshold must be within min_threshold and max_threshold",
        "[0.1, 10.0]",
    ),
    *rows(TypeError, "config", ("grpo", gk.LossConfig()), "config must be a SegmentConfig or a mapping"),
    *((ValueError, {"config": {key: 1}}, ["config's keys must be", repr(key), *FIELDS]) for key in ("tau", "modes", 3)),
    (ValueError, {"config": {"group_maxsize": 8}}, ["did you mean 'group_max_size'?"]),
]
WITHOUT_CRITIC = [
    (ValueError, {}, ["groups must be given without values", "None"]),
    *rows(TypeError, "groups", (True, 2.0, "2"), "groups must be an int or an integer tensor"),
    (TypeError, {"groups": [0, 1]}, ["groups must be an int", "list [0, 1]; gk.group_ids(...) makes the tensor"]),
    *rows(ValueError, "groups", (3, 0, -2, 8), "groups must divide the number of rows, 4, got"),
    *rows(TypeError, "groups", (IDS.bool(), IDS.float()), "groups must be of dtype int64"),
    *rows(ValueError, "groups", (IDS[:3], IDS[:, None], IDS[0]), "groups must have shape [4]"),
]
PACKED = [
    *rows(TypeError, "cu_seqlens", (BOUNDS.float(), BOUNDS.short()), "cu_seqlens must be of dtype int64 or int32"),
    *rows(ValueError, "cu_seqlens", (BOUNDS[0], BOUNDS[:0], BOUNDS[:, None]), "cu_seqlens must have shape [B + 1]"),
    *(
        (ValueError, {"values": None, "cu_seqlens": BOUNDS, "groups": groups}, parts)
        for groups, parts in ((3, ["the number of rows, 4", "got 3"]), (IDS[:3], ["must have shape [4]", "[3]"]))
    ),
]
POSITIVE = "group_variance_threshold group_epsilon min_threshold max_threshold"
CONFIG = [
    *rows(ValueError, "group_max_size", (0, -16), "group_max_size must be at least 1, got"),
    *rows(ValueError, POSITIVE, (-1.0, 0.0), "{} must be a finite number above 0"),
    *rows(ValueError, "threshold_lr gamma lam", (-0.1,), "{} must be a finite number of at least 0"),
    *rows(ValueError, "gamma lam", (1.5,), "{} must be in [0, 1]"),
    *(
        (ValueError, fields, ["group_variance_threshold must be within min_threshold and max", bounds, f"got {tau}"])
        for fields, bounds, tau in (
            ({"group_variance_threshold": 0.05}, "[0.1, 10.0]", "0.05"),
            ({"group_variance_threshold": 11.0}, "[0.1, 10.0]", "11.0"),
            ({"min_threshold": 2.0}, "[2.0, 10.0]", "1.0"),
            ({"min_threshold": 3.0, "max_threshold": 2.0, "group_variance_threshold": 2.5}, "[3.0, 2.0]", "2.5"),
        )
    ),
    (ValueError, {"adaptive_threshold": False, "group_variance_threshold": INF}, ["must be a finite number above 0"]),
]
LOADED = [
    *((ValueError, state, ["'value' alone", *state]) for state in ({}, {"tau": 1.0}, {"value": 1.0, "step": 3})),
    *rows(TypeError, "value", ("1.0", None, True), "value must be a number"),
    *rows(ValueError, "value", (0.09, 10.1, NAN), "value must be within min_threshold and max_threshold"),
]
METRICS = [
    *rows(TypeError, "result", ((1, 2),), "result must be EndpointSegments"),
    *rows(ValueError, "groups", (3,), "groups must divide the number of rows, 2, got"),
    *rows(TypeError, "groups", (1.0,), "groups must be an int or an integer tensor"),
    *rows(ValueError, "groups", (IDS[:3],), "groups must have shape [2]"),
    (ValueError, {"cu_seqlens": BOUNDS[:3]}, ["cu_seqlens must be given for packed", "a tensor"]),
    (ValueError, {"packed": True}, ["cu_seqlens must be given for packed", "None"]),
    (ValueError, {"packed": True, "cu_seqlens": BOUNDS[:2]}, ["cu_seqlens must have shape [3], got [2]"]),
    (RuntimeError, {"packed": True, "cu_seqlens": torch.tensor([0, 7, 6])}, ["cu_seqlens must ascend from 0"]),
    (TypeError, {"seconds": 1.0}, ["seconds must be two numbers", "got 1.0"]),
    *rows(ValueError, "seconds peak_bytes", ((1.0, 0.0), (INF, 1)), "{} must be positive and finite, got"),
]
OF_THRESHOLD = [
    *rows(TypeError, "config", (1.0,), "config must be a SegmentConfig or a mapping"),
    (ValueError, {"config": {"tau": 1.0}}, ["config's keys must be", "'tau'"]),
]
TABLES: dict[str, tuple[Callable[..., Any], list[Row]]] = {
    "endpoint_segments: ": (segments, OP),
    "endpoint_segments: without critic": (functools.partial(segments, values=None), WITHOUT_CRITIC),
    "endpoint_segments: packed": (functools.partial(segments, 6), PACKED),
    "SegmentConfig: ": (gk.SegmentConfig, CONFIG),
    "SegmentThreshold: ": (gk.SegmentThreshold, OF_THRESHOLD),
    "SegmentThreshold.load_state_dict: ": (lambda **state: gk.SegmentThreshold().load_state_dict(state), LOADED),
    "SegmentThreshold.update: ": (gk.SegmentThreshold().update, [(TypeError, {"result": 0.3}, ["got float"])]),
    "segment_metrics: ": (metrics, METRICS),
}


@pytest.mark.parametrize("start", TABLES)
def test_errors(start: str) -> None:
    call, table = TABLES[start]
    for error, changes, parts in table:
        assert_raises(error, start.partition(" ")[0] + " ", parts, functools.partial(call, **changes))


def test_what_is_allowed() -> None:
    segments()
    segments(6, cu_seqlens=BOUNDS, values=None, groups=2)
    for fields in ({"gamma": 0.0, "lam": 0, "threshold_lr": 0.0}, {"group_max_size": 1}, {"group_max_size": 2**40}):
        assert segments(config=fields).num_segments.min() >= 1
    fixed = gk.SegmentConfig(adaptive_threshold=False, min_threshold=0.5, max_threshold=0.6)
    for tau in (1e-3, 50.0):  # the bounds limit the adaptation alone
        assert segments(config=fixed, threshold=tau).threshold == tau
        threshold = gk.SegmentThreshold(dataclasses.replace(fixed, group_variance_threshold=tau))
        threshold.load_state_dict({"value": tau})
        assert threshold.update(segments()) == tau
    with pytest.raises(TypeError):
        gk.SegmentConfig(modes=[0])  # type: ignore[call-arg]


@needs_cpu_kernels
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", TENSORS)
def test_a_row_that_is_not_finite_is_named(name: str, value: float, packed: bool) -> None:
    """The first one, not the first of its prompt, unless the mask leaves the token out."""
    mask = torch.ones(4, 5)
    for critic in {True, name == "values"}:
        tokens = {key: -torch.rand(4, 5) for key in TENSORS if critic or key != "values"}
        tokens[name][2:, 3] = value
        more = {} if critic else {"groups": 4}

        def call(mask: Tensor, tokens: Any = tokens, more: Any = more) -> gk.EndpointSegments:
            given = {key: tensor.flatten() if packed else tensor for key, tensor in (tokens | {"mask": mask}).items()}
            bounds = torch.arange(5) * 5 if packed else None
            return gk.endpoint_segments(**given, **more, cu_seqlens=bounds, backend="cpu", config={"norm": "none"})

        what = "endpoint_segments: rewards, values and log-probs must be finite where the mask is True"
        assert_raises(RuntimeError, what, ["row 2"], functools.partial(call, mask))
        holes = mask.clone()
        holes[2:, 3] = 0
        assert call(holes).advantages.isfinite().all()
