"""Errors of gk.variants, token_shares and rollout_logprobs, and inputs that they accept.

An error names the function, the argument, the rule and the value. Tensors of another dtype, shape or device are those
of tests/ops/test_promises.py.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import variants

LP = torch.full((4, 3), -1.0)
ROWS = torch.tensor([1.0, -1.0, 0.5, -0.5])
OPSM = functools.partial(variants.off_policy_mask, LP, LP, ROWS)
ENTROPY = functools.partial(variants.high_entropy_mask, LP, None)
COV = functools.partial(variants.clip_cov_weights, LP, LP, ROWS)
PENALTY = functools.partial(variants.kl_cov_penalty, LP, LP, ROWS)
FUTURE = functools.partial(variants.future_kl_weights, LP, LP, ROWS)
GVPO = functools.partial(variants.gvpo_loss, LP, LP, ROWS)
REAL = functools.partial(variants.real_loss, LP, LP, ROWS, 2)
FLOWRL = functools.partial(variants.flowrl_loss, LP, LP, LP, ROWS)
SHARES = functools.partial(gk.token_shares, torch.ones(2, 3))
RATIOS = functools.partial(gk.rollout_logprobs, LP, rollouts=torch.tensor([0, 0, 1, 1]))
FLAT = functools.partial(gk.token_shares, torch.ones(4))
NORM = "seq-mean-token-sum-norm"

REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (OPSM, {"threshold": -1.0}, "threshold must be a finite number of at least 0, got -1.0"),
    (ENTROPY, {"quantile": 1.5}, "quantile must be at most 1, got 1.5"),
    (ENTROPY, {"quantile": -0.1}, "quantile must be a finite number of at least 0, got -0.1"),
    (ENTROPY, {"quantile": 0.5, "floor": torch.ones(2)}, "floor must have one element, got shape [2]"),
    (COV, {"ratio": 0.0}, "ratio must be a finite number above 0, got 0.0"),
    (COV, {"ratio": 2.0}, "ratio must be at most 1, got 2.0"),
    (COV, {"bounds": (5.0, 1.0)}, "bounds must be (low, high) with -inf <= low <= high, got (5.0, 1.0)"),
    (COV, {"bounds": 3}, "bounds must be (low, high)"),
    (COV, {"clip_low": -0.1}, "clip_low must be a finite number of at least 0, got -0.1"),
    (PENALTY, {"shares": None}, "shares must be a tensor, got NoneType"),
    (PENALTY, {"shares": ROWS}, "shares must have the shape of logprobs, [4, 3], got [4]"),
    (PENALTY, {"shares": LP, "coef": None}, "coef must be a number, got NoneType"),
    (FUTURE, {"half_life": 0.0}, "half_life must be a finite number above 0, got 0.0"),
    (FUTURE, {"cap": 0}, "cap must be a finite number above 0, got 0"),
    (FUTURE, {"safety": -1.0}, "safety must be a finite number above 0, got -1.0"),
    (FUTURE, {"clip": (2.0, 1.0)}, "clip must be (low, high) with 0 <= low <= high, got (2.0, 1.0)"),
    (FUTURE, {"clip": (0.8, 1.0, 1.2)}, "clip must be (low, high)"),
    (GVPO, {"groups": 3}, "groups must be the size of each group and divide the number of rows, 4, got 3"),
    (GVPO, {"groups": 2, "beta": "x"}, "beta must be a number, got str 'x'"),
    (GVPO, {"groups": 2, "count": torch.ones(2)}, "count must have one element, got shape [2]"),
    (REAL, {"tau": 0.0}, "tau must be a finite number above 0, got 0.0"),
    (REAL, {"count": 0}, "count must be a finite number above 0, got 0"),
    (FLOWRL, {"log_z": torch.ones(4, 2)}, "log_z must have shape [4], got [4, 2]"),
    (FLOWRL, {"log_z": ROWS, "clip": "mean"}, "clip must be one of product, geometric, logprob, got 'mean'"),
    (FLOWRL, {"log_z": ROWS, "ratio_cap": -1.0}, "ratio_cap must be a finite number above 0, got -1.0"),
    (RATIOS, {"old_logprobs": None}, "old_logprobs must be a tensor, got NoneType"),
    (SHARES, {"aggregation": "local-token-mean"}, "aggregation must be one of token-mean, "),
    (SHARES, {"aggregation": NORM, "max_length": 0}, "max_length must be at least 1, got 0"),
    (SHARES, {"aggregation": NORM, "max_length": "a"}, "max_length must be an int, got str 'a'"),
    (SHARES, {"aggregation": NORM}, f"max_length must be given with aggregation={NORM!r}, and only then, got None"),
    (SHARES, {"max_length": 3}, "max_length must be given with aggregation='seq-mean-token-sum-norm'"),
    (SHARES, {"count": 0.0}, "count must be a finite number above 0, got 0.0"),
    (SHARES, {"count": 6.0, "aggregation": "token-sum"}, "count must be None with aggregation='token-sum', which divi"),
    (SHARES, {"count": torch.ones(2)}, "count must have one element, got shape [2]"),
    *(
        (
            functools.partial(gk.token_shares, torch.ones(4)),
            {"cu_seqlens": bounds},
            "cu_seqlens must have shape [B + 1]",
        )
        for bounds in (torch.zeros(2, 2).int(), torch.zeros(0).int())
    ),
]


@pytest.mark.parametrize(("call", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_arguments(call: Any, options: dict[str, Any], message: str) -> None:
    name = call.func.__name__
    prefix = f"variants.{name}: " if hasattr(variants, name) else f"{name}: "
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(prefix + message)):
        call(**options)


@pytest.mark.parametrize("count", [0.5, 0.0, 8.0])
def test_a_count_is_the_same_as_a_number_and_as_a_tensor(count: float) -> None:
    """A tensor of 0, which cannot be refused without a wait, counts as 1."""
    number = count or 1.0
    assert torch.equal(SHARES(count=torch.tensor(count)), SHARES(count=number))
    assert torch.equal(GVPO(2, count=torch.tensor(count)), GVPO(2, count=number))


def test_no_clip_is_one_without_bounds() -> None:
    lp = torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    call = functools.partial(variants.clip_cov_weights, lp, lp / 2, ROWS, ratio=0.2, bounds=(0.0, math.inf))
    assert torch.equal(call(clip_low=None, clip_high=None), call(clip_low=1e30, clip_high=1e30))
    assert not torch.equal(call(clip_low=None, clip_high=None), call())


LOSSES: dict[str, Callable[..., Tensor]] = {
    "average": lambda lp, old, rows: gk.policy_loss(variants.average_logprobs(lp, old), old, rows).loss,
    "geometric": lambda lp, old, rows: gk.policy_loss(variants.geometric_average_logprobs(lp, old), old, rows).loss,
    "gvpo": lambda lp, old, rows: variants.gvpo_loss(lp, old, rows, 2),
    "real": lambda lp, old, rows: variants.real_loss(lp, old, rows, 2),
    "flowrl": lambda lp, old, rows: variants.flowrl_loss(lp, old, LP.double(), rows, rows),
    "kl_cov": lambda lp, old, rows: variants.kl_cov_penalty(lp, old, rows, LP.double().exp(), ratio=0.5),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_that_the_old_policy_could_not_sample_leaves_the_others_finite(name: str) -> None:
    lp, old = LP.double().requires_grad_(), LP.double() - 0.1
    old[1, 1] = -math.inf
    loss = LOSSES[name](lp, old, ROWS.double())
    (gradient,) = torch.autograd.grad(loss, lp)
    assert not loss.isnan() and gradient[[0, 2, 3]].isfinite().all()
