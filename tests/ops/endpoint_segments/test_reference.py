"""The specification of endpoint_segments against its formulas in NumPy, and cuts and advantages found by hand.

Faults: a cut one token early or late, or across a gap; sums that a cut does not reset; the wrong side of a tie; weights
without a clamp; an advantage that skips the outcome, a value or a discount, or that belongs to a sibling; a baseline
or a norm over the wrong rows; equal advantages that a norm does not bring to exactly 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given

import grpo_kernels as gk
from grpo_kernels.ops.endpoint_segments.registration import SUPPORTS
from tests.harness import runnable_backends
from tests.ops.endpoint_segments.cases import F64, calls, config_of, expected, is_tie, run
from tests.ops.promises import Inputs

on_backends = pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, F64))


@given(calls())
def test_the_reference_is_the_formulas(drawn: tuple[Inputs, gk.SegmentConfig]) -> None:
    batch, config = drawn
    assume(not is_tie(batch, config, 1e-9))
    results = run(batch, config, "reference")
    for name, want in expected(batch, config).items():
        size = float(want.max() - want.min()) if want.is_floating_point() and want.numel() else 0.0
        torch.testing.assert_close(results[name], want, rtol=1e-9, atol=1e-9 * (1 + size), msg=name)


# By hand, on every backend


def plan(advantages: Any, weights: Any = 0.5, mask: Any = True) -> Inputs:
    """One row whose tokens have these advantages at lam 0, and these weights; 1 of certain log-probs."""
    rewards = torch.as_tensor(advantages, dtype=F64)[None]
    logprobs = torch.log1p(-torch.as_tensor(weights, dtype=F64)).clamp(min=-1e3).expand_as(rewards)
    counted = torch.as_tensor(mask).expand_as(rewards)
    return dict(
        zip(("rewards", "logprobs", "old_logprobs", "mask"), (rewards, logprobs, logprobs, counted), strict=True)
    ) | {"values": torch.zeros_like(rewards), "groups": torch.zeros(1, dtype=torch.int64)}


def lengths(batch: Inputs, backend: str, dtype: torch.dtype = F64, **fields: Any) -> list[int]:
    ids = run(batch, config_of(**{"lam": 0.0} | fields), backend, dtype)["segment_ids"][0]
    return torch.bincount(ids[ids >= 0]).tolist()


def tau(value: float, **fields: Any) -> dict[str, Any]:
    return {"group_variance_threshold": value} | fields


LITERAL, UNCORRELATED = {"rule": "literal"}, {"proxy": "uncorrelated"}
SIGNS = [1.0, -1.0] * 10
RISING = [1.0, 3.0, 3.0, 3.0, 3.0, 3.0]
FALLING = [1.0, 1, 1, -1, -1, 1, -1, -1, -1, -1, 1, 1] * np.linspace(2.0, 1.9, 12)
CUTS: list[tuple[Inputs, dict[str, Any], list[int]]] = [
    # P = 2 and Q = 1 after two tokens: (1 * 3 / 2)^2 = 2.25, then (1.5 * 3 / 3.5)^2 = 1.65, 1.44, 1.33
    (plan(RISING), tau(1.2, **LITERAL), [2, 2, 2]),
    (plan(RISING), tau(0.9, **LITERAL), [3, 2, 1]),
    (plan(RISING), tau(0.4, **LITERAL), [4, 2]),
    (plan(RISING), tau(2.2), [1, 5]),
    (plan(RISING), tau(2.3), [6]),
    (plan(RISING), tau(1.7, **UNCORRELATED), [1, 5]),  # 2 * 9 / (1 + 9) = 1.8
    (plan(RISING), tau(1.9, **UNCORRELATED), [6]),
    (plan(FALLING), tau(0.999), [3, 2, 1, 4, 2]),
    (plan([2.0, 2.0, 2.0, -0.1]), {}, [4]),  # a flip to a small value
    (plan(SIGNS), {}, [1] * 20),
    (plan(SIGNS), UNCORRELATED, [16, 4]),
    (plan([1.0, 1, 1, 1, -1, -1] * 4, [0.2, 0.9, 0.4, 0.3, 0.5, 0.8] * 4), {}, [4, 2] * 4),  # later ones as the first
    (plan([0.7] * 20), tau(0.99), [1] * 20),
    (plan([0.7] * 20), tau(0.99, **UNCORRELATED), [1] * 20),
    (plan([0.7] * 20), tau(1.01), [16, 4]),
    (plan([1.0] * 16), tau(0.3, **LITERAL), [4] * 4),
    (plan([1.0] * 7), tau(1e6, **LITERAL), [2, 2, 2, 1]),  # no segment of one token but at the end
    (plan([1.0] * 3), {"group_max_size": 1, **LITERAL}, [1, 1, 1]),
    # ties, of exact sums: P = 0 and (Q a)^2 = 4
    (plan([4.0, -4.0] * 2, 1.0), {"group_epsilon": 4.0}, [2, 2]),
    (plan([4.0, -4.0] * 2, 1.0), {"group_epsilon": 3.999}, [1] * 4),
    (plan([4.0, -4.0] * 2, 1.0), tau(0.5, group_epsilon=4.0, **LITERAL), [2, 2]),
    (plan([4.0, -4.0] * 2, 1.0), tau(0.499, group_epsilon=4.0, **LITERAL), [4]),
    # the scale of advantages is their root mean square, but at least group_epsilon
    (plan([1e-4 * sign for sign in SIGNS]), {}, [1] * 20),
    (plan([1e-10 * sign for sign in SIGNS]), {}, [16, 4]),
    (plan([1e-10 * sign for sign in SIGNS]), {"group_epsilon": 1e-12}, [1] * 20),
    (plan([0.0] * 20), {}, [16, 4]),
    (plan([1.0] * 10, mask=[True] * 3 + [False] + [True] * 2 + [False] * 3 + [True]), tau(1e9), [3, 2, 1]),
]


@on_backends
def test_cuts_found_by_hand(backend: str) -> None:
    for number, (batch, fields, want) in enumerate(CUTS):
        assert lengths(batch, backend, **fields) == want, (number, fields)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@on_backends
def test_tokens_weigh_by_ratio_and_probability(backend: str, dtype: torch.dtype) -> None:
    """Weights w and 1 with advantages 1 and 3: the ratio of the variances is ((w + 1) * 3 / (w + 3))^2."""
    certain = -1e3
    half = float(np.log(0.5))
    for now, old, weight in (
        ((half, certain), (half, certain), 0.5),
        ((half, certain), (np.log(0.1), certain), 2.5),
        ((0.0, certain), (0.0, certain), 0.0),
        ((1e-3, certain), (1e-3, certain), 0.0),  # rounding can lift a log-prob above 0
        ((certain, certain), (certain - 700, certain - 19.5), np.exp(0.5)),  # log-ratios of 20 and 19.5
        ((certain, certain), (certain + 1e30, certain + 19.5), np.exp(-0.5)),
    ):
        ratio = ((weight + 1) * 3 / (weight + 3)) ** 2
        batch = plan([1.0, 3.0]) | {"logprobs": torch.tensor([now], dtype=F64), "old_logprobs": torch.tensor([old])}
        batch["old_logprobs"] = batch["old_logprobs"].to(F64)
        for factor, want in ((1.0001, [2]), (0.9999, [1, 1])):
            assert lengths(batch, backend, dtype, **tau(ratio * factor, group_epsilon=1e-30)) == want, weight


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1])
@on_backends
def test_equal_advantages_and_single_ones_are_normalized_to_zero(backend: str, value: float) -> None:
    """In binary, the mean of three values of 0.1 is not exactly 0.1."""
    rewards = torch.tensor([[value]] * 3 + [[2.0]], dtype=F64)
    equal = dict.fromkeys(("logprobs", "old_logprobs"), -torch.ones(4, 1, dtype=F64)) | {"rewards": rewards}
    equal |= {"values": 0 * rewards, "mask": rewards > 0, "groups": torch.tensor([4, 4, 4, 1])}
    results = run(equal, config_of(norm="prompt"), backend)
    assert results["advantages"].tolist() == [[0.0]] * 4 and results["endpoint_mask"].all()
    first = {name: tensor[:3] for name, tensor in equal.items()}
    assert run(first, config_of(norm="batch"), backend)["advantages"].tolist() == [[0.0]] * 3
