"""Errors of endpoint_segments, SegmentConfig, SegmentThreshold and segment_metrics."""

from __future__ import annotations

from typing import Any

import torch

import grpo_kernels as gk
from tests.ops.endpoint_segments.cases import INF, NAN
from tests.ops.error_rows import Call, Errors, Rows, each

TOKENS, IDS, BOUNDS = -torch.ones(4, 5), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 2, 3, 4])
RIGHT: dict[str, Any] = dict.fromkeys(("rewards", "logprobs", "old_logprobs", "values"), TOKENS)
RIGHT |= {"config": {"norm": "none"}}
FLAT: dict[str, Any] = RIGHT | dict.fromkeys(("rewards", "logprobs", "old_logprobs", "values"), TOKENS[0, :4])
PACKED = {"cu_seqlens": torch.tensor([0, 2, 4])}
CALLS = {
    "endpoint_segments": Call(gk.endpoint_segments, RIGHT),
    "endpoint_segments without critic": Call(gk.endpoint_segments, RIGHT | {"values": None, "groups": 2}),
    "endpoint_segments of packed rows": Call(
        gk.endpoint_segments, FLAT | {"cu_seqlens": BOUNDS, "values": None, "groups": 2}
    ),
    "SegmentConfig": Call(gk.SegmentConfig, {}),
    "SegmentThreshold": Call(gk.SegmentThreshold, {}),
    "SegmentThreshold.load_state_dict": Call(gk.SegmentThreshold().load_state_dict, {"state": {"value": 2}}),
    "SegmentThreshold.update": Call(gk.SegmentThreshold().update, {"result": gk.endpoint_segments(**RIGHT)}),
    "segment_metrics": Call(gk.segment_metrics, {"result": gk.endpoint_segments(**RIGHT)}),
    "segment_metrics of packed rows": Call(
        gk.segment_metrics, {"result": gk.endpoint_segments(**FLAT, **PACKED)} | PACKED
    ),
}
NOT_WITHIN = "must be within min_threshold and max_threshold, [0.1, 10.0], got {}; adaptive_threshold=False has no"
CONFIG: Rows = {
    **each("group_max_size", "must be at least 1, got {}", 0),
    **each("threshold_lr", "must be a finite number of at least 0, got {}", -0.1),
    **each("group_variance_threshold", NOT_WITHIN, 0.05, 11.0),
    "group_variance_threshold must be ... [2.0, 10.0], got 1.0": {"min_threshold": 2.0},
    "group_variance_threshold must be a finite number above 0, got inf": {
        "adaptive_threshold": False,
        "group_variance_threshold": INF,
    },
}
for field in ("group_variance_threshold", "group_epsilon", "min_threshold", "max_threshold"):
    CONFIG |= each(field, "must be a finite number above 0, got {}", 0.0)
for field in ("gamma", "lam"):
    CONFIG |= each(field, "must be in [0, 1], got {}", 1.5) | each(field, "must be ... at least 0, got {}", -0.1)
METRICS: Rows = {
    **each("groups", "must be the size of each group ... number of rows, 4, got {}", 3, 0),
    **each("groups", "must have shape [4], one element per row, got {}", IDS[:3]),
    "cu_seqlens must be given for packed tokens [M] and for no others, got a tensor": PACKED,
}
for field in ("seconds", "peak_bytes"):
    METRICS |= each(field, "must be positive and finite, got {}", (1.0, 0.0), (INF, 1))
