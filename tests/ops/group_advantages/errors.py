"""Errors of group_advantages, gigpo_advantages, group_ids, AdvantageConfig and the running statistics."""

from __future__ import annotations

import torch

import grpo_kernels as gk
from tests.ops.error_rows import Call, Errors, Rows, each
from tests.ops.group_advantages.cases import INF, NAN, PRESETS

ONES, IDS = torch.ones(6), torch.zeros(6, dtype=torch.int64)
STEPS = {"episode_rewards": ONES, "step_returns": ONES, "groups": IDS, "states": IDS}
BOUNDS = {"half_life": 0.1, "rho_min": 0.1, "rho_max": 0.2}
CALLS = {
    "group_advantages": Call(gk.group_advantages, {"rewards": ONES, "groups": 3}),
    "AdvantageConfig": Call(gk.AdvantageConfig, {}),
    "group_ids": Call(gk.group_ids, {"keys": [*"ab"]}),
    "gigpo_advantages": Call(gk.gigpo_advantages, STEPS),
    "EmaBaseline": Call(gk.EmaBaseline, {}),
    "EmaBaseline.step": Call(gk.EmaBaseline().step, {"rewards": ONES, "keys": IDS}),
    "ValueTracker": Call(gk.ValueTracker, BOUNDS),
    "ValueTracker.step": Call(gk.ValueTracker(**BOUNDS).step, {"rewards": ONES, "keys": IDS}),
    "RunningNorm": Call(gk.RunningNorm, {}),
    "RunningNorm.load_state_dict": Call(gk.RunningNorm().load_state_dict, {"state": gk.RunningNorm().state_dict()}),
}
WEIGHTED = gk.AdvantageConfig(reward_weights=(1, 2))
ARGUMENTS: Rows = {
    **each(
        "rewards", "must have shape [N] or [N, R] with R > 0, got {}", torch.ones(6, 0), ONES.view(3, 2, 1), ONES[0]
    ),
    **each("groups", "must be the size of each group ... got {}", 0, -3),
    **each(
        "groups",
        "must be the size of each group ... number of rows, 6, got {}; pass a tensor of ids for groups",
        4,
        12,
    ),
    "groups must be ... rewards [P, K] of P prompts are": {"rewards": torch.ones(3, 4), "groups": 4},
    "subgroups must be given, ... shrinkage=2.0": {"config": gk.AdvantageConfig(shrinkage=2.0)},
    "subgroups must be given, ... singleton='parent'": {"config": gk.AdvantageConfig(singleton="parent")},
    "config.reward_weights must have 1 numbers, one for each ... got (1.0, 2.0)": {"config": WEIGHTED},
    "config must be ... of tokens: token_advantages(config='gae')": {"config": "ppo"},
    "config must be ... token_advantages(config='reinforce_plus_plus')": {"config": "REINFORCE++"},
    "config must be ... got 'dapo'; 'dapo' is a loss, and its advantages are 'grpo'": {"config": "dapo"},
    "config must be one of grpo, ... got 'grop' (did you mean 'grpo'?)": {"config": "grop"},
    f"config must be one of {', '.join(PRESETS)}, got 'zzzzzz'": {"config": "zzzzzz"},
}
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
        ARGUMENTS[rule] = given | {"config": name}
CONFIG: Rows = {
    "estimator must be one of grpo, ... got 'dr-grpo' (did you mean 'dr_grpo'?)": {"estimator": "dr-grpo"},
    **each("clip", "must be a finite number above 0, got {}", 0.0),
    **each("ddof", "must be 0 or 1, got {}", 2, -1, 0.5, True, "1"),
    "reward_weights must have one number per reward, got none": {"reward_weights": ()},
    "reward_weights must be a finite number, got nan": {"reward_weights": (1.0, NAN)},
    # combinations that are meaningless or that no kernel computes
    "shrinkage must be 0 ... 'leave_one_out'": {"shrinkage": 1.0, "center": "leave_one_out"},
    "shrinkage must be 0 ... scale='batch_std'": {"shrinkage": 1.0, "scale": "batch_std"},
    "shrinkage must be 0 ... scale='mean'": {"shrinkage": 1.0, "scale": "mean"},
    "std_floor must be 0 ... got std_floor=0.1 with scale='none'": {"estimator": "dr_grpo", "std_floor": 0.1},
    "std_floor must be 0 ... got std_floor=0.1 with scale='mean'": {"scale": "mean", "std_floor": 0.1},
    "scale must not be 'leave_one_out_std' ... center='mean'": {"scale": "leave_one_out_std"},
    "scale must ... singleton='parent'": {"estimator": "nemo-grpo", "singleton": "parent"},
    "singleton must not be 'parent' ... center='none'": {"singleton": "parent", "center": "none"},
    "singleton must not be 'parent' ... 'baseline'": {"singleton": "parent", "estimator": "remax"},
    "singleton must be 'zero' with center='runner_up'": {"singleton": "raw", "center": "runner_up"},
    "only one of whiten, ... whiten='rows', gain='nonzero'": {"whiten": "rows", "gain": "nonzero"},
    "only one of ... whiten='tokens', scale='batch_std'": {"whiten": "tokens", "scale": "batch_std"},
    "only one of ... gain='nonzero', scale='batch_std'": {"gain": "nonzero", "scale": "batch_std"},
}
for field in ("eps", "std_floor", "shrinkage", "whiten_eps"):
    CONFIG |= each(field, "must be a finite number of at least 0, got {}", -1)
