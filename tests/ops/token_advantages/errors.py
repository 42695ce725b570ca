"""Errors of token_advantages, TokenAdvantageConfig and optimal_token_baseline."""

from __future__ import annotations

import torch

import grpo_kernels as gk
from tests.ops.error_rows import Call, Errors, each

TOKENS, INTS = torch.zeros(2, 3), torch.zeros(2, 3).int()
PACKED = {"rewards": torch.zeros(6), "values": torch.zeros(6)}
OF_BASELINE = {"rewards": TOKENS, "old_logprobs": TOKENS, "sum_pi_squared": TOKENS, "groups": 2}
CALLS = {
    "token_advantages": Call(gk.token_advantages, {"rewards": TOKENS, "values": TOKENS}),
    "TokenAdvantageConfig": Call(gk.TokenAdvantageConfig, {}),
    "optimal_token_baseline": Call(gk.optimal_token_baseline, OF_BASELINE),
}
ERRORS = [
    Errors(
        "token_advantages",
        TypeError,
        {
            "turns must be of dtype ... got torch.float32": {"turns": TOKENS},
            "cu_seqlens must be of dtype int64 or int32, got": PACKED | {"cu_seqlens": torch.zeros(2)},
            "config must be a TokenAdvantageConfig or a str, got int": {"config": 1},
            "config must be ... got dict; pass TokenAdvantageConfig(**config)": {"config": {"lam": 0.9}},
        },
    ),
    Errors(
        "token_advantages",
        ValueError,
        {
            **each("values", "must have the shape of rewards, [2, 3], got [3, 2]", TOKENS.T),
            **each("rewards", "must have shape [B, T], or [M] with cu_seqlens, got {}", TOKENS[0], TOKENS[None]),
            **each("cu_seqlens", "must have shape [B + 1], got {}", INTS[:1, :2], INTS[0, :0], **PACKED),
            "values must be given for estimator 'gae', got None": {"values": None},
            "turns must be below 2**31, got 4294967296 at [0, 0]": {"turns": INTS.long() + 2**32},
            "values must be left out for estimator 'reinforce', got Tensor": {"config": "reinforce"},
            "config must be one of gae, ... got 'gea' (did you mean 'gae'?)": {"config": "gea"},
        },
    ),
    Errors(
        "TokenAdvantageConfig",
        ValueError,
        {
            "estimator must be one of gae, reinforce_plus_plus, reinforce, got 'ppo'": {"estimator": "ppo"},
            "gamma must be in [0, 1], got 1.5": {"gamma": 1.5},
            "lam must be in [0, 1], got 2": {"lam": 2},
            "lam must be a finite number of at least 0, got -0.1": {"lam": -0.1},
            "lam must be 1 for estimator 'reinforce', ... got 0.9": {"estimator": "reinforce", "lam": 0.9},
        },
    ),
    Errors(
        "optimal_token_baseline",
        ValueError,
        {
            **each("sum_pi_squared", "must have the shape of rewards, [2, 3], got [3]", TOKENS[0]),
            **each("rewards", "must have shape [B, T], got [3]", TOKENS[0]),
            "old_logprobs must be at most 0, got 0.5 at [0, 0]": {"old_logprobs": TOKENS + 0.5},
            "sum_pi_squared must be within [0, 1], got -1.0 at [0, 0]": {"sum_pi_squared": TOKENS - 1},
            "sum_pi_squared must be within [0, 1], got 1.5 at [0, 0]": {"sum_pi_squared": TOKENS + 1.5},
            "places must be one of position, rank, got 'turn'": {"places": "turn"},
            "groups must be the size of each group ... number of rows, 2, got 3": {"groups": 3},
            "eps must be a finite number of at least 0, got -1": {"eps": -1},
        },
    ),
]
