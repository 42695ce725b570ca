"""What the functions of gk.variants and token_shares refuse: the function, the argument, the rule and the value."""

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
COV = functools.partial(variants.clip_cov_weights, LP, LP, ROWS)
PENALTY = functools.partial(variants.kl_cov_penalty, LP, LP, ROWS)
FUTURE = functools.partial(variants.future_kl_weights, LP, LP, ROWS)
GVPO = functools.partial(variants.gvpo_loss, LP, LP, ROWS, 2)
REAL = functools.partial(variants.real_loss, LP, LP, ROWS, 2)
FLOWRL = functools.partial(variants.flowrl_loss, LP, LP)
SHARES = functools.partial(gk.token_shares, torch.ones(2, 3))
NORM = "seq-mean-token-sum-norm"

REFUSED: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (PENALTY, {"shares": None}, TypeError, "shares must be a tensor, got NoneType"),
    (FLOWRL, {"ref_logprobs": None, "advantages": ROWS, "log_z": ROWS}, TypeError, "ref_logprobs must be a tensor"),
    (
        functools.partial(variants.off_policy_mask, LP, None, ROWS),
        {"threshold": 0.1},
        TypeError,
        "sampling_logprobs must be a tensor",
    ),
    (COV, {"ratio": 2.0}, ValueError, "ratio must be at most 1, got 2.0"),
    (COV, {"bounds": (5.0, 1.0)}, ValueError, "bounds must be (low, high) with -inf <= low <= high, got (5.0, 1.0)"),
    (COV, {"bounds": 3}, ValueError, "bounds must be (low, high)"),
    (COV, {"clip_low": -0.1}, ValueError, "clip_low must be a finite number of at least 0, got -0.1"),
    (PENALTY, {"shares": LP, "coef": None}, TypeError, "coef must be a number, got NoneType"),
    (FUTURE, {"cap": 0}, ValueError, "cap must be a finite number above 0, got 0"),
    (FUTURE, {"safety": -1.0}, ValueError, "safety must be a finite number above 0, got -1.0"),
    (FUTURE, {"clip": (2.0, 1.0)}, ValueError, "clip must be (low, high) with 0 <= low <= high, got (2.0, 1.0)"),
    (FUTURE, {"clip": (0.8, 1.0, 1.2)}, ValueError, "clip must be (low, high)"),
    (FUTURE, {"clip": 1.2}, ValueError, "clip must be (low, high) with 0 <= low <= high, got 1.2"),
    (GVPO, {"beta": "x"}, TypeError, "beta must be a number, got str 'x'"),
    (GVPO, {"count": torch.ones(2)}, ValueError, "count must have one element, got shape [2]"),
    (REAL, {"tau": 0.0}, ValueError, "tau must be a finite number above 0, got 0.0"),
    (
        FLOWRL,
        {"ref_logprobs": LP, "advantages": ROWS, "log_z": ROWS, "ratio_cap": -1.0},
        ValueError,
        "ratio_cap must be a finite number above 0, got -1.0",
    ),
    (SHARES, {"aggregation": NORM, "max_length": 0}, ValueError, "max_length must be at least 1, got 0"),
    (SHARES, {"aggregation": NORM, "max_length": "a"}, TypeError, "max_length must be an int, got str 'a'"),
]


@pytest.mark.parametrize(("call", "options", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_arguments(call: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    prefix = "token_shares: " if call is SHARES else f"variants.{call.func.__name__}: "
    with pytest.raises(error, match="^" + re.escape(prefix + message)):
        call(**options)


@pytest.mark.parametrize("bounds", [torch.zeros(2, 2).int(), torch.zeros(0).int()], ids=["[2, 2]", "[0]"])
def test_bounds_of_rows_of_another_shape(bounds: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^token_shares: cu_seqlens must have shape \[B \+ 1\], got"):
        gk.token_shares(torch.ones(4), cu_seqlens=bounds)


@pytest.mark.parametrize("count", [0.5, 0.0, 8.0])
def test_a_count_is_the_same_as_a_number_and_as_a_tensor(count: float) -> None:
    """A tensor of 0, which cannot be refused without a wait, counts as 1."""
    number = count or 1.0
    mask = torch.ones(2, 3)
    assert torch.equal(gk.token_shares(mask, count=torch.tensor(count)), gk.token_shares(mask, count=number))
    assert torch.equal(GVPO(count=torch.tensor(count)), GVPO(count=number))


def test_no_clip_is_one_without_bounds() -> None:
    lp = torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    call = functools.partial(variants.clip_cov_weights, lp, lp / 2, ROWS, ratio=0.2, bounds=(0.0, math.inf))
    assert torch.equal(call(clip_low=None, clip_high=None), call(clip_low=1e30, clip_high=1e30))
    assert not torch.equal(call(clip_low=None, clip_high=None), call())


@pytest.mark.parametrize("name", ["average_logprobs", "geometric_average_logprobs", "gvpo", "real", "flowrl", "kl_cov"])
def test_a_token_that_the_old_policy_could_not_sample_leaves_the_others_finite(name: str) -> None:
    lp = LP.double().requires_grad_()
    old = LP.double() - 0.1
    old[1, 1] = -math.inf
    rows = ROWS.double()
    losses: dict[str, Callable[[], Tensor]] = {
        "gvpo": lambda: variants.gvpo_loss(lp, old, rows, 2),
        "real": lambda: variants.real_loss(lp, old, rows, 2),
        "flowrl": lambda: variants.flowrl_loss(lp, old, LP.double(), rows, rows),
        "kl_cov": lambda: variants.kl_cov_penalty(lp, old, rows, LP.double().exp(), ratio=0.5),
    }
    loss = losses[name]() if name in losses else gk.policy_loss(getattr(variants, name)(lp, old), old, rows).loss
    (gradient,) = torch.autograd.grad(loss, lp)
    assert not loss.isnan() and gradient[[0, 2, 3]].isfinite().all()
