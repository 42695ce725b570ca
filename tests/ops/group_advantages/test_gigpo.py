"""gigpo_advantages against the formula of ROLL and of the paper, group by group, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.group_advantages.registration import SUPPORTS
from tests.harness import assert_raises, device_of, runnable_backends
from tests.strategies import NAN


def normalised(scores: Tensor, keys: list[Any]) -> Tensor:
    result = torch.zeros_like(scores)
    for key in set(keys):
        rows = [row for row, other in enumerate(keys) if other == key]
        own = scores[rows]
        if len(rows) > 1 and float(own.std()) > 1e-6:
            result[rows] = (own - own.mean()) / (own.std() + 1e-6)
    return result


def steps() -> dict[str, Tensor]:
    groups = torch.randint(0, 3, (40,))
    return {
        "episode_rewards": torch.randint(0, 3, (40,)).double(),
        "step_returns": torch.randn(40).double(),
        "groups": groups,
        "states": torch.randint(0, 6, (40,)),
    }


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS))
def test_both_levels_are_normalised_and_added(backend: str) -> None:
    batch = steps()
    groups, states = batch["groups"].tolist(), batch["states"].tolist()
    episodes = normalised(batch["episode_rewards"], groups)
    wanted = 0.7 * episodes + 1.5 * normalised(batch["step_returns"], list(zip(groups, states, strict=True)))
    inputs = {name: value.to(device_of(backend)) for name, value in batch.items()}
    got = gk.gigpo_advantages(**inputs, episode_weight=0.7, step_weight=1.5, backend=backend)
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-9, atol=1e-9)


def test_equal_rewards_and_single_states_give_zero() -> None:
    batch = steps() | {"episode_rewards": torch.full((40,), 0.7), "states": torch.arange(40)}
    assert not gk.gigpo_advantages(**batch).any()


def test_a_nan_return_leaves_the_step_out_of_its_state() -> None:
    batch = steps()
    batch["step_returns"][3] = NAN
    got = gk.gigpo_advantages(**batch)
    assert got.isfinite().all()
    episodes = normalised(batch["episode_rewards"], batch["groups"].tolist())
    torch.testing.assert_close(got[3], episodes[3], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("error", "part", "changes"),
    [
        (TypeError, "states must be a tensor, got list", {"states": [1]}),
        (ValueError, "episode_rewards must have shape [N]", {"episode_rewards": torch.zeros(4, 2)}),
        (ValueError, "step_returns must have shape [40]", {"step_returns": torch.zeros(3)}),
        (ValueError, "step_weight must be a finite number", {"step_weight": NAN}),
        (ValueError, "config must be one of grpo", {"config": "gropo"}),
    ],
    ids=str,
)
def test_errors(error: type[Exception], part: str, changes: dict[str, Any]) -> None:
    assert_raises(error, "gigpo_advantages: ", [part], lambda: gk.gigpo_advantages(**(steps() | changes)))