ERRORS = [
    Errors(
        "endpoint_segments",
        ValueError,
        {
            **each("rewards", "must have shape [B, T], or [M] with cu_seqlens, got {}", TOKENS[0], TOKENS[None]),
            "rewards must have shape [B, T], or [M] with cu_seqlens, got [4, 5]": {"cu_seqlens": BOUNDS},
            **each("values", "must have the shape of rewards, [4, 5], got {}", TOKENS.T, TOKENS.flatten()),
            **each("mask", "must have the shape of rewards, [4, 5], got {}", TOKENS.T, TOKENS.flatten()),
            "groups must be given without values and for norm='prompt', got None": {"config": {"norm": "prompt"}},
            "groups must be left out, as neither values nor norm uses them, got int": {"groups": 2},
            "groups must be left out, ... got Tensor": {"groups": IDS, "config": {"norm": "batch"}},
            **each("threshold", NOT_WITHIN, 0, 0.0999, 10.01, INF, NAN),
            "threshold must have the rule of config, 'bounded', got 'literal'": {
                "threshold": gk.SegmentThreshold({"rule": "literal"})
            },
        },
    ),
    Errors(
        "endpoint_segments",
        TypeError,
        {
            "rewards must be of dtype float32 ... got torch.int64": {"rewards": TOKENS.long()},
            "threshold must be a number or a SegmentThreshold, got bool": {"threshold": True},
            "threshold must be a number or a SegmentThreshold, got Tensor": {"threshold": TOKENS[0, 0]},
        },
    ),
    Errors(
        "endpoint_segments without critic",
        ValueError,
        {
            "groups must be given without values and for norm='prompt', got None": {"groups": None},
            **each("groups", "must be the size of each group ... number of rows, 4, got {}", 3, 0, -2, 8),
            **each("groups", "must have shape [4], got {}", IDS[:3], IDS[:, None]),
        },
    ),
    Errors(
        "endpoint_segments without critic",
        TypeError,
        {
            **each("groups", "must be an int, ... {}", True, 2.0, "2"),
            "groups must be an int ... list [0, 1]; gk.group_ids(...) makes the tensor": {"groups": [0, 1]},
        },
    ),
    Errors(
        "endpoint_segments of packed rows",
        ValueError,
        {
            **each("cu_seqlens", "must have shape [B + 1], got {}", BOUNDS[0], BOUNDS[:0], BOUNDS[:, None]),
            **each("groups", "must be the size of each group ... number of rows, 4, got {}", 3),
            **each("groups", "must have shape [4], got {}", IDS[:3]),
        },
    ),
    Errors("SegmentConfig", ValueError, CONFIG),
    Errors(
        ("endpoint_segments", "SegmentThreshold"),
        ValueError,
        {
            "config's keys must be one of group_variance_threshold, ... norm, got 3": {"config": {3: 1}},
            "config's keys must be ... 'group_maxsize' (did you mean 'group_max_size'?)": {
                "config": {"group_maxsize": 8}
            },
        },
    ),
    Errors(
        ("endpoint_segments", "SegmentThreshold"),
        TypeError,
        {"config must be a SegmentConfig or a mapping, got str": {"config": "grpo"}},
    ),
    Errors(
        "SegmentThreshold.load_state_dict",
        ValueError,
        {
            "state must have the key 'value' alone, got []": {"state": {}},
            "state must have the key 'value' alone, got ['step', 'value']": {"state": {"value": 1.0, "step": 3}},
            "value must be within min_threshold and max_threshold, ... nan": {"state": {"value": NAN}},
            "value must be within min_threshold and max_threshold, ... 10.1": {"state": {"value": 10.1}},
        },
    ),
    Errors(
        "SegmentThreshold.load_state_dict",
        TypeError,
        {f"value must be a number, ... {value!r}": {"state": {"value": value}} for value in ("1.0", None, True)},
    ),
    Errors("SegmentThreshold.update", TypeError, {"result must be EndpointSegments, got float": {"result": 0.3}}),
    Errors("segment_metrics", ValueError, METRICS),
    Errors(
        "segment_metrics",
        TypeError,
        {
            "result must be EndpointSegments, got tuple": {"result": (1, 2)},
            "groups must be an int, ... tensor of ids, got float 1.0": {"groups": 1.0},
            **each("seconds", "must be two numbers, ... got {}", 1.0, (1.0,), ("1", 2.0)),
        },
    ),
    Errors(
        "segment_metrics of packed rows",
        ValueError,
        {
            "cu_seqlens must be given for packed tokens [M] and for no others, got None": {"cu_seqlens": None},
            **each("cu_seqlens", "must have shape [3], got {}", BOUNDS[:2]),
        },
    ),
    Errors(
        "segment_metrics of packed rows",
        RuntimeError,
        {"cu_seqlens must ascend from 0 to at most the number of tokens": {"cu_seqlens": torch.tensor([0, 5, 4])}},
    ),
]
