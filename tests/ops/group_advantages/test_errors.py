"""Errors of group_advantages, gigpo_advantages, group_ids, AdvantageConfig and the running statistics.

Faults that this is for: a wrong argument that is taken, or fails with another type, without its value or the way out.
What test_promises.py checks of every tensor (its type, dtype, shape and device) is not here, nor what test_configs.py
checks of every field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises
from tests.ops.group_advantages.cases import BACKENDS, INF, NAN, PRESETS

ONES, IDS = torch.ones(6), torch.zeros(6, dtype=torch.int64)
BOUNDS = {"half_life": 0.1, "rho_min": 0.1, "rho_max": 0.2}
# by the name that errors begin with: what is called, with arguments that are right
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "group_advantages": (gk.group_advantages, {"rewards": ONES, "groups": 3}),
    "AdvantageConfig": (gk.AdvantageConfig, {}),
    "group_ids": (gk.group_ids, {}),
    "gigpo_advantages": (
        gk.gigpo_advantages,
        {"episode_rewards": ONES, "step_returns": ONES, "groups": IDS, "states": IDS},
    ),
    "EmaBaseline": (gk.EmaBaseline, {}),
    "EmaBaseline.step": (gk.EmaBaseline().step, {"rewards": ONES, "keys": IDS}),
    "ValueTracker": (gk.ValueTracker, BOUNDS),
    "ValueTracker.step": (gk.ValueTracker(**BOUNDS).step, {"rewards": ONES, "keys": IDS}),
    "RunningNorm": (gk.RunningNorm, {}),
    "RunningNorm.load_state_dict": (gk.RunningNorm().load_state_dict, {}),
}
# (type, message, arguments); " ... " stands for any text
Row = tuple[type[Exception], str, dict[str, Any]]
ARGUMENTS: list[Row] = [
    (TypeError, "rewards must be of dtype float32 ... got torch.int64; .float() converts it", {"rewards": IDS}),
    (ValueError, "rewards must have shape [N] or [N, R] with R > 0, got [6, 2, 1]", {"rewards": torch.ones(6, 2, 1)}),
    (ValueError, "rewards must have shape [N] or [N, R] with R > 0, got [6, 0]", {"rewards": torch.ones(6, 0)}),
    (ValueError, "rewards must have shape [N] or [N, R] with R > 0, got []", {"rewards": torch.ones(())}),
    # bool is an int in Python; True would mean groups of one
    (TypeError, "groups must be an int or an integer tensor, got bool True", {"groups": True}),
    (TypeError, "groups must be an int or an integer tensor, got float 2.0", {"groups": 2.0}),
    (TypeError, "groups must be an int or an integer tensor, got NoneType None", {"groups": None}),
    (TypeError, "groups must be an int or an integer tensor, got str '3'", {"groups": "3"}),
    (TypeError, "groups must be an int ... got list ... gk.group_ids(...) makes the tensor", {"groups": [0] * 6}),
    (TypeError, "groups must be of dtype int64 ... got torch.float32", {"groups": ONES}),
    (ValueError, "groups must be at least 1, got 0", {"groups": 0}),
    (ValueError, "groups must be at least 1, got -3", {"groups": -3}),
    (ValueError, "groups must divide the number of rewards, 6, got 4; pass a tensor of ids", {"groups": 4}),
    (ValueError, "groups must divide the number of rewards, 6, got 12; pass a tensor of ids", {"groups": 12}),
    (ValueError, "groups must divide ... rewards [P, K] of P prompts are", {"rewards": torch.ones(3, 4), "groups": 4}),
    (TypeError, "subgroups must be of dtype int64 ... got torch.bool", {"subgroups": ONES > 0}),
    (ValueError, "subgroups must be given, ... shrinkage=2.0", {"config": gk.AdvantageConfig(shrinkage=2.0)}),
    (ValueError, "subgroups must be given, ... singleton='parent'", {"config": gk.AdvantageConfig(singleton="parent")}),
    (TypeError, "valid must be of dtype bool, got torch.uint8", {"valid": ONES.byte()}),
    (TypeError, "lengths must be of dtype ... got torch.bool", {"lengths": ONES > 0, "config": "opo"}),
    (TypeError, "baselines must be of dtype ... got torch.int64", {"baselines": IDS, "config": "remax"}),
    (
        ValueError,
        "config.reward_weights must have 1 numbers, one for each reward column, got (1.0, 2.0)",
        {"config": gk.AdvantageConfig(reward_weights=(1, 2))},
    ),
    (ValueError, "config must be ... of tokens: token_advantages(config='gae')", {"config": "ppo"}),
    (ValueError, "config must be ... token_advantages(config='reinforce_plus_plus')", {"config": "REINFORCE++"}),
    (ValueError, "config must be ... got 'dapo'; 'dapo' is a loss, and its advantages are 'grpo'", {"config": "dapo"}),
    (ValueError, "config must be one of grpo, ... got 'grop' (did you mean 'grpo'?)", {"config": "grop"}),
    (ValueError, f"config must be one of {', '.join(PRESETS)}, got 'zzzzzz'", {"config": "zzzzzz"}),
    (TypeError, "config must be an AdvantageConfig or a str, got NoneType", {"config": None}),
    (
        TypeError,
        "config must be an AdvantageConfig or a str, got dict; pass AdvantageConfig(**",
        {"config": {"eps": 1}},
    ),
    (TypeError, "config must be an AdvantageConfig or a str, got type", {"config": gk.AdvantageConfig}),
]
# the estimators whose formula uses token counts or a baseline per row
USERS = {
    "lengths": {"opo", "reinforce_plus_plus_baseline", "verl-opo", "verl-gdpo", "verl-reinforce-plus-plus-baseline"},
    "baselines": {"remax", "spo", "verl-remax"},
}
for name in PRESETS:
    used = {argument: ONES for argument, users in USERS.items() if name in users}
    for argument in USERS:
        rule = f"{argument} must be {'given for' if argument in used else 'left out, as'} estimator {name!r}"
        given = {key: ONES for key in USERS if (key in used) != (key == argument)}
        ARGUMENTS.append((ValueError, rule, given | {"config": name}))
NUMBERS = ("eps", "std_floor", "shrinkage", "whiten_eps")
CONFIG: list[Row] = [
    (
        ValueError,
        "estimator must be one of grpo, ... got 'dr-grpo' (did you mean 'dr_grpo'?)",
        {"estimator": "dr-grpo"},
    ),
    (ValueError, "clip must be a finite number above 0, got 0.0", {"clip": 0.0}),
    *[(ValueError, f"{name} must be a finite number of at least 0, got -1", {name: -1}) for name in NUMBERS],
    *[(ValueError, f"ddof must be 0 or 1, got {value!r}", {"ddof": value}) for value in (2, -1, 0.5, True, "1")],
    (ValueError, "reward_weights must have one number per reward, got none", {"reward_weights": ()}),
    (TypeError, "reward_weights must be a sequence of numbers, got str", {"reward_weights": "1,2"}),
    (TypeError, "reward_weights must be a sequence of numbers, got set", {"reward_weights": {1.0}}),
    (TypeError, "reward_weights must be a number, got bool True", {"reward_weights": (1.0, True)}),
    (ValueError, "reward_weights must be a finite number, got nan", {"reward_weights": (1.0, NAN)}),
    # combinations that are meaningless or that no kernel computes
    (ValueError, "shrinkage must be 0 ... 'leave_one_out'", {"shrinkage": 1.0, "center": "leave_one_out"}),
    (ValueError, "shrinkage must be 0 ... scale='batch_std'", {"shrinkage": 1.0, "scale": "batch_std"}),
    (ValueError, "shrinkage must be 0 ... scale='mean'", {"shrinkage": 1.0, "scale": "mean"}),
    (ValueError, "scale must not be 'leave_one_out_std' ... center='mean'", {"scale": "leave_one_out_std"}),
    (ValueError, "scale must ... singleton='parent'", {"estimator": "nemo-grpo", "singleton": "parent"}),
    (ValueError, "singleton must not be 'parent' ... center='none'", {"singleton": "parent", "center": "none"}),
    (ValueError, "singleton must not be 'parent' ... 'baseline'", {"singleton": "parent", "estimator": "remax"}),
    (ValueError, "singleton must be 'zero' with center='runner_up'", {"singleton": "raw", "center": "runner_up"}),
    (ValueError, "combine must be 'sum_then_normalize' ... 'length'", {"estimator": "gdpo", "center": "length"}),
    (ValueError, "combine must be 'sum_then_normalize' ... 'runner_up'", {"estimator": "gdpo", "center": "runner_up"}),
    (ValueError, "combine must be 'sum_then_normalize' ... 'baseline'", {"estimator": "gdpo", "center": "baseline"}),
    (ValueError, "combine must be 'sum_then_normalize' ... 'batch_std'", {"estimator": "gdpo", "scale": "batch_std"}),
    (ValueError, "combine must be 'sum_then_normalize' ... 'nonzero'", {"estimator": "gdpo", "gain": "nonzero"}),
    (ValueError, "only one of whiten, ... whiten='rows', gain='nonzero'", {"whiten": "rows", "gain": "nonzero"}),
    (ValueError, "only one of ... whiten='tokens', scale='batch_std'", {"whiten": "tokens", "scale": "batch_std"}),
    (ValueError, "only one of ... gain='nonzero', scale='batch_std'", {"gain": "nonzero", "scale": "batch_std"}),
]
TABLE: dict[str, list[Row]] = {
    "group_advantages": ARGUMENTS,
    "AdvantageConfig": CONFIG,
    "group_ids": [
        (TypeError, "keys must be an iterable with a key for each row, got str 'ab'", {"keys": "ab"}),
        (TypeError, "keys must be an iterable with a key for each row, got int 4", {"keys": 4}),
        (TypeError, "keys must be an iterable with a key for each row, got shape [2, 1]", {"keys": IDS[:2, None]}),
        (TypeError, "keys must not be tensors, got tensor(0) in row 0; pass one tensor", {"keys": list(IDS)}),
        (TypeError, "keys must be hashable, got list [1] in row 0", {"keys": [[1], [2]]}),
    ],
    "gigpo_advantages": [
        (ValueError, "episode_rewards must have shape [N]", {"episode_rewards": torch.zeros(6, 2)}),
        (ValueError, "episode_weight must be a finite number, got inf", {"episode_weight": INF}),
        (ValueError, "step_weight must be a finite number, got nan", {"step_weight": NAN}),
        (ValueError, "config must be one of grpo", {"config": "gropo"}),
    ],
    "EmaBaseline": [
        (ValueError, "decay must be below 1, got 1.0", {"decay": 1.0}),
        (ValueError, "decay must be a finite number of at least 0, got -0.5", {"decay": -0.5}),
    ],
    "EmaBaseline.step": [
        (ValueError, "rewards must have shape [N], got [6, 2]", {"rewards": torch.ones(6, 2)}),
        (ValueError, "rewards must not require grad", {"rewards": torch.ones(6, requires_grad=True)}),
        (ValueError, "keys must have 6 entries, one per reward, got 3", {"keys": [*"abc"]}),
        (TypeError, "keys must be hashable, got list []", {"keys": [[]] * 6}),
    ],
    "ValueTracker": [
        (ValueError, "half_life must be a finite number above 0, got 0.0", {"half_life": 0.0}),
        (ValueError, "rho_min must be at most rho_max, ... got rho_min=0.3", {"rho_min": 0.3}),
        (ValueError, "rho_min must be at most rho_max, ... rho_max=1.0", {"rho_max": 1.0}),
        (ValueError, "rho_min must be at most rho_max, ... prior=1.5", {"prior": 1.5}),
    ],
    "ValueTracker.step": [
        (ValueError, "drift must have shape [6], got [3]", {"drift": ONES[:3]}),
        (ValueError, "rewards must be within [0, 1], or NaN, got -1.0 at [0]", {"rewards": -ONES}),
    ],
    "RunningNorm": [(ValueError, "eps must be a finite number of at least 0, got -1", {"eps": -1})],
    "RunningNorm.load_state_dict": [
        (ValueError, "state must have the keys 'keys' and 'state', got []", {"state": {}}),
        (ValueError, "state must have shape [1, 5], got [1, 6]", {"state": {"keys": ["a"], "state": ONES[None]}}),
    ],
}


@pytest.mark.parametrize(
    ("where", "error", "rule", "changes"), [(where, *row) for where, rows in TABLE.items() for row in rows], ids=str
)
def test_errors(where: str, error: type[Exception], rule: str, changes: dict[str, Any]) -> None:
    function, right = CALLS[where]
    start, *parts = rule.split(" ... ")
    assert_raises(error, f"{where}: {start}", parts, lambda: function(**right | changes))


@pytest.mark.parametrize("wrong", [-1.0, NAN, INF])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("cpu", "reference")])
def test_lengths_that_are_none(backend: str, wrong: float) -> None:
    """Only rows that take part are checked; a GPU is not waited for."""
    given = {"lengths": torch.tensor([4.0, 2.0, wrong, 1.0, 1.0, 1.0]), "config": "opo", "backend": backend}
    rule = f"group_advantages: lengths must be finite and not negative, got {wrong:g} in row 2"
    assert_raises(RuntimeError, rule, (), lambda: gk.group_advantages(ONES, 3, **given))
    for left_out in ({"valid": torch.arange(6) != 2}, {"subgroups": -(torch.arange(6) == 2).long()}):
        advantages = gk.group_advantages(torch.randn(6), 3, **given, **left_out).advantages
        assert advantages.isfinite().all() and advantages[2] == 0


@pytest.mark.skipif("cuda" not in BACKENDS, reason="the CUDA kernels do not run here")
def test_more_columns_than_a_kernel_takes() -> None:
    rewards = torch.randn(4, 65)
    rule = "group_advantages: rewards must have at most 64 columns in the CUDA kernel, got 65; use backend='reference'"
    assert_raises(RuntimeError, rule, (), lambda: gk.group_advantages(rewards, 2, backend="cuda"))
    assert gk.group_advantages(rewards, 2).advantages.isfinite().all()


def test_a_config_has_the_name_of_its_estimator() -> None:
    assert gk.AdvantageConfig("grpo", reward_weights=[1, 2]) == gk.AdvantageConfig(reward_weights=(1.0, 2.0))
    for name, preset in PRESETS.items():
        assert gk.AdvantageConfig.of(name) == preset == gk.AdvantageConfig.of(preset) and preset.estimator == name
