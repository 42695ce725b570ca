"""Errors of the losses of whole rows and of FIPO's weights, in configs and arguments."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import assert_raises, device_of, runnable_backends

BACKENDS = runnable_backends(SUPPORTS)
SHAPE = (4, 3)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"future_kl_cap": 2.0}, ("future_kl_cap", "2.0", "future_kl_half_life", "None")),
        ({"future_kl_half_life": 0.0}, ("future_kl_half_life", "above 0", "0.0")),
        ({"future_kl_half_life": 4.0, "future_kl_clip": (1.2, 1.0)}, ("future_kl_clip", "low <= high", "(1.2, 1.0)")),
        ({"future_kl_half_life": 4.0, "ratio": "sequence"}, ("ratio", "'sequence'", "future_kl_half_life")),
        ({"future_kl_half_life": 4.0, "correction": "token_mask"}, ("correction", "token_mask", "is_weights")),
        ({"loss": "gvpo", "gvpo_beta": 0.0}, ("gvpo_beta", "above 0", "0.0")),
        ({"loss": "real", "real_tau": -1.0}, ("real_tau", "above 0", "-1.0")),
        ({"loss": "flowrl", "flowrl_clip": "ratio"}, ("flowrl_clip", "product, geometric, logprob", "'ratio'")),
        ({"loss": "flowrl", "flowrl_clip": "logprob", "clip_low": 1.0}, ("clip_low", "below 1", "1.0")),
        *[
            ({"loss": "real", **field}, (*field, "left out", "'real'"))
            for field in ({"correction": "token_mask"}, {"off_policy_threshold": 0.1}, {"top_entropy_quantile": 0.5})
        ],
        ({"loss": "gvpo", "ratio": "sequence"}, ("ratio", "'sequence'", "'gvpo'")),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_settings_without_a_meaning(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^LossConfig: ") as caught:
        gk.LossConfig(**settings)
    assert all(part in str(caught.value) for part in parts), caught.value


ALL = torch.ones(SHAPE)
CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("gvpo", {"groups": None}, ("groups must be given for loss='gvpo', got None",)),
    ("clip", {"groups": 2}, ("groups must be left out unless loss is gvpo or real, got 2 with loss='clip'",)),
    ("flowrl", {"groups": torch.zeros(4)}, ("groups must be left out", "got a tensor with loss='flowrl'")),
    ("gvpo", {"groups": 3}, ("groups must divide the number of rows, 4, got 3",)),
    ("gvpo", {"groups": 0}, ("groups must divide the number of rows, 4, got 0",)),
    ("real", {"groups": torch.zeros(3).long()}, ("groups must have shape [4]", "got [3]")),
    ("real", {"log_z": torch.zeros(4)}, ("log_z must be left out unless loss is flowrl",)),
    ("flowrl", {"log_z": None}, ("log_z must be given for loss='flowrl', got None",)),
    ("flowrl", {"log_z": torch.zeros(3)}, ("log_z must have shape [4], got [3]",)),
    ("flowrl", {"ref_logprobs": None}, ("ref_logprobs must be given for loss='flowrl', got None",)),
    ("real", {"ref_logprobs": ALL}, ("ref_logprobs must be left out with kl='none'",)),
    ("gvpo", {"advantages": ALL}, ("advantages must be one per row, [4], for loss='gvpo', got shape [4, 3]",)),
    ("gvpo", {"weights": ALL}, ("weights must be left out for loss='gvpo'",)),
    ("real", {"is_weights": torch.ones(4)}, ("is_weights must be left out for loss='real'", "[4]")),
    ("flowrl", {"is_weights": ALL}, ("is_weights must be one per row for loss='flowrl'", "[4, 3]")),
    ("gvpo", {"kinds": ALL.to(torch.int8)}, ("kinds must be left out", "cross_entropy_aggregation")),
    ("gvpo", {"normalizer": 0}, ("normalizer must be a positive number, got 0",)),
    ("gvpo", {"normalizer": {"groups": torch.ones(2)}}, ("normalizer must have one element, got shape [2]",)),
    ("flowrl", {"normalizer": {"groups": 2}}, ("normalizer must be for one of tokens, rows", "got 'groups'")),
    ("clip", {"normalizer": {"groups": 2}}, ("normalizer must be for one of tokens, rows", "got 'groups'")),
    ("clip", {"normalizer": {"token": 2}}, ("got 'token' (did you mean 'tokens'?)",)),
]


@pytest.mark.parametrize(("loss", "changes", "parts"), CASES)
def test_arguments(loss: str, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    own: dict[str, dict[str, Any]] = {
        "gvpo": {"groups": 2},
        "real": {"groups": 2},
        "flowrl": {"log_z": torch.zeros(4), "ref_logprobs": ALL},
    }
    arguments = {"logprobs": -ALL, "old_logprobs": -ALL, "advantages": torch.ones(4)} | own.get(loss, {})
    for backend in (None, *BACKENDS):
        device = device_of(backend or "cpu")

        def moved(value: Any, device: torch.device = device) -> Any:
            if isinstance(value, dict):
                return {name: moved(count) for name, count in value.items()}
            return value.to(device) if isinstance(value, torch.Tensor) else value

        call = functools.partial(gk.policy_loss, config=gk.LossConfig(loss=loss), backend=backend)
        assert call(**moved(arguments)).loss.isfinite()
        assert_raises(ValueError, "policy_loss: ", parts, functools.partial(call, **moved(arguments | changes)))


@pytest.mark.parametrize(
    ("loss", "changes", "part"),
    [
        ("gvpo", {"groups": 2.0}, "groups must be an int or an integer tensor, got float 2.0"),
        ("gvpo", {"groups": torch.zeros(4)}, "groups must be of dtype int64"),
        ("flowrl", {"log_z": torch.zeros(4).long()}, "log_z must be of dtype float32"),
        ("flowrl", {"log_z": 1.0}, "log_z must be a tensor, got float"),
    ],
)
def test_dtypes(loss: str, changes: dict[str, Any], part: str) -> None:
    arguments = {"config": gk.LossConfig(loss=loss), "ref_logprobs": ALL if loss == "flowrl" else None}
    call = functools.partial(gk.policy_loss, -ALL, None, torch.ones(4), **arguments | changes)
    assert_raises(TypeError, "policy_loss: ", (part,), call)


def test_the_heads_refuse_by_their_own_name() -> None:
    hidden, weight, targets = torch.randn(4, 3, 2), torch.randn(5, 2), torch.zeros(4, 3).long()
    config, advantages = gk.LossConfig(loss="gvpo"), torch.ones(4)
    with pytest.raises(ValueError, match=r"^linear_policy_loss: groups must be given for loss='gvpo'"):
        gk.linear_policy_loss(hidden, weight, targets, None, advantages, config=config)