for field, values in {
    "center": ("length", "runner_up", "baseline"),
    "scale": ("batch_std",),
    "gain": ("nonzero",),
}.items():
    for value in values:
        CONFIG[f"combine must be 'sum_then_normalize' ... {value!r}"] = {"estimator": "gdpo", field: value}
ERRORS = [
    Errors("group_advantages", ValueError, ARGUMENTS),
    Errors(
        "group_advantages",
        TypeError,
        {
            "rewards must be of dtype float32 ... got torch.int64; .float() converts it": {"rewards": IDS},
            # bool is an int in Python; True would mean groups of one
            **each(
                "groups",
                "must be an int, ... tensor of ids, got ... {}",
                True,
                2.0,
                None,
                "3",
            ),
            "groups must be an int ... got list ... gk.group_ids(...) makes the tensor": {"groups": [0] * 6},
            "config must be an AdvantageConfig or a str, got NoneType": {"config": None},
            "config must be ... got dict; pass AdvantageConfig(**": {"config": {"eps": 1}},
        },
    ),
    Errors("AdvantageConfig", ValueError, CONFIG),
    Errors(
        "AdvantageConfig",
        TypeError,
        {
            "reward_weights must be a sequence of numbers, got str": {"reward_weights": "1,2"},
            "reward_weights must be a sequence of numbers, got set": {"reward_weights": {1.0}},
            "reward_weights must be a number, got bool True": {"reward_weights": (1.0, True)},
        },
    ),
    Errors(
        "group_ids",
        TypeError,
        {
            "keys must be an iterable with a key for each row, got str 'ab'": {"keys": "ab"},
            "keys must be an iterable with a key for each row, got int 4": {"keys": 4},
            "keys must be an iterable with a key for each row, got shape [2, 1]": {"keys": IDS[:2, None]},
            "keys must not be tensors, got tensor(0) in row 0; pass one tensor": {"keys": list(IDS)},
            "keys must be hashable, got list [1] in row 0": {"keys": [[1], [2]]},
        },
    ),
    Errors(
        "gigpo_advantages",
        ValueError,
        {
            **each("episode_rewards", "must have shape [N], got {}", ONES[:, None]),
            **each("episode_weight", "must be a finite number, got {}", INF),
            **each("step_weight", "must be a finite number, got {}", NAN),
            "config must be one of grpo ... 'gropo'": {"config": "gropo"},
            "config must need no lengths, which steps do not have, got 'opo'": {"config": "opo"},
            "config must need no baselines, which ... got 'remax'": {"config": "remax"},
            "step_returns must not require grad": {"step_returns": ONES.clone().requires_grad_()},
        },
    ),
    Errors(
        "EmaBaseline",
        ValueError,
        each("decay", "must be below 1, got {}", 1.0) | each("decay", "must be a finite number of at least 0", -0.5),
    ),
    Errors(
        "EmaBaseline.step",
        ValueError,
        {
            **each("rewards", "must have shape [N], got {}", ONES[:, None]),
            "rewards must not require grad": {"rewards": ONES.clone().requires_grad_()},
            "keys must have 6 entries, one per reward, got 3": {"keys": [*"abc"]},
        },
    ),
    Errors("EmaBaseline.step", TypeError, {"keys must be hashable, got list []": {"keys": [[]] * 6}}),
    Errors(
        "ValueTracker",
        ValueError,
        {
            **each("half_life", "must be a finite number above 0, got {}", 0.0),
            "rho_min must be at most rho_max, ... got rho_min=0.3": {"rho_min": 0.3},
            "rho_min must be at most rho_max, ... rho_max=1.0": {"rho_max": 1.0},
            "rho_min must be at most rho_max, ... prior=1.5": {"prior": 1.5},
        },
    ),
    Errors(
        "ValueTracker.step",
        ValueError,
        {
            **each("drift", "must have shape [6], got {}", ONES[:3]),
            "drift must not be NaN, got nan at [0]": {"drift": NAN},
            "rewards must be within [0, 1], or NaN, got -1.0 at [0]": {"rewards": -ONES},
        },
    ),
    Errors("RunningNorm", ValueError, each("eps", "must be a finite number of at least 0, got {}", -1)),
    Errors(
        "RunningNorm.load_state_dict",
        ValueError,
        {
            "state must have the keys 'keys' and 'state', got []": {"state": {}},
            "state must have shape [1, 5], got [1, 6]": {"state": {"keys": ["a"], "state": ONES[None]}},
        },
    ),
]
