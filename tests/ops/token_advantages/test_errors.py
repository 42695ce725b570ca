"""Errors of token_advantages, TokenAdvantageConfig and optimal_token_baseline.

Faults that this is for: a wrong argument that is taken, or fails with another type, without its value or the way out.
What test_promises.py checks of every tensor, and test_configs.py of every field, is not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises

TOKENS, INTS = torch.zeros(2, 3), torch.zeros(2, 3).int()
FLAT = {"rewards": torch.zeros(6), "values": torch.zeros(6), "cu_seqlens": torch.tensor([0, 6])}
# by the name that errors begin with: what is called, with arguments that are right
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "token_advantages": (gk.token_advantages, {"rewards": TOKENS, "values": TOKENS}),
    "TokenAdvantageConfig": (gk.TokenAdvantageConfig, {}),
    "optimal_token_baseline": (
        gk.optimal_token_baseline,
        {"rewards": TOKENS, "old_logprobs": TOKENS, "sum_pi_squared": TOKENS, "groups": 2},
    ),
}
# (type, message, arguments); " ... " stands for any text
TABLE: dict[str, list[tuple[type[Exception], str, dict[str, Any]]]] = {
    "token_advantages": [
        (TypeError, "rewards must be of dtype ... got torch.int32", {"rewards": INTS}),
        (TypeError, "values must be of dtype ... got torch.int32", {"values": INTS}),
        (TypeError, "turns must be of dtype ... got torch.float32", {"turns": TOKENS}),
        (TypeError, "cu_seqlens must be of dtype int64 or int32, got", FLAT | {"cu_seqlens": torch.zeros(2)}),
        (ValueError, "values must have the shape of rewards, [2, 3], got [3, 2]", {"values": TOKENS.T}),
        (ValueError, "rewards must have shape [B, T], or [M] with cu_seqlens, got [6]", {"rewards": torch.zeros(6)}),
        (ValueError, "rewards must have shape [B, T], or [M] with ... [1, 2, 3]", {"rewards": torch.zeros(1, 2, 3)}),
        (ValueError, "cu_seqlens must have shape [B + 1], got [1, 2]", FLAT | {"cu_seqlens": INTS[:1, :2]}),
        (ValueError, "cu_seqlens must have shape [B + 1], got [0]", FLAT | {"cu_seqlens": INTS[0, :0]}),
        (ValueError, "values must be given for estimator 'gae', got None", {"values": None}),
        (ValueError, "values must be left out for estimator 'reinforce', got Tensor", {"config": "reinforce"}),
        (TypeError, "config must be a TokenAdvantageConfig or a str, got int", {"config": 1}),
        (TypeError, "config must be ... got dict; pass TokenAdvantageConfig(**config)", {"config": {"lam": 0.9}}),
        (ValueError, "config must be one of gae, ... got 'gea' (did you mean 'gae'?)", {"config": "gea"}),
    ],
    "TokenAdvantageConfig": [
        (ValueError, "estimator must be one of gae, reinforce_plus_plus, reinforce, got 'ppo'", {"estimator": "ppo"}),
        (ValueError, "gamma must be in [0, 1], got 1.5", {"gamma": 1.5}),
        (ValueError, "lam must be in [0, 1], got 2", {"lam": 2}),
        (ValueError, "lam must be a finite number of at least 0, got -0.1", {"lam": -0.1}),
        (ValueError, "lam must be 1 for estimator 'reinforce', ... got 0.9", {"estimator": "reinforce", "lam": 0.9}),
    ],
    "optimal_token_baseline": [
        (TypeError, "is_weights must be of dtype ... got torch.int32", {"is_weights": INTS}),
        (ValueError, "sum_pi_squared must have the shape of rewards, [2, 3], got [3]", {"sum_pi_squared": TOKENS[0]}),
        (ValueError, "rewards must have shape [B, T], got [6]", {"rewards": torch.zeros(6)}),
        (ValueError, "old_logprobs must be at most 0, got 0.5 at [0, 0]", {"old_logprobs": TOKENS + 0.5}),
        (ValueError, "sum_pi_squared must be within [0, 1], got -1.0 at [0, 0]", {"sum_pi_squared": TOKENS - 1}),
        (ValueError, "sum_pi_squared must be within [0, 1], got 1.5 at [0, 0]", {"sum_pi_squared": TOKENS + 1.5}),
        (ValueError, "places must be one of position, rank, got 'turn'", {"places": "turn"}),
        (ValueError, "groups must divide the number of rows, 2, got 3", {"groups": 3}),
        (ValueError, "eps must be a finite number of at least 0, got -1", {"eps": -1}),
    ],
}


@pytest.mark.parametrize(
    ("where", "error", "rule", "changes"), [(where, *row) for where, rows in TABLE.items() for row in rows], ids=str
)
def test_errors(where: str, error: type[Exception], rule: str, changes: dict[str, Any]) -> None:
    function, right = CALLS[where]
    start, *parts = rule.split(" ... ")
    assert_raises(error, f"{where}: {start}", parts, lambda: function(**right | changes))
