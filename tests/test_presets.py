"""The numbers of every preset, from the pages and the sources of the peers.

Faults that this is for: a number of a preset that is another's, or off by a digit. One such as 1e-8
changes no result of ordinary rewards by more than its tolerance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from grpo_kernels.ops.policy_loss.verl_fields import VERL_LOSSES

INF = float("inf")
Numbers = dict[str, Any]
# of configs made without an argument
DEFAULTS: dict[type, Numbers] = {
    gk.AdvantageConfig: {"ddof": 1, "eps": 1e-6, "std_floor": 0.0, "shrinkage": 0.0, "whiten_eps": 0.0},
    gk.TokenAdvantageConfig: {"gamma": 1.0, "lam": 1.0, "whiten_eps": 1e-8},
    gk.LossConfig: {
        **{"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "entropy_coef": 0.0},
        **{"sapo_temperatures": (1.0, 1.05), "vespo_shape": (2.0, 3.0, 3.0, 2.0)},
    },
    gk.SegmentConfig: {
        **{"group_variance_threshold": 1.0, "group_max_size": 16, "group_epsilon": 1e-6},
        **{"threshold_lr": 0.01, "min_threshold": 0.1, "max_threshold": 10.0, "gamma": 1.0, "lam": 1.0},
    },
    gk.SimilarityConfig: {
        **{"k_min": 2, "min_silhouette": 0.1, "tie_tolerance": 0.0},
        **{"distance_floor": 1e-4, "different_at": 0.3},
    },
    gk.CorrectionConfig: {"log_ratio_bound": 20.0, "rejections": ()},
}
# what differs from these defaults
ADVANTAGES: dict[str, Numbers] = {
    "gdpo": {"whiten_eps": 1e-6},
    "reinforce_plus_plus_baseline": {"whiten_eps": 1e-8},
    "spo": {"whiten_eps": 1e-8},
    "trl-group": {"eps": 1e-4},
    "trl-batch": {"eps": 1e-4},
    "trl-gdpo": {"eps": 1e-4, "whiten_eps": 1e-4},
    "trl-rloo-normalized": {"whiten_eps": 1e-4},
    "trl-async": {"ddof": 0, "eps": 1e-8},
    "verl-gdpo": {"whiten_eps": 1e-8},
    "verl-reinforce-plus-plus-baseline": {"whiten_eps": 1e-8},
}
OF_TRL: dict[str, Numbers] = {
    "dr_grpo": {"max_length": 512},
    "cispo": {"clip_high": -0.8},  # an absolute bound of 0.2
}
CLAMPED = {"log_ratio_clamp": (-20.0, 20.0)}
OF_VERL: dict[str, Numbers] = {
    "vanilla": CLAMPED | {"dual_clip": 3.0},
    "gspo": {"log_ratio_clamp": (-INF, 10.0)},
    "sapo": CLAMPED,
    "cispo": CLAMPED,
    "dppo_tv": CLAMPED | {"ratio_cap": 3.0},
    "dppo_kl": CLAMPED | {"ratio_cap": 3.0},
    "dro": {"dro_beta": 0.25},
}


def numbers_of(config: Any) -> Numbers:
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if type(value) in (int, float, tuple)}


def none_of(names: Iterable[str]) -> dict[str, Numbers]:
    return {name: {} for name in names}


def changed(config: Any) -> Numbers:
    default = DEFAULTS[type(config)]
    return {name: value for name, value in numbers_of(config).items() if value != default.get(name)}


@pytest.mark.parametrize("config", DEFAULTS, ids=lambda config: config.__name__)
def test_defaults(config: type) -> None:
    assert numbers_of(config()) == DEFAULTS[config]


def test_numbers_of_estimators() -> None:
    names = gk.AdvantageConfig.names()
    assert {name: changed(gk.AdvantageConfig(name)) for name in names} == none_of(names) | ADVANTAGES
    assert not any(changed(gk.TokenAdvantageConfig(name)) for name in gk.TokenAdvantageConfig.names())


def test_numbers_of_losses() -> None:
    of_trl = {name: changed(gk.LossConfig.trl(loss_type=name)) for name in TRL_LOSS_TYPES}
    assert of_trl == none_of(TRL_LOSS_TYPES) | OF_TRL
    needed = {"dro": {"dro_beta": 0.25}}
    of_verl = {name: changed(gk.LossConfig.verl(loss_mode=name, **needed.get(name, {}))) for name in VERL_LOSSES}
    assert of_verl == none_of(VERL_LOSSES) | OF_VERL
    assert changed(gk.LossConfig.verl(use_kl_loss=True)) == OF_VERL["vanilla"] | {
        "kl_coef": 0.001,
        "kl_clamp": (20.0, 10.0),
    }


def test_numbers_of_corrections() -> None:
    assert numbers_of(gk.CorrectionConfig.trl()) == {"weight_max": 3.0, "rejections": ()}
    assert numbers_of(gk.CorrectionConfig.verl()) == DEFAULTS[gk.CorrectionConfig] | {"weight_max": 2.0}
