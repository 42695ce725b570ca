"""Errors of token_advantages and its config: the exception type and the parts of its message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises
from tests.ops.token_advantages.batches import INF, NAN

OP = "token_advantages: "
CONFIG = "TokenAdvantageConfig: "


def refused(error: type[Exception], *parts: str, **changes: Any) -> None:
    arguments: dict[str, Any] = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3), **changes}
    assert_raises(error, OP, parts, lambda: gk.token_advantages(**arguments))


@pytest.mark.parametrize("name", ["rewards", "values", "mask", "turns", "cu_seqlens"])
def test_an_argument_that_is_no_tensor(name: str) -> None:
    more = {"rewards": torch.zeros(6)} if name == "cu_seqlens" else {}
    more |= {"values": torch.zeros(6)} if name == "cu_seqlens" else {}
    refused(TypeError, f"{name} must be a tensor", "list", **{**more, name: [1.0]})


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("rewards", torch.zeros(2, 3).int(), "int32"),
        ("values", torch.zeros(2, 3).int(), "int32"),
        ("mask", torch.zeros(2, 3, dtype=torch.complex64), "complex64"),
        ("turns", torch.zeros(2, 3), "float32"),
    ],
)
def test_dtypes(name: str, value: torch.Tensor, part: str) -> None:
    refused(TypeError, f"{name} must be of dtype", part, **{name: value})


@pytest.mark.parametrize("name", ["values", "mask", "turns"])
def test_shapes(name: str) -> None:
    value = torch.zeros(3, 2) if name == "values" else torch.zeros(3, 2).int()
    refused(ValueError, f"{name} must have the shape of rewards, [2, 3], got [3, 2]", **{name: value})


@pytest.mark.parametrize("shape", [(6,), (1, 2, 3)], ids=str)
def test_rewards_of_other_dimensions(shape: tuple[int, ...]) -> None:
    refused(ValueError, "rewards must have shape [B, T], or [M] with cu_seqlens", rewards=torch.zeros(shape))


def test_cu_seqlens() -> None:
    packed = {"rewards": torch.zeros(6), "values": torch.zeros(6)}
    refused(ValueError, "[B + 1], got [1, 2]", **packed, cu_seqlens=torch.zeros(1, 2).long())
    refused(TypeError, "cu_seqlens must be of dtype int64 or int32", **packed, cu_seqlens=torch.zeros(2))


@pytest.mark.parametrize("bounds", [[0, 7], [0, 4, 2], [1, 6]], ids=str)
def test_bounds_that_do_not_ascend_within_the_tokens(bounds: list[int]) -> None:
    for backend in (None, "reference"):
        with pytest.raises(RuntimeError, match="cu_seqlens must ascend from 0 to at most the number of tokens"):
            tokens = torch.zeros(6)
            gk.token_advantages(tokens, tokens, cu_seqlens=torch.tensor(bounds), backend=backend)


def test_values_are_for_gae_alone() -> None:
    refused(ValueError, "values must be given for estimator 'gae', got None", values=None)
    refused(ValueError, "values must be left out for estimator 'reinforce', got Tensor", config="reinforce")


def test_configs() -> None:
    refused(TypeError, "config must be a TokenAdvantageConfig or a str, got int", config=1)
    refused(TypeError, "or a str, got dict; pass TokenAdvantageConfig(**config)", config={"lam": 0.9})
    refused(ValueError, "did you mean 'gae'", config="gea")


@pytest.mark.parametrize(
    ("error", "part", "fields"),
    [
        (ValueError, "estimator must be one of gae, reinforce_plus_plus, reinforce, got 'ppo'", {"estimator": "ppo"}),
        (ValueError, "whiten must be one of none, tokens, got 'rows'", {"whiten": "rows"}),
        (ValueError, "gamma must be in [0, 1], got 1.5", {"gamma": 1.5}),
        (ValueError, "lam must be a finite number of at least 0, got -0.1", {"lam": -0.1}),
        (ValueError, "gamma must be a finite number of at least 0, got nan", {"gamma": NAN}),
        (TypeError, "gamma must be a number, got str '1'", {"gamma": "1"}),
        (TypeError, "lam must be a number, got bool True", {"lam": True}),
        (ValueError, "whiten_eps must be a finite number of at least 0, got inf", {"whiten_eps": INF}),
        (ValueError, "lam must be 1 for estimator 'reinforce'", {"estimator": "reinforce", "lam": 0.9}),
    ],
    ids=str,
)
def test_fields(error: type[Exception], part: str, fields: dict[str, Any]) -> None:
    assert_raises(error, CONFIG, [part], lambda: gk.TokenAdvantageConfig(**fields))
